import type { SamplingParams, Tool } from '../core/index.ts';

/** An agent: what it is told, what it may do, how it samples. A task's own tools are added per run. */
export interface AgentDefinition {
  name: string;
  /** System message; empty for none. */
  system: string;
  tools: readonly Tool[];
  maxOutputTokens: number;
  sampling: SamplingParams;
}
