import { setTimeout as sleep } from 'node:timers/promises';
import { expect, it } from 'vitest';
import { Rng } from '../core/index.ts';
import { Lockstep } from './lockstep.ts';

/** Work of uneven length and speed: `shake` delays lanes at random between their calls. */
async function batchesOf(shake: number): Promise<{ samples: number[][]; programs: number[][] }> {
  const rng = Rng.of(shake, 'shake');
  const lockstep = new Lockstep();
  const samples: number[][] = [];
  const programs: number[][] = [];
  const sampler = lockstep.channel(async (items: number[]) => {
    samples.push(items);
    await sleep(rng.int(0, 2));
    return items.map((item) => item * 2);
  });
  const sandbox = lockstep.channel(async (items: number[]) => {
    programs.push(items);
    await sleep(rng.int(0, 2));
    return items;
  });
  await Promise.all(
    Array.from({ length: 9 }, (_, index) =>
      lockstep.run(index, async (lane) => {
        for (let call = 0; call <= index % 3; call++) {
          await sleep(rng.int(0, 3));
          expect(await lane.call(sampler, index)).toBe(index * 2);
          if (index !== 4) expect(await lane.call(sandbox, index)).toBe(index);
        }
      }),
    ),
  );
  return { samples, programs };
}

it('gives equal batches whatever the timing, ordered by lane', async () => {
  const first = await batchesOf(1);
  expect(first.samples).toEqual([[0, 1, 2, 3, 4, 5, 6, 7, 8], [4], [1, 2, 5, 7, 8], [2, 5, 8]]);
  for (const shake of [2, 3, 4]) expect(await batchesOf(shake)).toEqual(first);
});

it('lets a lone lane go at once', async () => {
  const lockstep = new Lockstep();
  const channel = lockstep.channel(async (items: string[]) => items);
  expect(await lockstep.run(0, (lane) => lane.call(channel, 'a'))).toBe('a');
});

it('passes a failed dispatch to all who waited, and goes on', async () => {
  const lockstep = new Lockstep();
  let failing = true;
  const channel = lockstep.channel(async (items: number[]) => {
    if (failing) throw new Error('away');
    return items;
  });
  const both = (work: (index: number) => Promise<unknown>) =>
    Promise.allSettled([work(0), work(1)]);
  const call = (index: number) => lockstep.run(index, (lane) => lane.call(channel, index));
  expect((await both(call)).map((result) => result.status)).toEqual(['rejected', 'rejected']);
  failing = false;
  expect((await both(call)).map((result) => result.status)).toEqual(['fulfilled', 'fulfilled']);
});

it('a lane that fails does not hold up the others', async () => {
  const lockstep = new Lockstep();
  const channel = lockstep.channel(async (items: number[]) => items);
  const results = await Promise.allSettled([
    lockstep.run(0, (lane) => lane.call(channel, 0)),
    lockstep.run(1, async () => {
      await sleep(5);
      throw new Error('gone');
    }),
  ]);
  expect(results.map((result) => result.status)).toEqual(['fulfilled', 'rejected']);
});
