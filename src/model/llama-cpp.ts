import { open } from 'node:fs/promises';
import { availableParallelism } from 'node:os';
import { resolve } from 'node:path';
import {
  type AssistantMessage,
  type Completion,
  LonghaulError,
  type Message,
  type ToolCall,
} from '../core/index.ts';
import type { Model, ModelRequest } from './contract.ts';
import { importOptional } from './optional-package.ts';
import { sendableInput, toolJsonSchema, withUniqueIds } from './vendor-prompt.ts';

const PACKAGE = 'node-llama-cpp';
const INSTALL = 'node-llama-cpp@3.21.1';
/** Less room than this for an answer counts as a conversation that is too long. */
const MIN_ANSWER_TOKENS = 16;
/** Tensors and metadata a GGUF header may announce; real ones have some thousands at most. */
const MAX_GGUF_ENTRIES = 1_000_000n;

/** The part of node-llama-cpp that is used here: the package is optional, so are its types. */
interface LlamaPackage {
  getLlama(options: object): Promise<Llama>;
  LlamaChat: new (options: { contextSequence: LlamaSequence }) => LlamaChat;
}
interface Llama {
  loadModel(options: { modelPath: string }): Promise<LlamaModel>;
  createGrammarForJsonSchema(schema: object): Promise<object>;
  dispose(): Promise<void>;
}
interface LlamaModel {
  readonly tokenizer: object;
  createContext(options: object): Promise<LlamaContext>;
}
interface LlamaContext {
  readonly contextSize: number;
  getSequence(): LlamaSequence;
}
interface LlamaSequence {
  readonly tokenMeter: { getState(): { usedInputTokens: number; usedOutputTokens: number } };
}
type LlamaHistory = (
  | { type: 'system' | 'user'; text: string }
  | { type: 'model'; response: string[] }
)[];
interface LlamaChat {
  readonly chatWrapper: {
    generateContextState(options: { chatHistory: LlamaHistory }): {
      contextText: { tokenize(tokenizer: object): readonly number[] };
    };
  };
  generateResponse(
    history: LlamaHistory,
    options: object,
  ): Promise<{ response: string; metadata: { stopReason: string } }>;
}

interface Loaded {
  llama: Llama;
  model: LlamaModel;
  context: LlamaContext;
  sequence: LlamaSequence;
  chat: LlamaChat;
}

export interface LlamaCppOptions {
  /** A GGUF file. It is parsed by native code in this process: load only files you trust. */
  path: string;
  ref?: string;
  /** Folders whose `node_modules` may hold the package. */
  folders?: readonly string[];
  /** Tokens of conversation and answer together. Default: what the model was trained with, at most 8192. */
  contextTokens?: number;
  /**
   * Default: one fewer than the processor has. llama.cpp's threads wait for each other by spinning, so a
   * core that something else holds stalls them all.
   */
  threads?: number;
}

/**
 * A local GGUF model through node-llama-cpp, loaded at the first call. With tools, the answer is held to
 * JSON by a grammar: a call that matches its tool's schema, or a final answer. Works with any chat model,
 * also those never taught to call tools. Calls take turns; the text of an answer that may be a tool call
 * goes to `onText` when it is whole.
 *
 * `ConfigInvalid` when the package is missing or the file is no GGUF, `NotFound` for a missing file,
 * `EngineFailed` when it does not load, `ContextTooLong`, `Interrupted` on abort.
 */
export function llamaCppModel(options: LlamaCppOptions): Model {
  const path = resolve(options.path);
  const ref = options.ref ?? `llama-cpp/${options.path}`;
  let loading: Promise<Loaded> | null = null;
  let turn: Promise<unknown> = Promise.resolve();

  return {
    ref,
    complete(request) {
      const mine = turn.then(async () => {
        throwIfAborted(request.signal, ref);
        loading ??= load(path, options).catch((error: unknown) => {
          // A failed load is tried again by the next call: the file may have come meanwhile.
          loading = null;
          throw error;
        });
        return await complete(await loading, request, ref);
      });
      turn = mine.catch(() => {});
      return mine;
    },
    async close() {
      await turn;
      const loaded = await loading;
      loading = null;
      await loaded?.llama.dispose();
    },
  };
}

async function load(path: string, options: LlamaCppOptions): Promise<Loaded> {
  const found = (await importOptional(
    PACKAGE,
    INSTALL,
    options.folders ?? [],
  )) as unknown as LlamaPackage;
  await checkHeader(path);
  const threads = options.threads ?? Math.max(1, availableParallelism() - 1);
  try {
    const llama = await found.getLlama({
      // Only binaries that came with the package: nothing is fetched or compiled behind the user's back.
      build: 'never',
      skipDownload: true,
      progressLogs: false,
      logLevel: 'error',
      maxThreads: threads,
    });
    const model = await llama.loadModel({ modelPath: path });
    const context = await model.createContext({
      contextSize: { max: options.contextTokens ?? 8192 },
      sequences: 1,
      threads,
    });
    const sequence = context.getSequence();
    const chat = new found.LlamaChat({ contextSequence: sequence });
    return { llama, model, context, sequence, chat };
  } catch (error) {
    throw new LonghaulError(
      'EngineFailed',
      `${path} does not load: ${error instanceof Error ? error.message : String(error)}`,
      {
        next: 'Check that the file is a whole GGUF of a chat model and that memory suffices.',
        cause: error,
      },
    );
  }
}

/** The library reads on for minutes in a file that is something else: refused here by its first bytes. */
async function checkHeader(path: string): Promise<void> {
  const header = Buffer.alloc(24);
  try {
    const file = await open(path);
    await file.read(header, 0, header.length, 0).finally(() => file.close());
  } catch (error) {
    throw new LonghaulError('NotFound', `No readable model file at ${path}`, {
      next: 'Name a GGUF file that exists: llama-cpp/PATH.gguf.',
      cause: error,
    });
  }
  const known =
    header.toString('latin1', 0, 4) === 'GGUF' &&
    [2, 3].includes(header.readUInt32LE(4)) &&
    header.readBigUInt64LE(8) < MAX_GGUF_ENTRIES &&
    header.readBigUInt64LE(16) < MAX_GGUF_ENTRIES;
  if (!known) {
    throw new LonghaulError('ConfigInvalid', `${path} is not a GGUF file of version 2 or 3`, {
      next: 'Name a chat model in GGUF format: llama-cpp/PATH.gguf.',
    });
  }
}

async function complete(loaded: Loaded, request: ModelRequest, ref: string): Promise<Completion> {
  const { chat, context, model, sequence, llama } = loaded;
  const history = toHistory(request.messages, request.tools);
  const promptTokens = chat.chatWrapper
    .generateContextState({ chatHistory: history })
    .contextText.tokenize(model.tokenizer).length;
  // The library would silently drop old messages to make room: refused here instead.
  const room = context.contextSize - promptTokens - 1;
  if (room < Math.min(MIN_ANSWER_TOKENS, request.maxOutputTokens)) {
    throw new LonghaulError(
      'ContextTooLong',
      `${ref}: the conversation has ${promptTokens} tokens, the context ${context.contextSize}`,
    );
  }
  const withTools = request.tools.length > 0;
  const { temperature, topP, topK, seed } = request.sampling;
  const before = sequence.tokenMeter.getState();
  let response: string;
  let stopReason: string;
  try {
    const result = await chat.generateResponse(history, {
      maxTokens: Math.min(request.maxOutputTokens, room),
      temperature,
      ...(topP === undefined ? {} : { topP }),
      ...(topK === undefined ? {} : { topK }),
      ...(seed === undefined ? {} : { seed }),
      ...(request.signal === undefined ? {} : { signal: request.signal }),
      ...(withTools
        ? { grammar: await llama.createGrammarForJsonSchema(answerSchema(request.tools)) }
        : request.onText === undefined
          ? {}
          : { onTextChunk: request.onText }),
    });
    response = result.response;
    stopReason = result.metadata.stopReason;
  } catch (error) {
    throwIfAborted(request.signal, ref);
    throw new LonghaulError(
      'EngineFailed',
      `${ref}: ${error instanceof Error ? error.message : String(error)}`,
      { cause: error },
    );
  }
  const after = sequence.tokenMeter.getState();
  const evaluated = after.usedInputTokens - before.usedInputTokens;
  const answer = withTools ? readAnswer(response) : { content: response, calls: [] };
  if (withTools && answer.content !== '') request.onText?.(answer.content);
  const toolCalls = withUniqueIds(answer.calls, request.messages);
  const message: AssistantMessage = {
    role: 'assistant',
    content: answer.content,
    ...(toolCalls.length === 0 ? {} : { toolCalls }),
  };
  return {
    message,
    finishReason:
      stopReason === 'maxTokens' ? 'length' : toolCalls.length > 0 ? 'tool_calls' : 'stop',
    usage: {
      inputTokens: promptTokens,
      outputTokens: after.usedOutputTokens - before.usedOutputTokens,
      cachedInputTokens: Math.max(0, promptTokens - evaluated),
    },
    provenance: 'none',
  };
}

/** One of: a call of a tool with arguments of its schema, or `{ "answer": TEXT }`. */
function answerSchema(tools: ModelRequest['tools']): object {
  return {
    oneOf: [
      ...tools.map((tool) => ({
        type: 'object',
        properties: { tool: { const: tool.name }, arguments: toolJsonSchema(tool.input) },
      })),
      { type: 'object', properties: { answer: { type: 'string' } } },
    ],
  };
}

/** An answer cut by its limit is no whole JSON: it stays text, and the finish reason says `length`. */
function readAnswer(text: string): { content: string; calls: ToolCall[] } {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return { content: text, calls: [] };
  }
  const { tool, arguments: input, answer } = value as Record<string, unknown>;
  if (typeof tool === 'string') return { content: '', calls: [{ callId: '', tool, input }] };
  return { content: typeof answer === 'string' ? answer : text, calls: [] };
}

/**
 * The conversation for a model without a tool format of its own: tools are told in the system message,
 * calls are shown as the JSON it would have written, results as what the user says next.
 */
function toHistory(messages: readonly Message[], tools: ModelRequest['tools']): LlamaHistory {
  const history: LlamaHistory = [];
  const system = messages
    .filter((message) => message.role === 'system')
    .map((message) => message.content);
  if (tools.length > 0) system.push(describeTools(tools));
  if (system.length > 0) history.push({ type: 'system', text: system.join('\n\n') });
  const say = (text: string) => {
    const last = history.at(-1);
    if (last?.type === 'user') last.text += `\n\n${text}`;
    else history.push({ type: 'user', text });
  };
  for (const message of messages) {
    if (message.role === 'user') say(message.content);
    else if (message.role === 'tool') {
      say(`${message.isError ? 'Error' : 'Result'} of ${message.tool}:\n${message.content}`);
    } else if (message.role === 'assistant') {
      const calls = message.toolCalls ?? [];
      const text =
        calls.length === 0 && tools.length > 0
          ? JSON.stringify({ answer: message.content })
          : [
              message.content,
              ...calls.map(({ tool, input }) =>
                JSON.stringify({ tool, arguments: sendableInput(input) }),
              ),
            ]
              .filter((part) => part !== '')
              .join('\n');
      history.push({ type: 'model', response: [text] });
    }
  }
  history.push({ type: 'model', response: [] });
  return history;
}

function describeTools(tools: ModelRequest['tools']): string {
  const list = tools.map(
    ({ name, description, input }) =>
      `- ${name}: ${description} Arguments: ${JSON.stringify(toolJsonSchema(input))}`,
  );
  return [
    'You can use these tools:',
    ...list,
    'To use one, reply with {"tool": NAME, "arguments": {...}} and nothing else; its result comes next.',
    'When the task is done, reply with {"answer": TEXT}.',
  ].join('\n');
}

function throwIfAborted(signal: AbortSignal | undefined, ref: string): void {
  if (signal?.aborted) throw new LonghaulError('Interrupted', `The call of ${ref} was aborted`);
}
