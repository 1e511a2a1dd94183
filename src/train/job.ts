import {
  appendFile,
  mkdir,
  open,
  readFile,
  rename,
  rm,
  truncate,
  writeFile,
} from 'node:fs/promises';
import { join } from 'node:path';
import { LonghaulError, type MetricSink } from '../core/index.ts';
import type { Trainer } from '../engine/contract.ts';

const FORMAT = 1;

/** Where a job stands: everything that its next step depends on besides the weights. */
export interface JobState<Spec, Results> {
  format: number;
  spec: Spec;
  /** Phase and number of finished steps in it. All randomness is a function of (seed, phase, step). */
  phase: string;
  step: number;
  /** Folder of weights and optimiser, relative to the job's; null before the first. */
  checkpoint: string | null;
  /** Bytes of the metrics file that belong to finished steps. */
  metricsBytes: number;
  results: Results;
}

/**
 * A training job's folder: `state.json`, `checkpoints/`, `metrics.jsonl`. The state is replaced atomically
 * after the checkpoint that it names is complete, so a job killed at any moment resumes from the last.
 */
export class Job<Spec, Results> {
  readonly folder: string;
  readonly id: string;
  state: JobState<Spec, Results>;
  readonly #sink: MetricSink | undefined;

  private constructor(
    folder: string,
    id: string,
    state: JobState<Spec, Results>,
    sink: MetricSink | undefined,
  ) {
    this.folder = folder;
    this.id = id;
    this.state = state;
    this.#sink = sink;
  }

  /** A fresh job; `ConfigInvalid` where the folder already holds one. */
  static async create<Spec, Results>(
    folder: string,
    id: string,
    spec: Spec,
    results: Results,
    sink?: MetricSink,
  ): Promise<Job<Spec, Results>> {
    if ((await readState(folder)) !== null)
      throw new LonghaulError('ConfigInvalid', `${folder} already holds a training job`, {
        next: 'Resume it with `longhaul train --resume`, or name another folder.',
      });
    await mkdir(join(folder, 'checkpoints'), { recursive: true });
    const state = {
      format: FORMAT,
      spec,
      phase: 'start',
      step: 0,
      checkpoint: null,
      metricsBytes: 0,
    };
    const job = new Job(folder, id, { ...state, results }, sink);
    await writeFile(job.#metricsFile, '');
    await job.#writeState();
    return job;
  }

  /** A job as its last checkpoint left it; metrics of steps after that are dropped, as they come again. */
  static async resume<Spec, Results>(
    folder: string,
    id: string,
    sink?: MetricSink,
  ): Promise<Job<Spec, Results>> {
    const state = (await readState(folder)) as JobState<Spec, Results> | null;
    if (state === null)
      throw new LonghaulError('CheckpointInvalid', `${folder} holds no training job`);
    if (state.format !== FORMAT)
      throw new LonghaulError(
        'CheckpointInvalid',
        `${folder} was written in format ${state.format}, this version reads ${FORMAT}`,
      );
    const job = new Job(folder, id, state, sink);
    await truncate(job.#metricsFile, state.metricsBytes);
    return job;
  }

  /** Absolute folder of the last checkpoint, if there is one. */
  get checkpoint(): string | null {
    return this.state.checkpoint === null ? null : join(this.folder, this.state.checkpoint);
  }

  /** Saves weights, optimiser and position. The checkpoint before is removed. */
  async save(trainer: Trainer, phase: string, step: number): Promise<void> {
    const previous = this.state.checkpoint;
    const checkpoint = join('checkpoints', `${phase}-${step}`);
    if (checkpoint !== previous) await trainer.save(join(this.folder, checkpoint));
    this.state = {
      ...this.state,
      phase,
      step,
      checkpoint,
      metricsBytes: await this.#metricsSize(),
    };
    await this.#writeState();
    if (previous !== null && previous !== checkpoint)
      await rm(join(this.folder, previous), { recursive: true, force: true });
  }

  /** One line in `metrics.jsonl` and one record in the sink, as job `ID/PHASE`: `step` counts within its phase. */
  async record(phase: string, step: number, values: Record<string, number>): Promise<void> {
    await appendFile(this.#metricsFile, `${JSON.stringify({ phase, step, ...values })}\n`);
    await this.#sink?.write({ job: `${this.id}/${phase}`, step, values });
  }

  get #metricsFile(): string {
    return join(this.folder, 'metrics.jsonl');
  }

  async #metricsSize(): Promise<number> {
    return (await readFile(this.#metricsFile)).length;
  }

  async #writeState(): Promise<void> {
    const file = join(this.folder, 'state.json');
    const draft = await open(`${file}.new`, 'w');
    try {
      await draft.writeFile(`${JSON.stringify(this.state, null, 2)}\n`);
      await draft.sync();
    } finally {
      await draft.close();
    }
    await rename(`${file}.new`, file);
  }
}

async function readState(folder: string): Promise<JobState<unknown, unknown> | null> {
  let text: string;
  try {
    text = await readFile(join(folder, 'state.json'), 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
    throw error;
  }
  try {
    return JSON.parse(text) as JobState<unknown, unknown>;
  } catch {
    throw new LonghaulError('CheckpointInvalid', `${folder}/state.json is not JSON`);
  }
}
