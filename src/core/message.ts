import { z } from 'zod';

/** One call of a tool that a model asked for. `input` is what it wrote, parsed; text if it is not JSON. */
export const ToolCall = z.object({
  callId: z.string().min(1),
  tool: z.string(),
  input: z.unknown(),
  /** What a vendor wants back with the call, unread by us: a signature of its hidden reasoning. */
  vendor: z.record(z.string(), z.unknown()).optional(),
});
export type ToolCall = z.infer<typeof ToolCall>;

/** Messages between agent and model. Tool output is hostile data whatever its role. */
export const Message = z.discriminatedUnion('role', [
  z.object({ role: z.literal('system'), content: z.string() }),
  z.object({ role: z.literal('user'), content: z.string() }),
  z.object({
    role: z.literal('assistant'),
    content: z.string(),
    reasoning: z.string().optional(),
    toolCalls: z.array(ToolCall).optional(),
  }),
  z.object({
    role: z.literal('tool'),
    callId: z.string(),
    tool: z.string(),
    content: z.string(),
    isError: z.boolean().optional(),
  }),
]);
export type Message = z.infer<typeof Message>;
export type AssistantMessage = Extract<Message, { role: 'assistant' }>;
