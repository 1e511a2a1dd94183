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
  // A mean of equal numbers can differ from them in the last bit, and 7e-18 is not an advantage.
  if (graded.every((reward) => reward === graded[0])) {
    return rewards.map((reward) => (reward === null ? null : 0));
  }
  const mean = graded.reduce((sum, reward) => sum + reward, 0) / graded.length;
  const squares = graded.reduce((sum, reward) => sum + (reward - mean) ** 2, 0);
  const scale =
    options.normalise === 'std' ? 1 / (Math.sqrt(squares / (graded.length - 1)) + EPSILON) : 1;
  return rewards.map((reward) => (reward === null ? null : (reward - mean) * scale));
}
const EPSILON = 1e-8;

/**
 * What each turn of an episode led to: `G_t = r_t + γ·G_{t+1}` (R. S. Sutton, A. G. Barto, "Reinforcement
 * Learning", 2nd ed., 3.3). With γ = 0 a turn answers for its own outcome only.
 *
 * @param perTurn r, one a turn
 */
export function returnsToGo(perTurn: readonly number[], discount: number): number[] {
  const returns: number[] = new Array(perTurn.length);
  let next = 0;
  for (let t = perTurn.length - 1; t >= 0; t--) returns[t] = next = perTurn[t]! + discount * next;
  return returns;
}

/**
 * Group-relative advantages turn by turn: the return of turn t against the mean of all rollouts of the
 * group that reached turn t. A turn that only one rollout reached has advantage 0. For episodes of one
 * turn this is `groupAdvantages` without normalisation. Turn-level credit in multi-turn GRPO:
 * arXiv 2505.11821.
 *
 * @param returns one list a rollout, one return a turn; null where the rollout was not graded: it is in
 *   no mean and gets null. All null where fewer than two were graded.
 */
export function turnAdvantages(
  returns: readonly (readonly number[] | null)[],
  options: { normalise?: 'none' | 'std' } = {},
): (number[] | null)[] {
  const graded = returns.filter((list) => list !== null);
  if (graded.length < 2) return returns.map(() => null);
  const turns = Math.max(...graded.map((list) => list.length));
  const byTurn = Array.from({ length: turns }, (_, t) =>
    groupAdvantages(
      returns.map((list) => list?.[t] ?? null),
      options,
    ),
  );
  return returns.map((list, i) => list?.map((_, t) => byTurn[t]?.[i] ?? 0) ?? null);
}
