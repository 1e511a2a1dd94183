import pg from 'pg';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { Database } from './database.ts';
import { embeddedStatus, openStore, type Store } from './index.ts';
import { MIGRATIONS, migrate } from './migrations.ts';
import { newRunId, SPEC, TestHomes } from './test-home.ts';

const homes = new TestHomes();
let home: string;
let keeper: Store;
let admin: pg.Client;
let databases = 0;
let url: string;

// The embedded server plays the team's Postgres: each test has a database of its own on it.
beforeAll(async () => {
  home = await homes.initialised();
  keeper = await openStore({ home });
  const { socketDir } = await embeddedStatus(home);
  admin = new pg.Client({ host: socketDir ?? '', user: 'longhaul', database: 'postgres' });
  await admin.connect();
});
beforeEach(async () => {
  const { socketDir } = await embeddedStatus(home);
  const name = `team${databases++}`;
  await admin.query(`create database ${name}`);
  url = `postgres://longhaul@localhost/${name}?host=${socketDir}`;
});
afterAll(async () => {
  await admin.end();
  await keeper.close();
  await homes.removeAll();
});

async function versions(database: Database): Promise<number[]> {
  const rows = await database.query<{ version: number }>({
    text: 'select version from longhaul.schema_migrations order by 1',
  });
  return rows.map(({ version }) => version);
}

test('several processes that migrate at once do it once', async () => {
  const all = await Promise.all(Array.from({ length: 5 }, () => Database.connect(url)));
  await Promise.all(all.map((database) => migrate(database)));
  expect(await versions(all[0]!)).toEqual(MIGRATIONS.map(({ version }) => version));
  await Promise.all(all.map((database) => database.close()));
});

test('a migration that fails leaves the schema as it was', async () => {
  const database = await Database.connect(url);
  await migrate(database);
  const newest = MIGRATIONS.at(-1)!.version;
  const known = MIGRATIONS.map(({ version }) => version);
  const next = {
    version: newest + 1,
    name: 'next',
    sql: 'create table longhaul.extra (n integer);',
  };
  const broken = {
    version: newest + 2,
    name: 'broken',
    sql: 'create table longhaul.runs (n integer);',
  };
  await expect(migrate(database, [...MIGRATIONS, next, broken])).rejects.toMatchObject({
    message: expect.stringMatching(/already exists/),
  });
  expect(await versions(database)).toEqual(known);
  await migrate(database, [...MIGRATIONS, next]);
  expect(await versions(database)).toEqual([...known, newest + 1]);
  await database.query({ text: 'select n from longhaul.extra' });
  await database.close();
});

test('a database that a newer Longhaul migrated is refused', async () => {
  const store = await openStore({ home, databaseUrl: url });
  await store.close();
  const database = await Database.connect(url);
  await database.query({
    text: `insert into longhaul.schema_migrations (version, name) values (1000, 'future')`,
  });
  await database.close();
  await expect(openStore({ home, databaseUrl: url })).rejects.toMatchObject({
    code: 'StoreTooNew',
    message: expect.stringContaining('1000'),
    next: expect.stringMatching(/Update Longhaul/),
  });
});

describe('a Postgres given by URL', () => {
  test('holds runs like the embedded one, and is not stopped', async () => {
    const pid = (await embeddedStatus(home)).pid;
    const store = await openStore({ home, databaseUrl: url });
    const runId = newRunId();
    await store.log.create(runId, SPEC);
    expect((await store.log.row(runId))?.status).toBe('queued');
    expect(await keeper.log.row(runId)).toBeNull();
    await store.close();
    expect((await embeddedStatus(home)).pid).toBe(pid);
  });

  test('refusals say what to do, and never the password', async () => {
    const missing = url.replace(/team\d+/, 'nowhere').replace('longhaul@', 'longhaul:s3cr3t-pw@');
    await expect(openStore({ home, databaseUrl: missing })).rejects.toMatchObject({
      code: 'ConfigInvalid',
      message: expect.not.stringContaining('s3cr3t'),
    });
    await expect(
      openStore({ home, databaseUrl: 'postgres://me:s3cr3t-pw@127.0.0.1:1/x' }),
    ).rejects.toMatchObject({
      code: 'StoreUnavailable',
      message: expect.not.stringContaining('s3cr3t'),
      next: expect.stringMatching(/DATABASE_URL/),
    });
    for (const wrong of ['not a url', 'mysql://me:s3cr3t@host/x', 'postgres://[s3cr3t'])
      await expect(openStore({ home, databaseUrl: wrong })).rejects.toMatchObject({
        code: 'ConfigInvalid',
        message: expect.not.stringContaining('s3cr3t'),
      });
  });

  test('a user that may not create a schema is told so', async () => {
    await admin.query(`create role guest_${databases} login`);
    const guest = url.replace('longhaul@', `guest_${databases}@`);
    await expect(openStore({ home, databaseUrl: guest })).rejects.toMatchObject({
      code: 'ConfigInvalid',
      next: expect.stringMatching(/schema/),
    });
  });
});
