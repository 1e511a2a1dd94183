import { isGraded, type Reward, Rng, type Trajectory } from '../core/index.ts';
import type { Datum, ForwardResult, Trainer } from '../engine/contract.ts';
import { groupAdvantages } from './algorithms/advantages.ts';
import { klK3, ppoClip, tokenMean } from './algorithms/objective.ts';
import { actionTokens, policyDatum } from './datum.ts';
import { adam } from './supervised.ts';

const CLIP = { low: 0.2, high: 0.2 } as const;

/** How rewards become what is learned from; a control puts something else in their place. */
export type RewardSource = (trajectory: Trajectory) => number | null;

export const trueReward: RewardSource = ({ reward }) => reward.value;

/** The control without signal: a coin for each rollout. What is ungraded stays so. */
export function randomReward(seed: number): RewardSource {
  return ({ reward, taskId, group, indexInGroup }) =>
    reward.value === null
      ? null
      : Rng.of(seed, 'random reward', group, taskId, indexInGroup).int(0, 1);
}

/**
 * Data of a batch of rollouts: each rollout's advantage within its group, on its action tokens. What
 * has advantage 0 gives no gradient and is left out, but its tokens count in the mean. Ungraded rollouts
 * are in neither.
 */
export function policyData(
  trajectories: readonly Trajectory[],
  reward: RewardSource,
): { data: Datum[]; tokens: number; groups: number; deadGroups: number } {
  const groups = Map.groupBy(trajectories, (trajectory) => trajectory.group);
  const data: Datum[] = [];
  let tokens = 0;
  let deadGroups = 0;
  for (const group of groups.values()) {
    const advantages = groupAdvantages(group.map(reward));
    if (advantages.every((advantage) => advantage === null || advantage === 0)) deadGroups += 1;
    for (const [i, trajectory] of group.entries()) {
      const advantage = advantages[i]!;
      if (advantage === null) continue;
      tokens += actionTokens(trajectory.segments);
      if (advantage === 0) continue;
      for (const segment of trajectory.segments) data.push(policyDatum(segment, advantage));
    }
  }
  return { data, tokens, groups: groups.size, deadGroups };
}

export interface GrpoResult {
  loss: number;
  gradNorm: number;
  tokens: number;
  deadGroups: number;
  clipFraction: number;
  /** k3 estimate between the sampling and the learning policy: drift of engine and trainer. */
  kl: number;
}

/** One on-policy update, `−Σ min(r·A, clip(r)·A) / action tokens`. Nothing happens where no group differs. */
export async function grpoStep(
  trainer: Trainer,
  trajectories: readonly Trajectory[],
  reward: RewardSource,
  learningRate: number,
): Promise<GrpoResult> {
  const { data, tokens, groups, deadGroups } = policyData(trajectories, reward);
  const dead = groups === 0 ? 0 : deadGroups / groups;
  if (data.length === 0)
    return { loss: 0, gradNorm: 0, tokens, deadGroups: dead, clipFraction: 0, kl: 0 };
  const result = await trainer.forwardBackward(data, {
    kind: 'ppo',
    clipLow: 1 - CLIP.low,
    clipHigh: 1 + CLIP.high,
  });
  const { gradNorm } = await trainer.optimStep(adam(learningRate, tokens));
  return {
    loss: tokenMean([{ sum: result.lossSum, tokens }]),
    gradNorm,
    tokens,
    deadGroups: dead,
    ...diagnostics(data, result),
  };
}

function diagnostics(data: readonly Datum[], result: ForwardResult) {
  let learned = 0;
  let clippedTokens = 0;
  let kl = 0;
  for (const [i, datum] of data.entries()) {
    const current = result.logprobs[i]!;
    const { clipped } = ppoClip(current, datum.logprobs!, datum.advantages!, CLIP);
    for (const [t, advantage] of datum.advantages!.entries()) {
      if (advantage === 0) continue;
      learned += 1;
      if (clipped[t]) clippedTokens += 1;
      kl += klK3(current[t]!, datum.logprobs![t]!);
    }
  }
  return { clipFraction: clippedTokens / learned, kl: kl / learned };
}

/** What a batch of rollouts was worth; only graded rollouts are in it. */
export function batchMetrics(rewards: readonly Reward[]): Record<string, number> {
  const graded = rewards.filter(isGraded);
  const mean = (value: (reward: (typeof graded)[number]) => number) =>
    graded.length === 0 ? 0 : graded.reduce((sum, item) => sum + value(item), 0) / graded.length;
  return {
    reward: mean((item) => item.value),
    solved: mean((item) => item.components.solved ?? 0),
    solvedFirst: mean((item) =>
      item.components.solved === 1 && item.components.tries === 1 ? 1 : 0,
    ),
    tries: mean((item) => item.components.tries ?? 0),
    invalid: mean((item) => item.components.invalid ?? 0),
    graded: graded.length,
    ungraded: rewards.length - graded.length,
  };
}
