import { z } from 'zod';

/**
 * A reward is graded or it is not. Ungraded (`value: null`) is the infrastructure's doing: it is in no
 * baseline, metric or gradient. What the guest caused (its own memory bomb, killing the grader) is
 * `agent_error` with a value, otherwise a policy learns to crash out of bad rewards.
 */
const graded = <S extends GradedStatus>(status: S) =>
  z.object({
    status: z.literal(status),
    value: z.number(),
    components: z.record(z.string(), z.number()),
    perStep: z.array(z.number()).optional(),
  });
const ungraded = <S extends UngradedStatus>(status: S) =>
  z.object({
    status: z.literal(status),
    value: z.null(),
    components: z.record(z.string(), z.number()),
    reason: z.string(),
  });

export const Reward = z.discriminatedUnion('status', [
  graded('ok'),
  graded('truncated'),
  graded('agent_error'),
  graded('agent_timeout'),
  ungraded('env_error'),
  ungraded('grader_error'),
  ungraded('infra_timeout'),
]);
export type GradedStatus = 'ok' | 'truncated' | 'agent_error' | 'agent_timeout';
export type UngradedStatus = 'env_error' | 'grader_error' | 'infra_timeout';
export type GradedReward = {
  status: GradedStatus;
  value: number;
  components: Record<string, number>;
  perStep?: number[] | undefined;
};
export type UngradedReward = {
  status: UngradedStatus;
  value: null;
  components: Record<string, number>;
  reason: string;
};
export type Reward = GradedReward | UngradedReward;

export function isGraded(reward: Reward): reward is GradedReward {
  return reward.value !== null;
}
