import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { chownSync, closeSync, openSync, readFileSync, statSync } from 'node:fs';
import { chmod, mkdir, mkdtemp, readdir, realpath, rename, rm } from 'node:fs/promises';
import { platform, tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { LonghaulError } from '../core/index.ts';
import { type Binaries, findBinaries } from './binaries.ts';
import { codeOf, fileError } from './failures.ts';
import { exists, isPrivateFolder, makeFolder } from './folders.ts';
import { isAlive, type PidFile, readPidFile } from './pidfile.ts';
import { type Launcher, unprivilegedLauncher } from './unprivileged.ts';

/** Where the embedded server's files lie below a home folder. All absolute, links resolved. */
export interface ServerPaths {
  root: string;
  dataDir: string;
  log: string;
  links: string;
}

export const DATABASE_USER = 'longhaul';

/** Bytes a socket's path may have, its final zero excluded (sun_path of Linux and of the BSDs). */
const MAX_SOCKET_PATH = platform() === 'linux' ? 107 : 103;
const SOCKET_NAME = '.s.PGSQL.5432';
const SOCKET_FOLDER_PREFIX = 'longhaul-';
const EMPTY_PID_FILE_MS = 5000;
const MAX_LOG_BYTES = 10 * 1024 * 1024;

/** Paths for a home; creates the folder `postgres` in it, closed to others. */
export async function preparePaths(home: string): Promise<ServerPaths> {
  await makeFolder(join(home, 'postgres'));
  return serverPaths(await realpath(home));
}

/** Paths for a home whose links are resolved. */
export function serverPaths(home: string): ServerPaths {
  const root = join(home, 'postgres');
  return {
    root,
    dataDir: join(root, 'data'),
    log: join(root, 'server.log'),
    links: join(root, 'lib'),
  };
}

/**
 * Creates the data directory if there is none. Several processes may do so at once and any may be
 * killed: each initialises a folder of its own and renames it, so that `data` is whole or absent.
 */
export async function initialise(paths: ServerPaths): Promise<void> {
  if (exists(join(paths.dataDir, 'PG_VERSION'))) return;
  const binaries = await findBinaries(paths.links);
  const launcher = unprivilegedLauncher();
  const draft = join(paths.root, `initdb-${process.pid}-${randomBytes(4).toString('hex')}`);
  try {
    await mkdir(draft, { mode: 0o700 });
    chownSync(draft, launcher.ownerUid, launcher.ownerGid);
  } catch (thrown) {
    throw fileError(thrown, paths.root);
  }
  try {
    const { code, output } = await runToEnd(launcher, binaries, binaries.initdb, [
      ['-D', draft, '-U', DATABASE_USER, '--auth-local=trust', '--auth-host=reject'],
      ['--encoding=UTF8', '--locale=C', '--locale-provider=builtin', '--builtin-locale=C.UTF-8'],
      ['--no-instructions'],
    ]);
    if (code !== 0)
      throw serverFailure(output, `initdb could not create ${paths.dataDir}`, paths.root);
    await rename(draft, paths.dataDir);
  } catch (thrown) {
    await rm(draft, { recursive: true, force: true });
    const lostRace = ['ENOTEMPTY', 'EEXIST'].includes(codeOf(thrown) ?? '');
    if (!lostRace) throw fileError(thrown, paths.dataDir);
  }
}

/** A postmaster we spawned. It lives on when this process ends. */
export interface SpawnedServer {
  pid: number;
  socketDir: string;
  /** Resolves with what it wrote to its log when it ends before it was ready. */
  ended: Promise<string>;
}

/**
 * Spawns the server, detached. Of several started at once Postgres itself lets one win, by its pid file;
 * the others end. `stalePid` is a pid the pid file names that now belongs to another program.
 */
export async function spawnServer(
  paths: ServerPaths,
  stalePid: number | null,
): Promise<SpawnedServer> {
  const binaries = await findBinaries(paths.links);
  const launcher = unprivilegedLauncher();
  await giveTo(launcher, paths);
  await removeEmptyPidFile(paths);
  // A home that was copied without its modes; Postgres insists on a closed folder, and so do we.
  for (const folder of [paths.root, paths.dataDir])
    await chmod(folder, 0o700).catch((thrown) => {
      throw fileError(thrown, folder);
    });
  const old = readPidFile(paths.dataDir);
  if (old?.dataDir === paths.dataDir) await removeSocketDir(old.socketDir);
  const socketDir = await makeSocketDir(paths);
  const log = await openLog(paths.log);
  const logStart = statSync(paths.log).size;
  const settings = {
    listen_addresses: '',
    unix_socket_directories: socketDir,
    unix_socket_permissions: '0700',
    port: '5432',
    // Durable: an append that returned survives a power failure.
    fsync: 'on',
    synchronous_commit: 'on',
    full_page_writes: 'on',
    max_connections: '200',
    shared_buffers: '64MB',
    max_wal_size: '512MB',
    // No replicas: less to write for each commit.
    wal_level: 'minimal',
    max_wal_senders: '0',
    // A laptop's server: few helper processes, no parallel queries, which also need much of /dev/shm.
    io_method: 'sync',
    max_worker_processes: '4',
    max_parallel_workers_per_gather: '0',
    jit: 'off',
    // Reading a run in order goes through its index, not through a sort.
    random_page_cost: '1.1',
    work_mem: '16MB',
    // A process that was stopped in the middle of a transaction must not hold up the others for ever.
    idle_in_transaction_session_timeout: '60s',
    // Payloads never reach the server's log: no statements, no details of rows.
    log_min_messages: 'warning',
    log_min_error_statement: 'panic',
    log_error_verbosity: 'terse',
    log_timezone: 'UTC',
    timezone: 'UTC',
    logging_collector: 'off',
    log_destination: 'stderr',
    max_stack_depth: '2MB',
  };
  const args = Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`]);
  const [command = '', ...rest] = [
    ...launcher.prefix,
    binaries.postgres,
    '-D',
    paths.dataDir,
    ...args,
  ];
  const child = spawn(command, rest, {
    detached: true,
    cwd: '/',
    stdio: ['ignore', log, log],
    env: {
      ...cleanEnvironment(binaries),
      // Postgres takes a pid file whose pid is alive for a running server, except for its grandparent's
      // pid. The check of shared memory, which protects the data, still takes place.
      ...(stalePid === null ? {} : { PG_GRANDPARENT_PID: String(stalePid) }),
    },
  });
  closeSync(log);
  const ended = new Promise<string>((resolve) => {
    child.once('error', (error) => resolve(error.message));
    child.once('exit', () => resolve(readTail(paths.log, logStart)));
  });
  child.unref();
  return { pid: child.pid ?? -1, socketDir, ended };
}

/**
 * A server that died between creating and writing its pid file leaves an empty one, on which every later
 * one gives up. A live starter needs microseconds for it; should one be this late after all, the check of
 * shared memory stops it.
 */
async function removeEmptyPidFile(paths: ServerPaths): Promise<void> {
  const path = join(paths.dataDir, 'postmaster.pid');
  const file = statSync(path, { throwIfNoEntry: false });
  if (file?.size === 0 && Date.now() - file.mtimeMs > EMPTY_PID_FILE_MS)
    await rm(path, { force: true });
}

/** Data files belong to whom the server runs as; another way of running was possible last time. */
async function giveTo(launcher: Launcher, paths: ServerPaths): Promise<void> {
  const owner = statSync(paths.dataDir).uid;
  if (process.getuid?.() !== 0 || owner === launcher.ownerUid) return;
  if (owner !== 0 && owner !== launcher.guestUid)
    throw new LonghaulError('StoreReadOnly', `${paths.dataDir} belongs to the user id ${owner}`, {
      next: 'Run Longhaul as that user (without sudo), or give another home folder with --home.',
    });
  const to = `${launcher.ownerUid}:${launcher.ownerGid}`;
  const { code, output } = await collect('chown', ['-R', to, paths.dataDir]);
  if (code !== 0) throw serverFailure(output, 'the data directory has another owner', paths.root);
}

/**
 * A folder of its own for the socket of one server, so that no other one, dying or hung, is in its way.
 * In the home where the path is short enough for a socket, else below the temporary folder; others find
 * it in the pid file. mkdtemp: a name that nobody can have taken before, mode 0700.
 */
async function makeSocketDir(paths: ServerPaths): Promise<string> {
  for (const parent of [paths.root, process.env.XDG_RUNTIME_DIR, tmpdir(), '/tmp']) {
    if (parent === undefined || !exists(parent)) continue;
    const example = join(parent, `${SOCKET_FOLDER_PREFIX}XXXXXX`, SOCKET_NAME);
    if (Buffer.byteLength(example) > MAX_SOCKET_PATH) continue;
    try {
      return await mkdtemp(join(parent, SOCKET_FOLDER_PREFIX));
    } catch (thrown) {
      throw fileError(thrown, parent);
    }
  }
  throw new LonghaulError('StoreUnavailable', 'no folder is short enough for a unix socket', {
    next: 'Give a shorter home folder with --home, or set TMPDIR to a short path.',
  });
}

/** Where a server has its socket. A home that was moved or copied has a pid file of another place. */
export function socketDirOf(file: PidFile, paths: ServerPaths): string {
  return file.dataDir === paths.dataDir
    ? file.socketDir
    : join(paths.root, basename(file.socketDir));
}

/** Removes the folder of a socket that nothing listens on any more, if it is one of ours. */
export async function removeSocketDir(folder: string): Promise<void> {
  if (basename(folder).startsWith(SOCKET_FOLDER_PREFIX) && isPrivateFolder(folder))
    await rm(folder, { recursive: true, force: true });
}

/**
 * Removes what killed servers and starters left in the home, once the server with the socket `used` runs.
 * An initdb whose starter was killed may still be writing: what then remains goes next time.
 */
export async function removeLeftovers(paths: ServerPaths, used: string): Promise<void> {
  for (const name of await readdir(paths.root)) {
    const path = join(paths.root, name);
    const starter = /^initdb-(\d+)-/.exec(name)?.[1];
    if (starter !== undefined && !isAlive(Number(starter)))
      await rm(path, { recursive: true, force: true, maxRetries: 2 }).catch(() => {});
    else if (path !== used) await removeSocketDir(path);
  }
}

async function openLog(path: string): Promise<number> {
  try {
    if (exists(path) && statSync(path).size > MAX_LOG_BYTES) await rename(path, `${path}.1`);
    return openSync(path, 'a', 0o600);
  } catch (thrown) {
    throw fileError(thrown, path);
  }
}

/** The server's own words, sorted into what a user can act on. */
export function serverFailure(output: string, context: string, path: string): LonghaulError {
  const lines = output.trim().split('\n');
  const last = lines.slice(-4).join(' | ').slice(-800);
  const message = `${context}: ${last || 'no output'}`;
  if (/No space left on device|Disk quota exceeded/i.test(output))
    return new LonghaulError('DiskFull', message);
  if (/Read-only file system|Permission denied|Operation not permitted/i.test(output))
    return new LonghaulError('StoreReadOnly', message, {
      next: `Make ${path} writable, or give another home folder with --home.`,
    });
  if (/failed to execute|spawn .* ENOENT/i.test(output))
    return new LonghaulError('StoreUnavailable', message, {
      next: 'The embedded binaries need glibc (not musl, as in Alpine): use another image, or set DATABASE_URL to a Postgres of yours.',
    });
  if (/not compatible with this version|incompatible with server/i.test(output))
    return new LonghaulError('StoreTooNew', message, {
      next: 'The data was written by another major version of Postgres: use the Longhaul that wrote it, dump, and restore.',
    });
  return new LonghaulError('StoreUnavailable', message, {
    next: `Look at the server's log (${join(path, 'server.log')}), or set DATABASE_URL to a Postgres of yours.`,
  });
}

/** Neither the user's API keys nor PG* variables reach the server. */
function cleanEnvironment(binaries: Binaries): Record<string, string> {
  return {
    PATH: process.env.PATH ?? '/usr/bin:/bin',
    LC_ALL: 'C',
    TZ: 'UTC',
    ...binaries.env,
  };
}

function runToEnd(
  launcher: Launcher,
  binaries: Binaries,
  program: string,
  args: readonly string[][],
): Promise<{ code: number | null; output: string }> {
  const [command = '', ...rest] = [...launcher.prefix, program, ...args.flat()];
  return collect(command, rest, cleanEnvironment(binaries));
}

function collect(
  command: string,
  args: readonly string[],
  env: Record<string, string> = { PATH: process.env.PATH ?? '/usr/bin:/bin' },
): Promise<{ code: number | null; output: string }> {
  return new Promise((resolve) => {
    const child = spawn(command, args, { cwd: '/', stdio: ['ignore', 'pipe', 'pipe'], env });
    let output = '';
    const take = (chunk: Buffer) => {
      output = (output + chunk.toString()).slice(-8192);
    };
    child.stdout.on('data', take);
    child.stderr.on('data', take);
    child.once('error', (error) => resolve({ code: -1, output: error.message }));
    child.once('close', (code) => resolve({ code, output }));
  });
}

function readTail(path: string, from: number): string {
  try {
    return readFileSync(path).subarray(from).toString().slice(-8192);
  } catch {
    return '';
  }
}
