import { z } from 'zod';
import { Message } from './message.ts';

/** Tokens a call used; nulls where a vendor does not say. */
export const Usage = z.object({
  inputTokens: z.number().int().nonnegative().nullable(),
  outputTokens: z.number().int().nonnegative().nullable(),
  cachedInputTokens: z.number().int().nonnegative().nullable().optional(),
});
export type Usage = z.infer<typeof Usage>;

/** How a token was drawn: what a trainer must know to use its log-prob. */
export const SamplingParams = z.object({
  temperature: z.number().nonnegative(),
  topK: z.number().int().nonnegative().optional(),
  topP: z.number().positive().max(1).optional(),
  seed: z.number().int().optional(),
});
export type SamplingParams = z.infer<typeof SamplingParams>;

/**
 * Exact tokens of one sampling call. `ids[i]` was drawn with natural-log probability `logprobs[i]`
 * after `promptIds` and `ids[..i]`. `logprobKind` says whether temperature and truncation are in the
 * figure (`processed`) or not (`raw`). A version span covers ids from `start` to the next span.
 */
export const CompletionTokens = z.object({
  promptIds: z.array(z.number().int()),
  ids: z.array(z.number().int()),
  logprobs: z.array(z.number()),
  logprobKind: z.enum(['raw', 'processed']),
  sampling: SamplingParams,
  versionSpans: z.array(z.object({ start: z.number().int(), version: z.string() })),
  tokenizerHash: z.string(),
  rendererHash: z.string(),
});
export type CompletionTokens = z.infer<typeof CompletionTokens>;

/**
 * - `exact`: the ids are those that were sampled. RL accepts only this.
 * - `retokenised`: ids made again from text; enough for supervised training and DPO.
 * - `none`: hosted by a foreign vendor; text only.
 */
export const Provenance = z.enum(['exact', 'retokenised', 'none']);
export type Provenance = z.infer<typeof Provenance>;

export const FinishReason = z.enum(['stop', 'tool_calls', 'length', 'content_filter', 'other']);
export type FinishReason = z.infer<typeof FinishReason>;

/** The answer of a model call. */
export const Completion = z.object({
  message: Message,
  finishReason: FinishReason,
  usage: Usage,
  tokens: CompletionTokens.optional(),
  provenance: Provenance,
});
export type Completion = z.infer<typeof Completion>;

/** Token arrays as bytes: a length-prefixed JSON head, then int32 ids and float32 log-probs, little-endian. */
export function encodeTokens(tokens: CompletionTokens): Uint8Array {
  const { promptIds, ids, logprobs, ...rest } = tokens;
  const head = new TextEncoder().encode(
    JSON.stringify({ ...rest, counts: [promptIds.length, ids.length, logprobs.length] }),
  );
  const bytes = new Uint8Array(
    4 + head.length + 4 * (promptIds.length + ids.length + logprobs.length),
  );
  const view = new DataView(bytes.buffer);
  view.setUint32(0, head.length, true);
  bytes.set(head, 4);
  let at = 4 + head.length;
  for (const id of [...promptIds, ...ids]) {
    view.setInt32(at, id, true);
    at += 4;
  }
  for (const logprob of logprobs) {
    view.setFloat32(at, logprob, true);
    at += 4;
  }
  return bytes;
}

/** Inverse of `encodeTokens`. Throws `RangeError` or a zod error on bytes that it did not write. */
export function decodeTokens(bytes: Uint8Array): CompletionTokens {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const headLength = view.getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headLength))) as {
    counts: [number, number, number];
  };
  const { counts, ...rest } = head;
  let at = 4 + headLength;
  const read = (count: number, get: (offset: number) => number): number[] => {
    const out: number[] = [];
    for (let i = 0; i < count; i++, at += 4) out.push(get(at));
    return out;
  };
  const int32 = (offset: number) => view.getInt32(offset, true);
  return CompletionTokens.parse({
    ...rest,
    promptIds: read(counts[0], int32),
    ids: read(counts[1], int32),
    logprobs: read(counts[2], (offset) => view.getFloat32(offset, true)),
  });
}
