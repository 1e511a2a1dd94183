import { LonghaulError } from '../core/index.ts';
import type { Database, Session } from './database.ts';

/** A released migration never changes; a new version is a new entry at the end. */
export interface Migration {
  version: number;
  name: string;
  sql: string;
}

export const MIGRATIONS: readonly Migration[] = [
  {
    version: 1,
    name: 'runs, events, inbox, metrics, jobs',
    sql: `
      create table longhaul.runs (
        run_id text collate "C" primary key,
        kind text not null,
        status text not null,
        head integer not null,
        task text not null,
        agent text not null,
        model text not null,
        seed bigint not null,
        reward double precision,
        last_step integer not null default 0,
        worker text,
        lease_token bigint not null default 0,
        lease_until timestamptz,
        created_at timestamptz not null,
        updated_at timestamptz not null
      ) with (fillfactor = 70);
      create index runs_by_kind on longhaul.runs (kind, run_id);

      create table longhaul.events (
        run_id text collate "C" not null,
        seq integer not null,
        type text not null,
        v smallint not null,
        data jsonb not null,
        at timestamptz not null,
        -- The transaction that wrote it: followers read in this order, behind the oldest one in flight.
        xid xid8 not null default pg_current_xact_id(),
        primary key (run_id, seq)
      );
      create index events_by_xid on longhaul.events (xid);

      create table longhaul.run_inbox (
        id bigint generated always as identity primary key,
        run_id text collate "C" not null references longhaul.runs,
        key text not null,
        signal text not null,
        data jsonb not null,
        posted_at timestamptz not null default now(),
        taken_at timestamptz,
        unique (run_id, key)
      );

      create table longhaul.metrics (
        job text collate "C" not null,
        step integer not null,
        values jsonb not null,
        at timestamptz not null default now(),
        primary key (job, step)
      );

      create table longhaul.jobs (
        id text collate "C" primary key,
        kind text not null,
        spec jsonb not null,
        status text not null,
        checkpoint text,
        created_at timestamptz not null default now(),
        updated_at timestamptz not null default now()
      );
    `,
  },
  {
    version: 2,
    name: 'layers that logs name',
    sql: `
      create index events_of_layers on longhaul.events ((data->>'layer'))
        where type = 'workspace.saved';
    `,
  },
];

/** Serialises migrations of several processes: any constant that nothing else locks. */
const MIGRATION_LOCK = '7310579613902812';

/**
 * Brings the schema to the newest version, one process at a time, all or nothing.
 * `StoreTooNew` when a newer Longhaul has migrated it: nothing is touched.
 */
export async function migrate(
  database: Database,
  migrations: readonly Migration[] = MIGRATIONS,
): Promise<void> {
  const newest = migrations.at(-1)?.version ?? 0;
  if (check(await installedVersion(database), newest)) return;
  await database.transaction(async (session) => {
    await session.query({ text: `select pg_advisory_xact_lock(${MIGRATION_LOCK})` });
    await session.query({ text: 'create schema if not exists longhaul' });
    await session.query({
      text: `create table if not exists longhaul.schema_migrations (
        version integer primary key, name text not null, applied_at timestamptz not null default now())`,
    });
    const installed = await installedVersion(session);
    if (check(installed, newest)) return;
    for (const { version, name, sql } of migrations) {
      if (version <= installed) continue;
      await session.query({ text: sql });
      await session.query({
        text: 'insert into longhaul.schema_migrations (version, name) values ($1, $2)',
        values: [version, name],
      });
    }
  });
}

function check(installed: number, newest: number): boolean {
  if (installed > newest)
    throw new LonghaulError(
      'StoreTooNew',
      `the database has schema version ${installed}, this Longhaul knows ${newest}`,
    );
  return installed === newest;
}

async function installedVersion(on: Pick<Session, 'query'>): Promise<number> {
  const [table] = await on.query<{ exists: boolean }>({
    text: `select to_regclass('longhaul.schema_migrations') is not null as exists`,
  });
  if (table?.exists !== true) return 0;
  const rows = await on.query<{ version: number | null }>({
    text: 'select max(version) as version from longhaul.schema_migrations',
  });
  return rows[0]?.version ?? 0;
}
