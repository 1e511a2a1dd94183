import { describe, expect, it } from 'vitest';
import type { ModelConfig } from '../contract.ts';
import { tensor } from './graph/session.ts';
import { KvCache } from './kv-cache.ts';

const CONFIG: ModelConfig = {
  vocabSize: 4,
  dim: 8,
  layers: 2,
  heads: 4,
  kvHeads: 2,
  ffnDim: 4,
  maxLength: 256,
  ropeTheta: 100,
  normEps: 1e-5,
  tiedHead: true,
};
const WIDTH = 2;

/** A value that says where it belongs: no two are equal. */
const value = (id: number, array: number, head: number, column: number, i: number) =>
  (((id * 4 + array) * 2 + head) * 256 + column) * 2 + i;

/** A prefill of one row. */
function prefill(id: number, length: number, padded: number) {
  const arrays = Array.from({ length: 4 }, (_, array) => {
    const data = new Float32Array(2 * padded * WIDTH).fill(-1);
    for (let head = 0; head < 2; head++)
      for (let column = 0; column < length; column++)
        for (let i = 0; i < WIDTH; i++)
          data[(head * padded + column) * WIDTH + i] = value(id, array, head, column, i);
    const name = array % 2 === 0 ? 'keys' : 'values';
    return [`${name}${array >> 1}`, tensor(data, [1, 2, padded, WIDTH])] as const;
  });
  return Object.fromEntries(arrays);
}

/** Rows by id, as a plain model of what the cache must hold. */
function expectHolds(cache: KvCache, rows: { id: number; length: number }[]): void {
  expect(cache.rows).toBe(rows.length);
  const fed = Math.max(2, rows.length);
  expect(cache.fedRows).toBe(fed);
  const feeds = cache.feeds();
  const columns = feeds.mask!.dims[3]!;
  const positions = Array.from(feeds.positions!.data as BigInt64Array, Number);
  expect(positions).toHaveLength(fed);
  expect(positions.slice(0, rows.length)).toEqual(rows.map((row) => row.length));
  for (let array = 0; array < 4; array++) {
    const name = `${array % 2 === 0 ? 'keys' : 'values'}${array >> 1}`;
    expect(feeds[name]!.dims).toEqual([fed, 2, columns, WIDTH]);
    const data = feeds[name]!.data as Float32Array;
    for (const [row, { id, length }] of rows.entries())
      for (let head = 0; head < 2; head++)
        for (let column = 0; column < length; column++)
          for (let i = 0; i < WIDTH; i++)
            expect(data[((row * 2 + head) * columns + column) * WIDTH + i]).toBe(
              value(id, array, head, column, i),
            );
  }
  const mask = feeds.mask!.data as Float32Array;
  for (const [row, { length }] of rows.entries())
    for (let column = 0; column < columns; column++)
      expect(mask[row * columns + column]).toBe(column < length ? 0 : -Infinity);
}

function append(cache: KvCache, rows: { id: number; length: number }[]): void {
  const fresh: number[] = [];
  for (const { id, length } of rows)
    for (let array = 0; array < 4; array++)
      for (let head = 0; head < 2; head++)
        for (let i = 0; i < WIDTH; i++) fresh.push(value(id, array, head, length, i));
  cache.append(Float32Array.from(fresh));
  for (const row of rows) row.length++;
}

describe('the key-value cache', () => {
  it('holds every row through joining, growing, leaving and reuse', () => {
    const cache = new KvCache(CONFIG, 2);
    const rows: { id: number; length: number }[] = [];
    const join = (id: number, length: number, limit: number) => {
      cache.reserve(rows.length + 1, Math.max(cache.longest, length) + 1, limit);
      cache.addRow(prefill(id, length, length + 3), 0, length + 3, length);
      rows.push({ id, length });
    };
    const step = (limit: number) => {
      cache.reserve(rows.length, cache.longest + 1, limit);
      append(cache, rows);
    };
    const leave = (row: number) => {
      cache.removeRow(row);
      const last = rows.pop()!;
      if (row < rows.length) rows[row] = last;
    };
    for (let round = 0; round < 2; round++) {
      join(0, 5, 60);
      join(1, 15, 60);
      expectHolds(cache, rows);
      for (let i = 0; i < 20; i++) step(60);
      expectHolds(cache, rows);
      join(2, 1, 60);
      join(3, 70, 200);
      expectHolds(cache, rows);
      leave(0);
      leave(1);
      expectHolds(cache, rows);
      for (let i = 0; i < 60; i++) step(200);
      join(4, 2, 200);
      expectHolds(cache, rows);
      while (rows.length > 0) leave(0);
      if (round === 0) cache.clear();
    }
  });

  it('an emptied cache takes the size of what comes next, not of what was', () => {
    const cache = new KvCache(CONFIG, 2);
    cache.reserve(3, 100, 200);
    for (let i = 0; i < 3; i++) cache.addRow(prefill(i, 100, 100), 0, 100, 100);
    for (let i = 0; i < 3; i++) cache.removeRow(0);
    cache.reserve(1, 6, 20);
    cache.addRow(prefill(9, 5, 8), 0, 8, 5);
    expectHolds(cache, [{ id: 9, length: 5 }]);
    expect(cache.feeds().mask!.dims).toEqual([2, 1, 1, 16]);
  });
});
