import {
  type Budget,
  type CallDecision,
  decideCall,
  type RunState,
  type ToolCall,
} from '../core/index.ts';

/** What a run does next. A pure function of its state: resume, fork and replay decide the same. */
export type Action =
  | { kind: 'model'; step: number; attempt: number }
  | { kind: 'tool'; call: ToolCall; decision: CallDecision }
  | { kind: 'exceeded'; limit: keyof Budget; used: number; allowed: number }
  | { kind: 'cancel'; reason: string }
  | { kind: 'finish'; reason: 'task_over' | 'agent_done' };

/**
 * Order: a stop wins over everything; a task that is over ends even with calls pending; limits are
 * checked before each call, not at the start of a turn; pending calls run in the order the model gave.
 */
export function decide(state: RunState, taskIsOver: boolean, elapsedMs: number): Action {
  if (state.stopRequested !== null) return { kind: 'cancel', reason: state.stopRequested.reason };
  if (taskIsOver) return { kind: 'finish', reason: 'task_over' };

  const call = state.pending[0];
  if (call === undefined && lastSpoke(state) === 'assistant') {
    return { kind: 'finish', reason: 'agent_done' };
  }

  const { budget } = state.spec;
  const wall = exceeded('wallMs', elapsedMs, budget.wallMs);
  if (wall) return wall;

  if (call !== undefined) {
    const decision = decideCall(state, call);
    const fresh = decision === 'start';
    return (
      (fresh && exceeded('toolCalls', state.used.toolCalls, budget.toolCalls)) || {
        kind: 'tool',
        call,
        decision,
      }
    );
  }
  const open = state.openModelCall;
  return (
    exceeded('modelCalls', state.used.modelCalls, budget.modelCalls) ||
    exceeded('outputTokens', state.used.outputTokens, budget.outputTokens) || {
      kind: 'model',
      step: open ? open.step : state.step + 1,
      attempt: open ? open.attempt + 1 : 1,
    }
  );
}

function lastSpoke(state: RunState): string | undefined {
  return state.messages.at(-1)?.role;
}

function exceeded(limit: keyof Budget, used: number, allowed: number | undefined): Action | null {
  return allowed !== undefined && used >= allowed
    ? { kind: 'exceeded', limit, used, allowed }
    : null;
}
