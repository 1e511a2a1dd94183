import { describe, expect, it } from 'vitest';
import { decideCall } from './effects.ts';
import { EVENT_TYPES, EVENT_VERSIONS, type Event, type NewEvent, parseEventData } from './event.ts';
import { fold } from './fold.ts';
import type { RunSpec } from './run.ts';

const spec: RunSpec = {
  kind: 'hosted',
  task: { name: 't', ref: 't' },
  agent: 'coder',
  model: { ref: 'p/m' },
  seed: 1,
  budget: { modelCalls: 3 },
};

/** A log from event bodies, one second apart. */
function log(...bodies: NewEvent[]): Event[] {
  return [{ type: 'run.created', data: spec } as NewEvent, ...bodies].map(
    (body, i) =>
      ({
        ...body,
        runId: 'r',
        seq: i + 1,
        at: new Date(i * 1000).toISOString(),
        v: EVENT_VERSIONS[body.type],
      }) as Event,
  );
}

const asked = (callId: string, tool = 'shell'): NewEvent => ({
  type: 'model.completed',
  data: {
    callId: 'm1.1',
    latencyMs: 1,
    completion: {
      message: { role: 'assistant', content: '', toolCalls: [{ callId, tool, input: {} }] },
      finishReason: 'tool_calls',
      usage: { inputTokens: 1, outputTokens: 7 },
      provenance: 'none',
    },
  },
});
const requested = (
  callId: string,
  effect: 'none' | 'workspace' | 'idempotent' | 'once',
): NewEvent => ({
  type: 'tool.requested',
  data: { callId, tool: 'shell', input: {}, effect, idempotencyKey: `r:${callId}`, timeoutMs: 1 },
});

describe('fold', () => {
  it('refuses a log with a hole and one that does not start at its beginning', () => {
    const events = log({ type: 'run.started', data: { worker: 'w', leaseToken: 1 } });
    expect(() => fold([events[0]!, { ...events[1]!, seq: 3 }])).toThrow(/gap: #3 after #1/);
    expect(() => fold([events[1]!])).toThrow(/starts with run.started/);
  });

  it('keeps a call pending until its result is in the conversation', () => {
    const open = fold(log(asked('a'), requested('a', 'none')));
    expect(open.pending.map((call) => call.callId)).toEqual(['a']);
    const closed = fold(
      log(asked('a'), requested('a', 'none'), {
        type: 'tool.completed',
        data: { callId: 'a', tool: 'shell', output: 'ok', isError: false, durationMs: 1 },
      }),
    );
    expect(closed.pending).toEqual([]);
    expect(closed.messages.at(-1)).toMatchObject({ role: 'tool', callId: 'a', content: 'ok' });
    expect(closed.used).toEqual({ modelCalls: 0, toolCalls: 1, outputTokens: 7 });
  });

  it('refuses the end of a call that was never requested', () => {
    const stray: NewEvent = {
      type: 'tool.completed',
      data: { callId: 'x', tool: 't', output: '', isError: false, durationMs: 0 },
    };
    expect(() => fold(log(stray))).toThrow(/never requested/);
  });

  it('counts only the time a worker had the run', () => {
    const state = fold(
      log(
        { type: 'run.started', data: { worker: 'w', leaseToken: 1 } }, // at 1 s
        asked('a'), // 2 s: one second active
        { type: 'run.resumed', data: { worker: 'v', leaseToken: 2 } }, // 3 s: a crash lies between, not counted
        requested('a', 'none'), // 4 s: another second
        {
          type: 'run.paused',
          data: { error: { code: 'Interrupted', class: 'pause', message: '', next: '' } },
        }, // 5 s
        { type: 'run.resumed', data: { worker: 'v', leaseToken: 3 } }, // 6 s: the pause is not counted
      ),
    );
    expect(state.activeMs).toBe(3000);
  });

  it('takes a larger budget from an answer', () => {
    const state = fold(
      log({
        type: 'signal.received',
        data: { key: 'k', signal: 'answer', data: { budget: { modelCalls: 9 } } },
      }),
    );
    expect(state.spec.budget.modelCalls).toBe(9);
  });
});

describe('effect ledger', () => {
  const call = { callId: 'a', tool: 'shell', input: {} };

  it.each([
    ['none', 'repeat'],
    ['idempotent', 'repeat'],
    ['workspace', 'rollback'],
    ['once', 'ask'],
  ] as const)('a %s call that was requested and has no end: %s', (effect, decision) => {
    expect(decideCall(fold(log(asked('a'), requested('a', effect))), call)).toBe(decision);
  });

  it('starts a call that was never requested', () => {
    expect(decideCall(fold(log(asked('a'))), call)).toBe('start');
  });

  it('does what a person answered for a once call', () => {
    const events = (answer: 'done' | 'repeat') =>
      log(asked('a'), requested('a', 'once'), {
        type: 'signal.received',
        data: { key: 'k', signal: 'answer', data: { callId: 'a', answer } },
      });
    expect(decideCall(fold(events('done')), call)).toBe('assumeDone');
    expect(decideCall(fold(events('repeat')), call)).toBe('repeat');
  });
});

describe('events', () => {
  it('every type has a version and refuses a foreign payload', () => {
    for (const type of EVENT_TYPES) {
      expect(EVENT_VERSIONS[type]).toBeGreaterThan(0);
      expect(() => parseEventData(type, 42)).toThrow();
    }
  });
});
