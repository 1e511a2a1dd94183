import type { NodeRecord, PortRecord, TensorRecord } from './onnx.ts';
import { type Attribute, type Dim, type DType, encodeModel } from './onnx.ts';

/** A tensor in a graph under construction. */
export interface Value {
  readonly name: string;
  readonly shape: readonly Dim[];
  readonly dtype: DType;
}

/**
 * Gradients of an operation's inputs, given those of its outputs. `needs[i]` says whether the i-th is
 * wanted; what is not wanted may be null. Emits nodes into the same graph.
 */
export type BackwardRule = (
  outputGradients: readonly Value[],
  needs: readonly boolean[],
) => readonly (Value | null)[];

export interface TapeEntry {
  readonly inputs: readonly Value[];
  readonly outputs: readonly Value[];
  readonly backward: BackwardRule;
}

type Scalars = readonly number[] | Float32Array | Int32Array;

/**
 * A typed ONNX graph with a tape for reverse-mode differentiation. Sizes that vary from run to run
 * (rows, length) are names; one session then serves every batch shape.
 */
export class Graph {
  readonly tape: TapeEntry[] = [];
  #nodes: NodeRecord[] = [];
  #initializers: TensorRecord[] = [];
  #inputs: PortRecord[] = [];
  #outputs: PortRecord[] = [];
  #constants = new Map<string, Value>();
  #dimensions = new Map<string, Value>();
  #counter = 0;

  input(name: string, shape: readonly Dim[], dtype: DType = 'float32'): Value {
    this.#inputs.push({ name, shape, dtype });
    const value = { name, shape, dtype };
    for (const [axis, dim] of shape.entries()) {
      if (typeof dim === 'string' && !this.#dimensions.has(dim))
        this.#dimensions.set(dim, this.#dimension(value, axis));
    }
    return value;
  }

  #dimension(value: Value, axis: number): Value {
    return this.emit('Shape', [value], [1], { start: axis, end: axis + 1 }, { dtype: 'int64' });
  }

  /** A constant tensor; equal small constants are stored once. */
  constant(data: Scalars, shape: readonly number[], dtype: DType = 'float32'): Value {
    const array = Array.isArray(data) ? data : Array.from(data);
    const key = array.length <= 16 ? `${dtype}|${shape.join()}|${array.join()}` : null;
    const known = key === null ? undefined : this.#constants.get(key);
    if (known) return known;
    const name = `const_${this.#counter++}`;
    this.#initializers.push({ name, dtype, shape, bytes: constantBytes(array, dtype) });
    const value: Value = { name, shape, dtype };
    if (key !== null) this.#constants.set(key, value);
    return value;
  }

  scalar(value: number): Value {
    return this.constant([value], []);
  }

  /** A one-output node. */
  emit(
    op: string,
    inputs: readonly Value[],
    shape: readonly Dim[],
    attributes: Record<string, Attribute> = {},
    options: { dtype?: DType; domain?: string } = {},
  ): Value {
    return this.emitMany(op, inputs, [shape], attributes, options)[0] as Value;
  }

  /** A node with one output a shape, all of one type. */
  emitMany(
    op: string,
    inputs: readonly Value[],
    shapes: readonly (readonly Dim[])[],
    attributes: Record<string, Attribute> = {},
    options: { dtype?: DType; domain?: string } = {},
  ): Value[] {
    const dtype = options.dtype ?? 'float32';
    const outputs = shapes.map((shape) => ({
      name: `${op}_${this.#counter++}`,
      shape,
      dtype,
    }));
    this.#nodes.push({
      op,
      domain: options.domain ?? '',
      inputs: inputs.map((value) => value.name),
      outputs: outputs.map((value) => value.name),
      attributes,
    });
    return outputs;
  }

  record(inputs: readonly Value[], outputs: readonly Value[], backward: BackwardRule): void {
    this.tape.push({ inputs, outputs, backward });
  }

  /**
   * A shape as an int64 tensor, with named sizes read from the inputs that carry them. A name that no
   * input carries is an error, but for a Reshape, which infers one such size.
   */
  shapeOf(dims: readonly Dim[], use: 'reshape' | 'exact' = 'exact'): Value {
    const unknown = dims.filter((dim) => typeof dim === 'string' && !this.#dimensions.has(dim));
    if (unknown.length > (use === 'reshape' ? 1 : 0))
      throw new Error(`sizes ${unknown.join()} are those of no input`);
    const parts = dims.map((dim) => {
      if (typeof dim === 'number') return this.constant([dim], [1], 'int64');
      return this.#dimensions.get(dim) ?? this.constant([-1], [1], 'int64');
    });
    if (dims.every((dim) => typeof dim === 'number'))
      return this.constant(dims as readonly number[], [dims.length], 'int64');
    const key = `shape|${dims.join()}`;
    const known = this.#constants.get(key);
    if (known) return known;
    const value = this.emit('Concat', parts, [dims.length], { axis: 0 }, { dtype: 'int64' });
    this.#constants.set(key, value);
    return value;
  }

  /** Makes a value an output under this name. */
  output(value: Value, name: string): void {
    const { shape, dtype } = value;
    this.#nodes.push({
      op: 'Identity',
      domain: '',
      inputs: [value.name],
      outputs: [name],
      attributes: {},
    });
    this.#outputs.push({ name, shape, dtype });
  }

  encode(): Uint8Array {
    return encodeModel({
      nodes: this.#nodes,
      initializers: this.#initializers,
      inputs: this.#inputs,
      outputs: this.#outputs,
    });
  }
}

function constantBytes(data: readonly number[], dtype: DType): Uint8Array {
  switch (dtype) {
    case 'float32':
      return new Uint8Array(Float32Array.from(data).buffer);
    case 'int32':
      return new Uint8Array(Int32Array.from(data).buffer);
    case 'int64':
      return new Uint8Array(BigInt64Array.from(data.map(BigInt)).buffer);
    case 'bool':
      return Uint8Array.from(data);
  }
}

/**
 * Reverse-mode gradients of a scalar `loss` with respect to each value of `wrt`, as values of the same
 * graph. A value that the loss does not depend on is an error: it is a parameter nobody uses.
 */
export function gradients(graph: Graph, loss: Value, wrt: readonly Value[]): Value[] {
  const wanted = new Set(wrt.map((value) => value.name));
  for (const entry of graph.tape) {
    if (entry.inputs.some((value) => wanted.has(value.name)))
      for (const value of entry.outputs) wanted.add(value.name);
  }
  const found = new Map<string, Value>([[loss.name, graph.scalar(1)]]);
  for (const entry of graph.tape.slice().reverse()) {
    const needs = entry.inputs.map((value) => wanted.has(value.name));
    if (!needs.includes(true) || !entry.outputs.some((value) => found.has(value.name))) continue;
    const outputGradients = entry.outputs.map(
      (value) => found.get(value.name) ?? zerosLike(graph, value),
    );
    const inputGradients = entry.backward(outputGradients, needs);
    for (const [i, value] of entry.inputs.entries()) {
      const gradient = inputGradients[i];
      if (!needs[i] || !gradient) continue;
      const sum = found.get(value.name);
      // `Sum`, not `Add`: ONNX Runtime folds it into the GEMM that made one of the two.
      found.set(value.name, sum ? graph.emit('Sum', [sum, gradient], value.shape) : gradient);
    }
  }
  return wrt.map((value) => {
    const gradient = found.get(value.name);
    if (!gradient) throw new Error(`the loss does not depend on ${value.name}`);
    return gradient;
  });
}

function zerosLike(graph: Graph, value: Value): Value {
  const shape = graph.emit('Shape', [value], [value.shape.length], {}, { dtype: 'int64' });
  return graph.emit('ConstantOfShape', [shape], value.shape);
}
