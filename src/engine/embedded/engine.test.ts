import { execFile } from 'node:child_process';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, afterEach, describe, expect, it } from 'vitest';
import { Rng } from '../../core/index.ts';
import type { Datum, Engine, ModelConfig, Trainer } from '../contract.ts';
import { createEmbeddedEngine } from './index.ts';

const CONFIG: ModelConfig = {
  vocabSize: 20,
  dim: 32,
  layers: 2,
  heads: 4,
  kvHeads: 2,
  ffnDim: 64,
  maxLength: 48,
  ropeTheta: 10000,
  normEps: 1e-5,
  tiedHead: true,
};

const root = await mkdtemp(join(tmpdir(), 'longhaul-engine-'));
afterAll(() => rm(root, { recursive: true, force: true }));

let engines: Engine[] = [];
function engineOf(threads = 1): Engine {
  const options = { trainerThreads: threads, samplerThreads: threads, dir: root };
  const engine = createEmbeddedEngine(options);
  engines.push(engine);
  return engine;
}
afterEach(async () => {
  await Promise.all(engines.map((engine) => engine.close()));
  engines = [];
});

function sequences(count: number): number[][] {
  return Array.from({ length: count }, (_, i) => {
    const rng = Rng.of(i, 'text');
    return [i % 20, ...Array.from({ length: rng.int(10, 24) }, () => rng.int(0, 19))];
  });
}

function datum(ids: number[]): Datum {
  return { tokens: Int32Array.from(ids.slice(0, -1)), targets: Int32Array.from(ids.slice(1)) };
}

async function train(trainer: Trainer, data: Datum[], steps: number): Promise<number> {
  const tokens = data.reduce((sum, { tokens }) => sum + tokens.length, 0);
  let mean = 0;
  for (let i = 0; i < steps; i++) {
    const { lossSum } = await trainer.forwardBackward(data, { kind: 'cross_entropy' });
    await trainer.optimStep({ learningRate: 5e-3, gradScale: 1 / tokens, gradClipNorm: 1 });
    mean = lossSum / tokens;
  }
  return mean;
}

describe('the embedded engine', () => {
  it('memorises a few sequences and samples them back greedily', async () => {
    const engine = engineOf();
    const texts = sequences(4);
    const trainer = await engine.createTrainer({ config: CONFIG, seed: 1 });
    const first = await train(trainer, texts.map(datum), 1);
    expect(first).toBeCloseTo(Math.log(CONFIG.vocabSize), 0);
    expect(await train(trainer, texts.map(datum), 120)).toBeLessThan(0.05);
    const sampler = await engine.sampler(await trainer.publish());
    const results = await sampler.sample(
      texts.map((ids) => ({
        prompt: ids.slice(0, 1),
        maxTokens: ids.length - 1,
        stopTokens: [],
        sampling: { temperature: 0 },
      })),
    );
    expect(results.map((result) => result.ids)).toEqual(texts.map((ids) => ids.slice(1)));
    expect(results[0]).toMatchObject({
      logprobKind: 'raw',
      version: expect.stringMatching(/^step-121-[0-9a-f]{12}$/),
    });
  });

  it('learns by policy gradient to prefer what is rewarded', async () => {
    const engine = engineOf();
    const trainer = await engine.createTrainer({ config: CONFIG, seed: 2 });
    const sampler = await engine.sampler(await trainer.publish());
    const rewarded = async (round: number) => {
      const results = await sampler.sample(
        Array.from({ length: 64 }, (_, i) => ({
          prompt: [3],
          maxTokens: 4,
          stopTokens: [],
          sampling: { temperature: 1, seed: round * 64 + i },
        })),
      );
      const rewards = results.map(({ ids }) => ids.filter((id) => id < 5).length / 4);
      return { results, rewards, mean: rewards.reduce((a, b) => a + b, 0) / 64 };
    };
    const before = (await rewarded(0)).mean;
    for (let round = 1; round <= 25; round++) {
      const { results, rewards, mean } = await rewarded(round);
      const data = results.map(({ ids, logprobs }, i) => ({
        ...datum([3, ...ids]),
        logprobs: Float32Array.from(logprobs),
        advantages: new Float32Array(4).fill(rewards[i]! - mean),
      }));
      await trainer.forwardBackward(data, { kind: 'ppo', clipLow: 0.8, clipHigh: 1.2 });
      await trainer.optimStep({ learningRate: 5e-3, gradScale: 1 / 256, gradClipNorm: 1 });
      await sampler.load(await trainer.publish());
    }
    expect(before).toBeLessThan(0.4);
    expect((await rewarded(99)).mean).toBeGreaterThan(0.8);
  });

  it('gives equal bytes for equal seeds and batches, with one and with two threads', async () => {
    // Only the first token of half of them counts: gradients then hold exact zeros and tiny values.
    const data = sequences(40).map((ids, i) => {
      const whole = datum(ids);
      const weights = new Float32Array(whole.tokens.length).fill(i % 2, 1);
      weights[0] = 1;
      return { ...whole, weights };
    });
    for (const threads of [1, 2]) {
      const bytes: Buffer[][] = [];
      for (const run of ['a', 'b']) {
        const trainer = await engineOf(threads).createTrainer({ config: CONFIG, seed: 5 });
        await train(trainer, data, 5);
        const name = `${run}-${threads}`;
        await trainer.save(name);
        const files = ['model.safetensors', 'optimizer.safetensors'];
        bytes.push(await Promise.all(files.map((file) => readFile(join(root, name, file)))));
      }
      const [a, b] = bytes as [Buffer[], Buffer[]];
      expect(a.map((file, i) => file.equals(b[i]!))).toEqual([true, true]);
    }
  });

  it('gives a request the same bits with any number of samplers behind the handle', async () => {
    const requests = sequences(30).map((ids, i) => ({
      prompt: ids.slice(0, 8),
      maxTokens: 12,
      stopTokens: [0],
      sampling: { temperature: 1, seed: i },
    }));
    const results = [];
    for (const samplerReplicas of [1, 2, 3]) {
      const engine = createEmbeddedEngine({ samplerReplicas, dir: root });
      engines.push(engine);
      const trainer = await engine.createTrainer({ config: CONFIG, seed: 5 });
      const sampler = await engine.sampler(await trainer.publish());
      await train(trainer, sequences(10).map(datum), 2);
      await sampler.load(await trainer.publish());
      results.push({
        sampled: await sampler.sample(requests),
        scored: await sampler.logprobs(requests.map((request) => request.prompt)),
        none: await sampler.sample([]),
      });
    }
    expect(results[0]!.sampled).toHaveLength(30);
    expect(results[1]).toEqual(results[0]);
    expect(results[2]).toEqual(results[0]);
  });

  it('goes on from a checkpoint as if never interrupted', async () => {
    const data = sequences(6).map(datum);
    const engine = engineOf();
    const trainer = await engine.createTrainer({ config: CONFIG, seed: 6 });
    await train(trainer, data, 3);
    await trainer.save('middle');
    await train(trainer, data, 2);
    await trainer.save('whole');
    const resumed = await engine.createTrainer({ checkpoint: 'middle' });
    await train(resumed, data, 2);
    await resumed.save('resumed');
    for (const file of ['model.safetensors', 'optimizer.safetensors', 'config.json']) {
      const [whole, again] = await Promise.all(
        ['whole', 'resumed'].map((folder) => readFile(join(root, folder, file))),
      );
      expect(again!.equals(whole!), file).toBe(true);
    }
    const sampler = await engine.sampler({ checkpoint: 'resumed' });
    const [score] = await sampler.logprobs([[1, 2, 3]]);
    const { logprobs } = await trainer.forward([datum([1, 2, 3])]);
    expect([...score!.slice(1)]).toEqual([...logprobs[0]!]);
    await sampler.load({ version: 'mine', path: 'middle' });
    const request = { prompt: [1], maxTokens: 2, stopTokens: [], sampling: { temperature: 0 } };
    expect((await sampler.sample([request]))[0]!.version).toBe('mine');
  });

  it('cancels by signal', async () => {
    const engine = engineOf();
    const trainer = await engine.createTrainer({ config: CONFIG, seed: 1 });
    const sampler = await engine.sampler(await trainer.publish());
    const request = { prompt: [1], maxTokens: 40, stopTokens: [], sampling: { temperature: 1 } };
    const control = new AbortController();
    const sampled = sampler.sample(new Array(400).fill(request), control.signal);
    control.abort();
    await expect(sampled).rejects.toMatchObject({ code: 'Interrupted' });
    await expect(sampler.sample([request], control.signal)).rejects.toMatchObject({
      code: 'Interrupted',
    });
    expect(await sampler.sample([request])).toHaveLength(1);
  });

  it('attributes errors of the worker and goes on', async () => {
    const engine = engineOf();
    const bad = engine.createTrainer({ config: { ...CONFIG, heads: 3 }, seed: 1 });
    await expect(bad).rejects.toMatchObject({ code: 'ConfigInvalid' });
    const trainer = await engine.createTrainer({ config: CONFIG, seed: 1 });
    await expect(trainer.forward([datum([1, 99])])).rejects.toMatchObject({ code: 'InputInvalid' });
    expect((await trainer.forward([datum([1, 2])])).logprobs).toHaveLength(1);
    await expect(engine.createTrainer({ checkpoint: 'nowhere' })).rejects.toMatchObject({
      code: 'CheckpointInvalid',
    });
    await expect(engine.sampler({ version: 'unheard-of' })).rejects.toMatchObject({
      code: 'NotFound',
    });
    const open = trainer.forward([datum([1, 2])]);
    await Promise.all([trainer.close(), trainer.close()]);
    expect((await open).logprobs).toHaveLength(1);
    await expect(trainer.forward([datum([1, 2])])).rejects.toMatchObject({ code: 'EngineFailed' });
  });

  it('keeps the latest published versions', async () => {
    const engine = engineOf();
    const trainer = await engine.createTrainer({ config: CONFIG, seed: 1 });
    const first = await trainer.publish();
    const sampler = await engine.sampler(first);
    for (let i = 0; i < 4; i++) {
      await train(trainer, [datum([1, 2, 3])], 1);
      await trainer.publish();
    }
    await expect(sampler.load(first)).rejects.toMatchObject({ code: 'NotFound' });
  });

  it('does not keep a process alive, closed or not', async () => {
    const url = new URL('./index.ts', import.meta.url).href;
    for (const close of ['await engine.close();', '']) {
      const script = `
        import { createEmbeddedEngine } from ${JSON.stringify(url)};
        const engine = createEmbeddedEngine();
        const trainer = await engine.createTrainer({ config: ${JSON.stringify(CONFIG)}, seed: 1 });
        const sampler = await engine.sampler(await trainer.publish());
        const request = { prompt: [1], maxTokens: 3, stopTokens: [], sampling: { temperature: 0 } };
        const [result] = await sampler.sample([request]);
        ${close}
        console.log(result.ids.length);`;
      const node = [process.execPath, ['--input-type=module', '-e', script]] as const;
      const { stdout } = await promisify(execFile)(...node, { timeout: 60_000 });
      expect(stdout.trim()).toBe('3');
    }
  });
});
