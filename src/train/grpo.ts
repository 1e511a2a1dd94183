import { isGraded, type Reward, Rng, type Trajectory } from '../core/index.ts';
import type { Datum, ForwardResult, Trainer } from '../engine/contract.ts';
import { returnsToGo, turnAdvantages } from './algorithms/advantages.ts';
import { klK3, ppoClip, tokenMean } from './algorithms/objective.ts';
import { actionChunks, policyDatum } from './datum.ts';
import { adam } from './supervised.ts';

const CLIP = { low: 0.2, high: 0.2 } as const;

/** Rewards of a run's turns, one a model call; a control puts something else in their place. */
export type RewardSource = (trajectory: Trajectory) => readonly number[] | null;

/** Each turn's own outcome where the environment states it, else the run's reward at its last turn. */
export const trueReward: RewardSource = ({ reward, segments }) => {
  if (reward.value === null) return null;
  const turns = segments.flatMap(actionChunks).length;
  return (
    reward.perStep ?? Array.from({ length: turns }, (_, t) => (t === turns - 1 ? reward.value : 0))
  );
};

/** The control without signal: a coin for each turn. What is ungraded stays so. */
export function randomReward(seed: number): RewardSource {
  return ({ reward, segments, taskId, group, indexInGroup }) => {
    if (reward.value === null) return null;
    const rng = Rng.of(seed, 'random reward', group, taskId, indexInGroup);
    return segments.flatMap(actionChunks).map(() => rng.int(0, 1));
  };
}

/**
 * Data of a batch of rollouts: the advantage of each turn within its group, on the turn's tokens. A run
 * with advantage 0 throughout gives no gradient and is left out, but its tokens count in the mean. Ungraded
 * rollouts are in neither.
 *
 * @param discount how much a turn answers for what came after it, 0 to 1
 */
export function policyData(
  trajectories: readonly Trajectory[],
  reward: RewardSource,
  discount: number,
): { data: Datum[]; tokens: number; groups: number; deadGroups: number } {
  const groups = Map.groupBy(trajectories, (trajectory) => trajectory.group);
  const data: Datum[] = [];
  let tokens = 0;
  let deadGroups = 0;
  for (const group of groups.values()) {
    const rewards = group.map(reward);
    const advantages = turnAdvantages(
      rewards.map((perTurn) => perTurn && returnsToGo(perTurn, discount)),
    );
    if (advantages.every((turns) => turns === null || isZero(turns))) deadGroups += 1;
    for (const [i, { segments }] of group.entries()) {
      const turns = advantages[i]!;
      if (turns === null) continue;
      let turn = 0;
      for (const segment of segments) {
        const actions = actionChunks(segment);
        const own = turns.slice(turn, (turn += actions.length));
        tokens += actions.reduce((sum, chunk) => sum + chunk.ids.length, 0);
        if (!isZero(own)) data.push(policyDatum(segment, own));
      }
    }
  }
  return { data, tokens, groups: groups.size, deadGroups };
}

function isZero(advantages: readonly number[]): boolean {
  return advantages.every((advantage) => advantage === 0);
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
  settings: { learningRate: number; discount: number },
): Promise<GrpoResult> {
  const { discount, learningRate } = settings;
  const { data, tokens, groups, deadGroups } = policyData(trajectories, reward, discount);
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
