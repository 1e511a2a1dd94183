import { type Completion, LonghaulError, Rng } from '../core/index.ts';
import type { SampleRequest, SampleResult, Sampler } from '../engine/contract.ts';
import type { Model, ModelRequest } from './contract.ts';
import type { Channel, Lane } from './lockstep.ts';
import type { Renderer } from './render/renderer.ts';

export interface EngineModelOptions {
  /** As `PROVIDER/MODEL`; what logs show. */
  ref: string;
  renderer: Renderer;
  /** Longest prompt and answer together, as the model's configuration has it. */
  maxLength: number;
  /** Samples one request: a sampler's own, or a lane of a lockstep batch. */
  sample: (request: SampleRequest, signal: AbortSignal | undefined) => Promise<SampleResult>;
}

/**
 * A model over a token-level sampler. Its completions carry the exact ids, log-probs and weight version
 * of the sampling call, so runs by it can be trained on. With a seed in the request's sampling, each
 * call of a conversation draws from a stream of its own.
 */
export function engineModel(options: EngineModelOptions): Model {
  const { ref, renderer, maxLength, sample } = options;
  return {
    ref,
    async complete(request: ModelRequest): Promise<Completion> {
      const prompt = renderer.prompt(request.messages);
      const maxTokens = Math.min(request.maxOutputTokens, maxLength - prompt.length);
      if (maxTokens < 1)
        throw new LonghaulError(
          'ModelRefused',
          `the conversation has ${prompt.length} tokens and ${ref} takes ${maxLength}`,
          { next: 'Shorten the conversation, or use a model with a longer context.' },
        );
      const { seed, ...sampling } = request.sampling;
      const result = await sample(
        {
          prompt,
          maxTokens,
          stopTokens: renderer.stopTokens,
          sampling:
            seed === undefined
              ? sampling
              : { ...sampling, seed: Rng.of(seed, 'call', request.messages.length).uint32() },
        },
        request.signal,
      );
      const ended = result.stopReason === 'stop';
      const message = renderer.parse(result.ids, ended);
      if (message.content !== '') request.onText?.(message.content);
      return {
        message,
        finishReason: ended ? (message.toolCalls ? 'tool_calls' : 'stop') : 'length',
        usage: { inputTokens: prompt.length, outputTokens: result.ids.length },
        provenance: 'exact',
        tokens: {
          promptIds: prompt,
          ids: result.ids,
          logprobs: result.logprobs,
          logprobKind: result.logprobKind,
          sampling: request.sampling,
          versionSpans: [{ start: 0, version: result.version }],
          tokenizerHash: renderer.tokenizerHash,
          rendererHash: renderer.rendererHash,
        },
      };
    },
  };
}

/** Samples one request by itself, as for a hosted run. */
export function sampleAlone(sampler: Pick<Sampler, 'sample'>): EngineModelOptions['sample'] {
  return async (request, signal) => {
    const [result] = await sampler.sample([request], signal);
    if (result === undefined) throw new LonghaulError('EngineFailed', 'the sampler gave no result');
    return result;
  };
}

/** Samples in the batch of a lockstep: `channel` dispatches to the sampler. */
export function sampleInLane(
  lane: Lane,
  channel: Channel<SampleRequest, SampleResult>,
): EngineModelOptions['sample'] {
  return (request) => lane.call(channel, request);
}
