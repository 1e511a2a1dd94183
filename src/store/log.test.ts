import { mkdirSync } from 'node:fs';
import { createConnection, createServer } from 'node:net';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import {
  type Event,
  fold,
  type Lease,
  type NewEvent,
  Redactor,
  Rng,
  type RunSpec,
} from '../core/index.ts';
import { embeddedStatus, MAX_EVENT_BYTES, openStore, type Store } from './index.ts';
import { newRunId, SPEC, TestHomes, userMessage } from './test-home.ts';

const homes = new TestHomes();
let home: string;
let store: Store;
beforeAll(async () => {
  home = await homes.initialised();
  store = await openStore({ home, redactor: new Redactor(['hunter2-hunter2']) });
});
afterAll(async () => {
  await store.close();
  await homes.removeAll();
});

async function newRun(spec: RunSpec = SPEC): Promise<string> {
  const runId = newRunId();
  await store.log.create(runId, spec);
  return runId;
}

async function newLease(): Promise<Lease> {
  const lease = await store.log.acquire(await newRun(), 'worker', 600_000);
  if (lease === null) throw new Error('not acquired');
  return lease;
}

const started: NewEvent = { type: 'run.started', data: { worker: 'worker', leaseToken: 1 } };

describe('append', () => {
  test('gives back exactly what is read later', async () => {
    const lease = await newLease();
    const appended = [
      ...(await store.log.append(lease, [
        started,
        userMessage('a\0b \ud800 "quoted" \\u0000 ünï 😀'),
      ])),
      ...(await store.log.append(lease, [userMessage('pass: hunter2-hunter2')])),
    ];
    expect(lease.head).toBe(4);
    const read = await store.log.read(lease.runId);
    expect(read.slice(1)).toEqual(appended);
    expect(read.map((event) => event.seq)).toEqual([1, 2, 3, 4]);
    expect(JSON.stringify(read)).not.toContain('hunter2');
    expect(fold(read).messages.map((message) => message.content)).toEqual([
      'a\uFFFDb \uFFFD "quoted" \\u0000 ünï 😀',
      'pass: [redacted:secret]',
    ]);
    expect(await store.log.read(lease.runId, 2, 3)).toEqual(appended.slice(0, 2));
    expect(await store.log.append(lease, [])).toEqual([]);
  });

  test('a stale head writes nothing', async () => {
    const lease = await newLease();
    const behind = { ...lease };
    await store.log.append(lease, [userMessage('first')]);
    await expect(store.log.append(behind, [userMessage('late')])).rejects.toMatchObject({
      code: 'LeaseLost',
    });
    expect(behind.head).toBe(1);
    expect(await store.log.read(lease.runId)).toHaveLength(2);
    await store.log.append(lease, [userMessage('second')]);
  });

  test('of two appends at once with one lease exactly one is written', async () => {
    const lease = await newLease();
    for (let i = 0; i < 20; i++) {
      const [a, b] = [{ ...lease }, { ...lease }];
      const results = await Promise.allSettled([
        store.log.append(a, [userMessage('a')]),
        store.log.append(b, [userMessage('b')]),
      ]);
      expect(results.map(({ status }) => status).sort()).toEqual(['fulfilled', 'rejected']);
      lease.head += 1;
    }
    expect((await store.log.row(lease.runId))?.head).toBe(21);
  });

  test('is all or nothing: one bad event, and none of them is written', async () => {
    const lease = await newLease();
    const large = userMessage('x'.repeat(MAX_EVENT_BYTES));
    await expect(store.log.append(lease, [userMessage('good'), large])).rejects.toMatchObject({
      code: 'Internal',
    });
    expect(await store.log.read(lease.runId)).toHaveLength(1);
    await store.log.append(lease, [userMessage('y'.repeat(MAX_EVENT_BYTES - 100))]);
  });

  test('is written once when the answer to it is lost', async () => {
    const { socketDir } = await embeddedStatus(home);
    const folder = join(home, 'proxy');
    mkdirSync(folder);
    let dropAnswers = 0;
    const proxy = createServer((client) => {
      const server = createConnection(join(socketDir ?? '', '.s.PGSQL.5432'));
      client.on('data', (chunk) => server.write(chunk));
      server.on('data', (chunk) => {
        // The server has answered, so the statement is committed; the client never hears of it.
        if (dropAnswers > 0 && chunk.includes('INSERT 0 2')) {
          dropAnswers -= 1;
          client.destroy();
          server.destroy();
        } else client.write(chunk);
      });
      client.on('close', () => server.destroy());
      server.on('close', () => client.destroy());
      client.on('error', () => {});
      server.on('error', () => {});
    });
    await new Promise<void>((resolve) => proxy.listen(join(folder, '.s.PGSQL.5432'), resolve));
    const remote = await openStore({
      home,
      databaseUrl: `postgres://longhaul@localhost/postgres?host=${folder}`,
    });
    const lease = await newLease();
    dropAnswers = 1;
    const events = await remote.log.append(lease, [started, userMessage('once')]);
    expect(dropAnswers).toBe(0);
    expect(events.map((event) => event.seq)).toEqual([2, 3]);
    expect(lease.head).toBe(3);
    expect(await store.log.read(lease.runId)).toHaveLength(3);
    await remote.close();
    await new Promise((resolve) => proxy.close(resolve));
  });
});

describe('projection', () => {
  const random: ((rng: Rng, i: number) => NewEvent)[] = [
    () => started,
    (_, i) => ({ type: 'run.resumed', data: { worker: 'w', leaseToken: i } }),
    (rng) => userMessage('m'.repeat(rng.int(0, 50))),
    (_, i) => ({
      type: 'model.requested',
      data: { callId: `m${i}`, model: 'm', step: i, attempt: 1 },
    }),
    (rng) => ({
      type: 'grade.recorded',
      data: {
        grader: 'g',
        reward:
          rng.float() < 0.5
            ? { status: 'ok', value: rng.normal(), components: {} }
            : { status: 'grader_error', value: null, components: {}, reason: 'r' },
      },
    }),
    () => ({
      type: 'run.paused',
      data: { error: { code: 'BudgetExceeded', class: 'pause', message: '', next: '' } },
    }),
    () => ({ type: 'run.cancelled', data: { by: 'me', reason: 'r' } }),
    (rng) => ({
      type: 'run.finished',
      data: { status: rng.pick(['succeeded', 'failed'] as const), summary: '' },
    }),
  ];

  async function expectEqual(runId: string): Promise<void> {
    const state = fold(await store.log.read(runId));
    expect(await store.log.row(runId)).toMatchObject({
      head: state.head,
      status: state.status,
      reward: state.reward?.value ?? null,
      createdAt: state.createdAt,
      updatedAt: state.updatedAt,
      task: state.spec.task.name,
      model: state.spec.model.ref,
      kind: state.spec.kind,
    });
  }

  test('equals the fold after every append of random sequences', async () => {
    for (let seed = 0; seed < 8; seed++) {
      const rng = Rng.of(seed, 'projection');
      const lease = await newLease();
      for (let i = 1; i <= 12; i++) {
        const batch = Array.from({ length: rng.int(1, 4) }, () => rng.pick(random)(rng, i));
        await store.log.append(lease, batch);
        await expectEqual(lease.runId);
      }
    }
  });

  test('equals the fold of runs that were written whole, and of new runs', async () => {
    const rng = Rng.of(1, 'whole');
    const runs = Array.from({ length: 30 }, (_, n) => ({
      runId: newRunId(),
      spec: { ...SPEC, kind: 'rollout' as const, seed: n },
      events: [
        ...Array.from({ length: rng.int(0, 6) }, (_, i) => rng.pick(random)(rng, i)),
        { type: 'run.finished', data: { status: 'succeeded', summary: '' } } as NewEvent,
      ],
    }));
    await store.log.writeRuns(runs);
    for (const { runId } of runs) await expectEqual(runId);
    const created = newRunId();
    await store.log.create(created, SPEC, [userMessage('task')]);
    await expectEqual(created);
    expect(await store.log.read(created)).toHaveLength(2);
  });
});

describe('runs written whole', () => {
  const finished: NewEvent = { type: 'run.finished', data: { status: 'succeeded', summary: '' } };

  test('go in all together or not at all, many megabytes too', async () => {
    const big = userMessage('z'.repeat(900_000));
    const runs = Array.from({ length: 12 }, () => ({
      runId: newRunId(),
      spec: SPEC,
      events: [big, finished],
    }));
    const taken = await newRun();
    await expect(
      store.log.writeRuns([...runs, { runId: taken, spec: SPEC, events: [finished] }]),
    ).rejects.toMatchObject({ code: 'ConfigInvalid', message: expect.stringContaining(taken) });
    for (const { runId } of runs) expect(await store.log.row(runId)).toBeNull();
    await store.log.writeRuns(runs);
    for (const { runId } of runs) expect((await store.log.row(runId))?.status).toBe('succeeded');
    expect(await store.log.read(taken)).toHaveLength(1);
  });

  test('must be whole', async () => {
    await expect(store.log.writeRun(newRunId(), SPEC, [started])).rejects.toMatchObject({
      code: 'Internal',
    });
    await store.log.writeRuns([]);
  });
});

describe('looking runs up', () => {
  test('an id that exists, or is none, is refused', async () => {
    const runId = await newRun();
    await expect(store.log.create(runId, SPEC)).rejects.toMatchObject({ code: 'ConfigInvalid' });
    await expect(store.log.create('../x', SPEC)).rejects.toMatchObject({ code: 'ConfigInvalid' });
  });

  test('by prefix, by suffix, newest, by kind and status', async () => {
    const runId = await newRun({ ...SPEC, kind: 'eval' });
    expect(await store.log.find(runId.slice(0, 20).toLowerCase())).toContain(runId);
    expect(await store.log.find(runId.slice(-6))).toEqual([runId]);
    expect(await store.log.find('%')).toEqual([]);
    expect(await store.log.find('')).toEqual([]);
    expect((await store.log.latest())?.runId).toBe(runId);
    expect((await store.log.list({ kind: 'eval', status: 'queued' })).map((r) => r.runId)).toEqual([
      runId,
    ]);
    expect(await store.log.list({ limit: 1, kind: 'eval', status: 'failed' })).toEqual([]);
    expect(await store.log.row(newRunId())).toBeNull();
    expect(await store.log.read(newRunId())).toEqual([]);
  });

  test('an event that a newer Longhaul wrote is refused on read', async () => {
    const lease = await newLease();
    await store.log.append(lease, [userMessage('old')]);
    const { Database } = await import('./database.ts');
    const database = await Database.embedded(home);
    await database.query({
      text: 'update longhaul.events set v = 9 where run_id = $1 and seq = 2',
      values: [lease.runId],
    });
    await database.close();
    await expect(store.log.read(lease.runId)).rejects.toMatchObject({ code: 'StoreTooNew' });
    const first: Event[] = await store.log.read(lease.runId, 1, 1);
    expect(first).toHaveLength(1);
  });
});

describe('inbox', () => {
  test('a key is taken once, before and after the holder moved it into the log', async () => {
    const lease = await newLease();
    const { runId } = lease;
    const stop = { key: 'stop-1', signal: 'stop' as const, data: { reason: 'hunter2-hunter2\0' } };
    await Promise.all([store.log.post(runId, stop), store.log.post(runId, stop)]);
    await store.log.post(runId, { key: 'a', signal: 'answer', data: undefined });
    const inbox = await store.log.inbox(runId);
    expect(inbox.map(({ key, signal, data }) => ({ key, signal, data }))).toEqual([
      { key: 'stop-1', signal: 'stop', data: { reason: '[redacted:secret]\uFFFD' } },
      { key: 'a', signal: 'answer', data: null },
    ]);
    await store.log.drain(lease, [inbox[0]!.id]);
    await store.log.post(runId, stop);
    expect((await store.log.inbox(runId)).map(({ key }) => key)).toEqual(['a']);
  });

  test('only the holder takes rows out, and only of its run', async () => {
    const lease = await newLease();
    const other = await newLease();
    await store.log.post(lease.runId, { key: 'k', signal: 'stop', data: {} });
    const [row] = await store.log.inbox(lease.runId);
    await store.log.drain(other, [row!.id]);
    await expect(
      store.log.drain({ ...lease, token: lease.token - 1 }, [row!.id]),
    ).rejects.toMatchObject({ code: 'LeaseLost' });
    expect(await store.log.inbox(lease.runId)).toHaveLength(1);
  });

  test('an unknown run has none', async () => {
    await expect(
      store.log.post(newRunId(), { key: 'k', signal: 'stop', data: {} }),
    ).rejects.toMatchObject({ code: 'NotFound' });
  });
});

describe('metrics and jobs', () => {
  test('a step written again replaces the first; figures that are not finite are left out', async () => {
    await store.metrics.write({ job: 'j1', step: 2, values: { loss: Number.NaN, reward: 0.5 } });
    await store.metrics.write({ job: 'j1', step: 1, values: { loss: 3 } });
    await store.metrics.write({ job: 'j1', step: 1, values: { loss: 2 } });
    expect((await store.metrics.read('j1')).map(({ step, values }) => [step, values])).toEqual([
      [1, { loss: 2 }],
      [2, { reward: 0.5 }],
    ]);
    expect(await store.metrics.read('j1', 2)).toHaveLength(1);
    expect(await store.metrics.read('none')).toEqual([]);
  });

  test('a job is created once, changed, found and listed', async () => {
    await store.jobs.create({ id: 'a', kind: 'train', spec: { key: 'hunter2-hunter2' } });
    await store.jobs.create({ id: 'b', kind: 'train', spec: null });
    await expect(store.jobs.create({ id: 'a', kind: 'train', spec: null })).rejects.toMatchObject({
      code: 'ConfigInvalid',
    });
    await store.jobs.update('a', { checkpoint: '/checkpoints/3' });
    await store.jobs.update('a', { status: 'interrupted' });
    expect(await store.jobs.get('a')).toMatchObject({
      spec: { key: '[redacted:secret]' },
      status: 'interrupted',
      checkpoint: '/checkpoints/3',
    });
    expect((await store.jobs.list({ kind: 'train' })).map(({ id }) => id)).toEqual(['a', 'b']);
    expect(await store.jobs.list({ kind: 'eval' })).toEqual([]);
    expect(await store.jobs.get('none')).toBeNull();
    await expect(store.jobs.update('none', {})).rejects.toMatchObject({ code: 'NotFound' });
  });
});
