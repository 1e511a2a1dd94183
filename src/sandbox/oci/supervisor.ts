import { type ChildProcess, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  closeSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { connect, type Socket } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { LonghaulError } from '../../core/index.ts';
import { type CgroupHost, makeOwnerGroups, ownerGroups } from '../bubblewrap/cgroup.ts';
import { hybridCgroups, type OciRuntime } from './runtimes.ts';

export interface SupervisorReady {
  root: boolean;
  firstUid: number;
  uids: number;
  /** Owners that had crashed and whose leftovers were removed. */
  cleaned: number;
  pid: number;
}

export interface ContainerExit {
  /** Exit code, or minus the signal that ended the container's first process or its runtime. */
  status: number;
  stderr: string;
}

export interface SupervisorOptions {
  dir: string;
  python: string;
  runtime: OciRuntime;
  cgroups: CgroupHost | null;
  uidBase: number;
}

export interface Launch {
  sid: string;
  container: string;
  config: Record<string, unknown>;
  cgroups: string[];
  detached: boolean;
  /** [inside, outside] of a user namespace to run the runtime in; null: none. */
  map: [number, number][] | null;
}

const UID_BLOCKS = 64;
const CLOSE_TIMEOUT_MS = 30_000;
const AGENT_DIR = fileURLToPath(new URL('../agent/', import.meta.url));

type Answer = { ok?: unknown; error?: string; errno?: number };

/** Client of the Python process that mounts workspaces and runs the runtime; it cleans up when this ends. */
export class Supervisor {
  readonly ready: SupervisorReady;
  readonly owner: string;
  readonly ownerDir: string;
  /** Settles with the reason when it has ended, however. */
  readonly ended: Promise<string>;
  readonly #child: ChildProcess;
  readonly #pending = new Map<number, (answer: Answer) => void>();
  readonly #exits = new Map<string, PromiseWithResolvers<ContainerExit>>();
  readonly #stderr: () => string;
  #said = '';
  #nextId = 1;
  #gone = false;

  private constructor(parts: {
    child: ChildProcess;
    ready: SupervisorReady;
    owner: string;
    ownerDir: string;
    stderr: () => string;
    lines: AsyncIterableIterator<string>;
  }) {
    this.#child = parts.child;
    this.ready = parts.ready;
    this.owner = parts.owner;
    this.ownerDir = parts.ownerDir;
    this.#stderr = parts.stderr;
    this.ended = this.#listen(parts.lines);
  }

  /** Starts it and waits until it has its namespaces; otherwise `SandboxUnavailable`. */
  static async start(options: SupervisorOptions): Promise<Supervisor> {
    const { runtime, cgroups } = options;
    const owner = randomBytes(6).toString('hex');
    const runDir = join(options.dir, 'run');
    const layersDir = join(options.dir, 'layers');
    const ownerDir = join(runDir, owner);
    for (const path of [runDir, layersDir, ownerDir])
      mkdirSync(path, { recursive: true, mode: 0o700 });
    const groups = cgroups ? ownerGroups(cgroups, owner) : [];
    const record = { pid: process.pid, started: new Date().toISOString(), cgroups: groups };
    writeFileSync(join(ownerDir, 'owner.json'), JSON.stringify(record));
    if (cgroups) makeOwnerGroups(cgroups, owner);

    const child = spawn(
      options.python,
      ['-I', '-S', '-B', fileURLToPath(new URL('./supervisor.py', import.meta.url))],
      {
        stdio: ['pipe', 'pipe', 'pipe'],
        env: { PATH: '/usr/sbin:/usr/bin:/sbin:/bin' },
        cwd: '/',
        // A session of its own: only the owner decides what Ctrl-C ends.
        detached: true,
      },
    );
    let stderr = '';
    child.stderr!.on('data', (chunk: Buffer) => {
      stderr = (stderr + chunk.toString()).slice(-4000);
    });
    child.stdin!.on('error', () => {});
    const failed = new Promise<never>((_, reject) => {
      child.once('error', (error) => reject(error));
    });
    const sources = readdirSync(AGENT_DIR).filter((name) => name.endsWith('.py'));
    child.stdin!.write(
      `${JSON.stringify({
        runDir,
        layersDir,
        ownerDir,
        runtime: runtime.binary,
        flags: runtime.flags,
        deletes: runtime.isolation !== 'gvisor',
        hideUnified: runtime.hideUnified && hybridCgroups(),
        cgroups: groups,
        uidBase: options.uidBase,
        uidBlocks: UID_BLOCKS,
        agent: Object.fromEntries(
          sources.map((name) => [name, readFileSync(join(AGENT_DIR, name), 'utf8')]),
        ),
      })}\n`,
    );
    const lines = createInterface({ input: child.stdout! })[Symbol.asyncIterator]();
    const first = await Promise.race([lines.next(), failed]).catch((error: Error) => ({
      done: true as const,
      value: error.message,
    }));
    const message = first.done
      ? { event: 'failed', message: stderr.trim() || first.value || 'ended at once' }
      : JSON.parse(first.value);
    if (message.event !== 'ready') {
      child.stdin!.end();
      child.kill('SIGKILL');
      rmSync(ownerDir, { recursive: true, force: true });
      throw new LonghaulError('SandboxUnavailable', `OCI supervisor: ${message.message}`, {
        next: 'Allow user and mount namespaces, or run as root; `longhaul sandbox doctor` says more.',
      });
    }
    return new Supervisor({
      child,
      ready: message as SupervisorReady,
      owner,
      ownerDir,
      stderr: () => stderr,
      lines,
    });
  }

  get gone(): boolean {
    return this.#gone;
  }

  /** The last that it said about a failure. */
  get said(): string {
    return this.#said || (this.#stderr().trim().split('\n').at(-1) ?? '');
  }

  async #listen(lines: AsyncIterableIterator<string>): Promise<string> {
    for await (const line of lines) {
      const message = JSON.parse(line);
      if (message.event === 'log') this.#said = message.message;
      else if (message.event === 'exit') {
        const { container, status, stderr } = message;
        this.#exits.get(container)?.resolve({ status, stderr });
        this.#exits.delete(container);
      } else if (message.id !== undefined) {
        this.#pending.get(message.id)?.(message);
        this.#pending.delete(message.id);
      }
    }
    this.#gone = true;
    const reason = `the supervisor is gone: ${this.said || 'it was ended from outside'}`;
    for (const settle of this.#pending.values()) settle({ error: reason, errno: 0 });
    this.#pending.clear();
    for (const exit of this.#exits.values()) exit.resolve({ status: -9, stderr: reason });
    this.#exits.clear();
    return reason;
  }

  /** One operation. What fails in it is the host's: `DiskFull` or `SandboxUnavailable`. */
  async request(op: string, fields: Record<string, unknown>): Promise<void> {
    const id = this.#nextId++;
    const answer = await new Promise<Answer>((resolve) => {
      if (this.#gone) return resolve({ error: 'the supervisor is gone', errno: 0 });
      this.#pending.set(id, resolve);
      this.#child.stdin!.write(`${JSON.stringify({ id, op, ...fields })}\n`);
    });
    if (answer.error === undefined) return;
    const ENOSPC = 28;
    throw new LonghaulError(
      answer.errno === ENOSPC ? 'DiskFull' : 'SandboxUnavailable',
      `container ${op}: ${answer.error}`,
    );
  }

  /**
   * Has the runtime start a container in an opened sandbox. The socket is the standard input and output of
   * the agent in it, which says hello when it runs; `exit` settles when the container has ended.
   */
  launch(request: Launch): Promise<{ socket: Socket; exit: Promise<ContainerExit> }> {
    const exit = Promise.withResolvers<ContainerExit>();
    this.#exits.set(request.container, exit);
    return new Promise((resolve, reject) => {
      // Through a descriptor of the folder: the address of a unix socket holds 108 bytes.
      const folder = openSync(this.ownerDir, 'r');
      const socket = connect(`/proc/self/fd/${folder}/s`);
      socket.once('error', (error) => {
        closeSync(folder);
        this.#exits.delete(request.container);
        reject(
          new LonghaulError('SandboxUnavailable', `container launch: ${error.message}`, {
            cause: error,
          }),
        );
      });
      socket.once('connect', () => {
        closeSync(folder);
        socket.removeAllListeners('error');
        socket.write(`${JSON.stringify(request)}\n`);
        resolve({ socket, exit: exit.promise });
      });
    });
  }

  /** Ends everything it started: the end of its input makes it delete containers, groups and its folder. */
  async close(): Promise<void> {
    if (this.#child.exitCode !== null || this.#child.signalCode !== null) return;
    const ended = new Promise((resolve) => this.#child.once('exit', resolve));
    this.#child.stdin!.end();
    const timer = setTimeout(() => this.#child.kill('SIGKILL'), CLOSE_TIMEOUT_MS);
    await ended;
    clearTimeout(timer);
  }
}
