import { afterAll, describe, expect, it } from 'vitest';
import { Rng } from '../../core/index.ts';
import type { Datum, Loss, ModelConfig } from '../contract.ts';
import { causalMask } from './batches.ts';
import { Session, tensor } from './graph/session.ts';
import { checkConfig, initialise, layoutOf } from './layout.ts';
import { parameterFeeds, Training } from './training.ts';
import { trainingGraph } from './training-graph.ts';

const OPTIONS = { threads: 1, spinning: false };

const TINY: ModelConfig = {
  vocabSize: 11,
  dim: 16,
  layers: 2,
  heads: 4,
  kvHeads: 2,
  ffnDim: 24,
  maxLength: 32,
  ropeTheta: 100,
  normEps: 1e-5,
  tiedHead: false,
};

/** Weights far enough from zero that every part of the model matters. */
function livelyWeights(config: ModelConfig): Float32Array {
  const rng = Rng.of(3, 'weights');
  return initialise(config, 3).map((w) => w + rng.normal() * (w === 1 ? 0.1 : 0.3));
}

function sequence(config: ModelConfig, seed: number, length: number): Datum {
  const rng = Rng.of(seed, 'sequence');
  const ids = Array.from({ length: length + 1 }, () => rng.int(0, config.vocabSize - 1));
  return { tokens: Int32Array.from(ids.slice(0, -1)), targets: Int32Array.from(ids.slice(1)) };
}

const opened: Training[] = [];
function trainingOf(config: ModelConfig, weights = livelyWeights(config)): Training {
  const training = new Training(config, weights, null, OPTIONS);
  opened.push(training);
  return training;
}
afterAll(() => Promise.all(opened.map((training) => training.dispose())));

/** Log-probs by the published formulas, in float64, without the graph: Llama as Hugging Face runs it. */
function referenceLogprobs(config: ModelConfig, weights: Float32Array, datum: Datum): number[] {
  const { dim, heads, kvHeads, vocabSize, ropeTheta, normEps, tiedHead, layers, ffnDim } = config;
  const width = dim / heads;
  const named = new Map(layoutOf(config).tensors.map((t) => [t.name, t]));
  const get = (name: string) => {
    const { offset, size } = named.get(name)!;
    return weights.subarray(offset, offset + size);
  };
  const project = (name: string, x: number[], out: number) =>
    Array.from({ length: out }, (_, o) =>
      x.reduce((sum, value, i) => sum + value * get(name)[o * x.length + i]!, 0),
    );
  const norm = (name: string, x: number[]) => {
    const r = 1 / Math.sqrt(x.reduce((sum, v) => sum + v * v, 0) / dim + normEps);
    return x.map((v, i) => v * r * get(name)[i]!);
  };
  const rotate = (x: number[], position: number) => {
    const half = width / 2;
    return x.map((value, j) => {
      const i = j % width;
      const angle = position * ropeTheta ** ((-2 * (i % half)) / width);
      const other = i < half ? -x[j + half]! : x[j - half]!;
      return value * Math.cos(angle) + other * Math.sin(angle);
    });
  };
  const embed = get('model.embed_tokens.weight');
  let xs = Array.from(datum.tokens, (id) => Array.from(embed.subarray(id * dim, (id + 1) * dim)));
  for (let layer = 0; layer < layers; layer++) {
    const at = `model.layers.${layer}`;
    const normed = xs.map((x) => norm(`${at}.input_layernorm.weight`, x));
    const q = normed.map((x, t) => rotate(project(`${at}.self_attn.q_proj.weight`, x, dim), t));
    const kvWidth = kvHeads * width;
    const k = normed.map((x, t) => rotate(project(`${at}.self_attn.k_proj.weight`, x, kvWidth), t));
    const v = normed.map((x) => project(`${at}.self_attn.v_proj.weight`, x, kvWidth));
    const attended = q.map((row, t) => {
      const out: number[] = [];
      for (let h = 0; h < heads; h++) {
        const kv = Math.floor(h / (heads / kvHeads)) * width;
        const scores = k.slice(0, t + 1).map((key) => {
          let dot = 0;
          for (let i = 0; i < width; i++) dot += row[h * width + i]! * key[kv + i]!;
          return Math.exp(dot / Math.sqrt(width));
        });
        const total = scores.reduce((a, b) => a + b, 0);
        for (let i = 0; i < width; i++)
          out.push(scores.reduce((sum, s, j) => sum + (s / total) * v[j]![kv + i]!, 0));
      }
      return out;
    });
    xs = xs.map((x, t) => {
      const o = project(`${at}.self_attn.o_proj.weight`, attended[t]!, dim);
      return x.map((value, i) => value + o[i]!);
    });
    xs = xs.map((x) => {
      const h = norm(`${at}.post_attention_layernorm.weight`, x);
      const gate = project(`${at}.mlp.gate_proj.weight`, h, ffnDim);
      const up = project(`${at}.mlp.up_proj.weight`, h, ffnDim);
      const inner = gate.map((g, i) => (g / (1 + Math.exp(-g))) * up[i]!);
      const down = project(`${at}.mlp.down_proj.weight`, inner, dim);
      return x.map((value, i) => value + down[i]!);
    });
  }
  const head = tiedHead ? 'model.embed_tokens.weight' : 'lm_head.weight';
  return xs.map((x, t) => {
    const logits = project(head, norm('model.norm.weight', x), vocabSize);
    return logits[datum.targets[t]!]! - Math.log(logits.reduce((sum, l) => sum + Math.exp(l), 0));
  });
}

describe('the decoder', () => {
  for (const change of [{}, { kvHeads: 4, tiedHead: true }, { kvHeads: 1 }]) {
    const config = { ...TINY, ...change };
    it(`gives the log-probs of the formulas with ${config.kvHeads} kv heads`, async () => {
      const weights = livelyWeights(config);
      const datum = sequence(config, 1, 9);
      const { logprobs } = await trainingOf(config, weights).forward([datum]);
      const expected = referenceLogprobs(config, weights, datum);
      for (const [t, value] of expected.entries()) expect(logprobs[0]![t]).toBeCloseTo(value, 5);
    });
  }

  it('gives a sequence the same log-probs in whatever batch it stands', async () => {
    const training = trainingOf(TINY);
    const data = [9, 32, 1, 17].map((length, i) => sequence(TINY, i, length));
    const together = (await training.forward(data)).logprobs;
    for (const [i, datum] of data.entries()) {
      const alone = (await training.forward([datum])).logprobs[0]!;
      expect(together[i]).toHaveLength(datum.tokens.length);
      for (const [t, value] of alone.entries()) expect(together[i]![t]).toBeCloseTo(value, 5);
    }
  });

  it('names the configuration field that does not fit', () => {
    expect(() => checkConfig({ ...TINY, kvHeads: 3 })).toThrow('kvHeads');
    expect(() => checkConfig({ ...TINY, layers: 0 })).toThrow('layers');
    expect(() => checkConfig({ ...TINY, dim: 12 })).toThrow('even');
  });
});

describe('the gradient of the whole model', () => {
  const losses: Loss[] = [
    { kind: 'cross_entropy' },
    { kind: 'importance_sampling' },
    { kind: 'ppo', clipLow: 0.8, clipHigh: 1.2 },
  ];
  for (const tiedHead of [true, false]) {
    for (const loss of losses) {
      it(`agrees with finite differences: ${loss.kind}, tied head ${tiedHead}`, async () => {
        const config = { ...TINY, tiedHead };
        const weights = livelyWeights(config);
        const layout = layoutOf(config);
        const rng = Rng.of(5, 'losses');
        const datum = sequence(config, 2, 8);
        const { logprobs } = await trainingOf(config, weights).forward([datum]);
        // Ratios well inside or outside the clip range, so that no step crosses a kink.
        const ratios = [0.5, 0.9, 1, 1.1, 1.5, 2, 0.7, 1.05];
        const feeds = {
          ...parameterFeeds(layout, weights),
          tokens: tensor(datum.tokens, [8]),
          targets: tensor(datum.targets, [8]),
          mask: tensor(causalMask(8), [8, 8]),
          weight: tensor(
            Float32Array.from(ratios, () => rng.normal()),
            [8],
          ),
          ...(loss.kind !== 'cross_entropy' && {
            sampled: tensor(
              logprobs[0]!.map((lp, i) => lp - Math.log(ratios[i]!)),
              [8],
            ),
          }),
          ...(loss.kind === 'ppo' && {
            clipLow: tensor(Float32Array.of(loss.clipLow), []),
            clipHigh: tensor(Float32Array.of(loss.clipHigh), []),
          }),
        };
        const session = await Session.compile(trainingGraph(config, loss.kind), OPTIONS);
        const gradient = (await session.run(feeds)).gradient!.data as Float32Array;
        const lossAt = async () => (await session.run(feeds)).loss!.data[0] as number;
        for (const { name, offset, size } of layout.tensors) {
          // Along the gradient of each tensor: the derivative there is the gradient's norm.
          const part = gradient.slice(offset, offset + size);
          const length = Math.hypot(...part);
          expect(length, name).toBeGreaterThan(1e-4);
          const kept = weights.slice(offset, offset + size);
          const h = 2e-3;
          const move = (sign: number) => {
            for (let i = 0; i < size; i++)
              weights[offset + i] = kept[i]! + (sign * h * part[i]!) / length;
          };
          move(1);
          const high = await lossAt();
          move(-1);
          const low = await lossAt();
          weights.set(kept, offset);
          const numeric = (high - low) / (2 * h);
          expect(
            Math.abs(numeric / length - 1),
            `${name}: ${numeric} against ${length}`,
          ).toBeLessThan(0.02);
        }
        await session.dispose();
      });
    }
  }
});

describe('losses', () => {
  /** Data whose ratios are `ratios`: the sampling log-probs are set from the current ones. */
  async function withRatios(training: Training, ratios: number[], advantages: number[]) {
    const datum = sequence(TINY, 4, ratios.length);
    const { logprobs } = await training.forward([datum]);
    const sampled = logprobs[0]!.map((lp, i) => lp - Math.log(ratios[i]!));
    return { ...datum, logprobs: sampled, advantages: Float32Array.from(advantages) };
  }

  // Published numbers: A = [1, −1, 2], ratios [.5, 1, 1.5], clip .2 / .2.
  const ppo: Loss = { kind: 'ppo', clipLow: 0.8, clipHigh: 1.2 };

  it('ppo: tokens [−.5, 1, −2.4] sum to −1.9', async () => {
    const training = trainingOf(TINY);
    const datum = await withRatios(training, [0.5, 1, 1.5], [1, -1, 2]);
    expect((await training.forwardBackward([datum], ppo)).lossSum).toBeCloseTo(-1.9, 4);
  });

  it('importance sampling: −Σ r·A = −2.5', async () => {
    const training = trainingOf(TINY);
    const datum = await withRatios(training, [0.5, 1, 1.5], [1, -1, 2]);
    const { lossSum } = await training.forwardBackward([datum], { kind: 'importance_sampling' });
    expect(lossSum).toBeCloseTo(-2.5, 4);
  });

  it('cross entropy: −Σ w·lp, weights 1 where none are given', async () => {
    const training = trainingOf(TINY);
    const datum = { ...sequence(TINY, 4, 3), weights: Float32Array.of(2, 0, 0.5) };
    const { lossSum, logprobs } = await training.forwardBackward([datum], {
      kind: 'cross_entropy',
    });
    const [a, b, c] = logprobs[0]! as unknown as [number, number, number];
    expect(lossSum).toBeCloseTo(-(2 * a + 0.5 * c), 5);
    const { weights: _, ...plain } = datum;
    const whole = await training.forwardBackward([plain], { kind: 'cross_entropy' });
    expect(whole.lossSum).toBeCloseTo(-(a + b + c), 5);
  });

  it('a NaN at a masked position changes nothing', async () => {
    const step = async (spoil: boolean) => {
      const training = trainingOf(TINY);
      const datum = await withRatios(training, [0.5, 1, 1.5], [1, 0, 2]);
      if (spoil) datum.logprobs[1] = Number.NaN;
      const { lossSum } = await training.forwardBackward([datum], ppo);
      training.optimStep({ learningRate: 0.1 });
      return { lossSum, weights: training.weights };
    };
    expect(await step(true)).toEqual(await step(false));
  });

  it('a NaN that counts is refused and adds nothing', async () => {
    const training = trainingOf(TINY);
    const before = training.weights.slice();
    const datum = await withRatios(training, [0.5, 1, 1.5], [1, -1, 2]);
    datum.logprobs[0] = Number.NaN;
    const failed = training.forwardBackward([sequence(TINY, 1, 4), datum].slice(1), ppo);
    await expect(failed).rejects.toMatchObject({ code: 'EngineFailed' });
    expect(training.optimStep({ learningRate: 0.1 }).gradNorm).toBe(0);
    expect(training.weights).toEqual(before);
  });
});

describe('updates', () => {
  it('gradients of several calls and of micro-batches add up', async () => {
    const data = Array.from({ length: 80 }, (_, i) => sequence(TINY, i, 20 + (i % 12)));
    const whole = trainingOf(TINY);
    await whole.forwardBackward(data, { kind: 'cross_entropy' });
    const parts = trainingOf(TINY);
    await parts.forwardBackward(data.slice(0, 3), { kind: 'cross_entropy' });
    for (const datum of data.slice(3))
      await parts.forwardBackward([datum], { kind: 'cross_entropy' });
    const a = whole.optimStep({ learningRate: 0.01, gradScale: 1e-3 });
    const b = parts.optimStep({ learningRate: 0.01, gradScale: 1e-3 });
    expect(a.gradNorm / b.gradNorm).toBeCloseTo(1, 4);
  });

  it('AdamW moves as its formula says', async () => {
    const training = trainingOf(TINY);
    const before = training.weights.slice();
    await training.forwardBackward([sequence(TINY, 1, 8)], { kind: 'cross_entropy' });
    const { gradNorm, step } = training.optimStep({
      learningRate: 0.01,
      beta1: 0.9,
      beta2: 0.99,
      eps: 1e-12,
      weightDecay: 0.1,
      gradClipNorm: 0.5,
    });
    expect(step).toBe(1);
    expect(gradNorm).toBeGreaterThan(0.5);
    const { m, v } = training.optimiser;
    // After one step m = 0.1·g and v = 0.01·g², so the move is the learning rate, by the sign of g.
    expect(Math.hypot(...m) / 0.1).toBeCloseTo(0.5, 5);
    for (let i = 0; i < before.length; i += 37) {
      expect(v[i]).toBeCloseTo((m[i]! / 0.1) ** 2 * 0.01, 9);
      const move = m[i] === 0 ? 0 : 0.01 * Math.sign(m[i]!);
      expect(training.weights[i]).toBeCloseTo(before[i]! * (1 - 0.001) - move, 5);
    }
  });

  it('a gradient that is not finite leaves the weights alone', async () => {
    const training = trainingOf(TINY);
    const before = training.weights.slice();
    const huge = { ...sequence(TINY, 1, 4), weights: new Float32Array(4).fill(3e38) };
    const failed = training.forwardBackward([huge], { kind: 'cross_entropy' });
    await expect(failed).rejects.toMatchObject({ code: 'EngineFailed' });
    training.optimStep({ learningRate: 0.1 });
    expect(training.weights).toEqual(before);
  });
});

describe('what does not fit is refused by name', () => {
  const good = sequence(TINY, 1, 4);
  const cases: [string, Datum[], Loss, RegExp][] = [
    ['an empty batch', [], { kind: 'cross_entropy' }, /empty/],
    ['no tokens', [sequence(TINY, 1, 0)], { kind: 'cross_entropy' }, /no tokens/],
    ['too many tokens', [sequence(TINY, 1, 33)], { kind: 'cross_entropy' }, /33 tokens/],
    [
      'a token outside',
      [good, { ...good, tokens: Int32Array.of(1, 2, 11, 3) }],
      { kind: 'cross_entropy' },
      /datum 1.*id 11 at 2/,
    ],
    [
      'a negative target',
      [{ ...good, targets: Int32Array.of(1, -1, 2, 3) }],
      { kind: 'cross_entropy' },
      /id -1/,
    ],
    [
      'targets of another length',
      [{ ...good, targets: Int32Array.of(1) }],
      { kind: 'cross_entropy' },
      /1 targets/,
    ],
    [
      'weights of another length',
      [{ ...good, weights: Float32Array.of(1) }],
      { kind: 'cross_entropy' },
      /1 weights/,
    ],
    [
      'no advantages',
      [{ ...good, logprobs: new Float32Array(4) }],
      { kind: 'importance_sampling' },
      /no advantages/,
    ],
    [
      'a clip range without 1',
      [{ ...good, logprobs: new Float32Array(4), advantages: new Float32Array(4) }],
      { kind: 'ppo', clipLow: 1.1, clipHigh: 2 },
      /contain 1/,
    ],
  ];
  for (const [name, data, loss, message] of cases) {
    it(name, async () => {
      const failed = trainingOf(TINY).forwardBackward(data, loss);
      await expect(failed).rejects.toMatchObject({
        code: 'InputInvalid',
        message: expect.stringMatching(message),
      });
    });
  }

  it('a learning rate that is not a number, an eps of zero', () => {
    const training = trainingOf(TINY);
    expect(() => training.optimStep({ learningRate: Number.NaN })).toThrow('learningRate');
    expect(() => training.optimStep({ learningRate: 0.1, eps: 0 })).toThrow('eps');
  });
});
