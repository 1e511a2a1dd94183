import { execFileSync, spawn, spawnSync } from 'node:child_process';
import {
  chmodSync,
  chownSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import pg from 'pg';
import { afterAll, afterEach, describe, expect, test } from 'vitest';
import { embeddedStatus, openStore, stopEmbedded } from './index.ts';
import { isAlive } from './pidfile.ts';
import { serverFailure } from './server.ts';
import { newRunId, SPEC, TestHomes, userMessage } from './test-home.ts';

const homes = new TestHomes();
afterEach(() => homes.remove());
afterAll(() => homes.removeAll());

const index = import.meta.resolve('./index.ts');
const isRoot = process.getuid?.() === 0;

/** Opens the store, says so, and stays until it is killed. */
const HOLD = `
  import { openStore } from 'STORE';
  const store = await openStore({ home: process.argv[1] });
  console.log('open');
  setInterval(() => {}, 1000);
`;

async function pidOf(home: string): Promise<number> {
  const { pid } = await embeddedStatus(home);
  if (pid === null) throw new Error('no server runs');
  return pid;
}

/** Writes a run into the store of a home and returns its id. */
async function writeSomething(home: string): Promise<string> {
  const store = await openStore({ home });
  const runId = newRunId();
  await store.log.create(runId, SPEC);
  await store.close();
  return runId;
}

async function expectRun(home: string, runId: string): Promise<void> {
  const store = await openStore({ home });
  expect((await store.log.read(runId)).map((event) => event.type)).toEqual(['run.created']);
  await store.close();
}

describe('who stops the server', () => {
  test('the last process that leaves does, and its data is there at the next start', async () => {
    const home = homes.create();
    const first = await openStore({ home });
    const second = await openStore({ home });
    const pid = await pidOf(home);
    await first.close();
    await first.close();
    expect(await pidOf(home)).toBe(pid);
    const runId = newRunId();
    await second.log.create(runId, SPEC);
    await second.close();
    expect(await embeddedStatus(home)).toMatchObject({ running: false, pid: null });
    expect(isAlive(pid)).toBe(false);
    await expectRun(home, runId);
    expect(await stopEmbedded(home)).toBe(false);
  });

  test('a killed process leaves it to others, who find it and stop it', async () => {
    const home = await homes.initialised();
    const holder = homes.process(HOLD, [home]);
    expect(await holder.line()).toBe('open');
    const pid = await pidOf(home);
    await holder.kill('SIGKILL');
    expect(await embeddedStatus(home)).toMatchObject({ running: true, pid, version: '18.4' });
    const store = await openStore({ home });
    expect(await pidOf(home)).toBe(pid);
    await store.close();
    expect(isAlive(pid)).toBe(false);
  });

  test('stopEmbedded stops it under a process, whose next statement starts it again', async () => {
    const home = await homes.initialised();
    const store = await openStore({ home });
    const pid = await pidOf(home);
    expect(await stopEmbedded(home)).toBe(true);
    expect(isAlive(pid)).toBe(false);
    const runId = newRunId();
    await store.log.create(runId, SPEC);
    expect(await pidOf(home)).not.toBe(pid);
    await store.close();
  });
});

describe('processes that are killed', () => {
  test('the server is killed while processes use it: they go on, nothing is lost', async () => {
    const home = await homes.initialised();
    const store = await openStore({ home });
    const runId = newRunId();
    await store.log.create(runId, SPEC);
    const lease = await store.log.acquire(runId, 'w', 600_000);
    if (lease === null) throw new Error('not acquired');
    for (let round = 0; round < 3; round++) {
      // Killed in the middle of appends, at no particular point.
      const killed = (async () => {
        await new Promise((resolve) => setTimeout(resolve, 5 * round));
        process.kill(await pidOf(home), 'SIGKILL');
      })();
      for (let i = 0; i < 20; i++) await store.log.append(lease, [userMessage(`${round}.${i}`)]);
      await killed;
      // Backends outlive their postmaster for a moment and still answer: the next round needs a new one.
      do await store.log.row(runId);
      while ((await embeddedStatus(home)).pid === null);
    }
    const contents = (await store.log.read(runId)).flatMap((event) =>
      event.type === 'message.added' ? [event.data.message.content] : [],
    );
    // Exactly once each: an append whose connection broke is not written twice.
    expect(contents).toEqual(
      [0, 1, 2].flatMap((round) => Array.from({ length: 20 }, (_, i) => `${round}.${i}`)),
    );
    expect((await store.log.row(runId))?.head).toBe(61);
    await store.close();
  });

  test('Node and the server are both killed, and the pid now belongs to another program', async () => {
    const home = await homes.initialised();
    const runId = await writeSomething(home);
    const holder = homes.process(HOLD, [home]);
    await holder.line();
    const pid = await pidOf(home);
    process.kill(pid, 'SIGKILL');
    await holder.kill('SIGKILL');
    const pidFile = join(home, 'postgres', 'data', 'postmaster.pid');
    const other = spawn('sleep', ['1000']);
    writeFileSync(pidFile, readFileSync(pidFile, 'utf8').replace(String(pid), String(other.pid)));
    expect(await stopEmbedded(home)).toBe(false);
    await expectRun(home, runId);
    expect(isAlive(other.pid ?? -1)).toBe(true);
    other.kill();
  });

  test('the socket file is deleted: the server is replaced', async () => {
    const home = await homes.initialised();
    const holder = homes.process(HOLD, [home]);
    await holder.line();
    const pid = await pidOf(home);
    unlinkSync(join((await embeddedStatus(home)).socketDir ?? '', '.s.PGSQL.5432'));
    const store = await openStore({ home });
    expect(await pidOf(home)).not.toBe(pid);
    await store.close();
  });

  test('a server died before it wrote its pid file', async () => {
    const home = await homes.initialised();
    const pidFile = join(home, 'postgres', 'data', 'postmaster.pid');
    writeFileSync(pidFile, '');
    utimesSync(pidFile, 0, 0);
    await writeSomething(home);
  });

  test('initdb is killed in the middle: its rest is removed and the start is clean', async () => {
    const home = homes.create();
    const root = join(home, 'postgres');
    const starter = homes.process(HOLD, [home]);
    const draft = () => (existsSync(root) ? readdirSync(root) : []).find((n) => /^initdb-/.test(n));
    while (draft() === undefined || !existsSync(join(root, draft() ?? '', 'global')))
      await new Promise((resolve) => setTimeout(resolve, 2));
    await starter.kill('SIGKILL');
    expect(draft()).toBeDefined();
    // The orphaned initdb may write on for a moment; every start removes what it finds.
    do await writeSomething(home);
    while (draft() !== undefined);
    expect(readdirSync(root).sort()).toEqual(['data', 'server.log']);
  });
});

test('four processes that start at once share one server', async () => {
  const home = homes.create();
  const starters = [1, 2, 3, 4].map(() => homes.process(HOLD, [home]));
  for (const starter of starters) expect(await starter.line()).toBe('open');
  const pid = await pidOf(home);
  const store = await openStore({ home });
  expect(await pidOf(home)).toBe(pid);
  await store.close();
  expect(await pidOf(home)).toBe(pid);
  expect(readdirSync(join(home, 'postgres')).filter((name) => /^initdb-/.test(name))).toEqual([]);
});

describe('places', () => {
  test('a long home has its socket in a closed temporary folder, removed with the server', async () => {
    const home = homes.create('a-long-folder-name-'.repeat(6), 'and-"quotes" in ünïcödé');
    const store = await openStore({ home });
    const { socketDir } = await embeddedStatus(home);
    if (socketDir === null) throw new Error('no socket');
    expect(dirname(socketDir)).toBe(process.env.XDG_RUNTIME_DIR ?? tmpdir());
    expect(statSync(socketDir).mode & 0o777).toBe(0o700);
    const other = await openStore({ home });
    await other.close();
    await store.close();
    expect(existsSync(socketDir)).toBe(false);
  });

  test('nothing of it is open to others, and it does not listen on TCP', async () => {
    const home = await homes.initialised();
    const store = await openStore({ home });
    const { socketDir } = await embeddedStatus(home);
    const root = join(home, 'postgres');
    for (const path of [root, ...readdirSync(root).map((name) => join(root, name))])
      expect(statSync(path).mode & 0o077).toBe(0);
    expect(dirname(socketDir ?? '')).toBe(root);
    const client = new pg.Client({ host: socketDir ?? '', user: 'longhaul', database: 'postgres' });
    await client.connect();
    const { rows } = await client.query(
      `select name, setting from pg_settings
       where name in ('listen_addresses', 'fsync', 'synchronous_commit', 'full_page_writes') order by 1`,
    );
    await client.end();
    expect(rows.map(({ setting }) => setting)).toEqual(['on', 'on', '', 'on']);
    await store.close();
  });

  test('a copied home has a server of its own, a moved one keeps its server', async () => {
    const home = await homes.initialised();
    const runId = await writeSomething(home);
    const holder = homes.process(HOLD, [home]);
    await holder.line();
    const pid = await pidOf(home);
    const copy = homes.create();
    cpSync(home, copy, { recursive: true, filter: (path) => basename(path) !== '.s.PGSQL.5432' });
    await expectRun(copy, runId);
    expect(await pidOf(home)).toBe(pid);
    const moved = homes.create();
    renameSync(home, moved);
    expect(await pidOf(moved)).toBe(pid);
    await holder.kill('SIGKILL');
    expect(await stopEmbedded(moved)).toBe(true);
    await expectRun(moved, runId);
  });

  test('data that was deleted under its server does not come back from it', async () => {
    const home = await homes.initialised();
    const runId = await writeSomething(home);
    const holder = homes.process(HOLD, [home]);
    await holder.line();
    const pid = await pidOf(home);
    rmSync(join(home, 'postgres', 'data'), { recursive: true, force: true });
    const store = await openStore({ home });
    expect(await pidOf(home)).not.toBe(pid);
    expect(await store.log.row(runId)).toBeNull();
    await store.close();
    await holder.kill('SIGKILL');
    // It notices by itself that its data is gone, within a minute; the test does not wait for that.
    if (isAlive(pid)) process.kill(pid, 'SIGQUIT');
  });
});

describe.skipIf(!isRoot)('as root (needs a root shell)', () => {
  test('below a 0700 folder of root the data stays with root and the server is not root', async () => {
    const home = homes.create();
    chmodSync(dirname(home), 0o700);
    const store = await openStore({ home });
    expect(statSync(join(home, 'postgres', 'data')).uid).toBe(0);
    const status = readFileSync(`/proc/${await pidOf(home)}/uid_map`, 'utf8').trim();
    expect(Number(status.split(/\s+/)[0])).toBeGreaterThan(0);
    await store.close();
  });

  test('a normal user has the same, in a home of its own', async ({ skip }) => {
    const folder = mkdtempSync(join(tmpdir(), 'lh-store-test-user-'));
    chownSync(folder, 65534, 65534);
    const readable = spawnSync(
      process.execPath,
      ['-e', `import('STORE')`.replace('STORE', index)],
      {
        uid: 65534,
        gid: 65534,
        cwd: '/',
      },
    );
    if (readable.status !== 0) skip('this checkout is closed to other users');
    const home = join(folder, 'home');
    const user = homes.process(
      `
      import { openStore, embeddedStatus } from 'STORE';
      const store = await openStore({ home: process.argv[1] });
      await store.metrics.write({ job: 'j', step: 1, values: { uid: process.getuid() } });
      console.log(JSON.stringify(await store.metrics.read('j')));
      console.log((await embeddedStatus(process.argv[1])).pid);
      await store.close();
      `,
      [home],
      { uid: 65534, gid: 65534, env: { PATH: process.env.PATH, HOME: folder } },
    );
    expect(JSON.parse(await user.line())).toMatchObject([{ values: { uid: 65534 } }]);
    const pid = Number(await user.line());
    await user.end();
    expect(statSync(join(home, 'postgres', 'data')).uid).toBe(65534);
    expect(isAlive(pid)).toBe(false);
    rmSync(folder, { recursive: true, force: true });
  });

  test('where namespaces are forbidden it runs as an unprivileged user', async () => {
    const home = await homes.initialised();
    chmodSync(dirname(home), 0o700);
    const runId = await writeSomething(home);
    const bin = homes.create();
    mkdirSync(bin);
    writeFileSync(join(bin, 'unshare'), '#!/bin/sh\nexit 1\n', { mode: 0o755 });
    const env = { PATH: `${bin}:${process.env.PATH}` };
    const holder = homes.process(HOLD, [home], { env });
    await holder.line();
    const pid = await pidOf(home);
    const uids = /^Uid:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'));
    expect(Number(uids?.[1])).toBeGreaterThan(0);
    await holder.kill('SIGKILL');
    expect(await stopEmbedded(home)).toBe(true);
    // And back: what is written belongs to root again.
    await expectRun(home, runId);
    expect(statSync(join(home, 'postgres', 'data')).uid).toBe(0);
    const fresh = homes.process(HOLD, [homes.create()], { env });
    expect(await fresh.line()).toBe('open');
  });

  test('the home of a user is not taken over by root', async () => {
    const home = await homes.initialised();
    await writeSomething(home);
    execFileSync('chown', ['-R', '1234:1234', join(home, 'postgres', 'data')]);
    await expect(openStore({ home })).rejects.toMatchObject({ code: 'StoreReadOnly' });
    expect(statSync(join(home, 'postgres', 'data')).uid).toBe(1234);
  });
});

describe('what the user is told', () => {
  test('a home that is a file, or cannot be written', async () => {
    const home = homes.create();
    writeFileSync(home, '');
    await expect(openStore({ home })).rejects.toMatchObject({ code: 'ConfigInvalid' });
    const closed = homes.create();
    const attempt = homes.process(
      `
      import { openStore } from 'STORE';
      await openStore({ home: process.argv[1] }).catch((error) => console.log(error.code, error.next));
      `,
      [closed],
      isRoot ? { uid: 65534, gid: 65534 } : {},
    );
    if (!isRoot) chmodSync(dirname(closed), 0o500);
    expect(await attempt.line()).toMatch(/^StoreReadOnly .*--home/);
    await attempt.end();
    chmodSync(dirname(closed), 0o700);
  });

  test('a home where there can be none', async () => {
    await expect(openStore({ home: '/proc/longhaul/home' })).rejects.toMatchObject({
      next: expect.stringMatching(/--home/),
    });
  });

  test('a server that cannot start: its own words, and its log', async () => {
    const home = await homes.initialised();
    await writeSomething(home);
    writeFileSync(join(home, 'postgres', 'data', 'postgresql.auto.conf'), 'no_such_setting = 1');
    await expect(openStore({ home })).rejects.toMatchObject({
      code: 'StoreUnavailable',
      message: expect.stringMatching(/no_such_setting/),
      next: expect.stringMatching(/server\.log/),
    });
  });

  test('a disk that is full', () => {
    const words = 'PANIC:  could not write to file "pg_wal/xlogtemp.1": No space left on device';
    expect(serverFailure(words, 'start', '/home/postgres')).toMatchObject({ code: 'DiskFull' });
  });
});
