import type { Graph, Value } from './graph.ts';
import type { Dim } from './onnx.ts';

/**
 * Operations of a transformer with backward rules of their own: each is a few fused kernels, and its
 * backward reuses what the forward pass already computed.
 */

const MICROSOFT = { domain: 'com.microsoft' };

/** Above this many rows the one-hot matrix of an embedding gradient costs more than a scatter. */
const ONE_HOT_ROWS = 4096;

/**
 * Rows of `table` [V, D] for ids [..., N] (int32): [N, D]. The table's gradient sums over equal ids: a
 * one-hot GEMM for small vocabularies, else ScatterElements. (ScatterND with reduction=add loses
 * updates on equal indices when several threads run.)
 */
export function embedding(g: Graph, table: Value, ids: Value): Value {
  const [vocab, width] = table.shape as [number, number];
  const count = ids.shape[0] as Dim;
  const y = g.emit('Gather', [table, ids], [count, width], { axis: 0 });
  g.record([table], [y], ([dy]) => {
    if (vocab <= ONE_HOT_ROWS) {
      const hot = oneHot(g, ids, count, vocab);
      return [g.emit('Gemm', [hot, dy!], table.shape, { transA: 1 })];
    }
    const column = g.emit(
      'Unsqueeze',
      [ids, g.constant([1], [1], 'int64')],
      [count, 1],
      {},
      {
        dtype: 'int32',
      },
    );
    const shape = g.emit('Shape', [dy!], [2], {}, { dtype: 'int64' });
    const index = g.emit('Expand', [column, shape], [count, width], {}, { dtype: 'int32' });
    const zeros = g.emit('ConstantOfShape', [g.shapeOf(table.shape)], table.shape);
    const attributes = { axis: 0, reduction: 'add' };
    return [g.emit('ScatterElements', [zeros, index, dy!], table.shape, attributes)];
  });
  return y;
}

function oneHot(g: Graph, ids: Value, count: Dim, depth: number): Value {
  const size = g.constant([depth], [], 'int32');
  return g.emit('OneHot', [ids, size, g.constant([0, 1], [2])], [count, depth], { axis: -1 });
}

/** x [N, in] · weight [out, in]ᵀ: [N, out], the layout of Hugging Face checkpoints. */
export function linear(g: Graph, x: Value, weight: Value): Value {
  const y = g.emit('Gemm', [x, weight], [x.shape[0] as Dim, weight.shape[0] as Dim], { transB: 1 });
  g.record([x, weight], [y], ([dy], needs) => [
    needs[0] ? g.emit('Gemm', [dy!, weight], x.shape) : null,
    needs[1] ? g.emit('Gemm', [dy!, x], weight.shape, { transA: 1 }) : null,
  ]);
  return y;
}

/**
 * y = x · r · weight, r = 1 / sqrt(mean(x²) + eps), over the last axis of x [N, D] (Zhang and
 * Sennrich 2019). With x̂ = x·r and h = dy·weight: dx = r·(h − x̂·mean(h·x̂)), dweight = Σ dy·x̂; the
 * mean is a GEMV of dy·x̂ with the weight.
 */
export function rmsNorm(g: Graph, x: Value, weight: Value, eps: number): Value {
  const column = [x.shape[0] as Dim, 1];
  const [y, r] = g.emitMany('SimplifiedLayerNormalization', [x, weight], [x.shape, column], {
    axis: -1,
    epsilon: { float: eps },
    stash_type: 1,
  }) as [Value, Value];
  g.record([x, weight], [y], ([dy], needs) => {
    const unit = g.emit('Mul', [x, r], x.shape);
    const scaled = g.emit('Mul', [dy!, unit], x.shape);
    let dx: Value | null = null;
    if (needs[0]) {
      const width = weight.shape[0] as number;
      const weightColumn = g.emit('Reshape', [weight, g.shapeOf([width, 1])], [width, 1]);
      const alpha = { alpha: { float: 1 / width } };
      const mean = g.emit('Gemm', [scaled, weightColumn], column, alpha);
      const h = g.emit('Mul', [dy!, weight], x.shape);
      const along = g.emit('Mul', [unit, mean], x.shape);
      dx = g.emit('Mul', [g.emit('Sub', [h, along], x.shape), r], x.shape);
    }
    const firstAxis = g.constant([0], [1], 'int64');
    const dweight = needs[1]
      ? g.emit('ReduceSum', [scaled, firstAxis], weight.shape, { keepdims: 0 })
      : null;
    return [dx, dweight];
  });
  return y;
}

/** Cosines and sines of every position, [maxLength, headDim / 2] each. */
export interface RotaryTable {
  cos: Value;
  sin: Value;
  negatedSin: Value;
}

/**
 * Angles position · theta^(−2i/headDim) (Su et al. 2021), as constants of the graph. `scale`
 * multiplies what is rotated.
 */
export function rotaryTable(
  g: Graph,
  options: { maxLength: number; headDim: number; theta: number; scale?: number },
): RotaryTable {
  const { maxLength, headDim, theta, scale = 1 } = options;
  const half = headDim / 2;
  const angle = (i: number) => Math.floor(i / half) * theta ** ((-2 * (i % half)) / headDim);
  const table = (f: (angle: number) => number) =>
    g.constant(
      Array.from({ length: maxLength * half }, (_, i) => f(angle(i)) * scale),
      [maxLength, half],
    );
  return {
    cos: table(Math.cos),
    sin: table(Math.sin),
    negatedSin: table((a) => -Math.sin(a)),
  };
}

/**
 * Rotates the two halves of each head of x [rows, heads, length, headDim]. `positions` is one start
 * position ([1]) or a position a token ([rows, length]), int64. The gradient is the inverse rotation.
 */
export function rope(g: Graph, x: Value, positions: Value, table: RotaryTable): Value {
  const { cos, sin, negatedSin } = table;
  const y = g.emit('RotaryEmbedding', [x, positions, cos, sin], x.shape, {}, MICROSOFT);
  g.record([x], [y], ([dy]) => [
    g.emit('RotaryEmbedding', [dy!, positions, cos, negatedSin], x.shape, {}, MICROSOFT),
  ]);
  return y;
}

/** a·bᵀ over the last two axes; no backward rule of its own. */
export function matMulTransposed(g: Graph, a: Value, b: Value, shape: readonly Dim[]): Value {
  return g.emit('FusedMatMul', [a, b], shape, { transB: 1 }, MICROSOFT);
}

/**
 * softmax(q·kᵀ + mask)·v for q, k, v [rows, heads, length, headDim] and an additive mask that
 * broadcasts to the scores. With P the probabilities, O the result, dP = dO·vᵀ and
 * δ = rowsum(dO·O): dS = P·(dP − δ), dq = dS·k, dk = dSᵀ·q, dv = Pᵀ·dO
 * (the row sum as in Dao et al. 2022: a vector, not a matrix, per head).
 */
export function attention(g: Graph, q: Value, k: Value, v: Value, mask: Value): Value {
  const [rows, heads, length] = q.shape as [Dim, Dim, Dim];
  const square = [rows, heads, length, k.shape[2] as Dim];
  const scores = matMulTransposed(g, q, k, square);
  const masked = g.emit('Add', [scores, mask], square);
  const p = g.emit('Softmax', [masked], square, { axis: -1 });
  const y = g.emit('MatMul', [p, v], q.shape);
  g.record([q, k, v], [y], ([dy]) => {
    const lastAxis = g.constant([3], [1], 'int64');
    const overlap = g.emit('Mul', [dy!, y], q.shape);
    const delta = g.emit('ReduceSum', [overlap, lastAxis], [rows, heads, length, 1], {
      keepdims: 1,
    });
    const dp = matMulTransposed(g, dy!, v, square);
    const ds = g.emit('Mul', [p, g.emit('Sub', [dp, delta], square)], square);
    return [
      g.emit('MatMul', [ds, k], q.shape),
      g.emit('FusedMatMul', [ds, q], k.shape, { transA: 1 }, MICROSOFT),
      g.emit('FusedMatMul', [p, dy!], v.shape, { transA: 1 }, MICROSOFT),
    ];
  });
  return y;
}

/**
 * silu(gate)·up, element-wise (Shazeer 2020). With s = sigmoid(gate):
 * dgate = dy·up·(s + gate·s·(1 − s)), dup = dy·gate·s.
 */
export function swiglu(g: Graph, gate: Value, up: Value): Value {
  const { shape } = gate;
  const s = g.emit('Sigmoid', [gate], shape);
  const silu = g.emit('Mul', [gate, s], shape);
  const y = g.emit('Mul', [silu, up], shape);
  g.record([gate, up], [y], ([dy]) => {
    // s + gate·s·(1 − s) = s + silu − silu·s
    const sum = g.emit('Add', [s, silu], shape);
    const slope = g.emit('Sub', [sum, g.emit('Mul', [silu, s], shape)], shape);
    const dgate = g.emit('Mul', [g.emit('Mul', [dy!, up], shape), slope], shape);
    return [dgate, g.emit('Mul', [dy!, silu], shape)];
  });
  return y;
}

/**
 * Natural-log probability of each target: logits [N, V], targets [N] (int32) → [N]. The gradient of
 * the logits is (onehot − softmax)·dy.
 */
export function targetLogProb(g: Graph, logits: Value, targets: Value): Value {
  const [count, vocab] = logits.shape as [Dim, number];
  const column = [count, 1];
  const lastAxis = g.constant([1], [1], 'int64');
  const all = g.emit('LogSoftmax', [logits], logits.shape, { axis: -1 });
  const index = g.emit('Unsqueeze', [targets, lastAxis], column, {}, { dtype: 'int32' });
  const picked = g.emit('GatherElements', [all, index], column, { axis: 1 });
  const y = g.emit('Squeeze', [picked, lastAxis], [count]);
  g.record([logits], [y], ([dy]) => {
    const p = g.emit('Exp', [all], logits.shape);
    const difference = g.emit('Sub', [oneHot(g, targets, count, vocab), p], logits.shape);
    const dyColumn = g.emit('Unsqueeze', [dy!, lastAxis], column);
    return [g.emit('Mul', [difference, dyColumn], logits.shape)];
  });
  return y;
}
