import type { AssistantMessage, Message } from '../../core/index.ts';

/**
 * Turns messages into a model's tokens and sampled tokens into a message. For RL it must be append-only
 * exact: rendering a conversation that ends in the parsed message starts with the very ids that were
 * sampled.
 */
export interface Renderer {
  readonly vocabSize: number;
  /** Names the text ⇄ id table. */
  readonly tokenizerHash: string;
  /** Names the table together with the template around it. */
  readonly rendererHash: string;
  readonly stopTokens: readonly number[];
  prompt(messages: readonly Message[]): number[];
  /** `ended`: the ids close with a stop token, which is among them. */
  parse(ids: readonly number[], ended: boolean): AssistantMessage;
}
