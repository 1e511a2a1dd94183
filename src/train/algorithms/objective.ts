/**
 * The clipped objective of PPO ("Proximal Policy Optimization Algorithms", arXiv 1707.06347), as a
 * loss a token, to be minimised:
 *
 *     r = exp(lp − q),   loss = −min(r·A, clip(r, 1 − low, 1 + high)·A)
 *
 * Engines compute it with its gradient; this is the reference for tests and for diagnostics.
 *
 * @param current log-probs lp under the policy that learns
 * @param sampled log-probs q under the policy that sampled
 * @param advantages A; a token with 0 is masked: its loss is 0 whatever its log-probs, NaN included
 */
export function ppoClip(
  current: ArrayLike<number>,
  sampled: ArrayLike<number>,
  advantages: ArrayLike<number>,
  clip: { low: number; high: number },
): { losses: number[]; clipped: boolean[] } {
  const losses: number[] = [];
  const clipped: boolean[] = [];
  for (let i = 0; i < advantages.length; i++) {
    const advantage = advantages[i]!;
    if (advantage === 0) {
      losses.push(0);
      clipped.push(false);
      continue;
    }
    const ratio = Math.exp(current[i]! - sampled[i]!);
    const bounded = Math.min(Math.max(ratio, 1 - clip.low), 1 + clip.high);
    losses.push(-Math.min(ratio * advantage, bounded * advantage));
    clipped.push(bounded * advantage < ratio * advantage);
  }
  return { losses, clipped };
}

/**
 * The k3 estimate of KL(sampled ‖ current) a token, "Approximating KL Divergence" (J. Schulman, 2020):
 * `exp(d) − 1 − d` with d = lp − q, never negative. In the exponential d is at most 20, so that one
 * token cannot overflow the mean.
 */
export function klK3(current: number, sampled: number): number {
  const d = current - sampled;
  return Math.exp(Math.min(20, d)) - 1 - d;
}

/**
 * Mean over all action tokens of a step, whatever batches they were computed in: the sum of the
 * batches' sums over the sum of their tokens, never a mean of means (DAPO, arXiv 2503.14476, eq. 8).
 * Tokens of rollouts whose advantage is 0 count as well, so a step in which few groups differ moves the
 * weights little. 0 for no tokens.
 */
export function tokenMean(batches: readonly { sum: number; tokens: number }[]): number {
  const tokens = batches.reduce((total, batch) => total + batch.tokens, 0);
  return tokens === 0 ? 0 : batches.reduce((total, batch) => total + batch.sum, 0) / tokens;
}
