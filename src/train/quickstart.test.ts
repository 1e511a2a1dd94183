import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { isFinal, type MetricSink, Redactor } from '../core/index.ts';
import { createEmbeddedEngine } from '../engine/embedded/index.ts';
import { engineModel, sampleAlone } from '../model/engine-model.ts';
import { tinyRenderer } from '../model/render/tiny.ts';
import { type Rollout, segmentsOf } from '../run/index.ts';
import { BubblewrapDriver } from '../sandbox/bubblewrap/driver.ts';
import {
  type QuickstartDeps,
  type QuickstartProgress,
  type QuickstartSpec,
  resumeQuickstart,
  startQuickstart,
} from './quickstart.ts';
import { scheduleFor } from './schedule.ts';

const root = mkdtempSync(join(tmpdir(), 'quickstart-'));
const opened = await BubblewrapDriver.open({ dir: join(root, 'sandboxes') }).catch(
  (error: Error) => error,
);
const reason = opened instanceof Error ? opened.message : '';

/** Far too small to learn anything: what is tested is that it runs, stops and goes on. */
const usual = scheduleFor(7, 'python');
const SPEC: QuickstartSpec = {
  seed: 5,
  minutes: 7,
  language: 'python',
  schedule: {
    ...usual,
    model: { ...usual.model, dim: 32, layers: 1, heads: 2, kvHeads: 2, ffnDim: 64 },
    maxOutputTokens: 12,
    warmup: { ...usual.warmup, steps: 30, rows: 8, rampSteps: 5, learningRate: 1e-2 },
    grpo: { ...usual.grpo, steps: 4, groups: 4, groupSize: 4 },
    evaluation: { auditTasks: 8, tasks: 12, validationTasks: 8 },
    validateEvery: 2,
    saveEvery: 3,
  },
};

describe.skipIf(opened instanceof Error)(`the quickstart ${reason}`, () => {
  const sandboxes = opened as BubblewrapDriver;
  const engine = createEmbeddedEngine();
  afterAll(async () => {
    await engine.close();
    await sandboxes.close();
    rmSync(root, { recursive: true, force: true });
  });

  function depsFor(name: string, stopAt?: (event: QuickstartProgress) => boolean) {
    const events: QuickstartProgress[] = [];
    const rollouts: Rollout[] = [];
    const metrics: Parameters<MetricSink['write']>[0][] = [];
    const stop = new AbortController();
    const deps: QuickstartDeps = {
      engine,
      sandboxes,
      folder: join(root, name),
      jobId: name,
      redactor: new Redactor(),
      clock: { now: Date.now, sleep: (ms) => sleep(ms) },
      signal: stop.signal,
      onProgress: (event) => {
        events.push(event);
        if (stopAt?.(event)) stop.abort('interrupt');
      },
      metrics: { write: async (record) => void metrics.push(record) },
      rollouts: { write: async (runs) => void rollouts.push(...runs) },
    };
    return { deps, events, rollouts, metrics };
  }
  const state = (name: string) => JSON.parse(readFileSync(join(root, name, 'state.json'), 'utf8'));
  const weights = (name: string) =>
    readFileSync(join(root, name, state(name).checkpoint, 'model.safetensors'));
  const metricLines = (name: string) =>
    readFileSync(join(root, name, 'metrics.jsonl'), 'utf8')
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line) as { phase: string; step: number });

  it('tells its story: audit, warm-up, before, training, after, hosting', async () => {
    const { deps, events, rollouts, metrics } = depsFor('whole');
    const hosted: string[] = [];
    const results = await startQuickstart(SPEC, {
      ...deps,
      host: async ({ checkpoint, task }) => {
        expect(task.split).toBe('heldout');
        const sampler = await engine.sampler({ checkpoint });
        const model = engineModel({
          ref: 'embedded/test',
          renderer: tinyRenderer,
          maxLength: sampler.config.maxLength,
          sample: sampleAlone(sampler),
        });
        const { message, tokens } = await model.complete({
          messages: [{ role: 'user', content: 's:rev=' }],
          tools: [],
          maxOutputTokens: 4,
          sampling: { temperature: 0 },
        });
        hosted.push(message.role);
        expect(tokens?.ids.length).toBeGreaterThan(0);
        await sampler.close();
      },
    });
    expect(hosted).toEqual(['assistant']);
    const stages = events.flatMap((event) => (event.kind === 'stage' ? [event.stage] : []));
    expect(stages).toEqual(['audit', 'warmup', 'before', 'train', 'after', 'host']);
    expect(results.audit?.passed).toBe(true);
    expect(results.curve.map((point) => point.step)).toEqual([0, 2, 4]);
    for (const evaluation of [results.before!, results.after!]) {
      expect(evaluation.ungraded).toBe(0);
      expect(evaluation.first.count).toBe(12);
      expect(evaluation.greedy?.count).toBe(12);
      expect(Object.keys(evaluation.byDomain)).toHaveLength(4);
    }
    expect(metricLines('whole')).toHaveLength(34);
    expect(metrics.map(({ job, step }) => `${job} ${step}`)).toEqual([
      ...Array.from({ length: 30 }, (_, i) => `whole/warmup ${i + 1}`),
      ...Array.from({ length: 4 }, (_, i) => `whole/train ${i + 1}`),
    ]);

    // Kept rollouts are whole runs: logs with a grade, and tokens that a trainer may use.
    expect(rollouts).toHaveLength(12 + 4 * 4 + 12);
    for (const run of rollouts) {
      expect(isFinal(run.state.status)).toBe(true);
      expect(run.events.some((event) => event.type === 'grade.recorded')).toBe(true);
      const segments = await segmentsOf(run.events, run.artifacts);
      expect(segments).toHaveLength(1);
      expect(segments![0]!.chunks.filter((chunk) => chunk.role === 'action')).toHaveLength(
        run.state.used.modelCalls,
      );
    }
  });

  it('interrupted twice and resumed, it ends with the same weights and figures', async () => {
    const at = (stage: string, step: number) => (event: QuickstartProgress) =>
      event.kind === 'step' && event.stage === stage && event.step === step;
    const interrupted = expect.objectContaining({ code: 'Interrupted' });
    await expect(startQuickstart(SPEC, depsFor('parts', at('warmup', 7)).deps)).rejects.toThrow(
      interrupted,
    );
    expect(state('parts')).toMatchObject({ phase: 'warmup', step: 7 });
    await expect(resumeQuickstart(depsFor('parts', at('train', 2)).deps)).rejects.toThrow(
      interrupted,
    );
    expect(state('parts')).toMatchObject({ phase: 'train', step: 2 });
    const results = await resumeQuickstart(depsFor('parts').deps);

    const whole = state('whole').results;
    expect(results.curve).toEqual(whole.curve);
    const shares = ({ seconds: _, ...rest }: { seconds: number }) => rest;
    expect(shares(results.before!)).toEqual(shares(whole.before));
    expect(shares(results.after!)).toEqual(shares(whole.after));
    expect(weights('parts').equals(weights('whole'))).toBe(true);
    const steps = (name: string) => metricLines(name).map(({ phase, step }) => `${phase} ${step}`);
    expect(steps('parts')).toEqual(steps('whole'));
  });

  it('a finished job resumes to its results without training', async () => {
    const { deps, events } = depsFor('whole');
    const before = weights('whole');
    const results = await resumeQuickstart(deps);
    expect(results.after).not.toBeNull();
    expect(events.filter((event) => event.kind === 'step')).toEqual([]);
    expect(weights('whole').equals(before)).toBe(true);
  });

  it.each(['random-reward', 'supervised', 'shuffled-feedback'] as const)(
    'runs with the control %s',
    async (control) => {
      const grpo = { ...SPEC.schedule.grpo, steps: 1 };
      const schedule = { ...SPEC.schedule, grpo, supervisedPerGrpo: 3 };
      const { deps, metrics } = depsFor(control);
      const results = await startQuickstart({ ...SPEC, control, schedule }, deps);
      expect(results.after).not.toBeNull();
      expect(metrics.at(-1)).toMatchObject({ job: `${control}/train`, step: 1 });
    },
  );

  it('refuses a folder in use, an empty one to resume, and a damaged one', async () => {
    await expect(startQuickstart(SPEC, depsFor('whole').deps)).rejects.toThrow(/already holds/);
    await expect(resumeQuickstart(depsFor('nowhere').deps)).rejects.toThrow(
      expect.objectContaining({ code: 'CheckpointInvalid' }),
    );
  });
});
