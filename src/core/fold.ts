import type { ErrorData } from './errors.ts';
import type { Effect, Event } from './event.ts';
import type { Message, ToolCall } from './message.ts';
import type { Reward } from './reward.ts';
import type { Budget, RunSpec, RunStatus } from './run.ts';

/** A tool call in the effect ledger: `requested` without an end is *unknown* after a crash. */
export interface LedgerCall {
  callId: string;
  tool: string;
  input: unknown;
  effect: Effect;
  requestedSeq: number;
  requestedAt: string;
  timeoutMs: number;
  state: 'requested' | 'done' | 'failed' | 'unknown';
  /** What resume decided for an unknown call. `ask` waits for a person. */
  resolution: 'repeat' | 'rolled_back' | 'ask' | null;
  answer: 'done' | 'repeat' | null;
}

/** State of a run: a pure fold of its events, nothing else. */
export interface RunState {
  runId: string;
  spec: RunSpec;
  head: number;
  status: RunStatus;
  messages: Message[];
  /** Calls the last assistant message asked for, in order, whose results are not in `messages` yet. */
  pending: ToolCall[];
  ledger: Map<string, LedgerCall>;
  /** A model call without a result yet; a failed attempt leaves it open for the next. */
  openModelCall: { callId: string; step: number; attempt: number } | null;
  step: number;
  workspace: { layer: string; seq: number } | null;
  used: { modelCalls: number; toolCalls: number; outputTokens: number };
  /** Keys of inbox rows that are in the log: a row that a crash left in both is not taken twice. */
  signals: Set<string>;
  stopRequested: { key: string; reason: string } | null;
  reward: Reward | null;
  summary: string | null;
  error: ErrorData | null;
  createdAt: string;
  updatedAt: string;
  /** Milliseconds a worker was on it: pauses and the time after a crash do not count. */
  activeMs: number;
  /** Whether a worker has it, as far as the log knows. */
  active: boolean;
}

/** What a person may answer: how an unknown call ended, a larger budget, where the model is now. */
export interface Answer {
  callId?: string;
  answer?: 'done' | 'repeat';
  budget?: Budget;
  model?: Partial<RunSpec['model']>;
}

/** Folds events onto a state (or from the first event, `run.created`). Mutates and returns `state`. */
export function fold(events: Iterable<Event>, state: RunState | null = null): RunState {
  for (const event of events) state = apply(state, event);
  if (state === null) throw new Error('a run has at least its run.created event');
  return state;
}

/** Applies one event. Throws on a gap in `seq`: a log with a hole is never silently continued. */
export function apply(state: RunState | null, event: Event): RunState {
  if (state === null) {
    if (event.type !== 'run.created' || event.seq !== 1) {
      throw new Error(
        `log of ${event.runId} starts with ${event.type} #${event.seq}, not run.created #1`,
      );
    }
    return {
      runId: event.runId,
      spec: event.data,
      head: 1,
      status: 'queued',
      messages: [],
      pending: [],
      ledger: new Map(),
      openModelCall: null,
      step: 0,
      workspace: null,
      used: { modelCalls: 0, toolCalls: 0, outputTokens: 0 },
      signals: new Set(),
      stopRequested: null,
      reward: null,
      summary: null,
      error: null,
      createdAt: event.at,
      updatedAt: event.at,
      activeMs: 0,
      active: false,
    };
  }
  if (event.seq !== state.head + 1) {
    throw new Error(`log of ${state.runId} has a gap: #${event.seq} after #${state.head}`);
  }
  const takenOver = event.type === 'run.started' || event.type === 'run.resumed';
  if (state.active && !takenOver)
    state.activeMs += Math.max(0, Date.parse(event.at) - Date.parse(state.updatedAt));
  state.head = event.seq;
  state.updatedAt = event.at;
  const status = statusAfter(event);
  if (status !== null) {
    state.status = status;
    state.active = status === 'running';
  }
  switch (event.type) {
    case 'run.started':
    case 'run.resumed':
      state.error = null;
      break;
    case 'run.paused':
      state.error = event.data.error as ErrorData;
      break;
    case 'run.finished':
      state.summary = event.data.summary;
      state.error = (event.data.error as ErrorData | undefined) ?? null;
      break;
    case 'run.cancelled':
      state.summary = event.data.reason;
      break;
    case 'message.added':
      state.messages.push(event.data.message);
      break;
    case 'model.requested':
      state.openModelCall = {
        callId: event.data.callId,
        step: event.data.step,
        attempt: event.data.attempt,
      };
      state.step = event.data.step;
      state.used.modelCalls += 1;
      break;
    case 'model.completed':
      state.openModelCall = null;
      state.used.outputTokens += event.data.completion.usage.outputTokens ?? 0;
      state.messages.push(event.data.completion.message);
      if (event.data.completion.message.role === 'assistant') {
        state.pending = event.data.completion.message.toolCalls?.slice() ?? [];
      }
      break;
    case 'tool.requested':
      state.ledger.set(event.data.callId, {
        callId: event.data.callId,
        tool: event.data.tool,
        input: event.data.input,
        effect: event.data.effect,
        requestedSeq: event.seq,
        requestedAt: event.at,
        timeoutMs: event.data.timeoutMs,
        state: 'requested',
        resolution: null,
        answer: null,
      });
      state.used.toolCalls += 1;
      break;
    case 'tool.completed':
      patchCall(state, event.data.callId, { state: 'done' });
      state.messages.push({
        role: 'tool',
        callId: event.data.callId,
        tool: event.data.tool,
        content: event.data.output,
        isError: event.data.isError,
      });
      state.pending = state.pending.filter((call) => call.callId !== event.data.callId);
      break;
    case 'tool.failed':
      patchCall(state, event.data.callId, { state: 'failed' });
      break;
    case 'tool.unknown':
      patchCall(state, event.data.callId, { state: 'unknown', resolution: event.data.resolution });
      break;
    case 'workspace.saved':
      state.workspace = { layer: event.data.layer, seq: event.seq };
      break;
    case 'signal.received':
      state.signals.add(event.data.key);
      if (event.data.signal === 'stop') {
        const reason = (event.data.data as { reason?: string } | null)?.reason ?? 'stopped';
        state.stopRequested = { key: event.data.key, reason };
      } else {
        const answer = event.data.data as Answer | null;
        if (answer?.callId !== undefined) {
          patchCall(state, answer.callId, { answer: answer.answer ?? null });
        }
        if (answer?.budget !== undefined) {
          state.spec = { ...state.spec, budget: { ...state.spec.budget, ...answer.budget } };
        }
        if (answer?.model !== undefined) {
          state.spec = { ...state.spec, model: { ...state.spec.model, ...answer.model } };
        }
      }
      break;
    case 'grade.recorded':
      state.reward = event.data.reward as Reward;
      break;
  }
  return state;
}

/** The status a run has after this event, or null where the event leaves it. The projection uses it too. */
export function statusAfter(event: Pick<Event, 'type' | 'data'>): RunStatus | null {
  switch (event.type) {
    case 'run.created':
      return 'queued';
    case 'run.started':
    case 'run.resumed':
      return 'running';
    case 'run.paused':
      return 'paused';
    case 'run.cancelled':
      return 'cancelled';
    case 'run.finished':
      return (event.data as { status: 'succeeded' | 'failed' }).status;
    default:
      return null;
  }
}

function patchCall(state: RunState, callId: string, patch: Partial<LedgerCall>): void {
  const call = state.ledger.get(callId);
  if (call === undefined)
    throw new Error(`log of ${state.runId} ends a call ${callId} that was never requested`);
  Object.assign(call, patch);
}
