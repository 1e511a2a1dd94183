import type { Graph, Value } from './graph.ts';
import type { Dim } from './onnx.ts';

/**
 * General operations and their backward rules. Shapes broadcast as in NumPy; named sizes match only
 * themselves.
 */

function broadcastShape(a: readonly Dim[], b: readonly Dim[]): Dim[] {
  const rank = Math.max(a.length, b.length);
  return Array.from({ length: rank }, (_, i) => {
    const x = a[a.length - rank + i] ?? 1;
    const y = b[b.length - rank + i] ?? 1;
    if (x === y || y === 1) return x;
    if (x === 1) return y;
    throw new Error(`shapes [${a.join()}] and [${b.join()}] do not broadcast`);
  });
}

/** Sums a gradient over the axes along which its value was broadcast. */
function sumTo(g: Graph, gradient: Value, shape: readonly Dim[]): Value {
  const rank = gradient.shape.length;
  const lead = rank - shape.length;
  const axes = gradient.shape.flatMap((dim, i) =>
    i < lead || (shape[i - lead] === 1 && dim !== 1) ? [i] : [],
  );
  if (axes.length === 0) return gradient;
  const kept = gradient.shape.map((dim, i) => (axes.includes(i) ? 1 : dim));
  const sum = g.emit('ReduceSum', [gradient, axesOf(g, axes)], kept, { keepdims: 1 });
  return lead === 0 ? sum : g.emit('Reshape', [sum, g.shapeOf(shape, 'reshape')], shape);
}

function axesOf(g: Graph, axes: readonly number[]): Value {
  return g.constant(axes, [axes.length], 'int64');
}

export function add(g: Graph, a: Value, b: Value): Value {
  const y = g.emit('Add', [a, b], broadcastShape(a.shape, b.shape));
  g.record([a, b], [y], ([dy]) => [sumTo(g, dy!, a.shape), sumTo(g, dy!, b.shape)]);
  return y;
}

export function sub(g: Graph, a: Value, b: Value): Value {
  const y = g.emit('Sub', [a, b], broadcastShape(a.shape, b.shape));
  g.record([a, b], [y], ([dy], needs) => [
    sumTo(g, dy!, a.shape),
    needs[1] ? sumTo(g, g.emit('Neg', [dy!], y.shape), b.shape) : null,
  ]);
  return y;
}

export function mul(g: Graph, a: Value, b: Value): Value {
  const y = g.emit('Mul', [a, b], broadcastShape(a.shape, b.shape));
  g.record([a, b], [y], ([dy], needs) => [
    needs[0] ? sumTo(g, g.emit('Mul', [dy!, b], y.shape), a.shape) : null,
    needs[1] ? sumTo(g, g.emit('Mul', [dy!, a], y.shape), b.shape) : null,
  ]);
  return y;
}

export function exp(g: Graph, x: Value): Value {
  const y = g.emit('Exp', [x], x.shape);
  g.record([x], [y], ([dy]) => [g.emit('Mul', [dy!, y], x.shape)]);
  return y;
}

/** Element-wise minimum of equal shapes; at a tie the gradient goes to `a`. */
export function minimum(g: Graph, a: Value, b: Value): Value {
  const y = g.emit('Min', [a, b], a.shape);
  g.record([a, b], [y], ([dy], needs) => {
    const first = g.emit('LessOrEqual', [a, b], a.shape, {}, { dtype: 'bool' });
    const zero = g.scalar(0);
    return [
      needs[0] ? g.emit('Where', [first, dy!, zero], a.shape) : null,
      needs[1] ? g.emit('Where', [first, zero, dy!], a.shape) : null,
    ];
  });
  return y;
}

/** Limits to [low, high] (scalars, no gradient); the gradient is zero outside. */
export function clip(g: Graph, x: Value, low: Value, high: Value): Value {
  const y = g.emit('Clip', [x, low, high], x.shape);
  g.record([x], [y], ([dy]) => {
    const inside = g.emit('Equal', [x, y], x.shape, {}, { dtype: 'bool' });
    return [g.emit('Where', [inside, dy!, g.scalar(0)], x.shape)];
  });
  return y;
}

/** Sum of all elements: a scalar. */
export function sum(g: Graph, x: Value): Value {
  const y = g.emit('ReduceSum', [x], [], { keepdims: 0 });
  g.record([x], [y], ([dy]) => [g.emit('Expand', [dy!, g.shapeOf(x.shape)], x.shape)]);
  return y;
}

export function reshape(g: Graph, x: Value, shape: readonly Dim[]): Value {
  const y = g.emit('Reshape', [x, g.shapeOf(shape, 'reshape')], shape);
  g.record([x], [y], ([dy]) => [g.emit('Reshape', [dy!, g.shapeOf(x.shape, 'reshape')], x.shape)]);
  return y;
}

export function transpose(g: Graph, x: Value, perm: readonly number[]): Value {
  const shape = perm.map((axis) => x.shape[axis] as Dim);
  const y = g.emit('Transpose', [x], shape, { perm });
  g.record([x], [y], ([dy]) => {
    const inverse = perm.map((_, i) => perm.indexOf(i));
    return [g.emit('Transpose', [dy!], x.shape, { perm: inverse })];
  });
  return y;
}

/** Repeats each slice of an axis `times` times in place: [a, b] becomes [a, a, b, b]. */
export function repeatEach(g: Graph, x: Value, axis: number, times: number): Value {
  const size = x.shape[axis] as number;
  const before = x.shape.slice(0, axis);
  const after = x.shape.slice(axis + 1);
  const single = [...before, size, 1, ...after];
  const wide = [...before, size, times, ...after];
  const shape = [...before, size * times, ...after];
  const spread = wide.map((_, i) => (i === axis + 1 ? times : 1));
  const lifted = g.emit('Reshape', [x, g.shapeOf(single, 'reshape')], single);
  const expanded = g.emit('Expand', [lifted, g.shapeOf(spread)], wide);
  const y = g.emit('Reshape', [expanded, g.shapeOf(shape, 'reshape')], shape);
  g.record([x], [y], ([dy]) => {
    const parts = g.emit('Reshape', [dy!, g.shapeOf(wide, 'reshape')], wide);
    return [g.emit('ReduceSum', [parts, axesOf(g, [axis + 1])], x.shape, { keepdims: 0 })];
  });
  return y;
}
