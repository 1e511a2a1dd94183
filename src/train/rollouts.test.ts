import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { LonghaulError, Redactor } from '../core/index.ts';
import type { Sampler } from '../engine/contract.ts';
import { createEmbeddedEngine } from '../engine/embedded/index.ts';
import { drawTasks, programs } from '../env/programs/environment.ts';
import { tinyRenderer } from '../model/render/tiny.ts';
import { MemoryArtifacts } from '../run/index.ts';
import { WasmDriver } from '../sandbox/wasm/driver.ts';
import { evaluate } from './evaluate.ts';
import { policyData, trueReward } from './grpo.ts';
import { programmer } from './programmer.ts';
import { logRollouts, type RolloutPlan, RolloutRunner } from './rollouts.ts';
import { scheduleFor } from './schedule.ts';

const root = mkdtempSync(join(tmpdir(), 'rollouts-'));
const engine = createEmbeddedEngine();
let sampler: Sampler;
beforeAll(async () => {
  const config = {
    ...scheduleFor(5, 'javascript').model,
    dim: 16,
    layers: 1,
    heads: 2,
    kvHeads: 2,
  };
  const trainer = await engine.createTrainer({ config: { ...config, ffnDim: 32 }, seed: 1 });
  sampler = await engine.sampler(await trainer.publish());
});
afterAll(async () => {
  await engine.close();
  rmSync(root, { recursive: true, force: true });
});

/** An untrained model: now and then it ends a program, mostly it is cut off. */
const plans: RolloutPlan[] = drawTasks('train', 1, 24).map((task, i) => ({
  task: task.ref,
  group: `group ${i >> 2}`,
  indexInGroup: i % 4,
  seed: i,
}));
const refs = plans.map((plan) => plan.task);

async function withRunner<T>(
  driver: Pick<WasmDriver, 'create'>,
  work: (runner: RolloutRunner) => Promise<T>,
  signal = new AbortController().signal,
): Promise<T> {
  const runner = new RolloutRunner({
    environment: programs('javascript'),
    sampler,
    renderer: tinyRenderer,
    sandboxes: driver,
    agent: programmer(60, { temperature: 1 }),
    modelRef: 'embedded/test',
    redactor: new Redactor(),
    clock: { now: Date.now, sleep: (ms) => sleep(ms) },
    signal,
    wave: 16,
    sandboxCount: 2,
  });
  return work(runner).finally(() => runner.close());
}
const play = (runner: RolloutRunner) => runner.play(plans, 'rollout', { temperature: 1 });

describe('rollouts', () => {
  it('are equal for equal seeds, and whole runs with exact tokens', async () => {
    const driver = await WasmDriver.open({ dir: join(root, 'a') });
    const [first, second] = [await withRunner(driver, play), await withRunner(driver, play)];
    const tokens = (played: typeof first) =>
      played.map(({ trajectory }) => [
        trajectory.segments.map((s) => s.chunks.map((c) => c.ids)),
        trajectory.reward,
      ]);
    expect(tokens(second)).toEqual(tokens(first));
    expect(first.some(({ rollout }) => rollout.state.used.toolCalls > 0)).toBe(true);
    for (const { rollout, trajectory } of first) {
      expect(trajectory.reward.value).not.toBeNull();
      expect(trajectory.segments).toHaveLength(1);
      expect(rollout.spec.kind).toBe('rollout');
    }

    const written: { runId: string; events: readonly unknown[] }[] = [];
    const artifacts = new MemoryArtifacts();
    const log = {
      writeRuns: async (runs: readonly (typeof written)[number][]) => void written.push(...runs),
    };
    await logRollouts(log, artifacts).write(first.map((item) => item.rollout));
    expect(written.map((run) => run.runId)).toEqual(first.map((item) => item.rollout.runId));
    for (const { rollout } of first) {
      for (const event of rollout.events) {
        if (event.type !== 'model.completed' || !event.data.tokens) continue;
        expect((await artifacts.get(event.data.tokens.sha256)).length).toBeGreaterThan(0);
      }
    }
    await driver.close();
  });

  it('that the sandbox fails are ungraded and taught nothing from', async () => {
    const driver = await WasmDriver.open({ dir: join(root, 'b') });
    const good = await withRunner(driver, play);
    await driver.close();
    const away = {
      create: async () => {
        throw new LonghaulError('SandboxUnavailable', 'this machine has no more sandboxes');
      },
    };
    const played = await withRunner(away, play);
    const submitted = played.filter(({ rollout }) => rollout.state.used.toolCalls > 0);
    expect(submitted.length).toBeGreaterThan(0);
    for (const { trajectory } of submitted) {
      expect(trajectory.reward).toMatchObject({ status: 'env_error', value: null });
      expect(trajectory.segments).toEqual([]);
    }
    const count = (list: typeof played) =>
      policyData(
        list.map((item) => item.trajectory),
        trueReward,
        0,
      ).tokens;
    expect(count(played)).toBeLessThan(count(good));
    const { evaluation } = await withRunner(away, (runner) =>
      evaluate(runner, refs, 1, { greedy: false }),
    );
    expect(evaluation.ungraded).toBeGreaterThan(0);
    expect(evaluation.first.count).toBe(refs.length - evaluation.ungraded);
  });

  it('stop when they are told to', async () => {
    const driver = await WasmDriver.open({ dir: join(root, 'c') });
    const stop = new AbortController();
    const playing = withRunner(driver, play, stop.signal);
    stop.abort('interrupt');
    await expect(playing).rejects.toBe('interrupt');
    await driver.close();
  });
});
