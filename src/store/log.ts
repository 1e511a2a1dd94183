import {
  type Event,
  type InboxRow,
  type LayerNames,
  type Lease,
  LonghaulError,
  type NewEvent,
  type Redactor,
  RunId,
  type RunKind,
  type RunLog,
  type RunRow,
  type RunSpec,
  type RunStatus,
} from '../core/index.ts';
import { build, type Database } from './database.ts';
import {
  decode,
  type EncodedEvent,
  EVENT_COLUMNS,
  EVENT_ROWS,
  type EventRow,
  encode,
  projectionChange,
  storable,
} from './events.ts';
import { codeOf } from './failures.ts';
import { type FollowedEvent, Follower, type FollowOptions } from './follow.ts';
import { type FinishedRun, insertRuns } from './rollouts.ts';

/*
 * One statement: the run's row is moved on if token, head and time of the lease still hold, and only then
 * the events go in. Waiting on a row that another holder changes ends with a second look at all three.
 */
const APPEND = {
  name: 'longhaul.append',
  text: `
    with fenced as (
      update longhaul.runs set
        head = head + $4,
        status = coalesce($5, status),
        reward = case when $6 then $7::float8 else reward end,
        last_step = coalesce($8::int, last_step),
        updated_at = clock_timestamp()
      where run_id = $1 and lease_token = $2 and head = $3 and lease_until > clock_timestamp()
      returning run_id, updated_at
    )
    insert into longhaul.events (run_id, seq, type, v, data, at)
    select fenced.run_id, e.seq, e.type, e.v, e.data, fenced.updated_at
    from fenced, jsonb_to_recordset($9::jsonb) as e (seq int, type text, v smallint, data jsonb)
    returning at`,
};

const READ = {
  name: 'longhaul.read',
  text: `
    select ${EVENT_COLUMNS} from longhaul.events
    where run_id = $1 and seq >= $2 and seq <= $3 order by seq`,
};

const MAX_SEQ = 2_147_483_647;
const RUN_COLUMNS = [
  'run_id',
  'kind',
  'status',
  'head',
  'task',
  'model',
  'reward',
  'created_at',
  'updated_at',
] as const;

/**
 * `RunLog` on Postgres. Beside the port: whole finished runs in batches, followers, and look-ups for
 * people. Every payload passes the redactor before it is stored.
 */
export class PostgresRunLog implements RunLog, LayerNames {
  readonly #database: Database;
  readonly #redactor: Redactor;
  readonly #follower: Follower;

  constructor(database: Database, redactor: Redactor) {
    this.#database = database;
    this.#redactor = redactor;
    this.#follower = new Follower(database);
  }

  async create(runId: string, spec: RunSpec, more: NewEvent[] = []): Promise<void> {
    await this.#insert([{ runId, spec, events: more }]);
  }

  /** Writes one whole run, `run.created` excluded: it comes from the spec. See `writeRuns`. */
  async writeRun(runId: string, spec: RunSpec, events: readonly NewEvent[]): Promise<void> {
    await this.writeRuns([{ runId, spec, events }]);
  }

  /**
   * Writes whole finished runs in one transaction: all or none. Nobody ever holds a lease on them.
   * `Internal` when a run does not end with a final event; usage error when an id exists.
   */
  async writeRuns(runs: readonly FinishedRun[]): Promise<void> {
    for (const { runId, events } of runs) {
      const last = events.at(-1)?.type;
      if (last !== 'run.finished' && last !== 'run.cancelled')
        throw new LonghaulError(
          'Internal',
          `run ${runId} is written whole but ends with ${last ?? 'nothing'}, not with run.finished`,
        );
    }
    await this.#insert(runs);
  }

  async #insert(runs: readonly FinishedRun[]): Promise<void> {
    if (runs.length === 0) return;
    for (const { runId } of runs) {
      if (!RunId.safeParse(runId).success)
        throw new LonghaulError('ConfigInvalid', `${JSON.stringify(runId)} is not a ULID`);
    }
    await insertRuns(this.#database, this.#redactor, runs);
    this.#follower.notify();
  }

  async acquire(runId: string, worker: string, ttlMs: number): Promise<Lease | null> {
    const rows = await this.#database.query<{ lease_token: string; head: number }>({
      name: 'longhaul.acquire',
      text: `
        update longhaul.runs set
          lease_token = lease_token + 1, worker = $2,
          lease_until = clock_timestamp() + $3::float8 * interval '1 millisecond'
        where run_id = $1 and (lease_until is null or lease_until <= clock_timestamp())
        returning lease_token, head`,
      values: [runId, worker, ttlMs],
    });
    const taken = rows[0];
    if (taken !== undefined)
      return { runId, worker, token: Number(taken.lease_token), head: taken.head };
    if ((await this.row(runId)) === null) throw unknownRun(runId);
    return null;
  }

  /** Frees the lease if this worker still holds it. Its token stays spent: late appends are refused once another holds it. */
  async evict(runId: string, worker: string): Promise<void> {
    await this.#database.query({
      name: 'longhaul.evict',
      text: `
        update longhaul.runs set lease_until = clock_timestamp()
        where run_id = $1 and worker = $2 and lease_until > clock_timestamp()`,
      values: [runId, worker],
    });
  }

  async renew(lease: Lease, ttlMs: number): Promise<void> {
    // An expired lease that nobody took is still ours: the token says so.
    const rows = await this.#database.query({
      name: 'longhaul.renew',
      text: `
        update longhaul.runs
        set lease_until = clock_timestamp() + $3::float8 * interval '1 millisecond'
        where run_id = $1 and lease_token = $2 and lease_until is not null returning 1`,
      values: [lease.runId, lease.token, ttlMs],
    });
    if (rows.length === 0) throw leaseLost(lease);
  }

  async release(lease: Lease): Promise<void> {
    await this.#database.query({
      name: 'longhaul.release',
      text: `
        update longhaul.runs set lease_until = null, worker = null
        where run_id = $1 and lease_token = $2`,
      values: [lease.runId, lease.token],
    });
  }

  /**
   * See the port. A connection lost in the middle does not make the append happen twice: under our token
   * nobody else moves the head, so a head that has moved on was moved by the first try.
   */
  async append(lease: Lease, events: readonly NewEvent[]): Promise<Event[]> {
    if (events.length === 0) return [];
    const encoded = events.map((event) => encode(event, this.#redactor));
    const change = projectionChange(encoded.map(({ event }) => event));
    let repeated = false;
    const rows = await this.#database.query<{ at: Date }>(
      {
        ...APPEND,
        values: [
          lease.runId,
          lease.token,
          lease.head,
          encoded.length,
          change.status,
          change.graded,
          change.reward,
          change.step,
          eventsJson(encoded, lease.head),
        ],
      },
      () => {
        repeated = true;
      },
    );
    const before = lease.head;
    const at = rows[0]?.at;
    if (at === undefined) {
      if (!repeated || !(await this.#headIs(lease, before + encoded.length)))
        throw leaseLost(lease);
      lease.head = before + encoded.length;
      return this.read(lease.runId, before + 1, lease.head);
    }
    lease.head = before + encoded.length;
    this.#follower.notify();
    const time = at.toISOString();
    return encoded.map(
      ({ event, v }, i) =>
        ({ ...event, runId: lease.runId, seq: before + 1 + i, at: time, v }) as Event,
    );
  }

  async #headIs(lease: Lease, head: number): Promise<boolean> {
    const rows = await this.#database.query({
      text: 'select 1 from longhaul.runs where run_id = $1 and lease_token = $2 and head = $3',
      values: [lease.runId, lease.token, head],
    });
    return rows.length === 1;
  }

  async read(runId: string, from = 1, to = MAX_SEQ): Promise<Event[]> {
    const rows = await this.#database.query<EventRow>({
      ...READ,
      ...EVENT_ROWS,
      values: [runId, from, to],
    });
    return rows.map(decode);
  }

  async row(runId: string): Promise<RunRow | null> {
    const rows = await this.#database.run(this.#rows().where('run_id', '=', runId).compile());
    return rows[0] === undefined ? null : runRow(rows[0]);
  }

  /** Newest first; 50 unless `limit` says otherwise. */
  async list(
    filter: { kind?: RunKind; status?: RunStatus; limit?: number } = {},
  ): Promise<RunRow[]> {
    let query = this.#rows()
      .orderBy('run_id', 'desc')
      .limit(filter.limit ?? 50);
    if (filter.kind !== undefined) query = query.where('kind', '=', filter.kind);
    if (filter.status !== undefined) query = query.where('status', '=', filter.status);
    return (await this.#database.run(query.compile())).map(runRow);
  }

  /** Ids that begin or end with these characters, in any case; at most 20, newest first. */
  async find(part: string): Promise<string[]> {
    const text = part.toUpperCase();
    if (!/^[0-9A-Z]{1,26}$/.test(text)) return [];
    const rows = await this.#database.run(
      build
        .selectFrom('longhaul.runs')
        .select('run_id')
        .where((on) => on.or([on('run_id', 'like', `${text}%`), on('run_id', 'like', `%${text}`)]))
        .orderBy('run_id', 'desc')
        .limit(20)
        .compile(),
    );
    return rows.map((row) => row.run_id);
  }

  async namedLayers(): Promise<ReadonlySet<string>> {
    const rows = await this.#database.query<{ layer: string }>({
      name: 'longhaul.named_layers',
      text: `
        select distinct data->>'layer' as layer from longhaul.events
        where type = 'workspace.saved'`,
    });
    return new Set(rows.map(({ layer }) => layer));
  }

  /** The newest run (of a kind), or null in an empty store. */
  async latest(kind?: RunKind): Promise<RunRow | null> {
    const rows = await this.list({ limit: 1, ...(kind === undefined ? {} : { kind }) });
    return rows[0] ?? null;
  }

  /** NotFound for an unknown run. See the port. */
  async post(
    runId: string,
    signal: { key: string; signal: InboxRow['signal']; data: unknown },
  ): Promise<void> {
    const data = JSON.stringify(this.#redactor.json(storable(signal.data ?? null)));
    try {
      await this.#database.run(
        build
          .insertInto('longhaul.run_inbox')
          .values({ run_id: runId, key: signal.key, signal: signal.signal, data, taken_at: null })
          .onConflict((conflict) => conflict.columns(['run_id', 'key']).doNothing())
          .compile(),
      );
    } catch (thrown) {
      if (codeOf((thrown as Error).cause) === '23503') throw unknownRun(runId);
      throw thrown;
    }
  }

  async inbox(runId: string): Promise<InboxRow[]> {
    const rows = await this.#database.run(
      build
        .selectFrom('longhaul.run_inbox')
        .select(['id', 'key', 'signal', 'data'])
        .where('run_id', '=', runId)
        .where('taken_at', 'is', null)
        .orderBy('id')
        .compile(),
    );
    return rows.map((row) => ({
      id: Number(row.id),
      key: row.key,
      signal: row.signal as InboxRow['signal'],
      data: row.data,
    }));
  }

  /** The rows' keys stay, without their data: a signal that is posted again later is still dropped. */
  async drain(lease: Lease, ids: readonly number[]): Promise<void> {
    const rows = await this.#database.query<{ held: boolean }>({
      name: 'longhaul.drain',
      text: `
        with held as (select 1 from longhaul.runs where run_id = $1 and lease_token = $2 for share),
        taken as (
          update longhaul.run_inbox set taken_at = now(), data = 'null'
          where run_id = $1 and id = any($3::bigint[]) and exists (select from held)
          returning 1
        )
        select exists (select from held) as held`,
      values: [lease.runId, lease.token, ids],
    });
    if (rows[0]?.held !== true) throw leaseLost(lease);
  }

  /** A cursor behind which every event that is committed from now on will appear. */
  end(): Promise<string> {
    return this.#follower.end();
  }

  /**
   * Events of all runs, or of one, in cursor order, and then those that come, until `signal` aborts. No
   * event is skipped, whatever the order in which transactions end: one becomes visible only when all that
   * began before it have ended. Goes on after a lost connection.
   */
  follow(options: FollowOptions = {}): AsyncGenerator<FollowedEvent, void, undefined> {
    return this.#follower.follow(options);
  }

  #rows() {
    return build
      .selectFrom('longhaul.runs')
      .select([...RUN_COLUMNS])
      .select((on) =>
        on
          .case()
          .when('lease_until', '>', on.fn<Date>('clock_timestamp'))
          .then(on.ref('worker'))
          .else(null)
          .end()
          .as('worker'),
      );
  }
}

function eventsJson(events: readonly EncodedEvent[], head: number): string {
  const items = events.map(
    ({ event, v, json }, i) =>
      `{"seq":${head + 1 + i},"type":"${event.type}","v":${v},"data":${json}}`,
  );
  return `[${items.join(',')}]`;
}

function runRow(row: {
  run_id: string;
  kind: string;
  status: string;
  head: number;
  task: string;
  model: string;
  reward: number | null;
  created_at: Date;
  updated_at: Date;
  worker: string | null;
}): RunRow {
  return {
    runId: row.run_id,
    kind: row.kind as RunKind,
    status: row.status as RunStatus,
    head: row.head,
    task: row.task,
    model: row.model,
    reward: row.reward,
    createdAt: row.created_at.toISOString(),
    updatedAt: row.updated_at.toISOString(),
    worker: row.worker,
  };
}

function unknownRun(runId: string): LonghaulError {
  return new LonghaulError('NotFound', `there is no run ${runId}`);
}

function leaseLost(lease: Lease): LonghaulError {
  return new LonghaulError(
    'LeaseLost',
    `${lease.worker} no longer holds run ${lease.runId} (token ${lease.token}, head ${lease.head})`,
  );
}
