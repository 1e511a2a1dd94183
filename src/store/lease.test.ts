import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { openStore, type Store } from './index.ts';
import { newRunId, SPEC, TestHomes, userMessage } from './test-home.ts';

const homes = new TestHomes();
const workers = new TestHomes();
let home: string;
let store: Store;
beforeAll(async () => {
  home = await homes.initialised();
  store = await openStore({ home });
});
afterEach(() => workers.remove());
afterAll(async () => {
  await store.close();
  await homes.removeAll();
});

async function newRun(): Promise<string> {
  const runId = newRunId();
  await store.log.create(runId, SPEC);
  return runId;
}

async function acquired(runId: string, worker: string, ttlMs: number) {
  const lease = await store.log.acquire(runId, worker, ttlMs);
  if (lease === null) throw new Error('not acquired');
  return lease;
}

/** Waits until the lease of a run has expired, however slow the machine is. */
async function takeOver(runId: string, worker: string) {
  for (;;) {
    const lease = await store.log.acquire(runId, worker, 600_000);
    if (lease !== null) return lease;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** A worker in a process of its own: takes the lease, then appends without end, or when it is told. */
const WORKER = `
  import { openStore } from 'STORE';
  const [, home, runId, ttl] = process.argv;
  const store = await openStore({ home });
  const lease = await store.log.acquire(runId, 'worker-' + process.pid, Number(ttl));
  console.log(lease === null ? 'refused' : 'acquired');
  for (let i = 0; lease !== null; i++) {
    try {
      await store.log.append(lease, [
        { type: 'message.added', data: { message: { role: 'user', content: 'old ' + i } } },
      ]);
      console.log('appended ' + lease.head);
    } catch (error) {
      console.log(error.code);
      break;
    }
  }
  const renewed = await store.log.renew(lease, 1000).then(() => 'renewed', (error) => error.code);
  console.log('renew ' + renewed);
  await store.close();
`;

test('one holder at a time; a renewed lease stays, a released one is free, the token grows', async () => {
  const runId = await newRun();
  const first = await acquired(runId, 'a', 600_000);
  expect(await store.log.acquire(runId, 'b', 600_000)).toBeNull();
  expect((await store.log.row(runId))?.worker).toBe('a');
  await store.log.renew(first, 600_000);
  await store.log.release(first);
  expect((await store.log.row(runId))?.worker).toBeNull();
  await expect(store.log.renew(first, 600_000)).rejects.toMatchObject({ code: 'LeaseLost' });
  await expect(store.log.append(first, [userMessage('late')])).rejects.toMatchObject({
    code: 'LeaseLost',
  });
  const second = await acquired(runId, 'b', 600_000);
  expect(second.token).toBe(first.token + 1);
  expect(second.head).toBe(1);
  // A late release of the first holder does not free the second one's lease.
  await store.log.release(first);
  expect((await store.log.row(runId))?.worker).toBe('b');
  await expect(store.log.acquire(newRunId(), 'c', 1)).rejects.toMatchObject({ code: 'NotFound' });
});

test('an expired lease cannot append, can be renewed while nobody took it, and is lost once taken', async () => {
  const runId = await newRun();
  const lease = await acquired(runId, 'a', 0);
  await expect(store.log.append(lease, [userMessage('x')])).rejects.toMatchObject({
    code: 'LeaseLost',
  });
  await store.log.renew(lease, 600_000);
  await store.log.append(lease, [userMessage('y')]);
  await store.log.renew(lease, 0);
  const next = await takeOver(runId, 'b');
  expect(next).toMatchObject({ token: lease.token + 1, head: 2 });
  await expect(store.log.renew(lease, 600_000)).rejects.toMatchObject({ code: 'LeaseLost' });
});

test('of many workers that want an expired lease one gets it', async () => {
  const runId = await newRun();
  await acquired(runId, 'dead', 0);
  const results = await Promise.all(
    Array.from({ length: 8 }, (_, i) => store.log.acquire(runId, `w${i}`, 600_000)),
  );
  expect(results.filter((lease) => lease !== null)).toHaveLength(1);
});

test('a worker that is stopped and wakes up after another took over writes nothing', async () => {
  const runId = await newRun();
  const worker = workers.process(WORKER, [home, runId, '1500']);
  expect(await worker.line()).toBe('acquired');
  expect(await worker.line()).toBe('appended 2');
  worker.signal('SIGSTOP');
  const lease = await takeOver(runId, 'new');
  const before = lease.head;
  await store.log.append(lease, [userMessage('new')]);
  worker.signal('SIGCONT');
  let line = await worker.line();
  while (line.startsWith('appended')) line = await worker.line();
  expect(line).toBe('LeaseLost');
  expect(await worker.line()).toBe('renew LeaseLost');
  await worker.end();
  const events = await store.log.read(runId);
  expect(events).toHaveLength(before + 1);
  expect(events.at(-1)).toMatchObject({ data: { message: { content: 'new' } } });
});

test('a worker that is killed leaves a whole log, from which the next one goes on', async () => {
  const runId = await newRun();
  const worker = workers.process(WORKER, [home, runId, '1500']);
  expect(await worker.line()).toBe('acquired');
  let confirmed = 1;
  while (confirmed < 10) confirmed = Number((await worker.line()).split(' ')[1]);
  await worker.kill('SIGKILL');
  const lease = await takeOver(runId, 'new');
  // Everything that was confirmed is there; at most the append in flight comes on top.
  expect(lease.head).toBeGreaterThanOrEqual(confirmed);
  const [next] = await store.log.append(lease, [userMessage('new')]);
  expect(next?.seq).toBe(lease.head);
  const seqs = (await store.log.read(runId)).map((event) => event.seq);
  expect(seqs).toEqual(Array.from({ length: lease.head }, (_, i) => i + 1));
});
