/**
 * Group-relative advantages: the reward of each rollout against those of the same task.
 *
 *     A_i = r_i − mean(r)               Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv 2503.20783)
 *     A_i = (r_i − mean(r)) / (sd(r) + ε)      GRPO, "DeepSeekMath" (arXiv 2402.03300), sd with n − 1
 *
 * Dividing by the deviation weighs tasks that are nearly solved or nearly lost above the rest.
 *
 * @param rewards one a rollout; null where it was not graded. Such a rollout is in no mean and no
 *   deviation and gets null: it must not be learned from.
 * @returns one a rollout; null for the whole group where fewer than two were graded, since a mean of
 *   one says nothing.
 */
export function groupAdvantages(
  rewards: readonly (number | null)[],
  options: { normalise?: 'none' | 'std' } = {},
): (number | null)[] {
  const graded = rewards.filter((reward) => reward !== null);
  if (graded.length < 2) return rewards.map(() => null);
  const mean = graded.reduce((sum, reward) => sum + reward, 0) / graded.length;
  const squares = graded.reduce((sum, reward) => sum + (reward - mean) ** 2, 0);
  const scale =
    options.normalise === 'std' ? 1 / (Math.sqrt(squares / (graded.length - 1)) + EPSILON) : 1;
  return rewards.map((reward) => (reward === null ? null : (reward - mean) * scale));
}
const EPSILON = 1e-8;
