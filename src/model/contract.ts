import type { Completion, Message, SamplingParams, ToolSpec } from '../core/index.ts';

export interface ModelRequest {
  messages: readonly Message[];
  tools: readonly Pick<ToolSpec, 'name' | 'description' | 'input'>[];
  maxOutputTokens: number;
  sampling: SamplingParams;
  signal?: AbortSignal;
  /** Text as it arrives, for people who watch. Not a record: the completion is. */
  onText?: (text: string) => void;
}

/**
 * A model that is spoken to in messages. `complete` makes one attempt: it does not retry; its errors
 * carry the class by which the executor decides (`ModelUnreachable`, `ModelOverloaded` and
 * `ModelMalformed` are retryable; `ModelUnknown` and `ModelRefused` are not).
 */
export interface Model {
  readonly ref: string;
  complete(request: ModelRequest): Promise<Completion>;
  close?(): Promise<void>;
}
