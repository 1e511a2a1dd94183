import { type Chunk, LonghaulError, type Segment } from '../core/index.ts';
import type { Datum } from '../engine/contract.ts';

/**
 * A segment as policy-gradient data: position i predicts token i + 1. Only tokens of action chunks carry
 * an advantage and their sampling log-prob; prompts and observations are masked by advantage 0.
 *
 * @param advantages one an action chunk, in order
 * @returns arrays of length (tokens of the segment − 1)
 */
export function policyDatum(segment: Segment, advantages: readonly number[]): Datum {
  const ids = segment.chunks.flatMap((chunk) => chunk.ids);
  const length = ids.length - 1;
  const logprobs = new Float32Array(length);
  const spread = new Float32Array(length);
  let turn = 0;
  let at = 0;
  for (const chunk of segment.chunks) {
    if (chunk.role === 'action') {
      if (chunk.logprobs?.length !== chunk.ids.length)
        throw new LonghaulError('Internal', 'an action chunk has not one log-prob a token');
      const advantage = advantages[turn++];
      if (advantage === undefined)
        throw new LonghaulError('Internal', 'there are fewer advantages than action chunks');
      for (const [i, logprob] of chunk.logprobs.entries()) {
        const position = at + i - 1;
        if (position < 0) continue;
        logprobs[position] = logprob;
        spread[position] = advantage;
      }
    }
    at += chunk.ids.length;
  }
  return { ...shifted(ids), logprobs, advantages: spread };
}

/** The chunks of a segment that were sampled, one a model call. */
export function actionChunks(segment: Segment): Chunk[] {
  return segment.chunks.filter((chunk) => chunk.role === 'action');
}

/** Text to imitate: `learned[i]` says whether the loss is taken on token i. */
export function imitationDatum(ids: readonly number[], learned: readonly boolean[]): Datum {
  return { ...shifted(ids), weights: Float32Array.from(learned.slice(1), (yes) => (yes ? 1 : 0)) };
}

function shifted(ids: readonly number[]): Pick<Datum, 'tokens' | 'targets'> {
  return { tokens: Int32Array.from(ids.slice(0, -1)), targets: Int32Array.from(ids.slice(1)) };
}
