import { availableParallelism } from 'node:os';
import type { Datum, Engine, ModelConfig, SampleRequest } from '../src/engine/contract.ts';
import { createEmbeddedEngine } from '../src/engine/embedded/index.ts';
import { quantile, type Row, type RowGroup } from './row.ts';

const ROUNDS = 7;

/** The size S of the design's measurements: 0.86 M parameters, 23.5 GFLOP a step of 32 × 128 tokens. */
const S: ModelConfig = {
  vocabSize: 256,
  dim: 128,
  layers: 4,
  heads: 4,
  kvHeads: 4,
  ffnDim: 344,
  maxLength: 128,
  ropeTheta: 10_000,
  normEps: 1e-5,
  tiedHead: false,
};
/** The quickstart's model: characters, short programs, many rollouts at once. */
const QUICKSTART: ModelConfig = { ...S, vocabSize: 80 };

/**
 * What the embedded engine does on this machine: `train.*` a step with its update, `decode.*` sampled
 * tokens a second, `swap` from trained weights to a sampler that uses them, `mismatch` the largest
 * difference between a sampler's and the trainer's log-probs.
 */
async function rows(): Promise<Row[]> {
  const threads = Math.min(2, availableParallelism());
  const engine = createEmbeddedEngine({ trainerThreads: threads, samplerThreads: threads });
  try {
    return [
      await trainRow(engine, 'train.S', S, 32, 128, 400),
      await trainRow(engine, 'train.quickstart', QUICKSTART, 128, 40, 600),
      await decodeRow(engine, 'decode.S', S, 32, 100, 8000),
      await decodeRow(engine, 'decode.quickstart', QUICKSTART, 128, 40, 15_000),
      ...(await agreementRows(engine)),
    ];
  } finally {
    await engine.close();
  }
}

function data(config: ModelConfig, rowCount: number, length: number): Datum[] {
  return Array.from({ length: rowCount }, (_, row) => {
    const ids = Array.from({ length: length + 1 }, (_, i) => (i * 7 + row) % config.vocabSize);
    return { tokens: Int32Array.from(ids.slice(0, -1)), targets: Int32Array.from(ids.slice(1)) };
  });
}

function requests(config: ModelConfig, count: number, maxTokens: number): SampleRequest[] {
  return Array.from({ length: count }, (_, row) => ({
    prompt: Array.from({ length: 16 }, (_, i) => (i * 5 + (row >> 3)) % config.vocabSize),
    maxTokens,
    stopTokens: [],
    sampling: { temperature: 1, seed: row },
  }));
}

/** Milliseconds of each round after one that compiles and warms. */
async function measure(job: () => Promise<unknown>): Promise<number[]> {
  const taken: number[] = [];
  for (let round = 0; round <= ROUNDS; round++) {
    const started = performance.now();
    await job();
    if (round > 0) taken.push(performance.now() - started);
  }
  return taken;
}

async function trainRow(
  engine: Engine,
  name: string,
  config: ModelConfig,
  rowCount: number,
  length: number,
  barMs: number,
): Promise<Row> {
  const trainer = await engine.createTrainer({ config, seed: 1 });
  const batch = data(config, rowCount, length);
  const taken = await measure(async () => {
    await trainer.forwardBackward(batch, { kind: 'cross_entropy' });
    await trainer.optimStep({ learningRate: 1e-3, gradScale: 1 / (rowCount * length) });
  });
  await trainer.close();
  return atMost(name, 'ms', taken, barMs);
}

async function decodeRow(
  engine: Engine,
  name: string,
  config: ModelConfig,
  count: number,
  maxTokens: number,
  bar: number,
): Promise<Row> {
  const trainer = await engine.createTrainer({ config, seed: 1 });
  const sampler = await engine.sampler(await trainer.publish());
  const batch = requests(config, count, maxTokens);
  const taken = await measure(() => sampler.sample(batch));
  await Promise.all([trainer.close(), sampler.close()]);
  const rates = taken.map((ms) => (count * maxTokens * 1000) / ms);
  const value = quantile(rates, 0.5);
  return {
    name,
    unit: 'tokens/s',
    n: rates.length,
    p50: value,
    p99: quantile(rates, 0.99),
    value,
    bar: `p50 >= ${bar} tokens/s`,
    pass: value >= bar,
  };
}

async function agreementRows(engine: Engine): Promise<Row[]> {
  const trainer = await engine.createTrainer({ config: S, seed: 1 });
  const sampler = await engine.sampler(await trainer.publish());
  const batch = data(S, 8, 64);
  const swaps: number[] = [];
  for (let round = 0; round < ROUNDS; round++) {
    await trainer.forwardBackward(batch, { kind: 'cross_entropy' });
    await trainer.optimStep({ learningRate: 1e-3, gradScale: 1 / 512 });
    const started = performance.now();
    await sampler.load(await trainer.publish());
    swaps.push(performance.now() - started);
  }
  const asked = requests(S, 32, 100);
  const sampled = await sampler.sample(asked);
  const { logprobs } = await trainer.forward(
    sampled.map(({ ids }, i) => {
      const all = [...asked[i]!.prompt, ...ids];
      return { tokens: Int32Array.from(all.slice(0, -1)), targets: Int32Array.from(all.slice(1)) };
    }),
  );
  const differences = sampled.flatMap((result, i) =>
    result.logprobs.map((value, t) => Math.abs(value - logprobs[i]![15 + t]!)),
  );
  await Promise.all([trainer.close(), sampler.close()]);
  const worst = quantile(differences, 1);
  return [
    atMost('swap', 'ms', swaps, 50),
    { ...atMost('mismatch', 'nats', differences, 1e-4), value: worst, pass: worst <= 1e-4 },
  ];
}

function atMost(name: string, unit: string, samples: number[], bar: number): Row {
  const p50 = quantile(samples, 0.5);
  return {
    name,
    unit,
    n: samples.length,
    p50,
    p99: quantile(samples, 0.99),
    value: p50,
    bar: `${name === 'mismatch' ? 'largest' : 'p50'} <= ${bar} ${unit}`,
    pass: p50 <= bar,
  };
}

/** Rows of `longhaul bench engine`. */
export const engine: readonly RowGroup[] = [
  {
    names: ['train.S', 'train.quickstart', 'decode.S', 'decode.quickstart', 'swap', 'mismatch'],
    measure: rows,
  },
];
