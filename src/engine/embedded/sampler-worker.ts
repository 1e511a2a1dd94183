import type { SampleRequest } from '../contract.ts';
import { loadWeights } from './checkpoint.ts';
import { Generation } from './generation.ts';
import type { SessionOptions } from './graph/session.ts';
import type { WeightSet } from './loaded-model.ts';
import { serve } from './rpc.ts';

/** The thread of one sampler. Calls overlap: their rows share decode steps. */

/** Weights in shared memory, or a checkpoint folder; `version` is what its tokens will carry. */
export type SamplerSource = WeightSet | { checkpoint: string; version?: string };

let generation: Generation | null = null;
const cancels = new Map<number, () => void>();

function current(): Generation {
  if (!generation) throw new Error('the sampler was not started');
  return generation;
}

async function fetchWeights(source: SamplerSource): Promise<WeightSet> {
  if ('weights' in source) return { ...source, weights: Float32Array.from(source.weights) };
  const { config, weights, step } = await loadWeights(source.checkpoint);
  return { config, weights, version: source.version ?? `checkpoint-${step}` };
}

serve({
  start: async ({ from, options }: { from: SamplerSource; options: SessionOptions }) => {
    generation = await Generation.create(await fetchWeights(from), options);
    return generation.config;
  },
  sample: async (requests: readonly SampleRequest[], id: number) => {
    const { done, cancel } = current().sample(requests);
    cancels.set(id, cancel);
    try {
      return await done;
    } finally {
      cancels.delete(id);
    }
  },
  cancel: (id: number) => cancels.get(id)?.(),
  logprobs: (sequences: readonly (readonly number[])[]) => current().logprobs(sequences),
  load: async (source: SamplerSource) => {
    const weights = await fetchWeights(source);
    await current().load(weights);
    return weights.config;
  },
  close: () => generation?.dispose(),
});
