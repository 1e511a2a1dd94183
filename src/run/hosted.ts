import { ulid } from 'ulid';
import {
  type Answer,
  type Budget,
  type Clock,
  type Event,
  fold,
  isFinal,
  type Lease,
  LonghaulError,
  type NewEvent,
  type RunLog,
  type RunSpec,
  type RunState,
} from '../core/index.ts';
import type { RunContext } from './context.ts';
import { execute } from './executor.ts';
import { LEASE_TTL_MS, LogJournal } from './journal.ts';

const HEARTBEAT_MS = 2_000;

export interface HostedContext extends Omit<RunContext, 'journal' | 'leaseToken'> {
  log: RunLog;
  onEvent?: (event: Event, state: RunState) => void;
  /** Whether a worker is certainly gone, so that its lease need not run out. */
  isDead?: (worker: string) => boolean;
  /** Told once when another worker's lease must run out first. */
  onWaiting?: (worker: string) => void;
}

/** Creates a hosted run, queued. Nothing of it runs yet. */
export async function createRun(log: RunLog, spec: RunSpec): Promise<string> {
  const runId = ulid();
  await log.create(runId, spec);
  return runId;
}

/**
 * Takes the run's lease, waiting for a dead worker's to run out, and drives it until it ends or pauses.
 * The lease is renewed while it works; losing it stops the work at once and throws `LeaseLost`.
 */
export async function runHosted(runId: string, context: HostedContext): Promise<RunState> {
  const lease = await acquire(runId, context);
  const calls = new AbortController();
  const signal = AbortSignal.any([context.signal, calls.signal]);
  const heart = beat(lease, context, calls);
  try {
    const journal = await LogJournal.open(context.log, lease, context.onEvent);
    if (isFinal(journal.state.status)) return journal.state;
    return await execute({ ...context, journal, leaseToken: lease.token, signal });
  } catch (error) {
    const cause = calls.signal.reason as unknown;
    throw cause instanceof LonghaulError ? cause : error;
  } finally {
    clearInterval(heart);
    await context.log.release(lease).catch(() => {});
  }
}

async function acquire(runId: string, context: HostedContext): Promise<Lease> {
  for (let waiting = false; ; ) {
    const lease = await context.log.acquire(runId, context.worker, LEASE_TTL_MS);
    if (lease !== null) return lease;
    const holder = (await context.log.row(runId))?.worker;
    if (holder && context.isDead?.(holder)) {
      await context.log.evict(runId, holder);
      continue;
    }
    if (!waiting) context.onWaiting?.(holder ?? 'another worker');
    waiting = true;
    await context.clock.sleep(250, context.signal);
    if (context.signal.aborted)
      throw new LonghaulError('Interrupted', 'stopped waiting for the lease');
  }
}

/** Renews the lease and looks for a stop. A store that is away is the journal's matter, not the heart's. */
function beat(lease: Lease, context: HostedContext, calls: AbortController): NodeJS.Timeout {
  let busy = false;
  const once = async () => {
    await context.log.renew(lease, LEASE_TTL_MS);
    const rows = await context.log.inbox(lease.runId);
    if (rows.some((row) => row.signal === 'stop')) calls.abort('stop');
  };
  return setInterval(() => {
    if (busy) return;
    busy = true;
    once()
      .catch((error: unknown) => {
        if (error instanceof LonghaulError && error.code === 'LeaseLost') calls.abort(error);
      })
      .finally(() => {
        busy = false;
      });
  }, HEARTBEAT_MS);
}

/** Asks for a stop. The worker that has the run ends it; where nobody has it, this call does. */
export async function stopRun(
  log: RunLog,
  runId: string,
  worker: string,
  reason: string,
  clock: Clock,
): Promise<'stopped' | 'asked'> {
  await log.post(runId, { key: `stop:${ulid()}`, signal: 'stop', data: { reason } });
  // A worker that lets go without having seen the stop, or that is dead, leaves it to us.
  let lease = await log.acquire(runId, worker, LEASE_TTL_MS);
  for (const until = clock.now() + LEASE_TTL_MS + 1_000; lease === null; ) {
    const row = await log.row(runId);
    if (row !== null && isFinal(row.status)) return 'stopped';
    if (clock.now() > until) return 'asked';
    await clock.sleep(250);
    lease = await log.acquire(runId, worker, LEASE_TTL_MS);
  }
  try {
    const state = fold(await log.read(runId));
    if (!isFinal(state.status)) {
      await log.append(lease, [{ type: 'run.cancelled', data: { by: worker, reason } }]);
    }
    await log.drain(
      lease,
      (await log.inbox(runId)).map((row) => row.id),
    );
  } finally {
    await log.release(lease);
  }
  return 'stopped';
}

/** Answers a paused run: how an unknown call ended, or a larger budget. It takes effect on resume. */
export async function answerRun(log: RunLog, runId: string, answer: Answer): Promise<void> {
  await log.post(runId, { key: `answer:${ulid()}`, signal: 'answer', data: answer });
}

/** Events a fork does not inherit: what happened to the parent as a run, not in its conversation. */
const NOT_INHERITED = new Set([
  'run.created',
  'run.started',
  'run.resumed',
  'run.paused',
  'run.forked',
  'run.cancelled',
  'run.finished',
  'signal.received',
  'budget.exceeded',
  'grade.recorded',
]);

/**
 * A new run that shares the parent's conversation, effect ledger and workspace up to the end of a step.
 *
 * @param atStep finished model step to fork after; 0 is the state before the first model call.
 * @param change what differs: another model, a further user message, another seed or budget.
 */
export async function forkRun(
  log: RunLog,
  parentId: string,
  atStep: number,
  change: { message?: string; model?: RunSpec['model']; seed?: number; budget?: Budget } = {},
): Promise<{ runId: string; spec: RunSpec }> {
  const events = await log.read(parentId);
  if (events.length === 0) throw new LonghaulError('NotFound', `there is no run ${parentId}`);
  const kept = eventsUntil(events, atStep);
  const parent = fold(kept).spec;
  const atSeq = kept.at(-1)?.seq ?? 1;
  const spec: RunSpec = {
    ...parent,
    kind: 'hosted',
    model: change.model ?? parent.model,
    seed: change.seed ?? parent.seed,
    budget: { ...parent.budget, ...change.budget },
    parent: { runId: parentId, seq: atSeq },
  };
  const inherited = kept
    .filter((event) => !NOT_INHERITED.has(event.type))
    .map(({ type, data }) => ({ type, data }) as NewEvent);
  if (change.message !== undefined) {
    inherited.push({
      type: 'message.added',
      data: { message: { role: 'user', content: change.message } },
    });
  }
  const runId = ulid();
  await log.create(runId, spec, inherited);
  return { runId, spec };
}

/** Events up to the quiescent point after a step: all its calls have ended, the next was not asked for. */
function eventsUntil(events: readonly Event[], atStep: number): Event[] {
  const next = events.findIndex(
    (event) => event.type === 'model.requested' && event.data.step === atStep + 1,
  );
  const kept = next === -1 ? events.slice() : events.slice(0, next);
  const state = fold(kept);
  const settled =
    state.step === atStep && state.openModelCall === null && state.pending.length === 0;
  if (!settled || state.messages.length === 0) {
    const last = fold(events).step;
    throw new LonghaulError('ConfigInvalid', `step ${atStep} is not a finished step of this run`, {
      next: `Choose a step from 0 to ${last}; \`longhaul show RUN\` lists them.`,
    });
  }
  return kept;
}
