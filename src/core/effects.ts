import type { LedgerCall, RunState } from './fold.ts';
import type { ToolCall } from './message.ts';

/**
 * What to do next with a call the model asked for. The decision table of the effect ledger:
 *
 * | in the ledger | effect | decision |
 * |---|---|---|
 * | absent | any | `start` |
 * | done, failed | any | `record` (its message is missing: the crash fell between two appends) |
 * | requested, no end | none, idempotent | `repeat` |
 * | requested, no end | workspace | `rollback`, then repeat |
 * | requested, no end | once | `ask` the tool's status, else a person |
 * | unknown, answered | once | `repeat`, or `assumeDone` |
 *
 * A shell command that was allowed the network counts as `once`: the caller declares it so in
 * `tool.requested`.
 */
export type CallDecision = 'start' | 'record' | 'repeat' | 'rollback' | 'ask' | 'assumeDone';

export function decideCall(state: RunState, call: ToolCall): CallDecision {
  const entry = state.ledger.get(call.callId);
  if (entry === undefined) return 'start';
  if (entry.state === 'done' || entry.state === 'failed') return 'record';
  if (entry.answer === 'done') return 'assumeDone';
  if (entry.answer === 'repeat') return 'repeat';
  return decideUnknown(entry);
}

function decideUnknown(entry: LedgerCall): CallDecision {
  switch (entry.effect) {
    case 'none':
    case 'idempotent':
      return 'repeat';
    case 'workspace':
      return 'rollback';
    case 'once':
      return 'ask';
  }
}

/** Key handed to a tool so that a repeat can be recognised outside. */
export function idempotencyKey(runId: string, callId: string): string {
  return `${runId}:${callId}`;
}
