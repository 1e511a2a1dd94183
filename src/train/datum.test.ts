import { describe, expect, it } from 'vitest';
import type { Reward, Segment, Trajectory } from '../core/index.ts';
import { imitationDatum, policyDatum } from './datum.ts';
import { batchMetrics, policyData, randomReward, trueReward } from './grpo.ts';

const segment: Segment = {
  startedBecause: 'start',
  chunks: [
    { role: 'prompt', ids: [1, 10, 11] },
    { role: 'action', ids: [20, 2], logprobs: [-0.5, -0.25] },
    { role: 'observation', ids: [30, 31] },
    { role: 'action', ids: [21, 22, 2], logprobs: [-1, -2, -4] },
  ],
};

describe('a datum', () => {
  it('predicts the next token and masks all that was not sampled', () => {
    const datum = policyDatum(segment, [0.5, -1]);
    expect([...datum.tokens]).toEqual([1, 10, 11, 20, 2, 30, 31, 21, 22]);
    expect([...datum.targets]).toEqual([10, 11, 20, 2, 30, 31, 21, 22, 2]);
    expect([...datum.advantages!]).toEqual([0, 0, 0.5, 0.5, 0, 0, -1, -1, -1]);
    expect([...datum.logprobs!]).toEqual([0, 0, -0.5, -0.25, 0, 0, -1, -2, -4]);
  });
  it('refuses an action without a log-prob a token', () => {
    const broken: Segment = {
      ...segment,
      chunks: [
        { role: 'prompt', ids: [1] },
        { role: 'action', ids: [2, 3], logprobs: [-1] },
      ],
    };
    expect(() => policyDatum(broken, [1])).toThrow(/log-prob/);
    expect(() => policyDatum(segment, [1])).toThrow(/fewer advantages/);
  });
  it('to imitate weighs the tokens to be learned as targets', () => {
    const datum = imitationDatum([1, 5, 6, 2], [false, false, true, true]);
    expect([...datum.tokens]).toEqual([1, 5, 6]);
    expect([...datum.targets]).toEqual([5, 6, 2]);
    expect([...datum.weights!]).toEqual([0, 1, 1]);
  });
});

const played = (group: string, indexInGroup: number, reward: Reward): Trajectory => ({
  runId: `${group}${indexInGroup}`,
  taskId: 's:rev#1',
  domain: 'strings',
  group,
  indexInGroup,
  segments: reward.value === null ? [] : [segment],
  reward,
  truncated: false,
});
const graded = (value: number): Reward => ({
  status: 'ok',
  value,
  components: { solved: value > 0.5 ? 1 : 0, tries: 1, invalid: 0 },
});
const ungraded: Reward = { status: 'env_error', value: null, components: {}, reason: 'gone' };

describe('data of a step', () => {
  it('ungraded rollouts are in no baseline, no token count and no gradient', () => {
    const without = policyData(
      [played('a', 0, graded(1)), played('a', 1, graded(0))],
      trueReward,
      1,
    );
    const mixed = policyData(
      [played('a', 0, graded(1)), played('a', 1, graded(0)), played('a', 2, ungraded)],
      trueReward,
      1,
    );
    expect(mixed).toEqual(without);
    expect(mixed.tokens).toBe(10);
    expect(mixed.data.map((datum) => Math.max(...datum.advantages!.map(Math.abs)))).toEqual([
      0.5, 0.5,
    ]);
  });
  it('gives each turn its own credit, or its share of what came after it', () => {
    const turns = (perStep: number[]) =>
      played('a', perStep.length, { ...graded(1), perStep } as Reward);
    const pair = [turns([0, 1]), turns([0, 0])];
    const advantages = (discount: number) =>
      policyData(pair, trueReward, discount).data.map(({ advantages }) => [
        advantages![2],
        advantages![8],
      ]);
    expect(advantages(0)).toEqual([
      [0, 0.5],
      [0, -0.5],
    ]);
    expect(advantages(0.5)).toEqual([
      [0.25, 0.5],
      [-0.25, -0.5],
    ]);
  });
  it('a group with one graded rollout teaches nothing and is not counted', () => {
    const { data, tokens, deadGroups } = policyData(
      [played('a', 0, graded(1)), played('a', 1, ungraded)],
      trueReward,
      1,
    );
    expect({ data, tokens, deadGroups }).toEqual({ data: [], tokens: 0, deadGroups: 1 });
  });
  it('a group of equal rewards gives no data, but its tokens count in the mean', () => {
    const { data, tokens, deadGroups } = policyData(
      [
        played('a', 0, graded(1)),
        played('a', 1, graded(1)),
        played('b', 0, graded(1)),
        played('b', 1, graded(0)),
      ],
      trueReward,
      1,
    );
    expect(data).toHaveLength(2);
    expect(tokens).toBe(20);
    expect(deadGroups).toBe(1);
  });
  it('the random control is a coin that leaves ungraded rollouts ungraded', () => {
    const coin = randomReward(1);
    const flips = Array.from({ length: 100 }, (_, i) => coin(played('a', i, graded(1)))!).flat();
    expect(new Set(flips)).toEqual(new Set([0, 1]));
    const heads = flips.reduce((sum, flip) => sum + flip, 0);
    expect(flips).toHaveLength(200);
    expect(heads).toBeGreaterThan(60);
    expect(heads).toBeLessThan(140);
    expect(coin(played('a', 0, ungraded))).toBeNull();
  });
  it('metrics speak of graded rollouts only', () => {
    expect(batchMetrics([graded(1), graded(0), ungraded])).toMatchObject({
      reward: 0.5,
      solved: 0.5,
      solvedFirst: 0.5,
      graded: 2,
      ungraded: 1,
    });
    expect(batchMetrics([ungraded]).reward).toBe(0);
  });
});
