import type { ModelConfig } from '../contract.ts';
import { add, repeatEach, reshape, split, transpose } from './graph/basic.ts';
import type { Graph, Value } from './graph/graph.ts';
import {
  attention,
  embedding,
  linear,
  type RotaryTable,
  rmsNorm,
  rope,
  rotaryTable,
  swiglu,
} from './graph/layers.ts';
import { headDim, layoutOf } from './layout.ts';

/** The parameters of a decoder as inputs of a graph, by the names of the layout. */
export type Parameters = ReadonlyMap<string, Value>;

export function parameterInputs(g: Graph, config: ModelConfig): Parameters {
  const inputs = layoutOf(config).parameters.map(
    ({ name, shape }) => [name, g.input(name, shape)] as const,
  );
  return new Map(inputs);
}

/** The named parameter; a missing one is a fault of this room. */
export function parameter(parameters: Parameters, name: string): Value {
  const value = parameters.get(name);
  if (!value) throw new Error(`no parameter ${name}`);
  return value;
}

/** What a layer's attention does with its projections; training, prefill and decoding differ here. */
export type AttendFn = (qkv: Value, layer: number) => Value;

/**
 * Runs token ids [count] through all layers (pre-norm residual blocks, as Llama): the normed final
 * hidden states [count, dim].
 */
export function decoderLayers(
  g: Graph,
  config: ModelConfig,
  parameters: Parameters,
  tokens: Value,
  attend: AttendFn,
): Value {
  const get = (name: string) => parameter(parameters, name);
  let x = embedding(g, get('embed'), tokens);
  for (let i = 0; i < config.layers; i++) {
    const normed = rmsNorm(g, x, get(`attentionNorm${i}`), config.normEps);
    const attended = attend(linear(g, normed, get(`qkv${i}`)), i);
    x = add(g, x, linear(g, attended, get(`attentionOut${i}`)));
    const wide = linear(g, rmsNorm(g, x, get(`ffnNorm${i}`), config.normEps), get(`gateUp${i}`));
    x = add(g, x, linear(g, swiglu(g, wide), get(`down${i}`)));
  }
  return rmsNorm(g, x, get('finalNorm'), config.normEps);
}

/** Logits [count, vocabSize] of hidden states. */
export function headLogits(
  g: Graph,
  config: ModelConfig,
  parameters: Parameters,
  hidden: Value,
): Value {
  return linear(g, hidden, parameter(parameters, config.tiedHead ? 'embed' : 'head'));
}

/**
 * Rotation of queries and keys, both scaled by headDim^(−1/4), so that their products come out scaled
 * by 1/sqrt(headDim) at no cost. Cached keys carry the factor.
 */
export function rotary(g: Graph, config: ModelConfig): RotaryTable {
  const { maxLength, ropeTheta } = config;
  const width = headDim(config);
  const scale = width ** -0.25;
  return rotaryTable(g, { maxLength, headDim: width, theta: ropeTheta, scale });
}

/**
 * Causal attention over whole rows of `length` tokens, for training, scoring and prefill. `mask` is
 * the additive causal mask [length, length]; tokens past the end of a row only follow real ones, so
 * they need no mask. `onCache` sees the rotated keys and the values, [rows, kvHeads, length, headDim].
 */
export function wholeRowAttention(
  g: Graph,
  config: ModelConfig,
  mask: Value,
  onCache?: (keys: Value, values: Value, layer: number) => void,
): AttendFn {
  const { heads, kvHeads } = config;
  const width = headDim(config);
  const table = rotary(g, config);
  const start = g.constant([0], [1], 'int64');
  return (qkv, layer) => {
    const count = qkv.shape[0]!;
    const byToken = reshape(g, qkv, ['rows', 'length', heads + 2 * kvHeads, width]);
    const byHead = transpose(g, byToken, [0, 2, 1, 3]);
    const [qk, v] = split(g, byHead, 1, [heads + kvHeads, kvHeads]) as [Value, Value];
    const [q, k] = split(g, rope(g, qk, start, table), 1, [heads, kvHeads]) as [Value, Value];
    onCache?.(k, v, layer);
    const group = heads / kvHeads;
    const wideK = group === 1 ? k : repeatEach(g, k, 1, group);
    const wideV = group === 1 ? v : repeatEach(g, v, 1, group);
    const out = attention(g, q, wideK, wideV, mask);
    return reshape(g, transpose(g, out, [0, 2, 1, 3]), [count, heads * width]);
  };
}
