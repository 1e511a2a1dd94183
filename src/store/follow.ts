import pg from 'pg';
import { type Event, LonghaulError } from '../core/index.ts';
import type { Database } from './database.ts';
import { decode, EVENT_COLUMNS, EVENT_ROWS, type EventRow } from './events.ts';

/** An event with its place in the order of all runs: following from `cursor` goes on behind it. */
export interface FollowedEvent {
  cursor: string;
  event: Event;
}

export interface FollowOptions {
  /** Absent: from the first event there is. */
  from?: string;
  runId?: string;
  signal?: AbortSignal;
}

/*
 * Order of all runs: (transaction id, run, seq). Rows are shown only while their transaction is older than
 * every one still in flight, so nothing can later appear before a cursor that was given out. In a shared
 * Postgres a long write transaction of anybody delays followers; it never makes them skip.
 */
const PAGE = `
  select ${EVENT_COLUMNS}, xid::text as xid from longhaul.events
  where xid >= $1::xid8 and (xid, run_id, seq) > ($1::xid8, $2, $3)
    and xid < pg_snapshot_xmin(pg_current_snapshot())
    and ($5::text is null or run_id = $5)
  order by xid, run_id, seq limit $4`;

const PAGE_ROWS = 500;
const CHANNEL = 'longhaul_events';
/** Followers look again after this time even if no notification came. */
const POLL_MS = 500;
/** Notifications of one process are bundled: they would otherwise serialise commits of all writers. */
const NOTIFY_AFTER_MS = 15;

type Cursor = [xid: string, runId: string, seq: number];

export class Follower {
  readonly #database: Database;
  #notifying = false;

  constructor(database: Database) {
    this.#database = database;
  }

  /** Tells followers, soon, that there is something new. Best effort: they also look by themselves. */
  notify(): void {
    if (this.#notifying) return;
    this.#notifying = true;
    setTimeout(() => {
      this.#notifying = false;
      this.#database.query({ text: `notify ${CHANNEL}` }).catch(() => {});
    }, NOTIFY_AFTER_MS).unref();
  }

  async end(): Promise<string> {
    const rows = await this.#database.query<{ xmin: string }>({
      text: 'select pg_snapshot_xmin(pg_current_snapshot())::text as xmin',
    });
    return `${rows[0]?.xmin ?? '0'}..0`;
  }

  async *follow(options: FollowOptions): AsyncGenerator<FollowedEvent, void, undefined> {
    const { signal } = options;
    const waiter = new Waiter(this.#database, signal);
    let cursor = parseCursor(options.from ?? '0..0');
    try {
      while (!isAborted(signal)) {
        // Listening before looking: what is committed in between still wakes us.
        await waiter.listen();
        const rows = await this.#database.query<EventRow>({
          ...EVENT_ROWS,
          name: 'longhaul.follow',
          text: PAGE,
          values: [...cursor, PAGE_ROWS, options.runId ?? null],
        });
        for (const row of rows) {
          const event = decode(row);
          cursor = [row[6] ?? '0', event.runId, event.seq];
          yield { cursor: cursor.join('.'), event };
          if (isAborted(signal)) return;
        }
        if (rows.length < PAGE_ROWS) await waiter.wait(POLL_MS);
      }
    } finally {
      await waiter.close();
    }
  }
}

function isAborted(signal: AbortSignal | undefined): boolean {
  return signal?.aborted === true;
}

function parseCursor(text: string): Cursor {
  const match = /^(\d+)\.([0-9A-Z]*)\.(\d+)$/.exec(text);
  if (match === null)
    throw new LonghaulError('ConfigInvalid', `${JSON.stringify(text)} is not a cursor`, {
      next: 'Use a cursor that came with an event, or none to start from the beginning.',
    });
  return [match[1] ?? '0', match[2] ?? '', Number(match[3])];
}

/** Waits for a notification, a time or an abort, whichever comes first. */
class Waiter {
  readonly #database: Database;
  readonly #signal: AbortSignal | undefined;
  #client: pg.Client | null = null;
  #notified = false;
  #wake: (() => void) | null = null;
  readonly #onAbort = () => this.#wake?.();

  constructor(database: Database, signal: AbortSignal | undefined) {
    this.#database = database;
    this.#signal = signal;
    signal?.addEventListener('abort', this.#onAbort);
  }

  /** Opens a listening session if there is none. Where that fails, polling remains. */
  async listen(): Promise<void> {
    if (this.#client !== null) return;
    const client = new pg.Client(this.#database.clientConfig());
    const lost = () => {
      if (this.#client === client) this.#client = null;
    };
    client.on('error', lost);
    client.on('end', lost);
    client.on('notification', () => {
      this.#notified = true;
      this.#wake?.();
    });
    try {
      await client.connect();
      await client.query(`listen ${CHANNEL}`);
      this.#client = client;
    } catch {
      client.end().catch(() => {});
    }
  }

  async wait(ms: number): Promise<void> {
    if (!this.#notified && !isAborted(this.#signal))
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, ms);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    this.#wake = null;
    this.#notified = false;
  }

  async close(): Promise<void> {
    this.#signal?.removeEventListener('abort', this.#onAbort);
    await this.#client?.end().catch(() => {});
  }
}
