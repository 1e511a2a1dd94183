import pg from 'pg';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { embeddedStatus, type FollowedEvent, openStore, type Store } from './index.ts';
import { newRunId, SPEC, TestHomes, userMessage } from './test-home.ts';

const homes = new TestHomes();
let home: string;
let store: Store;
beforeAll(async () => {
  home = await homes.initialised();
  store = await openStore({ home });
});
afterAll(async () => {
  await store.close();
  await homes.removeAll();
});

/** The next `count` events behind a cursor. */
async function take(count: number, from: string, runId?: string): Promise<FollowedEvent[]> {
  const out: FollowedEvent[] = [];
  for await (const item of store.log.follow({ from, ...(runId === undefined ? {} : { runId }) })) {
    out.push(item);
    if (out.length === count) break;
  }
  return out;
}

const ids = (items: FollowedEvent[]) => items.map(({ event }) => `${event.runId}#${event.seq}`);

async function client(): Promise<pg.Client> {
  const { socketDir } = await embeddedStatus(home);
  const connection = new pg.Client({
    host: socketDir ?? '',
    user: 'longhaul',
    database: 'postgres',
  });
  await connection.connect();
  return connection;
}

test('what is in flight holds back what was committed after it began: no event is skipped', async () => {
  const from = await store.log.end();
  const [slow, fast] = [newRunId(), newRunId()];
  const writer = await client();
  await writer.query('begin');
  const insert = (runId: string) =>
    writer.query(
      `insert into longhaul.events (run_id, seq, type, v, data, at)
       values ($1, 1, 'run.created', 1, $2, now())`,
      [runId, JSON.stringify(SPEC)],
    );
  await insert(slow);
  await store.log.create(fast, SPEC);
  const seen: FollowedEvent[] = [];
  const abort = new AbortController();
  const following = (async () => {
    for await (const item of store.log.follow({ from, signal: abort.signal })) {
      seen.push(item);
      if (seen.length === 2) abort.abort();
    }
  })();
  // Several rounds of polling and a notification: the committed event must not be shown before the other.
  await new Promise((resolve) => setTimeout(resolve, 1200));
  expect(seen).toEqual([]);
  await writer.query('commit');
  await following;
  expect(ids(seen)).toEqual([`${slow}#1`, `${fast}#1`]);
  await writer.end();
});

test('many writers at once: every event is seen once, in an order that can be resumed anywhere', async () => {
  const from = await store.log.end();
  const runs = Array.from({ length: 6 }, newRunId);
  const following = take(6 * 21, from);
  await Promise.all(
    runs.map(async (runId) => {
      await store.log.create(runId, SPEC);
      const lease = await store.log.acquire(runId, 'w', 600_000);
      if (lease === null) throw new Error('not acquired');
      for (let i = 0; i < 20; i++) await store.log.append(lease, [userMessage(`${i}`)]);
    }),
  );
  const seen = await following;
  expect(new Set(ids(seen)).size).toBe(6 * 21);
  for (const runId of runs) {
    const seqs = seen.filter(({ event }) => event.runId === runId).map(({ event }) => event.seq);
    expect(seqs).toEqual(Array.from({ length: 21 }, (_, i) => i + 1));
  }
  const middle = seen[50]!;
  expect(ids(await take(10, middle.cursor))).toEqual(ids(seen.slice(51, 61)));
  const [one] = runs;
  expect(ids(await take(21, from, one))).toEqual(
    Array.from({ length: 21 }, (_, i) => `${one}#${i + 1}`),
  );
});

test('pages: a transaction larger than one page is seen whole', async () => {
  const from = await store.log.end();
  const events = Array.from({ length: 1300 }, (_, i) => userMessage(`${i}`));
  const runId = newRunId();
  await store.log.writeRun(runId, SPEC, [
    ...events,
    { type: 'run.finished', data: { status: 'succeeded', summary: '' } },
  ]);
  const seen = await take(1302, from);
  expect(seen.map(({ event }) => event.seq)).toEqual(Array.from({ length: 1302 }, (_, i) => i + 1));
});

test('goes on over a killed server', async () => {
  const from = await store.log.end();
  const [before, after] = [newRunId(), newRunId()];
  const following = take(2, from);
  await store.log.create(before, SPEC);
  process.kill((await embeddedStatus(home)).pid ?? 0, 'SIGKILL');
  await store.log.create(after, SPEC);
  expect(ids(await following)).toEqual([`${before}#1`, `${after}#1`]);
});

test('an abort ends it while it waits, and a wrong cursor is refused', async () => {
  const abort = new AbortController();
  const following = (async () => {
    for await (const _ of store.log.follow({ from: await store.log.end(), signal: abort.signal }))
      expect.unreachable();
  })();
  setTimeout(() => abort.abort(), 50);
  await following;
  await expect(take(1, "0'; drop table")).rejects.toMatchObject({ code: 'ConfigInvalid' });
});
