import { describe, expect, it } from 'vitest';
import { z } from 'zod';
import {
  type ExecResult,
  fold,
  LonghaulError,
  type NewEvent,
  type RunState,
  type Tool,
} from '../core/index.ts';
import type { SandboxCapabilities, SandboxSpec } from '../sandbox/contract.ts';
import { checkCall } from './call.ts';
import { coder } from './coder.ts';
import { decide } from './decide.ts';
import { cut, describeExec } from './observation.ts';

function stateOf(budget: RunState['spec']['budget'], ...bodies: NewEvent[]): RunState {
  const created: NewEvent = {
    type: 'run.created',
    data: {
      kind: 'hosted',
      task: { name: 't', ref: 't' },
      agent: 'a',
      model: { ref: 'm' },
      seed: 0,
      budget,
    },
  };
  return fold(
    [created, ...bodies].map((body, i) => ({
      ...body,
      runId: 'r',
      seq: i + 1,
      at: new Date(0).toISOString(),
      v: 1,
    })),
  );
}

const user: NewEvent = {
  type: 'message.added',
  data: { message: { role: 'user', content: 'go' } },
};
const assistant = (toolCalls?: { callId: string; tool: string; input: unknown }[]): NewEvent => ({
  type: 'model.completed',
  data: {
    callId: 'm1.1',
    latencyMs: 0,
    completion: {
      message: { role: 'assistant', content: 'hm', ...(toolCalls ? { toolCalls } : {}) },
      finishReason: 'stop',
      usage: { inputTokens: 0, outputTokens: 5 },
      provenance: 'none',
    },
  },
});
const asked: NewEvent = {
  type: 'model.requested',
  data: { callId: 'm1.1', model: 'm', step: 1, attempt: 1 },
};
const call = { callId: 'a', tool: 'shell', input: {} };

describe('decide', () => {
  it('asks the model first, then runs its calls, then asks again, and ends when it asks for none', () => {
    expect(decide(stateOf({}, user), false, 0)).toEqual({ kind: 'model', step: 1, attempt: 1 });
    expect(decide(stateOf({}, user, asked, assistant([call])), false, 0)).toEqual({
      kind: 'tool',
      call,
      decision: 'start',
    });
    expect(decide(stateOf({}, user, asked, assistant()), false, 0)).toEqual({
      kind: 'finish',
      reason: 'agent_done',
    });
  });

  it('repeats a model call without a result as the next attempt of the same step', () => {
    expect(decide(stateOf({}, user, asked), false, 0)).toEqual({
      kind: 'model',
      step: 1,
      attempt: 2,
    });
  });

  it('checks each limit before the call it limits', () => {
    expect(decide(stateOf({ modelCalls: 1 }, user, asked), false, 0)).toMatchObject({
      kind: 'exceeded',
      limit: 'modelCalls',
    });
    expect(decide(stateOf({ toolCalls: 1 }, user, asked, assistant([call])), false, 0).kind).toBe(
      'tool',
    );
    const used = stateOf(
      { toolCalls: 1 },
      user,
      asked,
      assistant([call, { ...call, callId: 'b' }]),
      {
        type: 'tool.requested',
        data: { ...call, effect: 'none', idempotencyKey: 'k', timeoutMs: 1 },
      },
      {
        type: 'tool.completed',
        data: { callId: 'a', tool: 'shell', output: '', isError: false, durationMs: 0 },
      },
    );
    expect(decide(used, false, 0)).toMatchObject({ kind: 'exceeded', limit: 'toolCalls', used: 1 });
    expect(decide(stateOf({ wallMs: 10 }, user), false, 10)).toMatchObject({
      kind: 'exceeded',
      limit: 'wallMs',
    });
    expect(
      decide(stateOf({ outputTokens: 5 }, user, asked, assistant([call])), false, 0).kind,
    ).toBe('tool');
  });

  it('a stop wins over everything, and a task that is over ends with calls pending', () => {
    const stop: NewEvent = {
      type: 'signal.received',
      data: { key: 'k', signal: 'stop', data: { reason: 'enough' } },
    };
    expect(decide(stateOf({}, user, asked, assistant([call]), stop), true, 0)).toEqual({
      kind: 'cancel',
      reason: 'enough',
    });
    expect(decide(stateOf({}, user, asked, assistant([call])), true, 0)).toEqual({
      kind: 'finish',
      reason: 'task_over',
    });
  });
});

describe('checkCall', () => {
  const tool: Tool = {
    name: 'add',
    description: '',
    input: z.object({ a: z.number() }),
    effect: 'none',
    timeoutMs: 1,
    run: async () => ({ output: '' }),
  };

  it.each([
    ['an unknown tool', { callId: 'c', tool: 'sub', input: {} }, /no tool "sub".*add/],
    ['arguments that are no JSON', { callId: 'c', tool: 'add', input: '{"a":' }, /not valid JSON/],
    [
      'arguments of another shape',
      { callId: 'c', tool: 'add', input: { a: 'x' } },
      /a: .*expected number/i,
    ],
  ])('tells the model about %s', (_, bad, text) => {
    const checked = checkCall([tool], bad);
    expect('observation' in checked && checked.observation).toMatch(text);
  });
});

describe('observations', () => {
  const result: ExecResult = {
    cause: 'exited',
    code: 0,
    signal: null,
    stdout: '',
    stderr: '',
    stdoutBytes: 0,
    stderrBytes: 0,
    durationMs: 1500,
  };

  it('say how a process ended before what it printed', () => {
    expect(describeExec({ ...result, code: 2, stdout: 'out', stderr: 'err' })).toEqual({
      output: '[exit code 2]\nout\n[stderr]\nerr',
      isError: true,
    });
    expect(describeExec({ ...result, cause: 'timeout', code: null }).output).toContain(
      'time limit of 1.5 s',
    );
    expect(describeExec({ ...result, cause: 'out_of_memory', code: null }).output).toContain(
      'out of memory',
    );
    expect(describeExec(result)).toEqual({ output: '[no output]', isError: false });
  });

  it('keep head and tail of what is too long', () => {
    const text = `HEAD${'x'.repeat(100_000)}TAIL`;
    const short = cut(text, 1000);
    expect(short.length).toBeLessThan(1100);
    expect(short).toMatch(/^HEAD[\s\S]*99008 characters left out[\s\S]*TAIL$/);
  });
});

describe('coder', () => {
  const capabilities = { exec: true, languages: ['python'] } as unknown as SandboxCapabilities;
  const effects = (spec?: Partial<SandboxSpec>) =>
    Object.fromEntries(coder(capabilities, spec).tools.map(({ name, effect }) => [name, effect]));

  it('counts running programs as `once` where they have a network, and only there', () => {
    const offline = { shell: 'workspace', execute_code: 'workspace', write_file: 'workspace' };
    expect(effects()).toMatchObject(offline);
    expect(effects({ network: 'none' })).toMatchObject(offline);
    expect(effects({ network: { allow: [{ host: 'example.org' }] } })).toMatchObject({
      shell: 'once',
      execute_code: 'once',
      write_file: 'workspace',
      edit_file: 'workspace',
      read_file: 'none',
    });
  });

  it('is told where it works and what it can reach', () => {
    expect(coder(capabilities).system).toMatch(/workspace at \/workspace.*There is no network/s);
    const other = coder(capabilities, {
      image: 'rootfs:sha256:1',
      network: { allow: [{ host: 'a.org' }] },
    });
    expect(other.system).not.toMatch(/\/workspace|no network/);
  });

  it('hears that an image has no interpreter, instead of the run failing', async () => {
    const tool = coder(capabilities).tools.find(({ name }) => name === 'execute_code')!;
    const sandbox = {
      runCode: () => Promise.reject(new LonghaulError('CapabilityMissing', 'no python3')),
    };
    const result = await tool.run({ language: 'python', code: '1' }, { sandbox } as never);
    expect(result).toEqual({ output: 'no python3', isError: true });
  });
});
