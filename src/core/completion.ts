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
