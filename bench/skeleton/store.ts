import { ulid } from 'ulid';
import { fold, type NewEvent, type RunSpec } from '../../src/core/index.ts';
import { Database } from '../../src/store/database.ts';
import { openStore, type Store } from '../../src/store/index.ts';
import { quantile, type Row } from '../row.ts';

const APPENDS = 400;
const WARM_UP = 50;
const RESUME_EVENTS = 10_000;
const RESUMES = 15;

const SPEC: RunSpec = {
  kind: 'hosted',
  task: { name: 'bench', ref: 'bench' },
  agent: 'coder',
  model: { ref: 'bench/none' },
  seed: 1,
  budget: {},
};

/**
 * Rows `append` and `resume` of the skeleton's table, on the embedded Postgres of a home folder.
 * `append`: a result of about 2 KB (tool.completed and message.added) against one bare committed insert of
 * the same bytes, taken in turn on the same server.
 */
export async function rows(home: string): Promise<Row[]> {
  const store = await openStore({ home });
  const database = await Database.embedded(home);
  try {
    return [await appendRow(store, database), await resumeRow(store)];
  } finally {
    await database.close();
    await store.close();
  }
}

async function appendRow(store: Store, database: Database): Promise<Row> {
  const table = `bench_bare_${Date.now()}`;
  await database.query({
    text: `create table ${table} (id bigint generated always as identity primary key, data text not null)`,
  });
  const runId = ulid();
  await store.log.create(runId, SPEC);
  const lease = await store.log.acquire(runId, 'bench', 600_000);
  if (lease === null) throw new Error('the lease of a new run is free');
  const hosted: number[] = [];
  const bare: number[] = [];
  for (let i = 0; i < WARM_UP + APPENDS; i++) {
    const requested = toolRequested(i);
    await store.log.append(lease, [requested]);
    const pair = resultPair(i);
    const bytes = pair.map((event) => JSON.stringify(event)).join('\n');
    const append = async () => {
      const start = performance.now();
      await store.log.append(lease, pair);
      return performance.now() - start;
    };
    const insert = async () => {
      const start = performance.now();
      await database.query({
        name: 'bench.bare',
        text: `insert into ${table} (data) values ($1)`,
        values: [bytes],
      });
      return performance.now() - start;
    };
    // In turn first and second, so that neither always follows the other's flush.
    const [a, b] =
      i % 2 === 0 ? [await append(), await insert()] : swap(await insert(), await append());
    if (i < WARM_UP) continue;
    hosted.push(a);
    bare.push(b);
  }
  await store.log.release(lease);
  await database.query({ text: `drop table ${table}` });
  const p50 = quantile(hosted, 0.5);
  const baseline = quantile(bare, 0.5);
  const ratio = p50 / baseline;
  return {
    name: 'append',
    unit: 'ms',
    n: hosted.length,
    p50,
    p99: quantile(hosted, 0.99),
    value: ratio,
    baseline,
    ratio,
    bar: 'p50 ≤ 2x one bare committed insert',
    pass: ratio <= 2,
  };
}

async function resumeRow(store: Store): Promise<Row> {
  const runId = ulid();
  await store.log.writeRun(runId, SPEC, longRun(RESUME_EVENTS - 1));
  const times: number[] = [];
  for (let i = 0; i < RESUMES; i++) {
    const start = performance.now();
    const state = fold(await store.log.read(runId));
    times.push(performance.now() - start);
    if (state.head !== RESUME_EVENTS) throw new Error(`folded ${state.head} events`);
  }
  const p50 = quantile(times, 0.5);
  return {
    name: 'resume',
    unit: 'ms',
    n: times.length,
    p50,
    p99: quantile(times, 0.99),
    value: p50,
    bar: 'read and fold of 10,000 events of about 1 KB: p50 ≤ 300 ms',
    pass: p50 <= 300,
  };
}

function swap(b: number, a: number): [number, number] {
  return [a, b];
}

/** A run of whole steps, as an executor writes them, with about 1 KB an event; ends finished. */
function longRun(count: number): NewEvent[] {
  const events: NewEvent[] = [
    { type: 'run.started', data: { worker: 'bench', leaseToken: 1 } },
    { type: 'message.added', data: { message: { role: 'user', content: text(0, 1000) } } },
  ];
  for (let i = 0; events.length < count - 1; i++) {
    const message = {
      role: 'assistant' as const,
      content: text(i, 700),
      toolCalls: [{ callId: `call-${i}`, tool: 'shell', input: { command: text(i, 300) } }],
    };
    const step: NewEvent[] = [
      {
        type: 'model.requested',
        data: { callId: `model-${i}`, model: 'bench/none', step: i + 1, attempt: 1 },
      },
      {
        type: 'model.completed',
        data: {
          callId: `model-${i}`,
          completion: {
            message,
            finishReason: 'tool_calls',
            usage: { inputTokens: 3000, outputTokens: 250 },
            provenance: 'none',
          },
          latencyMs: 812,
        },
      },
      { type: 'message.added', data: { message } },
      toolRequested(i),
      ...resultPair(i),
    ];
    events.push(...step.slice(0, count - 1 - events.length));
  }
  events.push({ type: 'run.finished', data: { status: 'succeeded', summary: 'done' } });
  return events;
}

function toolRequested(i: number): NewEvent {
  return {
    type: 'tool.requested',
    data: {
      callId: `call-${i}`,
      tool: 'shell',
      input: { command: text(i, 300) },
      effect: 'workspace',
      idempotencyKey: `bench:call-${i}`,
      timeoutMs: 60_000,
    },
  };
}

function resultPair(i: number): [NewEvent, NewEvent] {
  const output = text(i, 900);
  return [
    {
      type: 'tool.completed',
      data: { callId: `call-${i}`, tool: 'shell', output, isError: false, durationMs: 12 },
    },
    {
      type: 'message.added',
      data: { message: { role: 'user', content: text(i + 1, 900) } },
    },
  ];
}

/** Lines as a test runner prints them: words, figures, quotes and line breaks. */
function text(seed: number, length: number): string {
  let out = '';
  for (let line = 0; out.length < length; line++)
    out += `tests/test_${(seed * 31 + line) % 97}.py:${line} "case ${(seed * 7919 + line * 104729) % 100003}" ok\n`;
  return out.slice(0, length);
}
