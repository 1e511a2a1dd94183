import { z } from 'zod';
import { Reward } from './reward.ts';

/**
 * Tokens that entered the context together. `action` chunks were sampled and carry a log-prob per
 * token, the weight version and the model call they came from; `observation` and `prompt` chunks are
 * masked out of every loss.
 */
export const Chunk = z.object({
  role: z.enum(['prompt', 'action', 'observation']),
  ids: z.array(z.number().int()),
  logprobs: z.array(z.number()).optional(),
  version: z.string().optional(),
  modelCallId: z.string().optional(),
});
export type Chunk = z.infer<typeof Chunk>;

/** Append-only tokens: each prompt extends the last exactly, else a new segment starts and says why. */
export const Segment = z.object({
  chunks: z.array(Chunk),
  startedBecause: z.enum(['start', 'context_compacted', 'prompt_rewritten', 'retokenised']),
});
export type Segment = z.infer<typeof Segment>;

/** A rollout as a trainer sees it. Baselines and normalisers are per run, never per segment. */
export const Trajectory = z.object({
  runId: z.string(),
  taskId: z.string(),
  domain: z.string(),
  group: z.string(),
  indexInGroup: z.number().int(),
  segments: z.array(Segment),
  reward: Reward,
  truncated: z.boolean(),
});
export type Trajectory = z.infer<typeof Trajectory>;

/**
 * Joins one sampling call to a segment list. `promptIds` must extend the last segment exactly: the
 * surplus becomes an observation; otherwise a new segment starts with the whole prompt.
 */
export function appendCall(
  segments: Segment[],
  call: {
    promptIds: readonly number[];
    ids: number[];
    logprobs: number[];
    version: string;
    modelCallId: string;
  },
  reasonOnMismatch: Segment['startedBecause'] = 'prompt_rewritten',
): void {
  const action: Chunk = {
    role: 'action',
    ids: call.ids,
    logprobs: call.logprobs,
    version: call.version,
    modelCallId: call.modelCallId,
  };
  const last = segments.at(-1);
  const known = last ? last.chunks.flatMap((chunk) => chunk.ids) : [];
  const extendsLast =
    last !== undefined &&
    known.length <= call.promptIds.length &&
    known.every((id, i) => id === call.promptIds[i]);
  if (extendsLast) {
    const surplus = call.promptIds.slice(known.length);
    if (surplus.length > 0) last.chunks.push({ role: 'observation', ids: surplus });
    last.chunks.push(action);
    return;
  }
  segments.push({
    chunks: [{ role: 'prompt', ids: call.promptIds.slice() }, action],
    startedBecause: segments.length === 0 ? 'start' : reasonOnMismatch,
  });
}
