import type { ModelConfig } from '../contract.ts';
import { type Tensors, tensor } from './graph/session.ts';
import { headDim } from './layout.ts';

/** Columns come in steps of this. */
const COLUMN_STEP = 16;
/** Growing moves every row, so it makes more room than is needed now. */
const GROWTH = 1.5;
/** Floats an idle cache keeps (64 MiB): the next batch then starts without allocating. */
const IDLE_FLOATS = 2 ** 24;

/** Columns that rows of this length take. */
export function columnsFor(length: number): number {
  return Math.ceil(length / COLUMN_STEP) * COLUMN_STEP;
}

/**
 * Keys and values of the rows that are being decoded, [row, kvHead, column, headDim] in each layer.
 * Rows 0 to `rows` − 1 are in use, without holes, so that a step feeds views of the first rows and
 * computes nothing else. All rows have as many columns as the longest needs; a mask hides the rest.
 */
export class KvCache {
  readonly #minRows: number;
  readonly #kvHeads: number;
  readonly #width: number;
  /** Keys, then values, of each layer: views into memory that may be larger. */
  readonly #arrays: Float32Array[];
  #mask = new Float32Array(0);
  #lengths: number[] = [];
  #columns = 0;

  /** A step feeds at least `minRows` rows; those not in use carry anything finite. */
  constructor(config: ModelConfig, minRows: number) {
    this.#minRows = minRows;
    this.#kvHeads = config.kvHeads;
    this.#width = headDim(config);
    this.#arrays = Array.from({ length: 2 * config.layers }, () => new Float32Array(0));
  }

  get rows(): number {
    return this.#lengths.length;
  }

  /** Rows of the next step's inputs. */
  get fedRows(): number {
    return Math.max(this.rows, this.#minRows);
  }

  /** Tokens of the longest row. */
  get longest(): number {
    return this.#lengths.reduce((a, b) => Math.max(a, b), 0);
  }

  /** Floats that one column of one row takes. */
  static floatsPerToken(config: ModelConfig): number {
    return 2 * config.layers * config.kvHeads * headDim(config);
  }

  /**
   * Makes room for `rows` rows of `length` tokens; `limit` is the most that any of them will reach.
   * Rows that are held move to their new places.
   */
  reserve(rows: number, length: number, limit: number): void {
    const held = this.rows;
    const old = held === 0 ? 0 : this.#columns;
    const needed = columnsFor(length);
    const grown = Math.min(columnsFor(old * GROWTH), columnsFor(limit));
    const columns = old >= needed ? old : Math.max(needed, grown);
    const fed = Math.max(rows, this.#minRows);
    const floats = fed * this.#kvHeads * columns * this.#width;
    if (columns === old && floats <= this.#arrays[0]!.length) return;
    const room = held === 0 ? floats : Math.ceil(floats * GROWTH);
    for (const [i, array] of this.#arrays.entries()) {
      const target = array.length >= floats ? array : new Float32Array(room);
      const blocks = held * this.#kvHeads;
      moveBlocks(array, old * this.#width, target, columns * this.#width, blocks);
      this.#arrays[i] = target;
    }
    const slots = Math.floor(this.#arrays[0]!.length / (this.#kvHeads * this.#width));
    this.#mask = new Float32Array(slots).fill(-Infinity);
    for (const [row, filled] of this.#lengths.entries())
      this.#mask.fill(0, row * columns, row * columns + filled);
    this.#columns = columns;
  }

  /** Adds a row from row `source` of a prefill's outputs, padded to `padded` tokens. Needs `reserve`. */
  addRow(prefill: Tensors, source: number, padded: number, length: number): void {
    const row = this.rows;
    const columns = this.#columns;
    const heads = this.#kvHeads;
    const width = this.#width;
    for (const [i, to] of this.#arrays.entries()) {
      const name = i % 2 === 0 ? 'keys' : 'values';
      const from = prefill[`${name}${Math.floor(i / 2)}`]!.data as Float32Array;
      for (let head = 0; head < heads; head++) {
        const start = (source * heads + head) * padded * width;
        const block = from.subarray(start, start + length * width);
        to.set(block, (row * heads + head) * columns * width);
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
    const heads = this.#kvHeads;
    let at = 0;
    for (let row = 0; row < this.rows; row++) {
      const column = this.#lengths[row]!;
      for (const to of this.#arrays) {
        for (let head = 0; head < heads; head++) {
          const start = ((row * heads + head) * columns + column) * width;
          for (let i = 0; i < width; i++) to[start + i] = fresh[at++]!;
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
      const columns = this.#columns;
      const span = this.#kvHeads * this.#width * columns;
      for (const array of this.#arrays)
        array.copyWithin(row * span, last * span, (last + 1) * span);
      this.#mask.copyWithin(row * columns, last * columns, (last + 1) * columns);
      this.#lengths[row] = this.#lengths[last]!;
    }
    this.#lengths.pop();
  }

  /** Inputs of the decode graph: views, valid until the next change. */
  feeds(): Tensors {
    const rows = this.fedRows;
    const columns = this.#columns;
    const shape = [rows, this.#kvHeads, columns, this.#width];
    const size = shape.reduce((a, b) => a * b, 1);
    const positions = new BigInt64Array(rows);
    for (const [row, length] of this.#lengths.entries()) positions[row] = BigInt(length);
    const feeds: Tensors = {
      positions: tensor(positions, [rows, 1]),
      mask: tensor(this.#mask.subarray(0, rows * columns), [rows, 1, 1, columns]),
    };
    for (const [i, array] of this.#arrays.entries()) {
      const name = i % 2 === 0 ? 'keys' : 'values';
      feeds[`${name}${Math.floor(i / 2)}`] = tensor(array.subarray(0, size), shape);
    }
    return feeds;
  }

  /** Forgets all rows; large memory is given back. */
  clear(): void {
    this.#lengths = [];
    const floats = this.#arrays.reduce((sum, array) => sum + array.length, 0);
    if (floats <= IDLE_FLOATS) return;
    this.#arrays.fill(new Float32Array(0));
  }
}

/** Moves `blocks` blocks from stride `oldSize` to the larger stride `size`, perhaps in place. */
function moveBlocks(
  from: Float32Array,
  oldSize: number,
  to: Float32Array,
  size: number,
  blocks: number,
): void {
  // Last block first: in place, a block then never lands on one that is still to be moved.
  for (let i = blocks - 1; i >= 0; i--) {
    if (from === to) to.copyWithin(i * size, i * oldSize, (i + 1) * oldSize);
    else to.set(from.subarray(i * oldSize, (i + 1) * oldSize), i * size);
  }
}
