import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type { JobRecord } from '../../store/index.ts';
import type { QuickstartResults, QuickstartSpec } from '../../train/index.ts';
import { duration } from '../output.ts';
import type { Platform } from '../platform.ts';
import { plot, report } from '../training-view.ts';

/** The job whose id ends with this text, or null. */
export async function findJob(platform: Platform, text: string): Promise<JobRecord | null> {
  const { jobs } = await platform.store();
  const wanted = text.toUpperCase();
  return (await jobs.list()).find((job) => job.id === wanted || job.id.endsWith(wanted)) ?? null;
}

function parse(text: string, folder: string): unknown {
  try {
    const state = JSON.parse(text) as { spec?: { schedule?: unknown }; results?: unknown };
    if (state.spec?.schedule !== undefined && state.results !== undefined) return state;
  } catch {}
  throw new LonghaulError('CheckpointInvalid', `${join(folder, 'state.json')} is damaged`, {
    next: 'Restore the file from a copy, or start another job with `longhaul train`.',
  });
}

async function readState(job: JobRecord, folder: string): Promise<string> {
  try {
    return await readFile(join(folder, 'state.json'), 'utf8');
  } catch (error) {
    throw new LonghaulError(
      'NotFound',
      `the job ${job.id} (${job.status}) has left nothing in ${folder}`,
      {
        next: 'It ended before its first step; start another with `longhaul train`.',
        cause: error,
      },
    );
  }
}

/** `longhaul show JOB`: where a training job stands, its curves, and what it measured. */
export async function showJob(platform: Platform, job: JobRecord): Promise<number> {
  const { output, home } = platform;
  const folder = join(home, 'jobs', job.id);
  const state = parse(await readState(job, folder), folder) as {
    spec: QuickstartSpec;
    phase: string;
    step: number;
    checkpoint: string | null;
    results: QuickstartResults;
  };
  const steps = (await readFile(join(folder, 'metrics.jsonl'), 'utf8'))
    .split('\n')
    // A step that was being written when the process died is not one.
    .filter((line) => line.endsWith('}'))
    .map((line) => JSON.parse(line) as Record<string, number> & { phase: string });
  const curve = (phase: string, name: string) =>
    steps.flatMap((step) =>
      step.phase === phase && typeof step[name] === 'number' ? [step[name]] : [],
    );

  const { schedule, ...options } = state.spec;
  output.print(`${job.id}  ${job.kind}  ${job.status}  ${JSON.stringify(options)}`);
  output.print(
    `model    ${schedule.model.layers} layers of ${schedule.model.dim}, vocabulary ${schedule.model.vocabSize}`,
  );
  output.print(
    `schedule ${schedule.warmup.steps} warm-up steps of ${schedule.warmup.rows} rows, ${schedule.grpo.steps} steps of ${schedule.grpo.groups} × ${schedule.grpo.groupSize} rollouts`,
  );
  output.print(
    `stands   phase ${state.phase}, step ${state.step}; weights ${state.checkpoint === null ? 'none yet' : join(folder, state.checkpoint)}`,
  );
  for (const [stage, seconds] of Object.entries(state.results.seconds)) {
    output.print(`time     ${stage} ${duration(1000 * (seconds as number))}`);
  }
  const losses = curve('warmup', 'loss');
  if (losses.length > 1) {
    output.print();
    for (const line of plot('warm-up loss', losses)) output.print(line);
  }
  report((line) => output.print(line), state.results, curve('train', 'reward'));
  output.document({ job, state, steps });
  if (job.status === 'interrupted')
    output.print(`go on    ${platform.hint(`train --resume ${job.id}`)}`);
  return 0;
}
