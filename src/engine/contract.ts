import type { SamplingParams } from '../core/index.ts';

/**
 * Token-level models. Trainer and sampler are separate handles and may live in different services.
 * Conventions (the same as Tinker's): losses are sums over tokens, position i predicts token i + 1,
 * a weight or advantage of 0 masks a token, gradients accumulate until `optimStep`.
 */

/** Shape of a Llama-style decoder. */
export interface ModelConfig {
  vocabSize: number;
  dim: number;
  layers: number;
  heads: number;
  kvHeads: number;
  ffnDim: number;
  maxLength: number;
  ropeTheta: number;
  normEps: number;
  tiedHead: boolean;
}

/** One sequence to learn from. All arrays have length T; `targets[i]` is the token that follows `tokens[i]`. */
export interface Datum {
  tokens: Int32Array;
  targets: Int32Array;
  /** cross_entropy: weight of each target's −log p. */
  weights?: Float32Array;
  /** Policy losses: log-prob of each target under the sampling policy. */
  logprobs?: Float32Array;
  /** Policy losses: advantage of each target; 0 masks. */
  advantages?: Float32Array;
}

/**
 * With lp = log p(target), q = sampling log-prob, r = exp(lp − q), A = advantage, all summed over tokens:
 * - cross_entropy: −Σ w·lp
 * - importance_sampling: −Σ r·A
 * - ppo: −Σ min(r·A, clip(r, clipLow, clipHigh)·A)
 */
export type Loss =
  | { kind: 'cross_entropy' }
  | { kind: 'importance_sampling' }
  | { kind: 'ppo'; clipLow: number; clipHigh: number };

export interface ForwardResult {
  /** Log-prob of each target, one array of length T per datum. */
  logprobs: Float32Array[];
  /** Sum of the loss over tokens and data. */
  lossSum: number;
}

export interface AdamParams {
  learningRate: number;
  beta1?: number;
  beta2?: number;
  eps?: number;
  weightDecay?: number;
  /** Global-norm clip; 0 is none. */
  gradClipNorm?: number;
  /** Gradients are multiplied by this before the clip: 1 / tokens turns the sum into a mean. */
  gradScale?: number;
}

/** Weights a sampler can load, and the version its tokens will carry. */
export interface SamplerRef {
  version: string;
  path?: string;
}

export interface Trainer {
  readonly config: ModelConfig;
  forward(data: readonly Datum[]): Promise<ForwardResult>;
  /** Adds gradients to those not yet applied. `EngineFailed` on a NaN loss: nothing is added then. */
  forwardBackward(data: readonly Datum[], loss: Loss): Promise<ForwardResult>;
  /** Applies and clears the gradients. */
  optimStep(adam: AdamParams): Promise<{ gradNorm: number; step: number }>;
  /** Weights, optimiser state and step into a folder, atomically (safetensors + config). */
  save(folder: string): Promise<void>;
  /** Makes the present weights available to samplers of this engine. */
  publish(): Promise<SamplerRef>;
  close(): Promise<void>;
}

export interface SampleRequest {
  prompt: readonly number[];
  maxTokens: number;
  stopTokens: readonly number[];
  sampling: SamplingParams;
}

export interface SampleResult {
  ids: number[];
  logprobs: number[];
  /** `raw`: of the model's distribution; `processed`: after temperature and truncation. */
  logprobKind: 'raw' | 'processed';
  /** The stop token is in `ids`, with its log-prob. */
  stopReason: 'stop' | 'length';
  version: string;
}

export interface Sampler {
  readonly config: ModelConfig;
  /** Requests of one call are decoded together; results keep their order. Temperature 0 is greedy. */
  sample(requests: readonly SampleRequest[], signal?: AbortSignal): Promise<SampleResult[]>;
  /** Log-prob of each token of each sequence given those before it; the first has none (0). */
  logprobs(sequences: readonly (readonly number[])[]): Promise<Float32Array[]>;
  /** Switches to published weights. Caches of older weights are dropped. */
  load(ref: SamplerRef): Promise<void>;
  close(): Promise<void>;
}

export interface EngineCapabilities {
  losses: readonly Loss['kind'][];
  full: boolean;
  critic: boolean;
  gradients: 'none' | 'norms' | 'vectors';
  inflightSwap: boolean;
  /** Equal seeds and equal batches give equal bytes with this many threads. */
  deterministic: boolean;
}

export interface Engine {
  readonly name: string;
  readonly capabilities: EngineCapabilities;
  createTrainer(
    from: { config: ModelConfig; seed: number } | { checkpoint: string },
  ): Promise<Trainer>;
  /** A sampler over published weights or a checkpoint folder. */
  sampler(from: SamplerRef | { checkpoint: string }): Promise<Sampler>;
  close(): Promise<void>;
}
