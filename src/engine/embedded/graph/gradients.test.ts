import { describe, expect, it } from 'vitest';
import { Rng } from '../../../core/index.ts';
import { add, clip, exp, minimum, mul, repeatEach, reshape, sub, sum, transpose } from './basic.ts';
import { Graph, gradients, type Value } from './graph.ts';
import {
  attention,
  embedding,
  linear,
  rmsNorm,
  rope,
  rotaryTable,
  swiglu,
  targetLogProb,
} from './layers.ts';
import { Session, tensor } from './session.ts';

type Input = { shape: number[]; data: Float32Array };

function random(rng: Rng, shape: number[], scale = 1): Input {
  const size = shape.reduce((a, b) => a * b, 1);
  return { shape, data: Float32Array.from({ length: size }, () => rng.normal() * scale) };
}

/**
 * Compares the gradient of Σ c·f(inputs), c random, with central differences, for every element of
 * every input. Steps of 2^-7 keep float32 rounding and curvature both near 1e-4.
 */
async function check(
  inputs: Input[],
  build: (g: Graph, values: Value[]) => Value | Value[],
  tolerance = 4e-3,
): Promise<void> {
  const g = new Graph();
  const values = inputs.map((input, i) => g.input(`x${i}`, input.shape));
  const built = build(g, values);
  const rng = Rng.of(7, 'coefficients');
  const losses = (Array.isArray(built) ? built : [built]).map((y) => {
    const c = random(rng, y.shape as number[]);
    return sum(g, mul(g, y, g.constant(c.data, c.shape)));
  });
  const loss = losses.reduce((a, b) => add(g, a, b));
  const grads = gradients(g, loss, values);
  g.output(loss, 'loss');
  for (const [i, value] of grads.entries()) g.output(value, `d${i}`);
  const session = await Session.compile(g, { threads: 2, spinning: false });
  const run = () =>
    session.run(Object.fromEntries(inputs.map((x, i) => [`x${i}`, tensor(x.data, x.shape)])));
  const base = await run();
  const h = 2 ** -7;
  for (const [i, input] of inputs.entries()) {
    const analytic = (base[`d${i}`]!.data as Float32Array).slice();
    expect(base[`d${i}`]!.dims).toEqual(input.shape);
    for (let j = 0; j < input.data.length; j++) {
      const kept = input.data[j]!;
      input.data[j] = kept + h;
      const high = (await run()).loss!.data[0] as number;
      input.data[j] = kept - h;
      const low = (await run()).loss!.data[0] as number;
      input.data[j] = kept;
      const numeric = (high - low) / (2 * h);
      const error = Math.abs(numeric - analytic[j]!) / Math.max(1, Math.abs(numeric));
      expect(error, `input ${i} element ${j}: ${analytic[j]} against ${numeric}`).toBeLessThan(
        tolerance,
      );
    }
  }
  await session.dispose();
}

describe('backward rules agree with finite differences', () => {
  const rng = Rng.of(1, 'gradients');
  const r = (shape: number[], scale = 1) => random(rng, shape, scale);

  it('add with broadcast', () => check([r([2, 3]), r([3])], (g, [a, b]) => add(g, a!, b!)));
  it('add with inner broadcast', () =>
    check([r([2, 3, 2]), r([2, 1, 2])], (g, [a, b]) => add(g, a!, b!)));
  it('sub with broadcast', () => check([r([3]), r([2, 3])], (g, [a, b]) => sub(g, a!, b!)));
  it('mul with broadcast', () => check([r([2, 3]), r([2, 1])], (g, [a, b]) => mul(g, a!, b!)));
  it('mul of a value by itself', () => check([r([4])], (g, [a]) => mul(g, a!, a!)));
  it('exp', () => check([r([5])], (g, [x]) => exp(g, x!)));
  it('minimum', () =>
    check(
      [
        { shape: [4], data: Float32Array.of(1, -1, 0.5, 2) },
        { shape: [4], data: Float32Array.of(0.5, 0, 1, -2) },
      ],
      (g, [a, b]) => minimum(g, a!, b!),
    ));
  it('clip', () =>
    check([{ shape: [5], data: Float32Array.of(-2, -0.4, 0.1, 0.4, 2) }], (g, [x]) =>
      clip(g, x!, g.scalar(-0.5), g.scalar(0.5)),
    ));
  it('reshape and transpose', () =>
    check([r([2, 3, 4])], (g, [x]) => transpose(g, reshape(g, x!, [4, 3, 2]), [2, 0, 1])));
  it('repeatEach', () => check([r([2, 2, 3])], (g, [x]) => repeatEach(g, x!, 1, 3)));
  it('linear', () => check([r([4, 3]), r([5, 3])], (g, [x, w]) => linear(g, x!, w!)));
  it('embedding by one-hot', () =>
    check([r([5, 3])], (g, [table]) =>
      embedding(g, table!, g.constant([4, 0, 4, 2, 4, 0], [6], 'int32')),
    ));
  it('rmsNorm', () => check([r([3, 6]), r([6])], (g, [x, w]) => rmsNorm(g, x!, w!, 1e-5)));
  it('rope at one start position', () =>
    check([r([2, 2, 3, 4])], (g, [x]) =>
      rope(
        g,
        x!,
        g.constant([0], [1], 'int64'),
        rotaryTable(g, { maxLength: 8, headDim: 4, theta: 100 }),
      ),
    ));
  it('rope at a position a token', () =>
    check([r([2, 1, 2, 4])], (g, [x]) =>
      rope(
        g,
        x!,
        g.constant([3, 7, 0, 5], [2, 2], 'int64'),
        rotaryTable(g, { maxLength: 8, headDim: 4, theta: 100 }),
      ),
    ));
  it('attention under a causal mask', () =>
    check([r([2, 2, 3, 4]), r([2, 2, 3, 4]), r([2, 2, 3, 4])], (g, [q, k, v]) => {
      const mask = g.constant([0, -1e9, -1e9, 0, 0, -1e9, 0, 0, 0], [3, 3]);
      return attention(g, q!, k!, v!, mask);
    }));
  it('swiglu', () => check([r([3, 4]), r([3, 4])], (g, [a, b]) => swiglu(g, a!, b!)));
  it('targetLogProb', () =>
    check([r([3, 5])], (g, [x]) => targetLogProb(g, x!, g.constant([4, 0, 4], [3], 'int32'))));
});

describe('embedding gradient of a large vocabulary', () => {
  it('sums over equal ids without losing one', async () => {
    const vocab = 5000;
    const count = 4096;
    const g = new Graph();
    const table = g.input('table', [vocab, 8]);
    const ids = g.input('ids', ['count'], 'int32');
    const grad = gradients(g, sum(g, embedding(g, table, ids)), [table])[0]!;
    g.output(grad, 'grad');
    const session = await Session.compile(g, { threads: 2, spinning: false });
    const picked = Int32Array.from({ length: count }, (_, i) => (i * 7) % 3);
    for (let repeat = 0; repeat < 20; repeat++) {
      const out = await session.run({
        table: tensor(new Float32Array(vocab * 8), [vocab, 8]),
        ids: tensor(picked, [count]),
      });
      const data = out.grad!.data as Float32Array;
      const expected = [0, 1, 2].map((id) => picked.filter((x) => x === id).length);
      expect([data[0], data[8], data[16], data[24]]).toEqual([...expected, 0]);
    }
    await session.dispose();
  });

  it('a parameter the loss does not use is an error', () => {
    const g = new Graph();
    const used = g.input('used', [2]);
    const unused = g.input('unused', [2]);
    expect(() => gradients(g, sum(g, used), [used, unused])).toThrow('unused');
  });
});
