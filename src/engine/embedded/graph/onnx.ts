/**
 * Writer of the ONNX wire format (protocol buffers): only the messages a computation graph needs.
 * Field numbers are those of onnx.proto3, IR version 9.
 */

export type DType = 'float32' | 'int32' | 'int64' | 'bool';

/** A fixed size, or the name of a size that is known only when the graph runs. */
export type Dim = number | string;

export type Attribute = number | { float: number } | string | readonly number[];

export interface NodeRecord {
  op: string;
  domain: string;
  inputs: readonly string[];
  outputs: readonly string[];
  attributes: Readonly<Record<string, Attribute>>;
}

export interface TensorRecord {
  name: string;
  dtype: DType;
  shape: readonly number[];
  /** Little-endian contents. */
  bytes: Uint8Array;
}

export interface PortRecord {
  name: string;
  dtype: DType;
  shape: readonly Dim[];
}

export interface GraphRecord {
  nodes: readonly NodeRecord[];
  initializers: readonly TensorRecord[];
  inputs: readonly PortRecord[];
  outputs: readonly PortRecord[];
}

const IR_VERSION = 9;
const OPSET = 18;
const ELEMENT_TYPE: Record<DType, number> = { float32: 1, int32: 6, int64: 7, bool: 9 };
const ATTRIBUTE_TYPE = { float: 1, int: 2, string: 3, ints: 7 } as const;

/** Protocol-buffer message under construction. */
class Message {
  #chunks: Uint8Array[] = [];
  #length = 0;

  #push(chunk: Uint8Array): void {
    this.#chunks.push(chunk);
    this.#length += chunk.length;
  }

  #varint(value: number): void {
    let rest = BigInt.asUintN(64, BigInt(value));
    const bytes: number[] = [];
    while (rest > 127n) {
      bytes.push(Number(rest & 127n) | 128);
      rest >>= 7n;
    }
    bytes.push(Number(rest));
    this.#push(Uint8Array.from(bytes));
  }

  int(field: number, value: number): this {
    this.#varint(field * 8);
    this.#varint(value);
    return this;
  }

  float(field: number, value: number): this {
    this.#varint(field * 8 + 5);
    this.#push(new Uint8Array(Float32Array.of(value).buffer));
    return this;
  }

  bytes(field: number, value: Uint8Array): this {
    this.#varint(field * 8 + 2);
    this.#varint(value.length);
    this.#push(value);
    return this;
  }

  text(field: number, value: string): this {
    return this.bytes(field, new TextEncoder().encode(value));
  }

  message(field: number, value: Message): this {
    return this.bytes(field, value.finish());
  }

  finish(): Uint8Array {
    const out = new Uint8Array(this.#length);
    let at = 0;
    for (const chunk of this.#chunks) {
      out.set(chunk, at);
      at += chunk.length;
    }
    return out;
  }
}

function attributeMessage(name: string, value: Attribute): Message {
  const message = new Message().text(1, name);
  if (typeof value === 'number') return message.int(3, value).int(20, ATTRIBUTE_TYPE.int);
  if (typeof value === 'string') return message.text(4, value).int(20, ATTRIBUTE_TYPE.string);
  if ('float' in value) return message.float(2, value.float).int(20, ATTRIBUTE_TYPE.float);
  for (const item of value) message.int(8, item);
  return message.int(20, ATTRIBUTE_TYPE.ints);
}

function nodeMessage(node: NodeRecord, index: number): Message {
  const message = new Message();
  for (const name of node.inputs) message.text(1, name);
  for (const name of node.outputs) message.text(2, name);
  message.text(3, `${node.op}_${index}`).text(4, node.op);
  for (const [name, value] of Object.entries(node.attributes))
    message.message(5, attributeMessage(name, value));
  return message.text(7, node.domain);
}

function tensorMessage(tensor: TensorRecord): Message {
  const message = new Message();
  for (const size of tensor.shape) message.int(1, size);
  return message.int(2, ELEMENT_TYPE[tensor.dtype]).text(8, tensor.name).bytes(9, tensor.bytes);
}

function portMessage(port: PortRecord): Message {
  const shape = new Message();
  for (const dim of port.shape) {
    const size = typeof dim === 'number' ? new Message().int(1, dim) : new Message().text(2, dim);
    shape.message(1, size);
  }
  const tensorType = new Message().int(1, ELEMENT_TYPE[port.dtype]).message(2, shape);
  return new Message().text(1, port.name).message(2, new Message().message(1, tensorType));
}

/** The bytes of a ModelProto that ONNX Runtime loads. */
export function encodeModel(graph: GraphRecord): Uint8Array {
  const body = new Message();
  for (const [index, node] of graph.nodes.entries()) body.message(1, nodeMessage(node, index));
  body.text(2, 'longhaul');
  for (const tensor of graph.initializers) body.message(5, tensorMessage(tensor));
  for (const port of graph.inputs) body.message(11, portMessage(port));
  for (const port of graph.outputs) body.message(12, portMessage(port));
  return new Message()
    .int(1, IR_VERSION)
    .text(2, 'longhaul')
    .message(7, body)
    .message(8, new Message().text(1, '').int(2, OPSET))
    .message(8, new Message().text(1, 'com.microsoft').int(2, 1))
    .finish();
}
