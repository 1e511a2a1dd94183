import { LonghaulError, type Rng, type SamplingParams } from '../../core/index.ts';

export interface Choice {
  id: number;
  /** Natural-log probability under the model itself: temperature 1, nothing truncated. */
  logprob: number;
}

/** Reused between calls: thousands of short-lived arrays a second keep the collector busy. */
let scratch = new Float64Array(0);

/**
 * Draws a token from one row of logits. Order of operations: temperature, then top-k, then top-p over
 * what is left. Temperature 0 takes the most likely token, the lowest id at a tie. Uses exactly one
 * random number a drawn token, so a request's tokens do not depend on its neighbours.
 */
export function choose(logits: Float32Array, sampling: SamplingParams, rng: Rng): Choice {
  const { temperature } = sampling;
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i]! > logits[best]!) best = i;
  const top = logits[best]!;
  if (scratch.length !== logits.length) scratch = new Float64Array(logits.length);
  const weights = scratch;
  let total = 0;
  for (let i = 0; i < logits.length; i++) total += weights[i] = Math.exp(logits[i]! - top);
  if (!Number.isFinite(total) || !Number.isFinite(top))
    throw new LonghaulError('EngineFailed', 'the model gave logits that are not finite', {
      next: 'Its weights have diverged: load an earlier checkpoint.',
    });
  const logOf = (id: number): Choice => ({ id, logprob: logits[id]! - top - Math.log(total) });
  if (temperature === 0) return logOf(best);
  if (temperature !== 1)
    for (let i = 0; i < logits.length; i++) weights[i] = Math.exp((logits[i]! - top) / temperature);
  const { topK = 0, topP = 1 } = sampling;
  if ((topK > 0 && topK < logits.length) || topP < 1) truncate(weights, topK, topP);
  return logOf(draw(weights, rng.float()));
}

/** The index at which the running sum of the weights passes the share `u` of the whole. */
function draw(weights: Float64Array, u: number): number {
  let total = 0;
  for (let i = 0; i < weights.length; i++) total += weights[i]!;
  let rest = u * total;
  let last = 0;
  for (let i = 0; i < weights.length; i++) {
    if (weights[i] === 0) continue;
    last = i;
    rest -= weights[i]!;
    if (rest < 0) return i;
  }
  return last;
}

/** Zeroes all but the `topK` largest weights, then all but the fewest that hold `topP` of the rest. */
function truncate(weights: Float64Array, topK: number, topP: number): void {
  const order = Array.from(weights.keys()).sort((a, b) => weights[b]! - weights[a]! || a - b);
  const kept = topK > 0 ? Math.min(topK, order.length) : order.length;
  let total = 0;
  for (let i = 0; i < kept; i++) total += weights[order[i]!]!;
  let held = 0;
  let count = 0;
  while (count < kept && (count === 0 || held < topP * total)) held += weights[order[count++]!]!;
  for (let i = count; i < order.length; i++) weights[order[i]!] = 0;
}
