import { type ChildProcess, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  closeSync,
  mkdirSync,
  openSync,
  readlinkSync,
  rmdirSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { connect, type Socket } from 'node:net';
import { constants as osConstants } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { type ErrorCode, LonghaulError } from '../../core/index.ts';
import { type CgroupHost, makeOwnerGroups, ownerGroups } from './cgroup.ts';
import { INSIDE_ID } from './command.ts';
import { initProgram } from './init.ts';
import { hostArchitecture, seccompFilter } from './seccomp.ts';

/** A layer as the supervisor finds it: on a sandbox's tmpfs, or in the durable layer folder. */
export type LayerRef =
  | { home: string; name: string; uid: number }
  | { durable: string; uid: number };

export interface SupervisorReady {
  root: boolean;
  firstUid: number;
  uids: number;
  idmap: boolean;
  /** Whether durable layers can stand on each other; otherwise each holds the whole workspace. */
  stackable: boolean;
  /** Owners that had crashed and whose leftovers were removed. */
  cleaned: number;
  pid: number;
}

export interface SandboxExit {
  /** Exit code, or minus the signal that ended bubblewrap. */
  status: number;
  stderr: string;
}

export interface SupervisorOptions {
  dir: string;
  bwrap: string;
  python: string;
  cgroups: CgroupHost | null;
  uidBase: number;
}

/**
 * Owner of the files of layers, as they are stored. Where mounts can be id-mapped it is the same for all,
 * and each sandbox sees them as its own; the folder around them is root's alone.
 */
export function layerOwner(ready: SupervisorReady, uidBase: number): number {
  if (!ready.root) return 0;
  return ready.idmap ? INSIDE_ID : uidBase;
}

const UID_BLOCKS = 64;
const ETC = {
  passwd:
    'root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:1000:1000:agent:/workspace:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n',
  group: 'root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n',
  hosts: '127.0.0.1 localhost\n::1 localhost\n',
  hostname: 'sandbox\n',
  'nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n',
};

/** The machine has no more of something that others give back. */
const { EAGAIN, ENOMEM, EMFILE, ENFILE, EUSERS } = {
  EUSERS: 87, // Node knows no name for it
  ...osConstants.errno,
};
const EXHAUSTED = new Set([EAGAIN, ENOMEM, EMFILE, ENFILE, EUSERS]);
const EXHAUSTED_SAID =
  /(Resource temporarily unavailable|Cannot allocate memory|Too many (open files|users)|No space left on device)/;
export const RETRY_MS = 100;

/** Whether what bubblewrap or an agent said means that the machine is full just now. */
export const saidExhausted = (text: string) => EXHAUSTED_SAID.test(text);

type Answer = { ok?: unknown; error?: string; errno?: number; code?: ErrorCode };

/** Client of the Python process that mounts and launches. It ends when this process does, however. */
export class Supervisor {
  readonly ready: SupervisorReady;
  readonly owner: string;
  readonly ownerDir: string;
  readonly #child: ChildProcess;
  readonly #cgroups: CgroupHost | null;
  readonly #pending = new Map<number, (answer: Answer) => void>();
  readonly #exits = new Map<string, PromiseWithResolvers<SandboxExit>>();
  readonly #stderr: () => string;
  #nextId = 1;
  #gone = false;

  private constructor(parts: {
    child: ChildProcess;
    ready: SupervisorReady;
    owner: string;
    ownerDir: string;
    cgroups: CgroupHost | null;
    stderr: () => string;
    lines: AsyncIterableIterator<string>;
  }) {
    this.#child = parts.child;
    this.ready = parts.ready;
    this.owner = parts.owner;
    this.ownerDir = parts.ownerDir;
    this.#cgroups = parts.cgroups;
    this.#stderr = parts.stderr;
    void this.#listen(parts.lines);
  }

  /** Starts it and waits until it has namespaces and a working overlay; otherwise `SandboxUnavailable`. */
  static async start(options: SupervisorOptions): Promise<Supervisor> {
    const architecture = hostArchitecture();
    if (!architecture)
      throw new LonghaulError(
        'SandboxUnavailable',
        `bubblewrap: no system call filter for ${process.arch}`,
      );
    const owner = randomBytes(6).toString('hex');
    const runDir = join(options.dir, 'run');
    const layersDir = join(options.dir, 'layers');
    const ownerDir = join(runDir, owner);
    for (const path of [runDir, layersDir, ownerDir])
      mkdirSync(path, { recursive: true, mode: 0o700 });
    writeFileSync(join(ownerDir, 'filter.bpf'), seccompFilter(architecture));
    writeFileSync(join(ownerDir, 'init'), initProgram(architecture));
    const cgroups = options.cgroups ? ownerGroups(options.cgroups, owner) : [];
    writeFileSync(
      join(ownerDir, 'owner.json'),
      JSON.stringify({
        pid: process.pid,
        pids: readlinkSync('/proc/self/ns/pid'),
        started: new Date().toISOString(),
        cgroups,
      }),
    );
    if (options.cgroups) makeOwnerGroups(options.cgroups, owner);

    const child = spawn(
      options.python,
      ['-I', '-S', '-B', fileURLToPath(new URL('./supervisor.py', import.meta.url))],
      {
        stdio: ['pipe', 'pipe', 'pipe'],
        env: { PATH: '/usr/sbin:/usr/bin:/sbin:/bin' },
        cwd: '/',
        // A session of its own: Ctrl-C signals the terminal's whole process group, and only the owner
        // decides what that ends. Its own end is seen by pdeathsig and the end of input.
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
    child.stdin!.write(
      `${JSON.stringify({
        pid: process.pid,
        runDir,
        layersDir,
        ownerDir,
        bwrap: options.bwrap,
        etc: ETC,
        uidBase: options.uidBase,
        uidBlocks: UID_BLOCKS,
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
      child.kill('SIGKILL');
      if (options.cgroups) removeGroups(options.cgroups, owner);
      rmSync(ownerDir, { recursive: true, force: true });
      throw new LonghaulError('SandboxUnavailable', `bubblewrap: ${message.message}`, {
        next: adviseOn(String(message.message)),
      });
    }
    return new Supervisor({
      child,
      ready: message as SupervisorReady,
      owner,
      ownerDir,
      cgroups: options.cgroups,
      stderr: () => stderr,
      lines,
    });
  }

  /** The last line that it, the zygote or an agent on its way in wrote about a failure. */
  get said(): string {
    return this.#stderr().trim().split('\n').at(-1) ?? '';
  }

  get gone(): boolean {
    return this.#gone;
  }

  async #listen(lines: AsyncIterableIterator<string>): Promise<void> {
    for await (const line of lines) {
      const message = JSON.parse(line);
      if (message.event === 'exit') {
        const { status, stderr } = message;
        this.#exits.get(message.sid)?.resolve({ status, stderr });
        this.#exits.delete(message.sid);
      } else if (message.id !== undefined) {
        this.#pending.get(message.id)?.(message);
        this.#pending.delete(message.id);
      }
    }
    this.#gone = true;
    const reason = this.said || 'it was ended from outside';
    for (const settle of this.#pending.values())
      settle({ error: `the supervisor is gone: ${reason}`, errno: 0 });
    this.#pending.clear();
    for (const exit of this.#exits.values())
      exit.resolve({ status: -9, stderr: `the supervisor is gone: ${reason}` });
  }

  /**
   * One operation. Failures of mounts and copies are the host's: `DiskFull` or `SandboxUnavailable`.
   * Layers may be `NotFound` or `LayerDamaged`, and a guest's tree beyond saving is `FileRefused`.
   */
  async request(op: string, fields: Record<string, unknown>): Promise<unknown> {
    const id = this.#nextId++;
    const answer = await new Promise<Answer>((resolve) => {
      if (this.#gone) return resolve({ error: 'the supervisor is gone', errno: 0 });
      this.#pending.set(id, resolve);
      this.#child.stdin!.write(`${JSON.stringify({ id, op, ...fields })}\n`);
    });
    if (answer.error === undefined) return answer.ok;
    const { ENOSPC, EDQUOT } = osConstants.errno;
    const full = answer.errno === ENOSPC || answer.errno === EDQUOT;
    throw new LonghaulError(
      answer.code ?? (full ? 'DiskFull' : 'SandboxUnavailable'),
      `sandbox ${op}: ${answer.error}`,
      EXHAUSTED.has(answer.errno ?? 0) ? { retryAfterMs: RETRY_MS } : {},
    );
  }

  /**
   * Has an agent sent into an opened sandbox, and bubblewrap started where it does not run. The socket is
   * the agent's, which says hello when it is in; `exit` settles when bubblewrap ends.
   */
  launch(
    sid: string,
    request: {
      argv: string[];
      fresh: boolean;
      network: boolean;
      agent: Record<string, unknown>;
    },
  ): Promise<{ socket: Socket; exit: Promise<SandboxExit> }> {
    let exit = this.#exits.get(sid);
    if (!exit) {
      exit = Promise.withResolvers<SandboxExit>();
      this.#exits.set(sid, exit);
    }
    const { promise } = exit;
    return new Promise((resolve, reject) => {
      // Through a descriptor of the folder: the address of a unix socket holds 108 bytes.
      const folder = openSync(this.ownerDir, 'r');
      const socket = connect(`/proc/self/fd/${folder}/s`);
      socket.once('error', (error) => {
        closeSync(folder);
        reject(
          new LonghaulError('SandboxUnavailable', `sandbox launch: ${error.message}`, {
            cause: error,
          }),
        );
      });
      socket.once('connect', () => {
        closeSync(folder);
        socket.removeAllListeners('error');
        socket.write(`${JSON.stringify({ sid, ...request })}\n`);
        resolve({ socket, exit: promise });
      });
    });
  }

  forget(sid: string): void {
    this.#exits.delete(sid);
  }

  /** Ends everything it started. The folder and the control groups go; durable layers stay. */
  async close(): Promise<void> {
    this.#exits.clear();
    if (this.#child.exitCode === null && this.#child.signalCode === null) {
      const ended = new Promise((resolve) => this.#child.once('exit', resolve));
      this.#child.stdin!.end();
      const timer = setTimeout(() => this.#child.kill('SIGKILL'), 5000);
      await ended;
      clearTimeout(timer);
    }
    // Groups first: while one is busy its record stays, and the next start removes both.
    if (!this.#cgroups || removeGroups(this.#cgroups, this.owner))
      rmSync(this.ownerDir, { recursive: true, force: true });
  }
}

function removeGroups(host: CgroupHost, owner: string): boolean {
  let all = true;
  for (const group of ownerGroups(host, owner)) {
    try {
      rmdirSync(group);
    } catch (error) {
      all &&= (error as NodeJS.ErrnoException).code === 'ENOENT';
    }
  }
  return all;
}

/** What a person does about a supervisor or a bubblewrap that could not start. */
export function adviseOn(message: string): string {
  if (/overlay/i.test(message))
    return 'Load the overlay module (`modprobe overlay`) on a kernel of 6.6 or later, or run as root.';
  if (/namespace|uid_map|setgroups|mount .*(not permitted|denied)/i.test(message))
    return 'Allow user namespaces (Ubuntu 24.04: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; Debian: `sysctl kernel.unprivileged_userns_clone=1`); in a container, run it with CAP_SYS_ADMIN and without its seccomp profile.';
  return 'Run `longhaul doctor` to see what this machine lacks.';
}
