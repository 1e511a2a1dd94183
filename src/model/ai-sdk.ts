import type { LanguageModel } from 'ai';
import {
  type AssistantMessage,
  type Completion,
  type FinishReason,
  LonghaulError,
  type ToolCall,
} from '../core/index.ts';
import type { Model, ModelRequest } from './contract.ts';
import { classifyVendorError, type Endpoint } from './vendor-errors.ts';
import {
  parseToolInput,
  toVendorPrompt,
  toVendorTools,
  type VendorModel,
  withUniqueIds,
} from './vendor-prompt.ts';

type StreamPart =
  Awaited<ReturnType<VendorModel['doStream']>>['stream'] extends ReadableStream<infer Part>
    ? Part
    : never;

/** An answer past this size is not an answer: the endpoint runs away or means harm. */
const MAX_ANSWER_CHARS = 16 * 1024 * 1024;

export interface AiSdkModelOptions extends Partial<Endpoint> {
  /** Longest silence of the endpoint, before the first part and between two. Default 5 minutes. */
  idleTimeoutMs?: number;
  /** Longest time for the whole answer. Default 30 minutes. */
  timeoutMs?: number;
}

/**
 * A model behind an AI SDK provider, streamed, one attempt a call. Providers of the two specifications
 * before the current one are adapted by the SDK. Provenance is `none`: a vendor's tokens are not ours.
 *
 * Arguments that are not JSON and tools that do not exist are passed on for the agent to answer.
 * Failures are attributed here, once: see `classifyVendorError`. An abort by the caller throws
 * `Interrupted`; silence past a limit is `ModelUnreachable`.
 */
export function aiSdkModel(
  model: Exclude<LanguageModel, string>,
  options: AiSdkModelOptions = {},
): Model {
  const ref = options.ref ?? `${model.provider}/${model.modelId}`;
  const endpoint: Endpoint = {
    ...options,
    ref,
    baseUrl: options.baseUrl ?? null,
    keyNames: options.keyNames ?? [],
    secrets: options.secrets ?? [],
  };
  const idleTimeoutMs = options.idleTimeoutMs ?? 300_000;
  const timeoutMs = options.timeoutMs ?? 1_800_000;
  let upgraded: VendorModel | undefined;

  return {
    ref,
    async complete(request) {
      const limits = new CallLimits(request.signal, ref, idleTimeoutMs, timeoutMs);
      try {
        upgraded ??= await currentSpecification(model);
        const { stream } = await limits.race(
          upgraded.doStream(callOptions(request, limits.signal)),
        );
        return await readAnswer(stream, request, limits, ref);
      } catch (thrown) {
        // An abort surfaces in many shapes; the limits know which of them it was.
        throw limits.reason ?? (await classifyVendorError(thrown, endpoint));
      } finally {
        limits.end();
      }
    },
  };
}

async function currentSpecification(model: Exclude<LanguageModel, string>): Promise<VendorModel> {
  if (model.specificationVersion === 'v4') return model;
  const { wrapLanguageModel } = await import('ai');
  return wrapLanguageModel({ model, middleware: [] });
}

function callOptions(
  request: ModelRequest,
  abortSignal: AbortSignal,
): Parameters<VendorModel['doStream']>[0] {
  const { temperature, topP, topK, seed } = request.sampling;
  return {
    prompt: toVendorPrompt(request.messages),
    maxOutputTokens: request.maxOutputTokens,
    temperature,
    abortSignal,
    includeRawChunks: true,
    ...(topP === undefined ? {} : { topP }),
    // OpenAI-compatible servers take top_k in the body, though the wire format has no such field.
    ...(topK === undefined ? {} : { topK, providerOptions: { openaiCompatible: { top_k: topK } } }),
    ...(seed === undefined ? {} : { seed }),
    ...(request.tools.length === 0
      ? {}
      : { tools: toVendorTools(request.tools), toolChoice: { type: 'auto' } }),
  };
}

async function readAnswer(
  stream: ReadableStream<StreamPart>,
  request: ModelRequest,
  limits: CallLimits,
  ref: string,
): Promise<Completion> {
  const reader = stream.getReader();
  let content = '';
  let reasoning = '';
  let size = 0;
  const calls: ToolCall[] = [];
  let wireIds: Set<string> | null = null;
  let finish: Extract<StreamPart, { type: 'finish' }> | undefined;
  const grow = (text: string) => {
    size += text.length;
    if (size > MAX_ANSWER_CHARS) {
      throw new LonghaulError(
        'ModelMalformed',
        `The answer of ${ref} passed ${MAX_ANSWER_CHARS} characters and was cut off`,
      );
    }
  };
  try {
    while (true) {
      const { done, value: part } = await limits.race(reader.read());
      if (done) break;
      limits.touch();
      if (part.type === 'raw') {
        const ids = chatCallIds(part.rawValue);
        if (ids !== null) wireIds = new Set([...(wireIds ?? []), ...ids]);
      } else if (part.type === 'text-delta') {
        grow(part.delta);
        content += part.delta;
        if (part.delta !== '') request.onText?.(part.delta);
      } else if (part.type === 'reasoning-delta') {
        grow(part.delta);
        reasoning += part.delta;
      } else if (part.type === 'tool-input-delta') {
        grow(part.delta);
      } else if (part.type === 'tool-call') {
        if (part.providerExecuted === true) continue;
        calls.push({
          // An id the SDK made up is random: empty here, so that a stable one takes its place.
          callId: wireIds?.has(part.toolCallId) === false ? '' : part.toolCallId,
          tool: part.toolName,
          input: parseToolInput(part.input),
          ...(part.providerMetadata === undefined ? {} : { vendor: part.providerMetadata }),
        });
      } else if (part.type === 'error') {
        throw part.error;
      } else if (part.type === 'finish') {
        finish = part;
      }
    }
  } finally {
    // Frees the connection when the stream was not read to its end; its own failure says nothing new.
    reader.cancel().catch(() => {});
  }
  if (finish === undefined || finish.finishReason.unified === 'error') {
    throw new LonghaulError('ModelMalformed', `The answer of ${ref} ended before it was finished`);
  }
  const toolCalls = withUniqueIds(calls, request.messages);
  const message: AssistantMessage = {
    role: 'assistant',
    content,
    ...(reasoning === '' ? {} : { reasoning }),
    ...(toolCalls.length === 0 ? {} : { toolCalls }),
  };
  const { inputTokens, outputTokens } = finish.usage;
  return {
    message,
    finishReason: finishReason(finish.finishReason.unified, toolCalls.length > 0),
    usage: {
      inputTokens: inputTokens.total ?? null,
      outputTokens: outputTokens.total ?? null,
      cachedInputTokens: inputTokens.cacheRead ?? null,
    },
    provenance: 'none',
  };
}

/** Ids of the tool calls in a chat-completions chunk; null where it has none or is another format. */
function chatCallIds(chunk: unknown): string[] | null {
  const { choices } = (chunk ?? {}) as { choices?: { delta?: { tool_calls?: unknown } }[] };
  const calls = Array.isArray(choices) ? choices[0]?.delta?.tool_calls : undefined;
  if (!Array.isArray(calls) || calls.length === 0) return null;
  return calls.flatMap((call: { id?: unknown } | null) =>
    typeof call?.id === 'string' ? [call.id] : [],
  );
}

/** Some servers say `stop` when they call tools; a cut or filtered answer stays one. */
function finishReason(unified: string, hasCalls: boolean): FinishReason {
  switch (unified) {
    case 'length':
      return 'length';
    case 'content-filter':
      return 'content_filter';
    case 'stop':
      return hasCalls ? 'tool_calls' : 'stop';
    default:
      return hasCalls ? 'tool_calls' : 'other';
  }
}

/** Ends a call on the caller's abort, on silence and on length, even if the provider ignores its signal. */
class CallLimits {
  readonly #controller = new AbortController();
  readonly #aborted: Promise<never>;
  readonly #caller: AbortSignal | undefined;
  readonly #onAbort: () => void;
  readonly #overall: NodeJS.Timeout;
  readonly #idle: NodeJS.Timeout;
  /** Why the call was ended from here; null while it was not. */
  reason: LonghaulError | null = null;

  constructor(
    caller: AbortSignal | undefined,
    ref: string,
    idleTimeoutMs: number,
    timeoutMs: number,
  ) {
    let reject: (reason: LonghaulError) => void = () => {};
    this.#aborted = new Promise<never>((_, fail) => {
      reject = fail;
    });
    this.#aborted.catch(() => {});
    const stop = (reason: LonghaulError) => {
      if (this.reason !== null) return;
      this.reason = reason;
      this.#controller.abort(reason);
      reject(reason);
    };
    this.#caller = caller;
    this.#onAbort = () => stop(new LonghaulError('Interrupted', `The call of ${ref} was aborted`));
    this.#overall = setTimeout(
      () => stop(new LonghaulError('ModelUnreachable', `${ref} took over ${timeoutMs / 1000} s`)),
      timeoutMs,
    );
    this.#idle = setTimeout(
      () =>
        stop(
          new LonghaulError('ModelUnreachable', `${ref} was silent for ${idleTimeoutMs / 1000} s`),
        ),
      idleTimeoutMs,
    );
    if (caller?.aborted === true) this.#onAbort();
    else caller?.addEventListener('abort', this.#onAbort, { once: true });
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  race<T>(work: PromiseLike<T>): Promise<T> {
    return Promise.race([work, this.#aborted]);
  }

  /** Something came: the silence starts anew. */
  touch(): void {
    this.#idle.refresh();
  }

  end(): void {
    clearTimeout(this.#overall);
    clearTimeout(this.#idle);
    this.#caller?.removeEventListener('abort', this.#onAbort);
  }
}
