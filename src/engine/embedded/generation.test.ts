import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { Rng } from '../../core/index.ts';
import type { ModelConfig, SampleRequest } from '../contract.ts';
import { Generation } from './generation.ts';
import { initialise } from './layout.ts';
import { Training } from './training.ts';

const OPTIONS = { threads: 1, spinning: false };

const CONFIG: ModelConfig = {
  vocabSize: 23,
  dim: 32,
  layers: 2,
  heads: 4,
  kvHeads: 2,
  ffnDim: 48,
  maxLength: 96,
  ropeTheta: 10000,
  normEps: 1e-5,
  tiedHead: true,
};

/** Larger than the initial weights, so that log-probs differ clearly between tokens. */
function weightsOf(seed: number, config = CONFIG): Float32Array {
  return initialise(config, seed).map((w) => (w === 1 ? 1 : w * 3));
}

function request(seed: number, change: Partial<SampleRequest> = {}): SampleRequest {
  const rng = Rng.of(seed, 'prompt');
  return {
    prompt: Array.from({ length: rng.int(1, 20) }, () => rng.int(0, 22)),
    maxTokens: rng.int(5, 50),
    stopTokens: [],
    sampling: { temperature: 1, seed },
    ...change,
  };
}

let generation: Generation;
beforeAll(async () => {
  const set = { config: CONFIG, version: 'one', weights: weightsOf(1) };
  generation = await Generation.create(set, OPTIONS);
});
afterAll(() => generation.dispose());

const sample = (requests: SampleRequest[]) => generation.sample(requests).done;

describe('sampling', () => {
  it('log-probs are those of the trainer and of scoring', async () => {
    const requests = Array.from({ length: 24 }, (_, i) => request(i));
    const results = await sample(requests);
    const training = new Training(CONFIG, weightsOf(1), null, OPTIONS);
    const sequences = results.map((result, i) => [...requests[i]!.prompt, ...result.ids]);
    const { logprobs } = await training.forward(
      sequences.map((ids) => ({
        tokens: Int32Array.from(ids.slice(0, -1)),
        targets: Int32Array.from(ids.slice(1)),
      })),
    );
    const scores = await generation.logprobs(sequences);
    let worst = 0;
    for (const [i, result] of results.entries()) {
      expect(result.ids).toHaveLength(requests[i]!.maxTokens);
      const from = requests[i]!.prompt.length;
      expect(scores[i]).toHaveLength(sequences[i]!.length);
      expect(scores[i]![0]).toBe(0);
      for (const [t, logprob] of result.logprobs.entries()) {
        worst = Math.max(worst, Math.abs(logprob - logprobs[i]![from + t - 1]!));
        worst = Math.max(worst, Math.abs(logprob - scores[i]![from + t]!));
      }
    }
    expect(worst).toBeLessThan(2e-5);
    await training.dispose();
  });

  it('a request gets the same bits alone, in a batch, and beside another call', async () => {
    // Larger than a kernel's blocks, so that rounding would show.
    const config = { ...CONFIG, dim: 128, ffnDim: 344 };
    const set = { config, version: 'one', weights: weightsOf(1, config) };
    const wide = await Generation.create(set, OPTIONS);
    const requests = Array.from({ length: 12 }, (_, i) => request(i));
    const together = await wide.sample(requests).done;
    const [late, early] = await Promise.all([
      wide.sample(requests.slice(6)).done,
      wide.sample(requests.slice(0, 6)).done,
    ]);
    expect([...early!, ...late!]).toEqual(together);
    for (const i of [0, 5, 11])
      expect(await wide.sample([requests[i]!]).done).toEqual([together[i]!]);
    await wide.dispose();
  });

  it('more requests than rows are all served, in order', async () => {
    const requests = Array.from({ length: 300 }, (_, i) => request(i, { maxTokens: 1 + (i % 7) }));
    const results = await sample(requests);
    expect(results.map((result) => result.ids.length)).toEqual(requests.map((r) => r.maxTokens));
    const again = await sample(requests.slice(280, 281));
    expect(results[280]!.ids).toEqual(again[0]!.ids);
  });

  it('one prompt with several seeds gives several continuations', async () => {
    const { prompt } = request(3);
    const group = Array.from({ length: 8 }, (_, seed) => request(seed, { prompt, maxTokens: 12 }));
    const results = await sample(group);
    expect(new Set(results.map((result) => result.ids.join())).size).toBe(8);
    const alone = await sample([group[5]!]);
    expect(alone[0]!.ids).toEqual(results[5]!.ids);
  });

  it('stops at a stop token, which is part of the result', async () => {
    const free = (await sample([request(4, { maxTokens: 40 })]))[0]!;
    const stop = free.ids[7]!;
    const first = free.ids.indexOf(stop);
    const stopped = (await sample([request(4, { maxTokens: 40, stopTokens: [22, stop] })]))[0]!;
    const end = Math.min(first, ...[free.ids.indexOf(22)].filter((i) => i >= 0));
    expect(stopped.ids).toEqual(free.ids.slice(0, end + 1));
    expect(stopped.logprobs).toHaveLength(end + 1);
    expect(stopped.stopReason).toBe('stop');
    expect(free.stopReason).toBe('length');
  });

  it('ends at the length of the model', async () => {
    const prompt = Array.from({ length: 90 }, (_, i) => i % 20);
    const result = (await sample([request(1, { prompt, maxTokens: 50 })]))[0]!;
    expect(result.ids).toHaveLength(6);
    expect(result.stopReason).toBe('length');
  });

  it('a lone token has no log-prob', async () => {
    expect(await generation.logprobs([[5], [5, 6]])).toMatchObject([{ length: 1 }, { length: 2 }]);
  });

  it('cancelling ends one call and leaves the others as they are', async () => {
    const others = [request(1), request(2)];
    const expected = await sample(others);
    const doomed = generation.sample([request(3, { prompt: [1], maxTokens: 90 }), request(4)]);
    const kept = sample(others);
    doomed.cancel();
    await expect(doomed.done).rejects.toMatchObject({ code: 'Interrupted' });
    expect((await kept).map((r) => r.ids)).toEqual(expected.map((r) => r.ids));
    doomed.cancel();
  });

  it('requests that do not fit are refused by name', () => {
    const cases: [Partial<SampleRequest>, string][] = [
      [{ prompt: [] }, 'empty prompt'],
      [{ prompt: [1, 23] }, 'id 23 at 1'],
      [{ prompt: [0.5] }, 'id 0.5'],
      [{ prompt: new Array(96).fill(1) }, '96 tokens'],
      [{ maxTokens: 0 }, 'maxTokens'],
      [{ stopTokens: [3, 23] }, 'stop tokens: id 23 at 1'],
      [{ sampling: { temperature: -1 } }, 'temperature'],
      [{ sampling: { temperature: 1, topP: 0 } }, 'topP'],
      [{ sampling: { temperature: 1, topK: 1.5 } }, 'topK'],
    ];
    for (const [change, message] of cases)
      expect(() => generation.sample([request(0), request(1, change)])).toThrow(message);
  });
});

describe('switching weights', () => {
  it('waits for rows in flight; later calls get the new weights and no stale cache', async () => {
    const swapping = await Generation.create(
      { config: CONFIG, version: 'one', weights: weightsOf(1) },
      OPTIONS,
    );
    const requests = [request(1), request(2)];
    const expectedOld = (await sample(requests)).map((r) => r.ids);
    const fresh = await Generation.create(
      { config: CONFIG, version: 'two', weights: weightsOf(2) },
      OPTIONS,
    );
    const expectedNew = (await fresh.sample(requests).done).map((r) => r.ids);
    expect(expectedNew).not.toEqual(expectedOld);

    const before = swapping.sample(requests).done;
    const loaded = swapping.load({ config: CONFIG, version: 'two', weights: weightsOf(2) });
    const after = swapping.sample(requests).done;
    await loaded;
    for (const [results, version, expected] of [
      [await before, 'one', expectedOld],
      [await after, 'two', expectedNew],
    ] as const) {
      expect(results.map((r) => r.version)).toEqual([version, version]);
      expect(results.map((r) => r.ids)).toEqual(expected);
    }
    await swapping.dispose();
    await fresh.dispose();
  });

  it('takes a model of another shape', async () => {
    const config = { ...CONFIG, dim: 16, layers: 1, kvHeads: 4 };
    const first = { config: CONFIG, version: 'a', weights: weightsOf(1) };
    const swapping = await Generation.create(first, OPTIONS);
    const small = { ...config, vocabSize: 20 };
    const loaded = swapping.load({ config: small, version: 'b', weights: weightsOf(2, small) });
    const misfit = swapping.sample([request(1, { prompt: [22] })]).done;
    const fit = swapping.sample([request(1, { prompt: [2] })]).done;
    await expect(misfit).rejects.toMatchObject({ code: 'InputInvalid' });
    expect((await fit)[0]!.version).toBe('b');
    await loaded;
    await swapping.load({ config, version: 'c', weights: weightsOf(2, config) });
    expect(swapping.config).toEqual(config);
    const result = (await swapping.sample([request(1)]).done)[0]!;
    expect(result.version).toBe('c');
    await swapping.dispose();
  });

  it('weights that give no finite logits fail the call, not the sampler', async () => {
    const set = { config: CONFIG, version: 'bad', weights: weightsOf(1).fill(Number.NaN) };
    const broken = await Generation.create(set, OPTIONS);
    await expect(broken.sample([request(1)]).done).rejects.toMatchObject({ code: 'EngineFailed' });
    await broken.load({ config: CONFIG, version: 'good', weights: weightsOf(1) });
    const expected = await sample([request(1)]);
    expect((await broken.sample([request(1)]).done)[0]!.ids).toEqual(expected[0]!.ids);
    await broken.dispose();
  });
});
