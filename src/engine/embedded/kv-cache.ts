import type { ModelConfig } from '../contract.ts';
import { type Tensors, tensor } from './graph/session.ts';
import { headDim } from './layout.ts';

/** Columns are added in steps: each growth copies the cache, each unused column is computed over. */
const COLUMN_STEP = 16;

export function columnsFor(length: number): number {
  return Math.ceil(length / COLUMN_STEP) * COLUMN_STEP;
}

/**
 * Keys and values of the rows that are being decoded. Rows 0 to `rows` − 1 are in use, without holes,
 * so that a step feeds views of the first rows and computes nothing else. Keys lie as
 * [row, kvHead, headDim, column] (a query then multiplies them untransposed), values as
 * [row, kvHead, column, headDim].
 */
export class KvCache {
  readonly #layers: number;
  readonly #kvHeads: number;
  readonly #width: number;
  #keys: Float32Array[] = [];
  #values: Float32Array[] = [];
  #mask = new Float32Array(0);
  #lengths: number[] = [];
  #rowCapacity = 0;
  #columns = 0;

  constructor(config: ModelConfig) {
    this.#layers = config.layers;
    this.#kvHeads = config.kvHeads;
    this.#width = headDim(config);
  }

  get rows(): number {
    return this.#lengths.length;
  }

  length(row: number): number {
    return this.#lengths[row]!;
  }

  /** Floats that one column of one row takes. */
  static floatsPerToken(config: ModelConfig): number {
    return 2 * config.layers * config.kvHeads * headDim(config);
  }

  /** Makes room for `rows` rows of `length` tokens; copies what is held when the shape changes. */
  reserve(rows: number, length: number): void {
    const held = this.rows;
    const columns = held === 0 ? columnsFor(length) : Math.max(this.#columns, columnsFor(length));
    if (rows <= this.#rowCapacity && columns === this.#columns) return;
    const capacity = Math.max(rows, this.#rowCapacity);
    const size = capacity * this.#kvHeads * this.#width * columns;
    for (let layer = 0; layer < this.#layers; layer++) {
      const keys = new Float32Array(size);
      const values = new Float32Array(size);
      if (held > 0) {
        copyKeys(
          this.#keys[layer]!,
          this.#columns,
          keys,
          columns,
          held * this.#kvHeads * this.#width,
        );
        const block = this.#columns * this.#width;
        for (let i = 0; i < held * this.#kvHeads; i++) {
          const from = this.#values[layer]!.subarray(i * block, (i + 1) * block);
          values.set(from, i * columns * this.#width);
        }
      }
      this.#keys[layer] = keys;
      this.#values[layer] = values;
    }
    this.#mask = new Float32Array(capacity * columns).fill(-Infinity);
    for (const [row, filled] of this.#lengths.entries())
      this.#mask.fill(0, row * columns, row * columns + filled);
    this.#rowCapacity = capacity;
    this.#columns = columns;
  }

  /** Adds a row from row `source` of a prefill's outputs, padded to `padded` tokens. Needs `reserve`. */
  addRow(prefill: Tensors, source: number, padded: number, length: number): void {
    const row = this.rows;
    const columns = this.#columns;
    const heads = this.#kvHeads;
    const width = this.#width;
    for (let layer = 0; layer < this.#layers; layer++) {
      const fromKeys = prefill[`keys${layer}`]!.data as Float32Array;
      const fromValues = prefill[`values${layer}`]!.data as Float32Array;
      const keys = this.#keys[layer]!;
      const values = this.#values[layer]!;
      for (let head = 0; head < heads; head++) {
        const from = (source * heads + head) * padded * width;
        const to = (row * heads + head) * columns * width;
        values.set(fromValues.subarray(from, from + length * width), to);
        for (let t = 0; t < length; t++) {
          for (let d = 0; d < width; d++)
            keys[to + d * columns + t] = fromKeys[from + t * width + d]!;
        }
      }
    }
    this.#mask.fill(-Infinity, row * columns, (row + 1) * columns);
    this.#mask.fill(0, row * columns, row * columns + length);
    this.#lengths.push(length);
  }

  /** Appends a decode step's `cache` output: one token to every row. Needs `reserve`. */
  append(fresh: Float32Array): void {
    const columns = this.#columns;
    const width = this.#width;
    const span = this.#kvHeads * width;
    let at = 0;
    for (let row = 0; row < this.rows; row++) {
      const column = this.#lengths[row]!;
      for (let layer = 0; layer < this.#layers; layer++) {
        const keys = this.#keys[layer]!;
        const start = row * span * columns + column;
        for (let i = 0; i < span; i++) keys[start + i * columns] = fresh[at++]!;
        const values = this.#values[layer]!;
        for (let head = 0; head < this.#kvHeads; head++) {
          const to = ((row * this.#kvHeads + head) * columns + column) * width;
          for (let i = 0; i < width; i++) values[to + i] = fresh[at++]!;
        }
      }
      this.#mask[row * columns + column] = 0;
      this.#lengths[row] = column + 1;
    }
  }

  /** Removes a row; the last row takes its place. */
  removeRow(row: number): void {
    const last = this.rows - 1;
    if (row !== last) {
      const span = this.#kvHeads * this.#width * this.#columns;
      for (const array of [...this.#keys, ...this.#values])
        array.copyWithin(row * span, last * span, (last + 1) * span);
      const columns = this.#columns;
      this.#mask.copyWithin(row * columns, last * columns, (last + 1) * columns);
      this.#lengths[row] = this.#lengths[last]!;
    }
    this.#lengths.pop();
  }

  /** Inputs of the decode graph: views, valid until the next change. */
  feeds(): Tensors {
    const rows = this.rows;
    const columns = this.#columns;
    const heads = this.#kvHeads;
    const width = this.#width;
    const size = rows * heads * width * columns;
    const positions = BigInt64Array.from(this.#lengths, (length) => BigInt(length));
    const feeds: Tensors = {
      positions: tensor(positions, [rows, 1]),
      mask: tensor(this.#mask.subarray(0, rows * columns), [rows, 1, 1, columns]),
    };
    for (let layer = 0; layer < this.#layers; layer++) {
      const keys = this.#keys[layer]!.subarray(0, size);
      const values = this.#values[layer]!.subarray(0, size);
      feeds[`keys${layer}`] = tensor(keys, [rows, heads, width, columns]);
      feeds[`values${layer}`] = tensor(values, [rows, heads, columns, width]);
    }
    return feeds;
  }

  /** Frees the memory; called when no row is left. */
  clear(): void {
    this.#keys = [];
    this.#values = [];
    this.#mask = new Float32Array(0);
    this.#lengths = [];
    this.#rowCapacity = 0;
    this.#columns = 0;
  }
}

/** Copies `lines` lines of `oldColumns` floats to lines of `columns`. */
function copyKeys(
  from: Float32Array,
  oldColumns: number,
  to: Float32Array,
  columns: number,
  lines: number,
): void {
  for (let line = 0; line < lines; line++) {
    const source = line * oldColumns;
    const target = line * columns;
    for (let i = 0; i < oldColumns; i++) to[target + i] = from[source + i]!;
  }
}
