/**
 * Wilson's score interval for a share (E. B. Wilson, 1927): the two p at which the observed share is
 * `z` standard errors off. Unlike the plain interval it stays in [0, 1] and holds for shares near them.
 *
 *     (p̂ + z²/2n ± z·√(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n)
 *
 * @param z 1.96 for 95 %. For no trials the interval is everything.
 */
export function wilson(successes: number, trials: number, z = 1.959964): [number, number] {
  if (trials === 0) return [0, 1];
  const share = successes / trials;
  const scale = 1 + (z * z) / trials;
  const centre = share + (z * z) / (2 * trials);
  const half = z * Math.sqrt((share * (1 - share)) / trials + (z * z) / (4 * trials * trials));
  // Rounding can leave [0, 1] by a last bit.
  return [Math.max(0, (centre - half) / scale), Math.min(1, (centre + half) / scale)];
}
