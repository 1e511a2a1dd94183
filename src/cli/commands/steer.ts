import { type Budget, fold, isFinal, LonghaulError, type RunSpec } from '../../core/index.ts';
import { answerRun, forkRun, stopRun } from '../../run/index.ts';
import { systemClock } from '../clock.ts';
import { host, openParts } from '../host.ts';
import { openModel } from '../models.ts';
import { type Platform, resolveRunId } from '../platform.ts';

/** `longhaul resume RUN`: goes on where the log ends, after a crash or a pause. */
export async function resume(
  platform: Platform,
  text: string,
  options: {
    answer?: 'done' | 'repeat';
    modelCalls?: number;
    toolCalls?: number;
    minutes?: number;
    model?: string;
    baseUrl?: string;
  },
): Promise<number> {
  const store = await platform.store();
  const runId = await resolveRunId(store, text);
  const state = fold(await store.log.read(runId));
  if (isFinal(state.status)) {
    throw new LonghaulError('ConfigInvalid', `the run is over (${state.status})`, {
      next: `Fork it from a step instead: \`${platform.hint(`fork ${runId} --at STEP`)}\`.`,
    });
  }
  const budget: Budget = {
    ...(options.modelCalls ? { modelCalls: options.modelCalls } : {}),
    ...(options.toolCalls ? { toolCalls: options.toolCalls } : {}),
    ...(options.minutes ? { wallMs: options.minutes * 60_000 } : {}),
  };
  if (Object.keys(budget).length > 0) await answerRun(store.log, runId, { budget });
  const moved = {
    ...(options.model ? { ref: options.model } : {}),
    ...(options.baseUrl ? { baseUrl: options.baseUrl } : {}),
  };
  const spec = { ...state.spec, model: { ...state.spec.model, ...moved } };
  if (Object.keys(moved).length > 0) {
    await openModel(platform, spec.model);
    await answerRun(store.log, runId, { model: moved });
  }
  if (options.answer !== undefined) {
    const unknown = [...state.ledger.values()].find(
      (call) => call.state === 'unknown' && call.resolution === 'ask',
    );
    if (unknown === undefined) {
      throw new LonghaulError('ConfigInvalid', 'no call of this run waits for an answer', {
        next: 'Resume it without --answer.',
      });
    }
    await answerRun(store.log, runId, { callId: unknown.callId, answer: options.answer });
  }
  return host(platform, runId, spec);
}

/** `longhaul fork RUN --at STEP`: a new run from the end of a step, workspace included. */
export async function fork(
  platform: Platform,
  text: string,
  options: {
    at: number;
    message?: string;
    model?: string;
    baseUrl?: string;
    seed?: number;
    start: boolean;
  },
): Promise<number> {
  const store = await platform.store();
  const parentId = await resolveRunId(store, text);
  const parent = fold(await store.log.read(parentId));
  const model: RunSpec['model'] = {
    ...(options.model ? { ref: options.model } : parent.spec.model),
    ...(options.baseUrl ? { baseUrl: options.baseUrl } : {}),
  };
  if (options.start) await openParts(platform, { ...parent.spec, model });
  const child = await forkRun(store.log, parentId, options.at, {
    ...(options.message === undefined ? {} : { message: options.message }),
    model,
    ...(options.seed === undefined ? {} : { seed: options.seed }),
  });
  platform.output.say(`run ${child.runId}: fork of ${parentId} after step ${options.at}`);
  if (!options.start) {
    platform.output.document(child);
    platform.output.say(`start  ${platform.hint(`resume ${child.runId}`)}`);
    return 0;
  }
  return host(platform, child.runId, child.spec);
}

/** `longhaul stop RUN`: the worker that has it ends it within seconds; without a worker it ends here. */
export async function stop(
  platform: Platform,
  text: string,
  options: { reason: string },
): Promise<number> {
  const store = await platform.store();
  const runId = await resolveRunId(store, text);
  const row = await store.log.row(runId);
  if (row !== null && isFinal(row.status)) {
    platform.output.say(`run ${runId} was over before (${row.status})`);
    platform.output.document({ runId, outcome: row.status });
    return 0;
  }
  const outcome = await stopRun(store.log, runId, platform.worker, options.reason, systemClock);
  platform.output.say(
    outcome === 'stopped' ? `run ${runId} is stopped` : `run ${runId}: its worker was told to stop`,
  );
  platform.output.document({ runId, outcome });
  return 0;
}
