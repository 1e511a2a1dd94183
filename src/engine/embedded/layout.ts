import { LonghaulError, Rng } from '../../core/index.ts';
import type { ModelConfig } from '../contract.ts';

/** A tensor as Hugging Face Llama checkpoints name it, at its place in the flat parameter vector. */
interface TensorSpec {
  name: string;
  shape: readonly number[];
  offset: number;
  size: number;
  /** Standard deviation of the initial normal; `ones` for norms. */
  init: { std: number } | 'ones';
}

export const EMBEDDING = 'model.embed_tokens.weight';
export const FINAL_NORM = 'model.norm.weight';
export const HEAD = 'lm_head.weight';

/** Names of a layer's tensors. */
export function layerNames(layer: number) {
  const at = `model.layers.${layer}`;
  return {
    attentionNorm: `${at}.input_layernorm.weight`,
    query: `${at}.self_attn.q_proj.weight`,
    key: `${at}.self_attn.k_proj.weight`,
    value: `${at}.self_attn.v_proj.weight`,
    attentionOut: `${at}.self_attn.o_proj.weight`,
    ffnNorm: `${at}.post_attention_layernorm.weight`,
    gate: `${at}.mlp.gate_proj.weight`,
    up: `${at}.mlp.up_proj.weight`,
    down: `${at}.mlp.down_proj.weight`,
  };
}

/** Where every parameter lies in one flat float32 vector. Optimiser moments have the same layout. */
export interface Layout {
  tensors: readonly TensorSpec[];
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
  let total = 0;
  const place = (name: string, shape: readonly number[], init: TensorSpec['init']) => {
    const size = shape.reduce((a, b) => a * b, 1);
    tensors.push({ name, shape, offset: total, size, init });
    total += size;
  };
  const embedInit = { std: 0.02 };
  const init = { std: dim ** -0.5 };
  // Residual branches add up: each starts smaller, so that the sum keeps its size (GPT-2).
  const residual = (fanIn: number) => ({ std: (2 * layers * fanIn) ** -0.5 });
  place(EMBEDDING, [vocabSize, dim], embedInit);
  for (let layer = 0; layer < layers; layer++) {
    const names = layerNames(layer);
    place(names.attentionNorm, [dim], 'ones');
    place(names.query, [heads * width, dim], init);
    place(names.key, [kvHeads * width, dim], init);
    place(names.value, [kvHeads * width, dim], init);
    place(names.attentionOut, [dim, heads * width], residual(dim));
    place(names.ffnNorm, [dim], 'ones');
    place(names.gate, [ffnDim, dim], init);
    place(names.up, [ffnDim, dim], init);
    place(names.down, [dim, ffnDim], residual(ffnDim));
  }
  place(FINAL_NORM, [dim], 'ones');
  if (!tiedHead) place(HEAD, [vocabSize, dim], embedInit);
  return { tensors, total };
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
