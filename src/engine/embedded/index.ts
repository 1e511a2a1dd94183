import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type {
  AdamParams,
  Datum,
  Engine,
  ForwardResult,
  Loss,
  ModelConfig,
  SampleRequest,
  SampleResult,
  Sampler,
  SamplerRef,
  Trainer,
} from '../contract.ts';
import type { SessionOptions } from './graph/session.ts';
import { replicated } from './replicas.ts';
import { WorkerClient } from './rpc.ts';
import type { SamplerSource } from './sampler-worker.ts';
import type { TrainerSource } from './trainer-worker.ts';

export interface EmbeddedEngineOptions {
  /** Threads of each trainer (default 1). */
  trainerThreads?: number;
  /**
   * Threads of each sampler (default 1). With one, a request's tokens and log-probs have the same bits
   * whatever else is decoded beside it; with more, they may differ by rounding.
   */
  samplerThreads?: number;
  /** Samplers behind each handle, which share the requests of a call (default 1). */
  samplerReplicas?: number;
  /** Idle threads spin: up to a fifth faster on a machine of one's own (default false). */
  spinning?: boolean;
  /** Folder that relative checkpoint paths start from (default: the working directory). */
  dir?: string;
}

/** Published weights kept in memory; older ones must be saved to be sampled. */
const KEPT_VERSIONS = 4;

interface Published {
  version: string;
  config: ModelConfig;
  weights: Float32Array;
}

/**
 * Small Llama-style models on this machine's CPU: training and sampling in worker threads of their
 * own, so that both can overlap. Weights pass from trainer to sampler in memory.
 */
export function createEmbeddedEngine(options: EmbeddedEngineOptions = {}): Engine {
  const {
    trainerThreads = 1,
    samplerThreads = 1,
    samplerReplicas = 1,
    spinning = false,
    dir = '.',
  } = options;
  const published = new Map<string, Published>();
  const open = new Set<{ close(): Promise<void> }>();
  let trainers = 0;

  const locate = (path: string) => resolve(dir, path);

  const publish = (set: Published): SamplerRef => {
    published.delete(set.version);
    published.set(set.version, set);
    for (const version of [...published.keys()].slice(0, -KEPT_VERSIONS)) published.delete(version);
    return { version: set.version };
  };

  const find = (from: SamplerRef | { checkpoint: string }): SamplerSource => {
    if ('checkpoint' in from) {
      const checkpoint = locate(from.checkpoint);
      return { checkpoint, version: checkpointVersion(checkpoint) };
    }
    if (from.path !== undefined) return { checkpoint: locate(from.path), version: from.version };
    const set = published.get(from.version);
    if (set) return set;
    throw new LonghaulError('NotFound', `weights ${from.version} are not in memory`, {
      next: `Publish again: the latest ${KEPT_VERSIONS} versions are kept; older ones need a checkpoint.`,
    });
  };

  return {
    name: 'embedded',
    capabilities: {
      losses: ['cross_entropy', 'importance_sampling', 'ppo'],
      full: true,
      critic: false,
      gradients: 'none',
      inflightSwap: false,
      deterministic: true,
    },

    async createTrainer(from) {
      const source = 'checkpoint' in from ? { checkpoint: locate(from.checkpoint) } : from;
      const session = { threads: trainerThreads, spinning };
      const name = `trainer-${++trainers}`;
      const trainer = await EmbeddedTrainer.start(source, session, { name, publish, locate });
      open.add(trainer);
      return trainer;
    },

    async sampler(from) {
      const session = { threads: samplerThreads, spinning };
      const start = () => EmbeddedSampler.start(find(from), session, find);
      const sampler = replicated([
        await start(),
        ...(await Promise.all(Array.from({ length: samplerReplicas - 1 }, start))),
      ]);
      open.add(sampler);
      return sampler;
    },

    async close() {
      await Promise.all([...open].map((handle) => handle.close()));
      open.clear();
      published.clear();
    },
  };
}

interface TrainerPlace {
  name: string;
  publish(set: Published): SamplerRef;
  locate(path: string): string;
}

class EmbeddedTrainer implements Trainer {
  readonly config: ModelConfig;
  readonly #worker: WorkerClient;
  readonly #place: TrainerPlace;

  private constructor(config: ModelConfig, worker: WorkerClient, place: TrainerPlace) {
    this.config = config;
    this.#worker = worker;
    this.#place = place;
  }

  static async start(
    from: TrainerSource,
    options: SessionOptions,
    place: TrainerPlace,
  ): Promise<EmbeddedTrainer> {
    const { worker, config } = await startWorker('trainer-worker', place.name, { from, options });
    return new EmbeddedTrainer(config, worker, place);
  }

  forward(data: readonly Datum[]): Promise<ForwardResult> {
    return this.#worker.call('forward', data);
  }

  forwardBackward(data: readonly Datum[], loss: Loss): Promise<ForwardResult> {
    return this.#worker.call('forwardBackward', { data, loss });
  }

  optimStep(adam: AdamParams): Promise<{ gradNorm: number; step: number }> {
    return this.#worker.call('optimStep', adam);
  }

  save(folder: string): Promise<void> {
    return this.#worker.call('save', this.#place.locate(folder));
  }

  async publish(): Promise<SamplerRef> {
    const { step, weights } = await this.#worker.call<{ step: number; weights: Float32Array }>(
      'publish',
      null,
    );
    const version = `step-${step}-${fingerprint(weights)}`;
    return this.#place.publish({ version, config: this.config, weights });
  }

  close(): Promise<void> {
    return this.#worker.close();
  }
}

/** Names weights by what they are, so that a token's version means the same in every job and process. */
function fingerprint(weights: Float32Array | Buffer): string {
  const bytes = Buffer.from(weights.buffer, weights.byteOffset, weights.byteLength);
  return createHash('sha256').update(bytes).digest('hex').slice(0, 12);
}

/** Of a checkpoint: its folder's name and its weights' file. A missing file is the worker's to report. */
function checkpointVersion(checkpoint: string): string {
  try {
    return `${basename(checkpoint)}-${fingerprint(readFileSync(join(checkpoint, 'model.safetensors')))}`;
  } catch {
    return basename(checkpoint);
  }
}

type Find = (from: SamplerRef) => SamplerSource;

class EmbeddedSampler implements Sampler {
  #config: ModelConfig;
  readonly #worker: WorkerClient;
  readonly #find: Find;

  private constructor(config: ModelConfig, worker: WorkerClient, find: Find) {
    this.#config = config;
    this.#worker = worker;
    this.#find = find;
  }

  static async start(
    from: SamplerSource,
    options: SessionOptions,
    find: Find,
  ): Promise<EmbeddedSampler> {
    const { worker, config } = await startWorker('sampler-worker', 'sampler', { from, options });
    return new EmbeddedSampler(config, worker, find);
  }

  get config(): ModelConfig {
    return this.#config;
  }

  sample(requests: readonly SampleRequest[], signal?: AbortSignal): Promise<SampleResult[]> {
    return this.#worker.call('sample', requests, signal);
  }

  logprobs(sequences: readonly (readonly number[])[]): Promise<Float32Array[]> {
    return this.#worker.call('logprobs', sequences);
  }

  async load(ref: SamplerRef): Promise<void> {
    this.#config = await this.#worker.call<ModelConfig>('load', this.#find(ref));
  }

  close(): Promise<void> {
    return this.#worker.close();
  }
}

async function startWorker(
  entry: string,
  name: string,
  payload: unknown,
): Promise<{ worker: WorkerClient; config: ModelConfig }> {
  const worker = new WorkerClient(entry, name);
  try {
    return { worker, config: await worker.call<ModelConfig>('start', payload) };
  } catch (error) {
    await worker.close();
    throw error;
  }
}
