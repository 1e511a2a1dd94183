import type { Sampler } from '../contract.ts';

/**
 * Samplers of the same weights as one. The items of a call are split into even runs in their order, so
 * that neighbours, such as the group of one prompt, stay together and share its prefill. With samplers of
 * one thread each, a request gets the same bits whatever the number of replicas.
 */
export function replicated(samplers: readonly [Sampler, ...Sampler[]]): Sampler {
  const [first] = samplers;

  const split = async <I, O>(
    items: readonly I[],
    work: (sampler: Sampler, part: readonly I[]) => Promise<O[]>,
  ): Promise<O[]> => {
    const size = Math.ceil(items.length / samplers.length);
    const parts = await Promise.all(
      samplers.map((sampler, i) => {
        const part = items.slice(i * size, (i + 1) * size);
        return part.length === 0 ? [] : work(sampler, part);
      }),
    );
    return parts.flat();
  };

  return {
    get config() {
      return first.config;
    },
    sample: (requests, signal) => split(requests, (sampler, part) => sampler.sample(part, signal)),
    logprobs: (sequences) => split(sequences, (sampler, part) => sampler.logprobs(part)),
    load: async (ref) => {
      await Promise.all(samplers.map((sampler) => sampler.load(ref)));
    },
    close: async () => {
      await Promise.all(samplers.map((sampler) => sampler.close()));
    },
  };
}
