import { describe, expect, it } from 'vitest';
import { groupAdvantages, returnsToGo, turnAdvantages } from './advantages.ts';
import { wilson } from './interval.ts';
import { klK3, ppoClip, tokenMean } from './objective.ts';

const close = (got: readonly (number | null)[], want: readonly (number | null)[], digits = 4) => {
  expect(got).toHaveLength(want.length);
  got.forEach((value, i) => {
    if (want[i] === null) expect(value).toBeNull();
    else expect(value).toBeCloseTo(want[i]!, digits);
  });
};

describe('group-relative advantages', () => {
  it('subtracts the mean of the group', () => {
    close(groupAdvantages([6, 3]), [1.5, -1.5]);
    close(groupAdvantages([9, 12]), [-1.5, 1.5]);
  });
  it('divides by the sample deviation when asked', () => {
    close(groupAdvantages([6, 3], { normalise: 'std' }), [Math.SQRT1_2, -Math.SQRT1_2], 5);
    close(groupAdvantages([9, 12], { normalise: 'std' }), [-Math.SQRT1_2, Math.SQRT1_2], 5);
  });
  it('leaves ungraded rollouts out of the baseline', () => {
    close(groupAdvantages([6, null, 3]), [1.5, null, -1.5]);
    close(
      groupAdvantages([6, null, 3], { normalise: 'std' }),
      [Math.SQRT1_2, null, -Math.SQRT1_2],
      5,
    );
  });
  it('gives nothing to a group with fewer than two graded rollouts', () => {
    expect(groupAdvantages([1, null])).toEqual([null, null]);
    expect(groupAdvantages([1])).toEqual([null]);
    expect(groupAdvantages([])).toEqual([]);
  });
  it('is exactly 0 where all rewards are equal, whatever their sum rounds to', () => {
    const equal = new Array<number>(7).fill(-0.05);
    expect(groupAdvantages(equal)).toEqual(equal.map(() => 0));
  });
  it('is 0 and finite where all rewards are equal', () => {
    expect(groupAdvantages([1, 1, 1], { normalise: 'std' })).toEqual([0, 0, 0]);
  });
});

describe('turn-level advantages', () => {
  it('returns are discounted sums of what follows', () => {
    close(returnsToGo([1, 2, 3], 1), [6, 5, 3]);
    close(returnsToGo([1, 2, 3], 0), [1, 2, 3]);
    close(returnsToGo([0, 0, 1], 0.5), [0.25, 0.5, 1]);
    expect(returnsToGo([], 0.5)).toEqual([]);
  });
  it('equal group advantages where episodes have one turn', () => {
    expect(turnAdvantages([[6], null, [3]]).map((list) => list?.[0] ?? null)).toEqual(
      groupAdvantages([6, null, 3]),
    );
  });
  it('compare a turn with those who reached it', () => {
    expect(turnAdvantages([[1], [0, 1], [0, 0, 1], [3, 2]])).toEqual([
      [0],
      [-1, 0],
      [-1, -1, 0],
      [2, 1],
    ]);
  });
  it('leave out what was not graded', () => {
    expect(turnAdvantages([[1, 5], null, [0]])).toEqual([[0.5, 0], null, [-0.5]]);
    expect(turnAdvantages([[1], null])).toEqual([null, null]);
  });
});

describe('PPO clip', () => {
  const advantages = [1, -1, 2];
  const sampled = [-1, -1, -1];
  const current = [-1.69315, -1, -0.59453];
  it('agrees with the published case', () => {
    const { losses, clipped } = ppoClip(current, sampled, advantages, { low: 0.2, high: 0.2 });
    close(losses, [-0.5, 1, -2.4]);
    expect(clipped).toEqual([false, false, true]);
    expect(losses.reduce((a, b) => a + b)).toBeCloseTo(-1.9, 4);
    expect(tokenMean([{ sum: losses.reduce((a, b) => a + b), tokens: 3 }])).toBeCloseTo(-0.6333, 4);
  });
  it('does not let a NaN in a masked token through', () => {
    expect(ppoClip([Number.NaN], [-1], [0], { low: 0.2, high: 0.2 }).losses).toEqual([0]);
  });
  it('does not clip what a negative advantage makes worse', () => {
    const { losses, clipped } = ppoClip([0], [-Math.LN2 * 2], [-1], { low: 0.2, high: 0.2 });
    close(losses, [4]);
    expect(clipped).toEqual([false]);
  });
});

it('k3 agrees with the published case and never overflows', () => {
  close([klK3(0, -1), klK3(-15, -1), klK3(-30, -1)], [0.7183, 13, 28]);
  expect(klK3(0, -1000)).toBeCloseTo(Math.exp(20) - 1001, 0);
  expect(klK3(-1, -1)).toBe(0);
});

it('averages over tokens, not over batches', () => {
  const batches = [
    { sum: 1 + 2, tokens: 2 },
    { sum: 3 + 4 + 5 + 6 + 7, tokens: 5 },
  ];
  expect(tokenMean(batches)).toBe(4);
  expect(tokenMean([])).toBe(0);
});

describe('the Wilson interval', () => {
  it('agrees with published values', () => {
    // 15 of 50: Brown, Cai, DasGupta, "Interval Estimation for a Binomial Proportion" (2001) formula.
    close(wilson(15, 50), [0.191, 0.4375], 3);
    close(wilson(0, 10), [0, 0.2775], 3);
    close(wilson(10, 10), [0.7225, 1], 3);
  });
  it('is everything for no trials', () => {
    expect(wilson(0, 0)).toEqual([0, 1]);
  });
});
