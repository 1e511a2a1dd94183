import type { ModelConfig } from '../contract.ts';
import {
  type AttendFn,
  decoderLayers,
  headLogits,
  parameterInputs,
  rotary,
  wholeRowAttention,
} from './decoder.ts';
import { add, mul, reshape } from './graph/basic.ts';
import { Graph, type Value } from './graph/graph.ts';
import { embedding, matMulTransposed, rope } from './graph/layers.ts';
import { headDim } from './layout.ts';

/**
 * Whole prompts at once. Inputs: the parameters, `tokens` [count] (rows of equal length), `mask`
 * [length, length] and `last` [picked], where each prompt ends in `tokens`. Outputs: `logits`
 * [picked, vocabSize] after those positions, and of each layer `keys` and `values`
 * [rows, kvHeads, length, headDim].
 */
export function prefillGraph(config: ModelConfig): Graph {
  const g = new Graph();
  const parameters = parameterInputs(g, config);
  const tokens = g.input('tokens', ['count'], 'int32');
  const mask = g.input('mask', ['length', 'length']);
  const last = g.input('last', ['picked'], 'int32');
  const attend = wholeRowAttention(g, config, mask, (keys, values, layer) => {
    g.output(keys, `keys${layer}`);
    g.output(values, `values${layer}`);
  });
  const hidden = decoderLayers(g, config, parameters, tokens, attend);
  const ends = embedding(g, hidden, last);
  g.output(headLogits(g, config, parameters, ends), 'logits');
  return g;
}

/**
 * One token a row. Inputs: the parameters, `tokens` [rows], `positions` [rows, 1], `mask`
 * [rows, 1, 1, past] (0 where the cache holds a token of the row, else −∞) and of each layer `keys`
 * and `values` [rows, kvHeads, past, headDim]. Outputs: `logits`
 * [rows, vocabSize] and `cache` [rows, layers · 2 · kvHeads · headDim]: the new keys and values, layer
 * by layer. The caller owns the cache: returning only what is new copies least.
 */
export function decodeGraph(config: ModelConfig): Graph {
  const g = new Graph();
  const { heads, kvHeads } = config;
  const width = headDim(config);
  const group = heads / kvHeads;
  const parameters = parameterInputs(g, config);
  const tokens = g.input('tokens', ['rows'], 'int32');
  const positions = g.input('positions', ['rows', 1], 'int64');
  const mask = g.input('mask', ['rows', 1, 1, 'past']);
  const table = rotary(g, config);
  const fresh: Value[] = [];
  const attend: AttendFn = ({ query, key, value }, layer) => {
    const cached = ['rows', kvHeads, 'past', width];
    const pastKeys = g.input(`keys${layer}`, cached);
    const pastValues = g.input(`values${layer}`, cached);
    const rotate = (x: Value, count: number) =>
      rope(g, reshape(g, x, ['rows', count, 1, width]), positions, table);
    const q = reshape(g, rotate(query, heads), ['rows', kvHeads, group, width]);
    const k = rotate(key, kvHeads);
    const v = reshape(g, value, ['rows', kvHeads, 1, width]);
    fresh.push(reshape(g, k, ['rows', kvHeads * width]), value);
    // The new token is not in the cache yet: its score is the last column of the softmax.
    const past = matMulTransposed(g, q, pastKeys, ['rows', kvHeads, group, 'past']);
    const column = ['rows', kvHeads, group, 1];
    const products = mul(g, q, k);
    const lastAxis = g.constant([3], [1], 'int64');
    const own = g.emit('ReduceSum', [products, lastAxis], column, { keepdims: 1 });
    const scored = ['rows', kvHeads, group, 'past+1'];
    const scores = g.emit('Concat', [add(g, past, mask), own], scored, { axis: 3 });
    const p = g.emit('Softmax', [scores], scored, { axis: -1 });
    const pPast = slice(g, p, past, 0, -1);
    const pOwn = slice(g, p, own, -1, 2 ** 31 - 1);
    const seen = g.emit('MatMul', [pPast, pastValues], q.shape);
    const out = add(g, seen, mul(g, pOwn, v));
    return reshape(g, out, ['rows', heads * width]);
  };
  const hidden = decoderLayers(g, config, parameters, tokens, attend);
  g.output(headLogits(g, config, parameters, hidden), 'logits');
  const cacheWidth = fresh.length * kvHeads * width;
  g.output(g.emit('Concat', fresh, ['rows', cacheWidth], { axis: 1 }), 'cache');
  return g;
}

/** The columns [start, end) of the last axis of `x`, with the shape of `like`. */
function slice(g: Graph, x: Value, like: Value, start: number, end: number): Value {
  const index = (value: number) => g.constant([value], [1], 'int64');
  return g.emit('Slice', [x, index(start), index(end), index(3)], like.shape);
}
