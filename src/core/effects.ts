import type { LedgerCall, RunState } from './fold.ts';
import type { ToolCall } from './message.ts';

/**
 * What to do next with a pending call. The decision table of the effect ledger:
 *
 * | in the ledger | effect | decision |
 * |---|---|---|
 * | absent | any | `start` |
 * | requested without an end, or failed by the host | none, idempotent | `repeat` |
 * | the same | workspace | `rollback` to the last saved workspace, then repeat |
 * | the same | once | `ask` the tool's status, else a person |
 * | the same, answered by a person | once | `repeat` or `assumeDone` |
 *
 * A finished call is never pending. A shell command that was allowed the network counts as `once`:
 * the caller declares it so in `tool.requested`.
 */
export type CallDecision = 'start' | 'repeat' | 'rollback' | 'ask' | 'assumeDone';

export function decideCall(state: RunState, call: ToolCall): CallDecision {
  const entry = state.ledger.get(call.callId);
  if (entry === undefined) return 'start';
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
