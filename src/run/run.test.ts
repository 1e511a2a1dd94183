import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ulid } from 'ulid';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { z } from 'zod';
import { type ChatServer, type Scenario, startChatServer } from '../../test/chat-server/server.ts';
import type { AgentDefinition } from '../agent/index.ts';
import {
  fold,
  LonghaulError,
  type NewEvent,
  Redactor,
  type RunSpec,
  type Tool,
} from '../core/index.ts';
import type { TaskSession } from '../env/contract.ts';
import { resolveModel } from '../model/index.ts';
import type { SandboxDriver } from '../sandbox/contract.ts';
import { openSandboxes } from '../sandbox/index.ts';
import { openStore, type Store, stopEmbedded } from '../store/index.ts';
import { answerRun, createRun, type HostedContext, rollout, runHosted, stopRun } from './index.ts';

const clock = {
  now: () => Date.now(),
  // Nothing is waited out: what is tested is what happens after it. A tool's limit is longer than a back-off.
  sleep: (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms > 10_000 ? 500 : 1)),
};

let home: string;
let store: Store;
let driver: SandboxDriver;
let vendor: ChatServer;
beforeAll(async () => {
  home = mkdtempSync(join(tmpdir(), 'longhaul-run-'));
  store = await openStore({ home });
  driver = (await openSandboxes({ dir: join(home, 'sandbox'), prefer: 'wasm' })).driver;
});
afterEach(() => vendor?.close());
afterAll(async () => {
  await driver.close();
  await store.close();
  await stopEmbedded(home);
  rmSync(home, { recursive: true, force: true });
});

/** A task that is graded 1 when the agent says so. */
const session: TaskSession = {
  ref: { environment: 'test', id: 't', domain: 'd', split: 'train' },
  name: 't',
  hash: 'h',
  messages: [{ role: 'user', content: 'do it' }],
  tools: [],
  sandbox: {},
  prepare: async () => {},
  isOver: () => false,
  grade: async (state) => ({
    reward: {
      status: 'ok',
      value: state.messages.at(-1)?.content === 'done' ? 1 : 0,
      components: {},
    },
  }),
};

/** A tool that reaches the world once; `effects` is the world. */
function payment(effects: string[], status?: Tool['status']): Tool {
  return {
    name: 'pay',
    description: '',
    input: z.object({ amount: z.number() }),
    effect: 'once',
    timeoutMs: 1000,
    run: async (_, { idempotencyKey }) => {
      effects.push(idempotencyKey);
      return { output: 'paid' };
    },
    ...(status ? { status } : {}),
  };
}

const spec = (kind: RunSpec['kind'] = 'hosted', budget = {}): RunSpec => ({
  kind,
  task: { name: 't', ref: 't' },
  agent: 'a',
  model: { ref: 'openai-compatible/scripted' },
  seed: 0,
  budget,
});

async function context(scenario: Scenario, tools: Tool[]): Promise<HostedContext> {
  vendor = await startChatServer({ scenario });
  const agent: AgentDefinition = {
    name: 'a',
    system: '',
    tools,
    maxOutputTokens: 100,
    sampling: { temperature: 0 },
  };
  const model = await resolveModel({
    ref: 'openai-compatible/scripted',
    baseUrl: vendor.baseUrl,
    env: {},
  });
  return {
    log: store.log,
    session,
    agent,
    model,
    sandboxes: driver,
    artifacts: store.artifacts,
    clock,
    redactor: new Redactor(['secret-of-the-test']),
    worker: 'test:1',
    signal: new AbortController().signal,
    saveWorkspace: false,
  };
}

const pays: Scenario = {
  turns: [{ toolCalls: [{ id: 'c1', name: 'pay', arguments: { amount: 5 } }] }, { text: 'done' }],
};

/** A run whose worker died right after it had logged the intent to pay. */
async function crashedWhilePaying(): Promise<string> {
  const runId = ulid();
  const events: NewEvent[] = [
    { type: 'run.started', data: { worker: 'dead:1', leaseToken: 1 } },
    { type: 'message.added', data: { message: { role: 'user', content: 'do it' } } },
    { type: 'model.requested', data: { callId: 'm1.1', model: 'm', step: 1, attempt: 1 } },
    {
      type: 'model.completed',
      data: {
        callId: 'm1.1',
        latencyMs: 1,
        completion: {
          message: {
            role: 'assistant',
            content: '',
            toolCalls: [{ callId: 'c1', tool: 'pay', input: { amount: 5 } }],
          },
          finishReason: 'tool_calls',
          usage: { inputTokens: 1, outputTokens: 1 },
          provenance: 'none',
        },
      },
    },
    {
      type: 'tool.requested',
      data: {
        callId: 'c1',
        tool: 'pay',
        input: { amount: 5 },
        effect: 'once',
        idempotencyKey: `${runId}:c1`,
        timeoutMs: 1000,
      },
    },
  ];
  await store.log.create(runId, spec(), events);
  return runId;
}

describe('a call that must happen once and whose end is unknown', () => {
  it('waits for a person, who says that it happened', async () => {
    const effects: string[] = [];
    const runId = await crashedWhilePaying();
    const hosted = await context(pays, [payment(effects)]);
    const paused = await runHosted(runId, hosted);
    expect(paused).toMatchObject({ status: 'paused', error: { code: 'EffectUnknown' } });
    await answerRun(store.log, runId, { callId: 'c1', answer: 'done' });
    const state = await runHosted(runId, hosted);
    expect(state).toMatchObject({ status: 'succeeded', reward: { value: 1 } });
    expect(effects).toEqual([]);
    expect(state.messages.find((message) => message.role === 'tool')?.content).toMatch(
      /happened, but its result was lost/,
    );
  });

  it('is repeated with the same key when a person says that it did not happen', async () => {
    const effects: string[] = [];
    const runId = await crashedWhilePaying();
    const hosted = await context(pays, [payment(effects)]);
    await runHosted(runId, hosted);
    await answerRun(store.log, runId, { callId: 'c1', answer: 'repeat' });
    expect((await runHosted(runId, hosted)).status).toBe('succeeded');
    expect(effects).toEqual([`${runId}:c1`]);
  });

  it.each([
    ['done', 0],
    ['absent', 1],
  ] as const)('asks nobody when the tool itself knows: %s', async (status, times) => {
    const effects: string[] = [];
    const asked: string[] = [];
    const runId = await crashedWhilePaying();
    const tool = payment(effects, async (key) => {
      asked.push(key);
      return status;
    });
    expect((await runHosted(runId, await context(pays, [tool]))).status).toBe('succeeded');
    expect(asked).toEqual([`${runId}:c1`]);
    expect(effects).toHaveLength(times);
  });
});

describe('a hosted run', () => {
  it('saves the files after a call that must happen once too', async () => {
    const writes: Tool = {
      ...payment([]),
      run: async (_, { sandbox }) => {
        await sandbox.writeFile('paid', 'yes');
        return { output: 'paid' };
      },
    };
    const hosted = { ...(await context(pays, [writes])), saveWorkspace: true };
    const runId = await createRun(store.log, spec());
    const state = await runHosted(runId, hosted);
    expect(state.status).toBe('succeeded');
    const saved = (await store.log.read(runId)).filter(({ type }) => type === 'workspace.saved');
    expect(saved).toMatchObject([{ data: { afterCallId: null } }, { data: { afterCallId: 'c1' } }]);
    const sandbox = await driver.create({}, state.workspace!.layer);
    try {
      expect(Buffer.from(await sandbox.readFile('paid')).toString()).toBe('yes');
    } finally {
      await sandbox.stop();
    }
  });

  it('gives calls of a vendor that repeats its ids names of their own', async () => {
    const effects: string[] = [];
    const twice = { toolCalls: [{ id: 'call_1', name: 'pay', arguments: { amount: 1 } }] };
    const hosted = await context({ turns: [twice, twice, { text: 'done' }] }, [payment(effects)]);
    const runId = await createRun(store.log, spec());
    expect((await runHosted(runId, hosted)).status).toBe('succeeded');
    expect(new Set(effects).size).toBe(2);
  });

  it('gives up on a model that keeps failing, paused with the reason, and goes on later', async () => {
    const hosted = await context(
      { turns: [[...Array(6).fill({ error: { status: 503 } }), { text: 'done' }]] },
      [],
    );
    const runId = await createRun(store.log, spec());
    expect(await runHosted(runId, hosted)).toMatchObject({
      status: 'paused',
      error: { class: 'retryable' },
    });
    expect(await runHosted(runId, hosted)).toMatchObject({ status: 'succeeded' });
  });

  it('is stopped while it waits to try a failing model again', async () => {
    const hosted = await context({ turns: [{ error: { status: 503 } }] }, []);
    const runId = await createRun(store.log, spec());
    const calls = new AbortController();
    const waiting = {
      now: () => Date.now(),
      sleep: async () => {
        await store.log.post(runId, { key: 'stop', signal: 'stop', data: { reason: 'enough' } });
        calls.abort('stop');
      },
    };
    const state = await runHosted(runId, { ...hosted, clock: waiting, signal: calls.signal });
    expect(state).toMatchObject({ status: 'cancelled', summary: 'enough' });
  });

  it('keeps a lease that ran out while nobody took it', async () => {
    const hosted = await context(pays, [
      {
        ...payment([]),
        run: async (_, { runId }) => {
          await store.log.evict(runId, 'test:1');
          return { output: 'paid' };
        },
      },
    ]);
    const runId = await createRun(store.log, spec());
    expect(await runHosted(runId, hosted)).toMatchObject({ status: 'succeeded', error: null });
  });

  it('pauses, and does not fail, where its workspace cannot be opened', async () => {
    const hosted = await context(pays, [payment([])]);
    const runId = await createRun(store.log, spec());
    const lost = {
      create: async () => {
        throw new LonghaulError('NotFound', 'no such layer');
      },
    };
    const paused = await runHosted(runId, { ...hosted, sandboxes: lost });
    expect(paused).toMatchObject({ status: 'paused', error: { code: 'NotFound' } });
    expect((await runHosted(runId, hosted)).status).toBe('succeeded');
  });

  it('keeps no tokens of an answer in which something was redacted', async () => {
    const hosted = await context({ turns: [] }, []);
    const answers = (content: string): HostedContext['model'] => ({
      ref: 'exact/model',
      complete: async () => ({
        message: { role: 'assistant', content },
        finishReason: 'stop',
        usage: { inputTokens: 1, outputTokens: 1 },
        provenance: 'exact',
        tokens: {
          promptIds: [1],
          ids: [2],
          logprobs: [-1],
          logprobKind: 'raw',
          sampling: { temperature: 1 },
          versionSpans: [{ start: 0, version: 'v' }],
          tokenizerHash: 't',
          rendererHash: 'r',
        },
      }),
    });
    const completed = async (content: string) => {
      const runId = await createRun(store.log, spec());
      await runHosted(runId, { ...hosted, model: answers(content) });
      const events = await store.log.read(runId);
      return events.find((event) => event.type === 'model.completed')?.data;
    };
    expect(await completed('secret-of-the-test')).toMatchObject({
      completion: { provenance: 'none', message: { content: '[redacted:secret]' } },
    });
    expect(await completed('secret-of-the-test')).not.toHaveProperty('tokens');
    expect(await completed('plain')).toMatchObject({
      completion: { provenance: 'exact' },
      tokens: { bytes: expect.any(Number) },
    });
  });

  it('runs a call as the model wrote it and logs it redacted', async () => {
    const seen: unknown[] = [];
    const writes: Tool = {
      ...payment([]),
      name: 'write',
      input: z.object({ text: z.string() }),
      run: async (input) => {
        seen.push(input);
        return { output: 'wrote' };
      },
    };
    const text = 'key = secret-of-the-test';
    const hosted = await context(
      { turns: [{ toolCalls: [{ name: 'write', arguments: { text } }] }, { text: 'done' }] },
      [writes],
    );
    const runId = await createRun(store.log, spec());
    expect((await runHosted(runId, hosted)).status).toBe('succeeded');
    expect(seen).toEqual([{ text }]);
    expect(JSON.stringify(await store.log.read(runId))).not.toContain('secret-of-the-test');
  });

  it('that could not be graded pauses and is graded when it goes on', async () => {
    const hosted = await context({ turns: [{ text: 'done' }] }, []);
    let broken = true;
    const flaky: TaskSession = {
      ...session,
      grade: async (state, sandbox) =>
        broken
          ? { reward: { status: 'grader_error', value: null, components: {}, reason: 'gone' } }
          : session.grade(state, sandbox),
    };
    const runId = await createRun(store.log, spec());
    const paused = await runHosted(runId, { ...hosted, session: flaky });
    expect(paused).toMatchObject({ status: 'paused', error: { code: 'GraderFailed' } });
    broken = false;
    const state = await runHosted(runId, { ...hosted, session: flaky });
    expect(state).toMatchObject({ status: 'succeeded', reward: { value: 1 } });
  });

  it('takes a signal once though a crash left it in the inbox and in the log', async () => {
    const hosted = await context({ turns: [{ text: 'done' }] }, []);
    const runId = await createRun(store.log, spec());
    await store.log.post(runId, {
      key: 'k',
      signal: 'answer',
      data: { budget: { modelCalls: 9 } },
    });
    const lease = await store.log.acquire(runId, 'dead:1', 60_000);
    await store.log.append(lease!, [
      {
        type: 'signal.received',
        data: { key: 'k', signal: 'answer', data: { budget: { modelCalls: 9 } } },
      },
    ]);
    await store.log.evict(runId, 'dead:1');
    await runHosted(runId, hosted);
    const events = await store.log.read(runId);
    expect(events.filter((event) => event.type === 'signal.received')).toHaveLength(1);
    expect(await store.log.inbox(runId)).toEqual([]);
  });

  it('that nobody has is stopped on the spot and its log says by whom', async () => {
    const runId = await createRun(store.log, spec());
    expect(await stopRun(store.log, runId, 'person:1', 'enough', clock)).toBe('stopped');
    const state = fold(await store.log.read(runId));
    expect(state).toMatchObject({ status: 'cancelled', summary: 'enough' });
    expect((await store.log.row(runId))?.status).toBe('cancelled');
  });

  it('loses nothing to a second worker: the first one is refused', async () => {
    const runId = await createRun(store.log, spec());
    const first = await store.log.acquire(runId, 'a:1', 60_000);
    await store.log.evict(runId, 'a:1');
    const second = await store.log.acquire(runId, 'b:2', 60_000);
    await expect(
      store.log.append(first!, [{ type: 'run.cancelled', data: { by: 'a:1', reason: 'late' } }]),
    ).rejects.toMatchObject({ code: 'LeaseLost' });
    await store.log.release(second!);
    expect((await store.log.read(runId)).map((event) => event.type)).toEqual(['run.created']);
  });
});

describe('a rollout', () => {
  const play = async (scenario: Scenario, tools: Tool[], budget = {}) => {
    const { log: _, ...rest } = await context(scenario, tools);
    return rollout(ulid(), spec('rollout', budget), rest);
  };

  it('that the model server fails is ungraded, not wrong', async () => {
    const played = await play({ turns: [{ error: { status: 503 } }] }, []);
    expect(played.reward).toMatchObject({ value: null, status: 'env_error' });
    expect(played.state.status).toBe('failed');
  });

  it('that the sandbox fails is ungraded', async () => {
    const breaks: Tool = {
      ...payment([]),
      effect: 'workspace',
      run: async () => {
        throw new LonghaulError('SandboxBroken', 'gone');
      },
    };
    const played = await play(pays, [breaks]);
    expect(played.reward).toMatchObject({ value: null, reason: 'SandboxBroken: gone' });
  });

  it('whose tool never answers is ungraded instead of waiting for ever', async () => {
    const hangs: Tool = { ...payment([]), effect: 'none', run: () => new Promise(() => {}) };
    const played = await play(pays, [hangs]);
    expect(played.reward).toMatchObject({
      value: null,
      reason: 'SandboxBroken: pay did not answer within its limit',
    });
  });

  it('that reaches its limit is graded as far as it came', async () => {
    const played = await play(pays, [payment([])], { modelCalls: 1 });
    expect(played.reward).toMatchObject({ value: 0 });
    expect(played.events.map((event) => event.type)).toContain('budget.exceeded');
    expect(fold(played.events).head).toBe(played.events.length);
  });
});
