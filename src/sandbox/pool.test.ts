import { setTimeout as sleep } from 'node:timers/promises';
import { describe, expect, test, vi } from 'vitest';
import { LonghaulError } from '../core/index.ts';
import { Pool } from './pool.ts';

const WAIT_MS = 20_000;

class Member {
  healthy = true;
  stopped = false;
  readonly #onStop: () => void;
  constructor(onStop: () => void) {
    this.#onStop = onStop;
  }
  async ping() {
    return this.healthy;
  }
  async stop() {
    if (!this.stopped) this.#onStop();
    this.stopped = true;
  }
}

function setUp(options: { warm?: number; maxLive?: number; waitMs?: number; fails?: number } = {}) {
  let alive = 0;
  let most = 0;
  let failures = options.fails ?? 0;
  const pool: Pool<Member> = new Pool<Member>({
    warm: options.warm ?? 1,
    maxLive: options.maxLive ?? 4,
    waitMs: options.waitMs ?? 5000,
    make: async () => {
      await sleep(1);
      if (failures-- > 0) throw new Error('cannot make one');
      most = Math.max(most, ++alive);
      return new Member(() => {
        alive--;
        pool.release();
      });
    },
  });
  return { pool, most: () => most, alive: () => alive };
}

describe('pool', () => {
  test('hands out the warm one and refills', async () => {
    const { pool } = setUp({ warm: 2 });
    pool.prepare('a');
    await vi.waitFor(() => expect(pool.ready('a')).toBe(2), WAIT_MS);
    await pool.acquire('a');
    await vi.waitFor(() => expect(pool.ready('a')).toBe(2), WAIT_MS);
    expect(pool.live).toBe(3);
    await pool.close();
  });

  test('a machine that is full makes requests wait, as long as somebody will make room', async () => {
    let room = 2;
    const pool: Pool<Member> = new Pool<Member>({
      warm: 0,
      maxLive: 100,
      waitMs: WAIT_MS,
      make: async () => {
        if (room === 0)
          throw new LonghaulError('SandboxUnavailable', 'no process left', { retryAfterMs: 5 });
        room--;
        return new Member(() => {
          room++;
          pool.release();
        });
      },
    });
    const held = await Promise.all([pool.acquire('a'), pool.acquire('a')]);
    let third: Member | null = null;
    const waiting = pool.acquire('a').then((member) => {
      third = member;
      return member;
    });
    await sleep(50);
    expect(third).toBeNull();
    await held[0]!.stop();
    await (await waiting).stop();
    await held[1]!.stop();
    room = 0; // nobody is left to make room
    await expect(pool.acquire('a')).rejects.toMatchObject({ code: 'SandboxUnavailable' });
    expect(pool.live).toBe(0);
    await pool.close();
  });

  test('never more alive than places; waiting requests are served in order', async () => {
    const { pool, most } = setUp({ maxLive: 3 });
    const order: number[] = [];
    await Promise.all(
      Array.from({ length: 30 }, async (_, i) => {
        const member = await pool.acquire('a');
        order.push(i);
        await sleep(1);
        await member.stop();
      }),
    );
    expect(order).toHaveLength(30);
    expect(most()).toBeLessThanOrEqual(3);
    await pool.close();
    expect(pool.live).toBe(0);
  });

  test('a request beyond the places fails after the wait and takes no place with it', async () => {
    const { pool } = setUp({ maxLive: 1, warm: 0, waitMs: 20 });
    const member = await pool.acquire('a');
    await expect(pool.acquire('a')).rejects.toMatchObject({ code: 'SandboxUnavailable' });
    await member.stop();
    await (await pool.acquire('a')).stop();
    expect(pool.live).toBe(0);
    await pool.close();
  });

  test('an unhealthy member is replaced, a failed start is reported and frees its place', async () => {
    const { pool, alive } = setUp({ warm: 0, maxLive: 1, fails: 1 });
    await expect(pool.acquire('a')).rejects.toThrow('cannot make one');
    expect(pool.live).toBe(0);
    const { pool: other } = setUp({ warm: 1, maxLive: 1 });
    other.prepare('a');
    await vi.waitFor(() => expect(other.ready('a')).toBe(1), WAIT_MS);
    const first = await other.acquire('a');
    expect(first.healthy).toBe(true);
    await first.stop();
    other.prepare('a');
    await vi.waitFor(() => expect(other.ready('a')).toBe(1), WAIT_MS);
    expect(alive()).toBe(0);
    await Promise.all([pool.close(), other.close()]);
  });

  test('idle members make way for another spec', async () => {
    const { pool } = setUp({ warm: 1, maxLive: 1 });
    pool.prepare('a');
    await vi.waitFor(() => expect(pool.ready('a')).toBe(1), WAIT_MS);
    await pool.acquire('b');
    expect(pool.ready('a')).toBe(0);
    await pool.close();
  });

  test('only the specs asked for last stay warm', async () => {
    const { pool, alive } = setUp({ maxLive: 20 });
    for (const key of ['a', 'b', 'c', 'd', 'e', 'f']) pool.prepare(key);
    const ready = () => ['a', 'b', 'c', 'd', 'e', 'f'].map((key) => pool.ready(key));
    await vi.waitFor(() => expect(ready()).toEqual([0, 0, 1, 1, 1, 1]), WAIT_MS);
    await vi.waitFor(() => expect([alive(), pool.live]).toEqual([4, 4]), WAIT_MS);
    await pool.close();
  });

  test('close ends all waiting', async () => {
    const { pool } = setUp({ maxLive: 1, warm: 0 });
    await pool.acquire('a');
    const waiting = pool.acquire('a');
    const ended = expect(waiting).rejects.toMatchObject({ code: 'SandboxUnavailable' });
    await pool.close();
    await ended;
  });
});
