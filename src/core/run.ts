import { z } from 'zod';

/** ULID: 26 characters of Crockford base 32, sortable by time. */
export const RunId = z
  .string()
  .regex(/^[0-9A-HJKMNP-TV-Z]{26}$/, 'a run id is a ULID (26 characters)');
export type RunId = z.infer<typeof RunId>;

export const RunKind = z.enum(['hosted', 'rollout', 'eval']);
export type RunKind = z.infer<typeof RunKind>;

export const RunStatus = z.enum([
  'queued',
  'running',
  'waiting',
  'paused',
  'succeeded',
  'failed',
  'cancelled',
]);
export type RunStatus = z.infer<typeof RunStatus>;

export function isFinal(status: RunStatus): boolean {
  return status === 'succeeded' || status === 'failed' || status === 'cancelled';
}

/** Limits of a run. Checked before each call, not after. Absent means no limit. */
export const Budget = z.object({
  modelCalls: z.number().int().positive().optional(),
  toolCalls: z.number().int().positive().optional(),
  outputTokens: z.number().int().positive().optional(),
  wallMs: z.number().int().positive().optional(),
});
export type Budget = z.infer<typeof Budget>;

/** What a run is, fixed at its creation. `task`, `agent` and `model` are references that must resolve again on resume. */
export const RunSpec = z.object({
  kind: RunKind,
  task: z.object({ name: z.string(), ref: z.string(), hash: z.string().optional() }),
  agent: z.string(),
  model: z.object({ ref: z.string(), baseUrl: z.string().optional() }),
  seed: z.number().int().nonnegative(),
  budget: Budget,
  parent: z.object({ runId: RunId, seq: z.number().int().nonnegative() }).optional(),
});
export type RunSpec = z.infer<typeof RunSpec>;
