import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import type { Event } from '../../src/core/index.ts';
import { finished, heard, Stage } from './processes.ts';

let stage: Stage;
beforeEach(() => {
  stage = new Stage();
});
afterEach(() => stage.close());

const show = async (job: string) => {
  const { json } = await stage.run('show', job);
  return json as unknown as {
    job: { status: string };
    state: { phase: string; results: { before: unknown; after: unknown } };
    steps: { phase: string; step: number }[];
  };
};

it('a quickstart stopped by Ctrl-C goes on where it was, hosts the agent, and its run can be opened', async () => {
  const child = stage.start('quickstart', '--minutes', '0.3', '--seed', '3');
  const ending = finished(child);
  const said = await heard(child, /job \S+:/);
  const started = /job (\S+):/.exec(said)![1]!;
  await heard(child, /1\/\d+ {2}loss/);
  child.kill('SIGINT');
  const stopped = await ending;
  expect(stopped.json).toMatchObject({ error: { code: 'Interrupted' } });
  expect(stopped.stderr).toContain(`train --resume ${started} --home ${stage.home}`);
  expect((await show(started)).job.status).toBe('interrupted');

  const resumed = await stage.run('train', '--resume');
  expect(resumed.stderr).toContain(`job ${started} goes on`);
  const done = await show(started);
  expect(done.job.status).toBe('succeeded');
  expect(done.state.results).toMatchObject({
    before: { ungraded: 0, first: { count: 83 } },
    after: { ungraded: 0, first: { count: 83 } },
  });
  // No step is missing and none is twice, in the file and in the store.
  const warmup = done.steps.filter((step) => step.phase === 'warmup').map((step) => step.step);
  expect(warmup).toEqual(warmup.map((_, i) => i + 1));
  const lines = readFileSync(join(stage.home, 'jobs', started, 'metrics.jsonl'), 'utf8');
  expect(lines.trim().split('\n')).toHaveLength(done.steps.length);

  const hosted = (await stage.run('runs', '--kind', 'hosted')).json as unknown as {
    runs: { runId: string }[];
  };
  const shown = (await stage.run('show', hosted.runs[0]!.runId)).json as unknown as {
    events: Event[];
  };
  const completed = shown.events.filter((event) => event.type === 'model.completed');
  expect(completed.length).toBeGreaterThan(0);
  for (const event of completed) {
    expect(event.data).toMatchObject({
      completion: { provenance: 'exact' },
      tokens: { bytes: expect.any(Number) },
    });
  }
});

it('refuses to resume what is not there', async () => {
  const done = await stage.run('train', '--resume');
  expect(done.code).toBe(2);
  expect(done.json).toMatchObject({ error: { code: 'NotFound' } });
});
