import { LonghaulError } from '../../core/index.ts';
import type { AdamParams, Datum, ForwardResult, Loss, ModelConfig } from '../contract.ts';
import { adamW, norm, type OptimiserState } from './adamw.ts';
import { causalMask, checkData, invalid, type MicroBatch, planBatches } from './batches.ts';
import { Session, type SessionOptions, type Tensors, tensor } from './graph/session.ts';
import { type Layout, layoutOf } from './layout.ts';
import { scoringGraph, trainingGraph } from './training-graph.ts';

/** Tokens of one micro-batch: enough to fill the kernels, few enough that activations stay in cache. */
const MICRO_BATCH_TOKENS = 2048;

const NUMERIC_ADVICE =
  'Lower the learning rate, clip gradients, or check weights, advantages and log-probs.';

/** Views of a flat weight vector as the graph's parameter inputs. */
export function parameterFeeds(layout: Layout, weights: Float32Array): Tensors {
  const feeds: Tensors = {};
  for (const { name, shape, offset, size } of layout.tensors)
    feeds[name] = tensor(weights.subarray(offset, offset + size), shape);
  return feeds;
}

/** Tokens, targets and mask of a micro-batch; rows are padded at their end with token 0. */
function batchFeeds(data: readonly Datum[], batch: MicroBatch): Tensors {
  const { members, length } = batch;
  const count = members.length * length;
  const pad = (pick: (datum: Datum) => Int32Array) => {
    const out = new Int32Array(count);
    for (const [row, i] of members.entries()) out.set(pick(data[i]!), row * length);
    return tensor(out, [count]);
  };
  return {
    tokens: pad((datum) => datum.tokens),
    targets: pad((datum) => datum.targets),
    mask: tensor(causalMask(length), [length, length]),
  };
}

/** Runs the scoring graph over sequences: log-probs of each target, in the caller's order. */
export async function scoreTargets(
  session: Session,
  parameters: Tensors,
  data: readonly Datum[],
): Promise<Float32Array[]> {
  const logprobs: Float32Array[] = [];
  const lengths = data.map((datum) => datum.tokens.length);
  for (const batch of planBatches(lengths, MICRO_BATCH_TOKENS)) {
    const out = await session.run({ ...parameters, ...batchFeeds(data, batch) });
    takeLogprobs(out, data, batch, logprobs);
  }
  return logprobs;
}

function takeLogprobs(
  out: Tensors,
  data: readonly Datum[],
  { members, length }: MicroBatch,
  into: Float32Array[],
): void {
  const flat = out.logprobs!.data as Float32Array;
  for (const [row, i] of members.entries())
    into[i] = flat.slice(row * length, row * length + data[i]!.tokens.length);
}

/**
 * Weights, optimiser moments and the gradients not yet applied: everything a trainer does, on the
 * thread it is called on. Calls must not overlap.
 */
export class Training {
  readonly config: ModelConfig;
  readonly layout: Layout;
  readonly weights: Float32Array;
  readonly optimiser: OptimiserState;
  readonly #options: SessionOptions;
  readonly #feeds: Tensors;
  readonly #gradient: Float32Array;
  #sessions = new Map<string, Session>();

  constructor(
    config: ModelConfig,
    weights: Float32Array,
    optimiser: OptimiserState | null,
    options: SessionOptions,
  ) {
    this.config = config;
    this.layout = layoutOf(config);
    this.weights = weights;
    const { total } = this.layout;
    this.optimiser = optimiser ?? {
      m: new Float32Array(total),
      v: new Float32Array(total),
      step: 0,
    };
    this.#options = options;
    this.#gradient = new Float32Array(total);
    this.#feeds = parameterFeeds(this.layout, weights);
  }

  async #session(kind: Loss['kind'] | 'scoring'): Promise<Session> {
    let session = this.#sessions.get(kind);
    if (!session) {
      const { config } = this;
      const graph = kind === 'scoring' ? scoringGraph(config) : trainingGraph(config, kind);
      session = await Session.compile(graph, this.#options);
      this.#sessions.set(kind, session);
    }
    return session;
  }

  /** Log-probs, and cross-entropy as the loss (weights where given, else 1). */
  async forward(data: readonly Datum[]): Promise<ForwardResult> {
    checkData(data, this.config);
    const logprobs = await scoreTargets(await this.#session('scoring'), this.#feeds, data);
    let lossSum = 0;
    for (const [i, datum] of data.entries()) {
      for (const [t, logprob] of logprobs[i]!.entries()) {
        const weight = datum.weights?.[t] ?? 1;
        if (weight !== 0) lossSum -= weight * logprob;
      }
    }
    return { logprobs, lossSum };
  }

  async forwardBackward(data: readonly Datum[], loss: Loss): Promise<ForwardResult> {
    checkData(data, this.config, loss);
    const session = await this.#session(loss.kind);
    const lengths = data.map((datum) => datum.tokens.length);
    const logprobs: Float32Array[] = [];
    let lossSum = 0;
    let fresh: Float32Array | null = null;
    for (const batch of planBatches(lengths, MICRO_BATCH_TOKENS)) {
      const feeds = { ...this.#feeds, ...batchFeeds(data, batch), ...lossFeeds(data, batch, loss) };
      const out = await session.run(feeds);
      takeLogprobs(out, data, batch, logprobs);
      lossSum += out.loss!.data[0] as number;
      const gradient = out.gradient!.data as Float32Array;
      if (fresh === null) fresh = gradient;
      else accumulate(fresh, gradient);
    }
    if (fresh === null || !Number.isFinite(lossSum) || !Number.isFinite(norm(fresh)))
      throw new LonghaulError(
        'EngineFailed',
        `${loss.kind} gave a loss of ${lossSum} at step ${this.optimiser.step + 1}, or a gradient that is not finite; nothing was added`,
        { next: NUMERIC_ADVICE },
      );
    accumulate(this.#gradient, fresh);
    flushTiny(this.#gradient);
    return { logprobs, lossSum };
  }

  /** `EngineFailed` when the summed gradient is not finite: it is dropped and the weights stay. */
  optimStep(adam: AdamParams): { gradNorm: number; step: number } {
    checkAdam(adam);
    const gradNorm = adamW(this.weights, this.#gradient, this.optimiser, adam);
    this.#gradient.fill(0);
    if (!Number.isFinite(gradNorm))
      throw new LonghaulError(
        'EngineFailed',
        `the gradient of step ${this.optimiser.step + 1} is not finite; it was dropped`,
        { next: NUMERIC_ADVICE },
      );
    return { gradNorm, step: this.optimiser.step };
  }

  async dispose(): Promise<void> {
    for (const session of this.#sessions.values()) await session.dispose();
    this.#sessions.clear();
  }
}

function accumulate(sum: Float32Array, more: Float32Array): void {
  for (let i = 0; i < sum.length; i++) sum[i] = sum[i]! + more[i]!;
}

/**
 * Zeroes what is too small to matter. Threads differ in whether they flush denormals; without this,
 * traces of them would make equal runs differ in bytes.
 */
function flushTiny(gradient: Float32Array): void {
  for (let i = 0; i < gradient.length; i++) if (Math.abs(gradient[i]!) < 1e-30) gradient[i] = 0;
}

/** Loss inputs of a micro-batch. Masked positions carry zeros, whatever the caller left in them. */
function lossFeeds(data: readonly Datum[], batch: MicroBatch, loss: Loss): Tensors {
  const { members, length } = batch;
  const count = members.length * length;
  const weight = new Float32Array(count);
  const sampled = new Float32Array(count);
  for (const [row, i] of members.entries()) {
    const datum = data[i]!;
    const at = row * length;
    if (loss.kind === 'cross_entropy') {
      if (datum.weights) weight.set(datum.weights, at);
      else weight.fill(1, at, at + datum.tokens.length);
      continue;
    }
    const { advantages, logprobs } = datum as Required<Datum>;
    for (let t = 0; t < advantages.length; t++) {
      if (advantages[t] === 0) continue;
      weight[at + t] = advantages[t]!;
      sampled[at + t] = logprobs[t]!;
    }
  }
  const feeds: Tensors = { weight: tensor(weight, [count]) };
  if (loss.kind !== 'cross_entropy') feeds.sampled = tensor(sampled, [count]);
  if (loss.kind === 'ppo') {
    feeds.clipLow = tensor(Float32Array.of(loss.clipLow), []);
    feeds.clipHigh = tensor(Float32Array.of(loss.clipHigh), []);
  }
  return feeds;
}

function checkAdam(adam: AdamParams): void {
  const { learningRate, beta1 = 0.9, beta2 = 0.95, eps = 1e-8 } = adam;
  const { weightDecay = 0, gradClipNorm = 0, gradScale = 1 } = adam;
  const limits: [string, number, number, number][] = [
    ['learningRate', learningRate, 0, 10],
    ['beta1', beta1, 0, 0.9999999],
    ['beta2', beta2, 0, 0.9999999],
    // Zero would divide zero by zero where a weight has had no gradient.
    ['eps', eps, 1e-15, 1],
    ['weightDecay', weightDecay, 0, 100],
    ['gradClipNorm', gradClipNorm, 0, Number.MAX_VALUE],
    ['gradScale', gradScale, 0, Number.MAX_VALUE],
  ];
  for (const [name, value, low, high] of limits) {
    if (!(value >= low && value <= high))
      invalid(`${name} is ${value}; it must lie in [${low}, ${high}]`);
  }
}
