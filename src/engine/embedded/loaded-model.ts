import type { ModelConfig } from '../contract.ts';
import { causalMask } from './batches.ts';
import { decodeGraph, prefillGraph } from './generation-graph.ts';
import { Session, type SessionOptions, type Tensors, tensor } from './graph/session.ts';
import { KvCache } from './kv-cache.ts';
import { layoutOf } from './layout.ts';
import { parameterFeeds, scoreTargets } from './training.ts';
import { scoringGraph } from './training-graph.ts';

/** Weights with the shape and the version they carry. */
export interface WeightSet {
  config: ModelConfig;
  version: string;
  weights: Float32Array;
}

/**
 * Kernels treat a matrix of one row otherwise than one of several, which changes the rounding. With
 * two rows at least, and one thread, a sequence gets the same bits whatever else is in the batch.
 * (Several threads divide a small matrix by columns, and its sums into other blocks.)
 */
const MIN_ROWS = 2;

interface Sessions {
  prefill: Session;
  decode: Session;
  scoring: Session;
}

/** Compiled graphs and weights of one version, and the cache that belongs to them. */
export class LoadedModel {
  readonly config: ModelConfig;
  readonly version: string;
  readonly cache: KvCache;
  readonly #parameters: Tensors;
  readonly #sessions: Sessions;

  private constructor(set: WeightSet, sessions: Sessions) {
    this.config = set.config;
    this.version = set.version;
    this.cache = new KvCache(set.config, MIN_ROWS);
    this.#parameters = parameterFeeds(layoutOf(set.config), set.weights);
    this.#sessions = sessions;
  }

  /** Takes over the graphs of `old` where the shapes are equal: a swap then costs nothing. */
  static async create(
    set: WeightSet,
    options: SessionOptions,
    old?: LoadedModel,
  ): Promise<LoadedModel> {
    const { config } = set;
    if (old && JSON.stringify(old.config) === JSON.stringify(config))
      return new LoadedModel(set, old.#sessions);
    const sessions = {
      prefill: await Session.compile(prefillGraph(config), options),
      decode: await Session.compile(decodeGraph(config), options),
      scoring: await Session.compile(scoringGraph(config), options),
    };
    await old?.dispose();
    return new LoadedModel(set, sessions);
  }

  /** Cache and next-token logits of whole prompts, padded to `length`; rows beyond them are filler. */
  async prefill(prompts: readonly (readonly number[])[], length: number): Promise<Tensors> {
    const count = prompts.length * length;
    const tokens = new Int32Array(count);
    for (const [row, prompt] of prompts.entries()) tokens.set(prompt, row * length);
    const last = new Int32Array(Math.max(prompts.length, MIN_ROWS));
    for (const [row, prompt] of prompts.entries()) last[row] = row * length + prompt.length - 1;
    return this.#sessions.prefill.run({
      ...this.#parameters,
      tokens: tensor(tokens, [count]),
      mask: tensor(causalMask(length), [length, length]),
      last: tensor(last, [last.length]),
    });
  }

  /** One token for each row of the cache. Outputs may hold more rows: those are to be ignored. */
  decode(ids: readonly number[]): Promise<Tensors> {
    const tokens = new Int32Array(this.cache.fedRows);
    tokens.set(ids);
    return this.#sessions.decode.run({
      ...this.#parameters,
      ...this.cache.feeds(),
      tokens: tensor(tokens, [tokens.length]),
    });
  }

  score(data: { tokens: Int32Array; targets: Int32Array }[]): Promise<Float32Array[]> {
    return scoreTargets(this.#sessions.scoring, this.#parameters, data);
  }

  async dispose(): Promise<void> {
    for (const session of Object.values(this.#sessions)) await session.dispose();
  }
}
