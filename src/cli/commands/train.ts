import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { ulid } from 'ulid';
import { LonghaulError, type RunSpec } from '../../core/index.ts';
import { programs } from '../../env/programs/environment.ts';
import { createRun } from '../../run/index.ts';
import type { JobRecord } from '../../store/index.ts';
import {
  type Control,
  logRollouts,
  type QuickstartDeps,
  type QuickstartResults,
  resumeQuickstart,
  runQuickstart,
} from '../../train/index.ts';
import { systemClock } from '../clock.ts';
import { host } from '../host.ts';
import { onInterrupt } from '../interrupt.ts';
import type { Platform } from '../platform.ts';
import { report, TrainingView } from '../training-view.ts';

const KIND = 'quickstart';
const WORKER_FILE = 'worker';

export interface TrainOptions {
  seed: number;
  minutes: number;
  control?: Control;
}

/** `longhaul quickstart`: train, then host the trained agent for one held-out task. */
export async function quickstart(platform: Platform, options: TrainOptions): Promise<number> {
  const { output } = platform;
  output.say(
    'Longhaul quickstart: a small agent is taught, measured, post-trained on what execution says,',
  );
  output.say(
    'measured again and hosted. All of it on this machine, in sandboxes. Ctrl-C stops it; nothing is lost.',
  );
  return train(platform, { ...options, host: true });
}

/** `longhaul train`: the training job alone. `resume` names a job, or `last`. */
export async function train(
  platform: Platform,
  options: TrainOptions & { resume?: string; host?: boolean },
): Promise<number> {
  const { output } = platform;
  const store = await platform.store();
  const resumed =
    options.resume === undefined ? null : await interruptedJob(platform, options.resume);
  const id = resumed?.id ?? ulid();
  const spec = { ...options, resume: undefined };
  const wanted = (resumed?.spec ?? spec) as TrainOptions & { host?: boolean };
  output.say(
    `job ${id}${resumed ? ' goes on' : ''}: seed ${wanted.seed}, about ${wanted.minutes} minutes on two cores${wanted.control ? `, control ${wanted.control}` : ''}`,
  );

  const view = new TrainingView(output);
  const rewards: number[] = [];
  const interrupt = onInterrupt(() =>
    output.say('\nstopping; a checkpoint is written (Ctrl-C again ends at once)'),
  );
  const folder = jobFolder(platform, id);
  let hosted = 0;
  const deps: QuickstartDeps = {
    engine: platform.engine(),
    sandboxes: await platform.sandboxes(),
    folder,
    jobId: id,
    clock: systemClock,
    redactor: platform.redactor,
    signal: interrupt.signal,
    metrics: store.metrics,
    rollouts: logRollouts(store.log, store.artifacts),
    onProgress: (event) => {
      if (event.kind === 'step' && event.stage === 'train' && event.values.reward !== undefined) {
        rewards.push(event.values.reward);
      }
      view.show(event);
    },
    ...(wanted.host
      ? {
          host: async ({ checkpoint, task, spec }) => {
            const { name, hash } = await programs(spec.language).open(task);
            const run: RunSpec = {
              kind: 'hosted',
              task: { name, ref: JSON.stringify(task), hash },
              agent: 'programmer',
              model: { ref: `embedded/${checkpoint}` },
              seed: wanted.seed,
              budget: { modelCalls: 8 },
            };
            hosted = await host(platform, await createRun(store.log, run), run);
          },
        }
      : {}),
  };
  let results: QuickstartResults;
  claim(platform, folder);
  try {
    if (resumed === null) await store.jobs.create({ id, kind: KIND, spec });
    else await store.jobs.update(id, { status: 'running' });
    results = await (resumed === null ? runQuickstart(wanted, deps) : resumeQuickstart(deps));
    await store.jobs.update(id, { status: 'succeeded', checkpoint: folder });
  } catch (error) {
    const interrupted = error instanceof LonghaulError && error.code === 'Interrupted';
    await store.jobs.update(id, { status: interrupted ? 'interrupted' : 'failed' });
    throw interrupted
      ? new LonghaulError('Interrupted', error.message, {
          next: `Go on with \`${platform.hint(`train --resume ${id}`)}\`.`,
        })
      : error;
  } finally {
    rmSync(join(folder, WORKER_FILE), { force: true });
    view.close();
    interrupt.dispose();
  }
  report((line) => output.say(line), results, rewards);
  output.document({ job: id, results });
  output.say();
  output.say(`look   ${platform.hint(`show ${id}`)}   the job: curves and figures`);
  output.say(
    `       ${platform.hint('runs --kind eval')}   runs of the measurements; show any of them`,
  );
  output.say(`       ${folder}/metrics.jsonl`);
  // What the agent made of one task is not the quickstart's success; a machine that failed it is.
  return hosted === 3 ? 3 : 0;
}

const jobFolder = (platform: Platform, id: string) => join(platform.home, 'jobs', id);

/** Two processes in one job would delete each other's checkpoints: its folder names the one that has it. */
function claim(platform: Platform, folder: string): void {
  mkdirSync(folder, { recursive: true });
  const holder = holderOf(platform, folder);
  if (holder !== null) {
    throw new LonghaulError('ConfigInvalid', `the job is being trained by ${holder}`, {
      next: `Wait for it, or stop that process; if it is gone, remove ${join(folder, WORKER_FILE)}.`,
    });
  }
  rmSync(join(folder, WORKER_FILE), { force: true });
  writeFileSync(join(folder, WORKER_FILE), platform.worker, { flag: 'wx' });
}

/** The process that trains a job now, or null. One that is certainly gone does not count. */
function holderOf(platform: Platform, folder: string): string | null {
  try {
    const holder = readFileSync(join(folder, WORKER_FILE), 'utf8');
    return platform.isGone(holder) ? null : holder;
  } catch {
    return null;
  }
}

async function interruptedJob(platform: Platform, text: string): Promise<JobRecord> {
  const store = await platform.store();
  const open = (await store.jobs.list({ kind: KIND })).filter(
    (job) => job.status !== 'succeeded' && holderOf(platform, jobFolder(platform, job.id)) === null,
  );
  const job =
    text === 'last' ? open[0] : open.find((candidate) => candidate.id.endsWith(text.toUpperCase()));
  if (job === undefined) {
    throw new LonghaulError(
      'NotFound',
      text === 'last' ? 'no interrupted training job' : `no interrupted job ${text}`,
      {
        next: 'Start one with `longhaul train`.',
      },
    );
  }
  return job;
}
