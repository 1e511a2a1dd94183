import { setTimeout as sleep } from 'node:timers/promises';
import {
  type CompiledQuery,
  DummyDriver,
  Kysely,
  PostgresAdapter,
  PostgresIntrospector,
  PostgresQueryCompiler,
} from 'kysely';
import pg from 'pg';
import { LonghaulError } from '../core/index.ts';
import { type Attachment, attachEmbedded } from './embedded.ts';
import { fileError, isConnectionLost, storeError } from './failures.ts';
import type { Schema } from './schema.ts';

/** A statement. With `name` it is prepared once per connection; without `values` it may hold several. */
export interface Statement {
  name?: string;
  text: string;
  values?: unknown[];
  /** `array` and `types` are the driver's: rows as arrays, columns parsed by other functions. */
  rowMode?: 'array';
  types?: { getTypeParser: () => (text: string) => unknown };
}

export interface Session {
  query<Row>(statement: Statement): Promise<Row[]>;
}

/** Builds SQL and runs none: `database.run(build.selectFrom(…).compile())`. */
export const build = new Kysely<Schema>({
  dialect: {
    createAdapter: () => new PostgresAdapter(),
    createDriver: () => new DummyDriver(),
    createIntrospector: (db) => new PostgresIntrospector(db),
    createQueryCompiler: () => new PostgresQueryCompiler(),
  },
});

const POOL_SIZE = 8;
const REMOTE_CONNECT_MS = 15_000;
/** How long statements wait for a server that went away to come back. */
const RECOVERY_MS = 30_000;

/**
 * Connections to the embedded server of a home, or to a team's Postgres. When the server goes away,
 * the next statement waits for it (the embedded one is started again) and is repeated: every statement of
 * this room is safe to repeat, and those that must know are told.
 */
export class Database implements Session {
  readonly #home: string | null;
  readonly #url: string | null;
  #attachment: Attachment | null = null;
  #pool: pg.Pool;
  #recovering: Promise<void> | null = null;
  #closed = false;

  private constructor(home: string | null, url: string | null, attachment: Attachment | null) {
    this.#home = home;
    this.#url = url;
    this.#attachment = attachment;
    this.#pool = this.#newPool();
  }

  /** The embedded server of a home folder; starts it where none runs. */
  static async embedded(home: string): Promise<Database> {
    try {
      return new Database(home, null, await attachEmbedded(home));
    } catch (thrown) {
      throw fileError(thrown, home);
    }
  }

  /** A Postgres given by URL. `ConfigInvalid` or `StoreUnavailable` when it does not answer. */
  static async connect(url: string): Promise<Database> {
    // Messages never repeat the URL, which may hold a password.
    if (!/^postgres(ql)?:\/\//.test(url) || !URL.canParse(url))
      throw new LonghaulError('ConfigInvalid', 'DATABASE_URL is not a Postgres URL', {
        next: 'Write it as postgres://USER:PASSWORD@HOST:PORT/DATABASE.',
      });
    const database = new Database(null, url, null);
    try {
      await database.#pool.query('select 1');
    } catch (thrown) {
      await database.close();
      const error = storeError(thrown);
      if (error.code !== 'StoreUnavailable') throw error;
      throw new LonghaulError('StoreUnavailable', error.message, {
        next: 'Check that the server of DATABASE_URL runs and can be reached from here, or unset it to use the embedded one.',
        cause: thrown,
      });
    }
    return database;
  }

  /** Settings of a connection of its own, for a session that listens. */
  clientConfig(): pg.ClientConfig {
    const application_name = `longhaul ${process.pid}`;
    if (this.#attachment === null)
      return {
        connectionString: this.#url ?? '',
        application_name,
        connectionTimeoutMillis: REMOTE_CONNECT_MS,
      };
    // Nothing of the user's PG* environment applies here.
    return { ...this.#attachment.connection, password: '', ssl: false, application_name };
  }

  /**
   * Runs one statement. `onRepeat` is called before it is run again after a lost connection, when the
   * first try may have been committed.
   */
  async query<Row>(statement: Statement, onRepeat?: () => void): Promise<Row[]> {
    return this.#surviving(
      async () => (await this.#pool.query(statement as pg.QueryConfig)).rows as Row[],
      onRepeat,
    );
  }

  /** Runs what Kysely compiled. */
  run<Row>(compiled: CompiledQuery<Row>): Promise<Row[]> {
    return this.query<Row>({ text: compiled.sql, values: compiled.parameters.slice() });
  }

  /** Runs `work` in one transaction, from its start again after a lost connection. */
  async transaction<T>(work: (session: Session) => Promise<T>, onRepeat?: () => void): Promise<T> {
    return this.#surviving(async () => {
      const client = await this.#pool.connect();
      let broken: Error | undefined;
      try {
        await client.query('begin');
        const result = await work({
          query: async <Row>(statement: Statement) =>
            (await client.query(statement as pg.QueryConfig)).rows as Row[],
        });
        await client.query('commit');
        return result;
      } catch (thrown) {
        await client.query('rollback').catch((error: Error) => {
          broken = error;
        });
        throw thrown;
      } finally {
        client.release(broken);
      }
    }, onRepeat);
  }

  /** Ends the connections. The embedded server is stopped by the last process that leaves. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await this.#recovering?.catch(() => {});
    await this.#pool.end();
    await this.#attachment?.detach();
  }

  async #surviving<T>(work: () => Promise<T>, onRepeat?: () => void): Promise<T> {
    const deadline = Date.now() + RECOVERY_MS;
    for (let attempt = 1; ; attempt++) {
      if (this.#closed)
        throw new LonghaulError('StoreUnavailable', 'the store was closed', {
          next: 'Open it again.',
        });
      const pool = this.#pool;
      try {
        return await work();
      } catch (thrown) {
        if (!isConnectionLost(thrown) || this.#closed || Date.now() > deadline)
          throw storeError(thrown);
        onRepeat?.();
        if (attempt > 1) await sleep(Math.min(50 * 2 ** attempt, 1000));
        await this.#recover(pool);
      }
    }
  }

  /** One recovery at a time; a pool that was replaced meanwhile needs none. */
  async #recover(failed: pg.Pool): Promise<void> {
    if (this.#home === null || this.#pool !== failed) return;
    const home = this.#home;
    this.#recovering ??= (async () => {
      try {
        this.#attachment?.drop();
        this.#attachment = await attachEmbedded(home);
        this.#pool = this.#newPool();
        failed.end().catch(() => {});
      } finally {
        this.#recovering = null;
      }
    })();
    await this.#recovering;
  }

  #newPool(): pg.Pool {
    const pool = new pg.Pool({ ...this.clientConfig(), max: POOL_SIZE, idleTimeoutMillis: 60_000 });
    // An idle connection that breaks is noticed by the next statement.
    pool.on('error', () => {});
    return pool;
  }
}
