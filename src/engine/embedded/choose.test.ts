import { describe, expect, it } from 'vitest';
import { Rng, type SamplingParams } from '../../core/index.ts';
import { choose } from './choose.ts';

const LOGITS = Float32Array.from([0.5, 0.3, 0.15, 0.05], Math.log);

function frequencies(sampling: SamplingParams, draws = 20_000): number[] {
  const rng = Rng.of(1, 'draws');
  const counts = [0, 0, 0, 0];
  for (let i = 0; i < draws; i++) counts[choose(LOGITS, sampling, rng).id]!++;
  return counts.map((count) => count / draws);
}

function expectNear(actual: number[], expected: number[]): void {
  for (const [i, value] of expected.entries()) {
    if (value === 0) expect(actual[i]).toBe(0);
    else expect(Math.abs(actual[i]! - value)).toBeLessThan(0.015);
  }
}

describe('choosing a token', () => {
  it('draws by probability at temperature 1', () =>
    expectNear(frequencies({ temperature: 1 }), [0.5, 0.3, 0.15, 0.05]));

  it('sharpens at a lower temperature: p^2 at one half', () => {
    const squares = [0.25, 0.09, 0.0225, 0.0025].map((x) => x / 0.365);
    expectNear(frequencies({ temperature: 0.5 }), squares);
  });

  it('keeps the k most likely', () =>
    expectNear(frequencies({ temperature: 1, topK: 2 }), [0.625, 0.375, 0, 0]));

  it('keeps the fewest that hold p', () =>
    expectNear(frequencies({ temperature: 1, topP: 0.7 }), [0.625, 0.375, 0, 0]));

  it('a p below the first keeps the first', () =>
    expectNear(frequencies({ temperature: 1, topP: 0.1 }), [1, 0, 0, 0]));

  it('top-p applies to what top-k left', () =>
    expectNear(frequencies({ temperature: 1, topK: 2, topP: 0.6 }), [1, 0, 0, 0]));

  it('is greedy at temperature 0 and takes the lowest id at a tie', () => {
    const { id, logprob } = choose(Float32Array.of(1, 3, 3), { temperature: 0 }, Rng.of(1));
    expect(id).toBe(1);
    expect(logprob).toBeCloseTo(-Math.log(2 + Math.exp(-2)), 6);
  });

  it('reports the raw log-prob whatever the truncation', () => {
    const { id, logprob } = choose(LOGITS, { temperature: 0.2, topK: 1 }, Rng.of(1));
    expect(id).toBe(0);
    expect(logprob).toBeCloseTo(Math.log(0.5), 6);
  });

  it('refuses logits that are not finite', () => {
    for (const bad of [Number.NaN, Infinity])
      expect(() => choose(Float32Array.of(0, bad), { temperature: 1 }, Rng.of(1))).toThrow(
        'finite',
      );
  });
});
