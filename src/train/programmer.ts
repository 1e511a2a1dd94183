import type { SamplingParams } from '../core/index.ts';
import type { RunContext } from '../run/index.ts';

/** The agent of the quickstart: no system message, no tools but the task's. */
export function programmer(maxOutputTokens: number, sampling: SamplingParams): RunContext['agent'] {
  return { name: 'programmer', system: '', tools: [], maxOutputTokens, sampling };
}
