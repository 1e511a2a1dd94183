import { LonghaulError, Rng } from '../../core/index.ts';
import type { ModelConfig } from '../contract.ts';

/** A tensor as Hugging Face Llama checkpoints name it, at its place in the flat parameter vector. */
export interface TensorSpec {
  name: string;
  shape: readonly number[];
  offset: number;
  size: number;
  /** Standard deviation of the initial normal; `ones` for norms. */
  init: { std: number } | 'ones';
}

/**
 * A parameter as the graph takes it. Projections that read the same input lie side by side and enter
 * as one matrix: [q | k | v] and [gate | up] are one GEMM each.
 */
export interface ParameterSpec {
  name: string;
  shape: readonly number[];
  offset: number;
  size: number;
}

/** Where every parameter lies in one flat float32 vector. Optimiser moments have the same layout. */
export interface Layout {
  tensors: readonly TensorSpec[];
  parameters: readonly ParameterSpec[];
  total: number;
}

export function headDim(config: ModelConfig): number {
  return config.dim / config.heads;
}

/** Far above any model a CPU trains; a hostile configuration may not make us lay out millions. */
const MAX_LAYERS = 1024;

/** `ConfigInvalid` names the first field that does not fit. */
export function checkConfig(config: ModelConfig): void {
  const fail = (text: string) => {
    throw new LonghaulError('ConfigInvalid', `model configuration: ${text}`);
  };
  const counts = ['vocabSize', 'dim', 'layers', 'heads', 'kvHeads', 'ffnDim', 'maxLength'] as const;
  for (const name of counts) {
    const value = config[name];
    if (!Number.isSafeInteger(value) || value < 1 || value > 2 ** 24)
      fail(`${name} must be a positive integer, got ${value}`);
  }
  if (config.layers > MAX_LAYERS) fail(`at most ${MAX_LAYERS} layers`);
  if (config.dim % config.heads !== 0) fail(`dim ${config.dim} is no multiple of heads`);
  if (config.heads % config.kvHeads !== 0) fail(`heads ${config.heads} is no multiple of kvHeads`);
  if (headDim(config) % 2 !== 0) fail('dim / heads must be even for rotary positions');
  if (!(config.ropeTheta > 0)) fail('ropeTheta must be positive');
  if (!(config.normEps > 0)) fail('normEps must be positive');
  if (typeof config.tiedHead !== 'boolean') fail('tiedHead must be true or false');
  if (layoutOf(config).total > 2 ** 30) fail('more than 2^30 parameters');
}

export function layoutOf(config: ModelConfig): Layout {
  const { vocabSize, dim, layers, heads, kvHeads, ffnDim, tiedHead } = config;
  const width = headDim(config);
  const tensors: TensorSpec[] = [];
  const parameters: ParameterSpec[] = [];
  let total = 0;
  const parameter = (
    name: string,
    shape: readonly number[],
    parts: readonly { name: string; rows: number; init: TensorSpec['init'] }[],
  ) => {
    const rowSize = shape.slice(1).reduce((a, b) => a * b, 1);
    const offset = total;
    for (const part of parts) {
      const size = part.rows * rowSize;
      const tensorShape = [part.rows, ...shape.slice(1)];
      tensors.push({ name: part.name, shape: tensorShape, offset: total, size, init: part.init });
      total += size;
    }
    parameters.push({ name, shape, offset, size: total - offset });
  };
  const norm = (name: string, tensor: string) =>
    parameter(name, [dim], [{ name: tensor, rows: dim, init: 'ones' }]);

  const embedInit = { std: 0.02 };
  const init = { std: dim ** -0.5 };
  // Residual branches add up: each starts smaller, so that the sum keeps its size (GPT-2).
  const residual = (fanIn: number) => ({ std: (2 * layers * fanIn) ** -0.5 });
  const embedName = 'model.embed_tokens.weight';
  parameter('embed', [vocabSize, dim], [{ name: embedName, rows: vocabSize, init: embedInit }]);
  for (let i = 0; i < layers; i++) {
    const at = `model.layers.${i}`;
    norm(`attentionNorm${i}`, `${at}.input_layernorm.weight`);
    parameter(
      `qkv${i}`,
      [(heads + 2 * kvHeads) * width, dim],
      [
        { name: `${at}.self_attn.q_proj.weight`, rows: heads * width, init },
        { name: `${at}.self_attn.k_proj.weight`, rows: kvHeads * width, init },
        { name: `${at}.self_attn.v_proj.weight`, rows: kvHeads * width, init },
      ],
    );
    const out = { name: `${at}.self_attn.o_proj.weight`, rows: dim, init: residual(dim) };
    parameter(`attentionOut${i}`, [dim, heads * width], [out]);
    norm(`ffnNorm${i}`, `${at}.post_attention_layernorm.weight`);
    parameter(
      `gateUp${i}`,
      [2 * ffnDim, dim],
      [
        { name: `${at}.mlp.gate_proj.weight`, rows: ffnDim, init },
        { name: `${at}.mlp.up_proj.weight`, rows: ffnDim, init },
      ],
    );
    const down = { name: `${at}.mlp.down_proj.weight`, rows: dim, init: residual(ffnDim) };
    parameter(`down${i}`, [dim, ffnDim], [down]);
  }
  norm('finalNorm', 'model.norm.weight');
  if (!tiedHead) {
    const head = { name: 'lm_head.weight', rows: vocabSize, init: embedInit };
    parameter('head', [vocabSize, dim], [head]);
  }
  return { tensors, parameters, total };
}

/** Initial weights: each tensor has a random stream of its own, so equal seeds give equal bytes. */
export function initialise(config: ModelConfig, seed: number): Float32Array {
  const { tensors, total } = layoutOf(config);
  const weights = new Float32Array(total);
  for (const { name, offset, size, init } of tensors) {
    if (init === 'ones') {
      weights.fill(1, offset, offset + size);
      continue;
    }
    const rng = Rng.of(seed, 'init', name);
    for (let i = offset; i < offset + size; i++) weights[i] = rng.normal() * init.std;
  }
  return weights;
}
