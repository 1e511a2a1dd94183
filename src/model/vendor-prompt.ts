import type { LanguageModel } from 'ai';
import { z } from 'zod';
import type { Message, ToolCall } from '../core/index.ts';
import type { ModelRequest } from './contract.ts';

/** The provider interface of AI SDK 7, by way of its public union, so that it needs no further package. */
export type VendorModel = Extract<LanguageModel, { specificationVersion: 'v4' }>;
type CallOptions = Parameters<VendorModel['doStream']>[0];
type Prompt = CallOptions['prompt'];
type AssistantContent = Extract<Prompt[number], { role: 'assistant' }>['content'];
type VendorTools = NonNullable<CallOptions['tools']>;

/**
 * Core messages as a provider takes them. Results of one step share a message, as several vendors
 * demand. Arguments must be an object on the wire: what the model wrote instead (text that is no JSON,
 * an array) is sent back inside one, under `invalid_arguments`.
 */
export function toVendorPrompt(messages: readonly Message[]): Prompt {
  const prompt: Prompt = [];
  for (const message of messages) {
    switch (message.role) {
      case 'system':
        prompt.push({ role: 'system', content: message.content });
        break;
      case 'user':
        prompt.push({ role: 'user', content: [{ type: 'text', text: message.content }] });
        break;
      case 'assistant': {
        const content: AssistantContent = [];
        if (message.reasoning) content.push({ type: 'reasoning', text: message.reasoning });
        if (message.content !== '') content.push({ type: 'text', text: message.content });
        for (const call of message.toolCalls ?? []) {
          content.push({
            type: 'tool-call',
            toolCallId: call.callId,
            toolName: call.tool,
            input: sendableInput(call.input),
            ...(call.vendor === undefined
              ? {}
              : { providerOptions: call.vendor as NonNullable<CallOptions['providerOptions']> }),
          });
        }
        prompt.push({ role: 'assistant', content });
        break;
      }
      case 'tool': {
        const part = {
          type: 'tool-result' as const,
          toolCallId: message.callId,
          toolName: message.tool,
          output: {
            type: message.isError === true ? ('error-text' as const) : ('text' as const),
            value: message.content,
          },
        };
        const last = prompt.at(-1);
        if (last?.role === 'tool') last.content.push(part);
        else prompt.push({ role: 'tool', content: [part] });
        break;
      }
    }
  }
  return prompt;
}

export function sendableInput(input: unknown): Record<string, unknown> {
  return isRecord(input) ? input : { invalid_arguments: input ?? null };
}

/** Tools by schema only: a provider never runs one. */
export function toVendorTools(tools: ModelRequest['tools']): VendorTools {
  return tools.map((tool) => ({
    type: 'function',
    name: tool.name,
    description: tool.description,
    inputSchema: toolJsonSchema(tool.input) as Extract<
      VendorTools[number],
      { type: 'function' }
    >['inputSchema'],
  }));
}

/** JSON Schema (draft 7, the dialect every vendor reads) of what a tool takes. */
export function toolJsonSchema(input: z.ZodType): Record<string, unknown> {
  const { $schema: _dialect, ...schema } = z.toJSONSchema(input, {
    target: 'draft-7',
    io: 'input',
    unrepresentable: 'any',
  });
  return schema;
}

/**
 * Arguments as a model wrote them. Empty text means none were given. Text that is not JSON is kept as
 * text: the agent answers it with an observation. Arguments that were encoded twice, a habit of some
 * servers, are decoded.
 */
export function parseToolInput(text: string): unknown {
  if (text.trim() === '') return {};
  const value = parseJson(text);
  if (value === undefined) return text;
  if (typeof value !== 'string') return value;
  const inner = parseJson(value);
  return isRecord(inner) ? inner : value;
}

/**
 * Ids that are unique in the whole conversation, since the effect ledger goes by them. A missing id,
 * or one used before (some servers count from `call_0` in every answer), is replaced by one made of
 * the turn and the position, so the same answer gets the same ids again. Nine letters and digits: the
 * narrowest format vendors accept.
 */
export function withUniqueIds(
  calls: readonly ToolCall[],
  messages: readonly Message[],
): ToolCall[] {
  const used = new Set<string>();
  let turn = 0;
  for (const message of messages) {
    if (message.role !== 'assistant') continue;
    turn += 1;
    for (const call of message.toolCalls ?? []) used.add(call.callId);
  }
  return calls.map((call, position) => {
    let callId = call.callId;
    for (let n = position; callId === '' || used.has(callId); n += calls.length) {
      callId = `call${turn.toString(36).padStart(3, '0')}${n.toString(36).padStart(2, '0')}`;
    }
    used.add(callId);
    return { ...call, callId };
  });
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
