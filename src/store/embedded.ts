import { realpath } from 'node:fs/promises';
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import { attribute, LonghaulError } from '../core/index.ts';
import { codeOf, isConnectionLost, storeError } from './failures.ts';
import { isPrivateFolder } from './folders.ts';
import { isPostmaster, type PidFile, readPidFile } from './pidfile.ts';
import {
  DATABASE_USER,
  initialise,
  preparePaths,
  removeLeftovers,
  removeSocketDir,
  type ServerPaths,
  serverFailure,
  serverPaths,
  socketDirOf,
  spawnServer,
} from './server.ts';

/*
 * The embedded server belongs to a home folder, not to a process. Whoever opens the store attaches to
 * the running server or starts one. Each attached process holds an advisory lock, shared, on a session
 * of its own; one that leaves and then gets the lock alone was the last, and stops the server. The lock
 * of a killed process goes with its session, so no count can be wrong; a server whose last process was
 * killed stays until the next one leaves, or until `stopEmbedded`.
 */
const ATTACHED_LOCK = '7310579613902811';
const START_DEADLINE_MS = 60_000;
const STOP_DEADLINE_MS = 30_000;

/** A process' hold on the embedded server of a home. */
export interface Attachment {
  connection: { host: string; port: number; user: string; database: string };
  /** Lets go; the last one to do so stops the server and waits for its end. Never throws. */
  detach(): Promise<void>;
  /** Lets go without stopping: for a server that is known to be gone. */
  drop(): void;
}

export interface EmbeddedStatus {
  running: boolean;
  pid: number | null;
  /** Version of the server that runs, as Postgres states it. */
  version: string | null;
  socketDir: string | null;
  dataDir: string;
  log: string;
}

/**
 * Attaches to the embedded Postgres of a home folder and starts it where none runs: after a first
 * start, a clean stop, a kill of Node, of the server, or of both.
 * `StoreReadOnly`, `DiskFull` or `StoreUnavailable`, each with what to do next.
 */
export async function attachEmbedded(home: string): Promise<Attachment> {
  const paths = await preparePaths(home);
  const deadline = Date.now() + START_DEADLINE_MS;
  let failure = 'it did not get ready';
  while (Date.now() < deadline) {
    const running = await tryAttach(paths, deadline);
    if (running !== null) return running;
    await initialise(paths);
    const output = await startOnce(paths, deadline);
    if (output === null) continue;
    failure = output;
    // Another process won the start, or processes of a killed server are still on their way out.
    const transient =
      /"postmaster\.pid" (already exists|is empty)|pre-existing shared memory block/;
    if (!transient.test(output))
      throw serverFailure(output, 'the embedded Postgres does not start', paths.root);
    await sleep(50);
  }
  throw serverFailure(failure, 'the embedded Postgres does not start', paths.root);
}

/** Stops the embedded server of a home, whoever uses it. False when none was running. */
export async function stopEmbedded(home: string): Promise<boolean> {
  const paths = await existingPaths(home);
  if (paths === null) return false;
  const file = readPidFile(paths.dataDir);
  if (file === null || !isPostmaster(file.pid, paths.dataDir)) return false;
  await stopServer(paths, file);
  return true;
}

/** Whether the embedded server of a home runs, and where its files are. Starts nothing. */
export async function embeddedStatus(home: string): Promise<EmbeddedStatus> {
  const paths = (await existingPaths(home)) ?? serverPaths(home);
  const idle = {
    running: false,
    pid: null,
    version: null,
    socketDir: null,
    dataDir: paths.dataDir,
    log: paths.log,
  };
  const file = readPidFile(paths.dataDir);
  if (file === null) return idle;
  const socketDir = socketDirOf(file, paths);
  const client = newClient(socketDir);
  try {
    await client.connect();
    const { rows } = await client.query<{ version: string }>(
      `select current_setting('server_version') as version`,
    );
    return { ...idle, running: true, pid: file.pid, version: rows[0]?.version ?? null, socketDir };
  } catch {
    return isPostmaster(file.pid, paths.dataDir)
      ? { ...idle, running: true, pid: file.pid, socketDir }
      : idle;
  } finally {
    await client.end().catch(() => {});
  }
}

async function existingPaths(home: string): Promise<ServerPaths | null> {
  try {
    return serverPaths(await realpath(home));
  } catch {
    return null;
  }
}

/** An attachment to a server that runs or is starting; null when none does. */
async function tryAttach(paths: ServerPaths, deadline: number): Promise<Attachment | null> {
  let unreachableSince: number | null = null;
  while (Date.now() < deadline) {
    const file = readPidFile(paths.dataDir);
    if (file === null) return null;
    const attempt = await connectTo(file, paths);
    if (attempt.attachment !== undefined) return attempt.attachment;
    // The socket answers first, so that a server in another pid namespace is never taken for a dead one.
    if (!attempt.answered) {
      if (!isPostmaster(file.pid, paths.dataDir)) return null;
      if (file.status === 'ready') {
        unreachableSince ??= Date.now();
        // Its socket was deleted: nobody can reach it any more, so it is replaced.
        if (Date.now() - unreachableSince > 3000) {
          await stopServer(paths, file);
          return null;
        }
      }
    }
    await sleep(15);
  }
  throw new LonghaulError(
    'StoreUnavailable',
    'the embedded Postgres is neither ready nor gone after a minute',
    { next: `Look at ${paths.log}.` },
  );
}

async function connectTo(
  file: PidFile,
  paths: ServerPaths,
): Promise<{ attachment?: Attachment; answered: boolean }> {
  const host = socketDirOf(file, paths);
  if (!isPrivateFolder(host)) return { answered: false };
  const keeper = newClient(host);
  try {
    await keeper.connect();
    // Waits while a leaving process decides whether it is the last; its stop then ends this session.
    await keeper.query(`select pg_advisory_lock_shared(${ATTACHED_LOCK})`);
  } catch (thrown) {
    keeper.end().catch(() => {});
    if (codeOf(thrown) === 'ENOENT' || codeOf(thrown) === 'ECONNREFUSED')
      return { answered: false };
    if (isConnectionLost(thrown)) return { answered: true };
    throw storeError(thrown);
  }
  return { answered: true, attachment: attachment(keeper, host, paths) };
}

function attachment(keeper: pg.Client, host: string, paths: ServerPaths): Attachment {
  return {
    connection: { host, port: 5432, user: DATABASE_USER, database: 'postgres' },
    drop: () => {
      keeper.end().catch(() => {});
    },
    detach: async () => {
      try {
        const file = readPidFile(paths.dataDir);
        await keeper.query(`select pg_advisory_unlock_shared(${ATTACHED_LOCK})`);
        const { rows } = await keeper.query<{ last: boolean }>(
          `select pg_try_advisory_lock(${ATTACHED_LOCK}) as last`,
        );
        if (rows[0]?.last === true && file !== null && isPostmaster(file.pid, paths.dataDir))
          await stopServer(paths, file);
      } catch {
        // The server is gone already, or does not end: either way there is nothing to hold any more.
      } finally {
        await keeper.end().catch(() => {});
      }
    },
  };
}

/** Spawns a server and waits until it is ready (null) or has ended (what it said). */
async function startOnce(paths: ServerPaths, deadline: number): Promise<string | null> {
  const stale = readPidFile(paths.dataDir);
  const server = await spawnServer(paths, stale?.pid ?? null);
  let output: string | null = null;
  server.ended.then((text) => {
    output = text;
  });
  while (Date.now() < deadline) {
    const file = readPidFile(paths.dataDir);
    if (file?.pid === server.pid && file.status === 'ready') {
      await removeLeftovers(paths, server.socketDir);
      return null;
    }
    if (output !== null) {
      await removeSocketDir(server.socketDir);
      return output;
    }
    await sleep(10);
  }
  throw new LonghaulError(
    'StoreUnavailable',
    'the embedded Postgres is still recovering after a minute',
    { next: `Wait and try again; its log is ${paths.log}.` },
  );
}

/** Fast shutdown: sessions are ended, everything is written. Immediate if that takes too long. */
async function stopServer(paths: ServerPaths, file: PidFile): Promise<void> {
  for (const signal of ['SIGINT', 'SIGQUIT', 'SIGKILL'] as const) {
    try {
      process.kill(file.pid, signal);
    } catch (thrown) {
      if (codeOf(thrown) === 'ESRCH') break;
      throw attribute(thrown, 'StoreUnavailable', `the server ${file.pid} cannot be stopped`);
    }
    const deadline = Date.now() + STOP_DEADLINE_MS;
    while (Date.now() < deadline && isPostmaster(file.pid, paths.dataDir)) await sleep(10);
    if (!isPostmaster(file.pid, paths.dataDir)) break;
  }
  await removeSocketDir(socketDirOf(file, paths));
}

function newClient(host: string): pg.Client {
  const client = new pg.Client({
    host,
    port: 5432,
    user: DATABASE_USER,
    database: 'postgres',
    application_name: 'longhaul attached',
    // Nothing of the user's PG* environment applies here.
    password: '',
    ssl: false,
    connectionTimeoutMillis: 10_000,
  });
  // A session that breaks while idle is noticed at its next use.
  client.on('error', () => {});
  return client;
}
