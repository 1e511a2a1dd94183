import { z } from 'zod';

/**
 * One answer of the scripted server. Fields combine: `text` with `toolCalls`, any of them with
 * `delayMs` or `dropAfterChunks`.
 */
export const Reply = z.strictObject({
  text: z.string().optional(),
  reasoning: z.string().optional(),
  toolCalls: z
    .array(
      z.strictObject({
        /** null leaves the id out, as some servers do. Default `call-TURN-POSITION`. */
        id: z.string().nullable().optional(),
        name: z.string(),
        /** Text is sent as it is, so that it may be broken JSON. */
        arguments: z.union([z.string(), z.record(z.string(), z.unknown())]),
        /** Sent as `extra_content.google.thought_signature`, which the vendor wants back. */
        signature: z.string().optional(),
      }),
    )
    .optional(),
  finishReason: z.string().optional(),
  /** null leaves the usage chunk out. */
  usage: z
    .strictObject({ prompt: z.number(), completion: z.number(), cached: z.number().optional() })
    .nullable()
    .optional(),
  /** An HTTP error instead of an answer. A body that is text is sent as it is. */
  error: z
    .strictObject({
      status: z.number().int(),
      body: z.unknown().optional(),
      retryAfter: z.string().optional(),
    })
    .optional(),
  /** Destroys the connection after so many chunks of the stream (0: right after the headers). */
  dropAfterChunks: z.number().int().nonnegative().optional(),
  /** Headers and the chunks before it are sent, then nothing more, with the connection open. */
  hangAfterChunks: z.number().int().nonnegative().optional(),
  /** Milliseconds between two chunks. */
  delayMs: z.number().nonnegative().optional(),
  /** Bytes of the response body, sent instead of a well-formed stream. */
  raw: z.array(z.string()).optional(),
});
export type Reply = z.infer<typeof Reply>;

/**
 * A fixed conversation. Turn i answers a request that holds i assistant messages, whichever process
 * asks and whenever the server was started. A list of replies is played by the number of requests
 * already made for that turn, the last one repeated.
 */
export const Scenario = z.strictObject({
  model: z.string().default('scripted'),
  /** When set, requests need `Authorization: Bearer KEY`. */
  apiKey: z.string().optional(),
  turns: z.array(z.union([Reply, z.array(Reply).min(1)])),
});
export type Scenario = z.input<typeof Scenario>;
