import type { ModelConfig } from '../contract.ts';
import { add, repeatEach, reshape, transpose } from './graph/basic.ts';
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
import { EMBEDDING, FINAL_NORM, HEAD, headDim, layerNames, layoutOf } from './layout.ts';

/** The parameters of a decoder as inputs of a graph, by the names of the layout. */
export type Parameters = ReadonlyMap<string, Value>;

export function parameterInputs(g: Graph, config: ModelConfig): Parameters {
  const inputs = layoutOf(config).tensors.map(
    ({ name, shape }) => [name, g.input(name, shape)] as const,
  );
  return new Map(inputs);
}

/** The named parameter; a missing one is a fault of this room. */
function parameter(parameters: Parameters, name: string): Value {
  const value = parameters.get(name);
  if (!value) throw new Error(`no parameter ${name}`);
  return value;
}

/** Projections of one layer, before rotation: [count, heads · headDim] and twice [count, kvHeads · headDim]. */
interface Projections {
  query: Value;
  key: Value;
  value: Value;
}

/**
 * What a layer's attention does with its projections: [count, heads · headDim]. Training, prefill and
 * decoding differ here and nowhere else.
 */
export type AttendFn = (projections: Projections, layer: number) => Value;

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
  const project = (x: Value, name: string) => linear(g, x, get(name));
  let x = embedding(g, get(EMBEDDING), tokens);
  for (let layer = 0; layer < config.layers; layer++) {
    const names = layerNames(layer);
    const normed = rmsNorm(g, x, get(names.attentionNorm), config.normEps);
    const query = project(normed, names.query);
    const key = project(normed, names.key);
    const value = project(normed, names.value);
    const attended = attend({ query, key, value }, layer);
    x = add(g, x, project(attended, names.attentionOut));
    const wide = rmsNorm(g, x, get(names.ffnNorm), config.normEps);
    const inner = swiglu(g, project(wide, names.gate), project(wide, names.up));
    x = add(g, x, project(inner, names.down));
  }
  return rmsNorm(g, x, get(FINAL_NORM), config.normEps);
}

/** Logits [count, vocabSize] of hidden states. */
export function headLogits(
  g: Graph,
  config: ModelConfig,
  parameters: Parameters,
  hidden: Value,
): Value {
  return linear(g, hidden, parameter(parameters, config.tiedHead ? EMBEDDING : HEAD));
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
  const byHead = (x: Value, count: number) =>
    transpose(g, reshape(g, x, ['rows', 'length', count, width]), [0, 2, 1, 3]);
  return ({ query, key, value }, layer) => {
    const count = query.shape[0]!;
    const q = rope(g, byHead(query, heads), start, table);
    const k = rope(g, byHead(key, kvHeads), start, table);
    const v = byHead(value, kvHeads);
    onCache?.(k, v, layer);
    const group = heads / kvHeads;
    const wideK = group === 1 ? k : repeatEach(g, k, 1, group);
    const wideV = group === 1 ? v : repeatEach(g, v, 1, group);
    const out = attention(g, q, wideK, wideV, mask);
    return reshape(g, transpose(g, out, [0, 2, 1, 3]), [count, heads * width]);
  };
}
