import { type ChildProcess, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { chmodSync, chownSync, closeSync, mkdirSync, openSync, rmSync } from 'node:fs';
import { connect, createServer } from 'node:net';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { LonghaulError } from '../../core/index.ts';
import { connectTo } from './lines.ts';
import { Qmp } from './qmp.ts';
import { AgentStream } from './stream.ts';
import { Warden } from './warden.ts';

const LAUNCHER = join(import.meta.dirname, 'launcher.py');
/** The first descriptor of what the launcher opens for QEMU. */
const FIRST_FD = 3;
const BOOT_TIMEOUT_MS = 300_000;
/** Emulated, the string instructions that a kernel clears and copies pages with are its slowest way. */
export const PROCESSOR = { kvm: 'host', tcg: 'max,erms=off,fsrm=off' };
const CONSOLE_BYTES = 8192;
const SEED_BYTES = 64;
/** QEMU's own limit would stretch a save of a few hundred megabytes over seconds. */
const BANDWIDTH = 64 * 2 ** 30;
const QUIET = [
  ...[
    'console=ttyS0',
    'quiet',
    'loglevel=3',
    'panic=-1',
    'random.trust_cpu=on',
    'unknown_nmi_panic',
  ],
  ...['init_on_alloc=0', 'rdinit=/init'],
].join(' ');

/** What every machine of a driver has in common. */
export interface MachineHost {
  qemu: string;
  python: string;
  kernel: string;
  initrd: string;
  accel: 'kvm' | 'tcg';
  machine: 'q35' | 'microvm';
  /** Null where QEMU runs as the user that we are. */
  gid: number | null;
  groups: readonly number[];
}

export interface MachineSize {
  mebibytes: number;
  processors: number;
}

/**
 * Where a machine's memory lives. `own`: in its process. `kept`: in a memory file that others start from
 * later. `from`: a private copy of such a file, page by page as it is written.
 */
export type Memory = { kind: 'own' } | { kind: 'kept' | 'from'; path: string };

/** How a machine ended: by what went on inside, or by what the host did. */
export interface MachineEnd {
  by: 'guest' | 'host';
  detail: string;
  /** Whether the guest's kernel said that it had no memory left. */
  memory: boolean;
}

export interface MachineOptions {
  /** Made here, removed at the end: the sockets. */
  folder: string;
  size: MachineSize;
  uid: number | null;
  memory: Memory;
  /** Whether it will boot the kernel or wait for `load`. */
  boot: boolean;
  /** What its agent had said of a frame when it was saved. */
  partial?: Buffer;
}

/** One QEMU process. It has no network, no disk and no file; it talks to unix sockets in a folder of its own. */
export class Machine {
  readonly ended: Promise<MachineEnd>;
  warden!: Warden;
  stream!: AgentStream;
  #qmp!: Qmp;
  #child!: ChildProcess;
  #end: MachineEnd | null = null;
  #ending!: (end: MachineEnd) => void;
  #guestEnded = '';
  #console = '';
  #stderr = '';
  readonly #folder: string;
  readonly #uid: number | null;
  #folderFd: number | null;

  private constructor(folder: string, uid: number | null) {
    this.#folder = folder;
    this.#folderFd = openSync(folder, 'r');
    this.#uid = uid;
    this.ended = new Promise((resolve) => {
      this.#ending = resolve;
    });
  }

  /** Starts QEMU, with the machine standing still. `SandboxUnavailable` where it does not start. */
  static async start(host: MachineHost, options: MachineOptions): Promise<Machine> {
    const { folder, uid } = options;
    mkdirSync(folder, { mode: 0o700 });
    if (uid !== null) chownSync(folder, uid, host.gid!);
    const machine = new Machine(folder, uid);
    try {
      machine.#spawn(host, options);
      const gone = () => (machine.#end ? new Error(machine.#end.detail) : null);
      machine.#qmp = new Qmp(await connectTo(machine.#path('qmp.sock'), gone));
      machine.#qmp.onEvent(({ event, data }) => {
        if (event === 'SHUTDOWN' && data.guest === true) machine.#guestEnded = String(data.reason);
      });
      await machine.#qmp.command('qmp_capabilities');
      await machine.#qmp.command('migrate-set-capabilities', {
        capabilities: [{ capability: 'events', state: true }],
      });
      await machine.#qmp.command('migrate-set-parameters', { 'max-bandwidth': BANDWIDTH });
      machine.warden = new Warden(await connectTo(machine.#path('warden.sock'), gone));
      const socket = await connectTo(machine.#path('agent.sock'), gone);
      machine.stream = new AgentStream(socket, options.partial);
      return machine;
    } catch (error) {
      const detail = machine.#stderr.trim().split('\n').at(-1) || (error as Error).message;
      await machine.kill();
      throw new LonghaulError('SandboxUnavailable', `microvm: QEMU did not start: ${detail}`, {
        next: /kvm/i.test(detail)
          ? "Use accel: 'tcg', or give this user access to /dev/kvm."
          : 'Run the same QEMU by hand to see more.',
        cause: error,
      });
    }
  }

  /** The path of a socket's address may have 108 bytes, and a folder's path more than that. */
  #path(name: string): string {
    return `/proc/self/fd/${this.#folderFd}/${name}`;
  }

  #spawn(host: MachineHost, { folder, size, uid, memory, boot }: MachineOptions): void {
    const bytes = `${size.mebibytes}M`;
    // QEMU's user may reach none of these by their paths: the launcher opens them.
    const files = {
      ...(memory.kind !== 'own' && { memory: memory.path }),
      ...(boot && { kernel: host.kernel, initrd: host.initrd }),
    };
    const opened = (name: string) => `/proc/self/fd/${FIRST_FD + Object.keys(files).indexOf(name)}`;
    const ram =
      memory.kind === 'own'
        ? `memory-backend-ram,id=ram,size=${bytes}`
        : `memory-backend-file,id=ram,size=${bytes},mem-path=${opened('memory')},share=${memory.kind === 'kept' ? 'on' : 'off'}`;
    const socket = (name: string) => `socket,id=${name},path=${name}.sock,server=on,wait=off`;
    const bus = host.machine === 'microvm' ? 'virtio-serial-device' : 'virtio-serial-pci';
    const command = [
      ...[host.qemu, '-nodefaults', '-no-user-config', '-display', 'none', '-no-reboot', '-S'],
      ...['-M', `${host.machine},accel=${host.accel},memory-backend=ram`],
      ...['-cpu', PROCESSOR[host.accel]],
      ...['-m', bytes, '-smp', String(size.processors), '-object', ram],
      ...['-sandbox', 'on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny'],
      ...['-chardev', socket('qmp'), '-mon', 'chardev=qmp,mode=control'],
      ...['-chardev', socket('agent'), '-chardev', socket('warden')],
      ...['-device', `${bus},id=serial,max_ports=3`],
      ...['-device', 'virtserialport,bus=serial.0,nr=1,chardev=agent,id=agent'],
      ...['-device', 'virtserialport,bus=serial.0,nr=2,chardev=warden,id=warden'],
      ...['-chardev', 'stdio,id=console,signal=off', '-serial', 'chardev:console'],
      ...(boot
        ? ['-kernel', opened('kernel'), '-initrd', opened('initrd'), '-append', QUIET]
        : ['-incoming', 'defer']),
    ];
    const options = {
      parent: process.pid,
      uid,
      gid: host.gid,
      groups: host.groups,
      folder,
      files: Object.entries(files).map(([name, path]) => ({ path, write: name === 'memory' })),
    };
    const child = spawn(
      host.python,
      ['-IS', LAUNCHER, 'run', JSON.stringify(options), ...command],
      // A pipe that nobody writes to: the console takes no input.
      { env: {}, cwd: '/', stdio: ['pipe', 'pipe', 'pipe'] },
    );
    this.#child = child;
    const keep = (text: string, chunk: Buffer) => (text + chunk).slice(-CONSOLE_BYTES);
    child.stdout!.on('data', (chunk) => {
      this.#console = keep(this.#console, chunk);
    });
    child.stderr!.on('data', (chunk) => {
      this.#stderr = keep(this.#stderr, chunk);
    });
    child.stdin!.on('error', () => {});
    child.on('error', (error) => this.#over(error.message));
    child.on('close', (code, signal) => this.#over(signal ?? `exit ${code}`));
  }

  #over(how: string): void {
    if (this.#end) return;
    const said = this.#console.match(/Kernel panic - not syncing: (.*)/)?.[1]?.trim();
    this.#end = this.#guestEnded
      ? {
          by: 'guest',
          detail: `the machine's kernel ended it (${said ?? this.#guestEnded})`,
          memory: /memory/i.test(said ?? ''),
        }
      : {
          by: 'host',
          detail: `QEMU ended: ${this.#stderr.trim().split('\n').at(-1) || how}`,
          memory: false,
        };
    this.#ending(this.#end);
  }

  get end(): MachineEnd | null {
    return this.#end;
  }

  get pid(): number {
    return this.#child.pid!;
  }

  /** The last that the guest's kernel printed, for people. */
  get console(): string {
    return this.#console;
  }

  /** Boots the kernel and waits for its first process. */
  async boot(): Promise<void> {
    const timer = setTimeout(() => void this.kill(), BOOT_TIMEOUT_MS);
    try {
      await this.cont();
      await this.warden.hello;
    } catch (error) {
      await this.kill();
      const said = this.#console.trim().split('\n').at(-1);
      throw new LonghaulError('SandboxUnavailable', `microvm: no boot: ${said || error}`, {
        next: 'Check that the kernel has virtio-pci and virtio-console, or give their modules.',
        cause: error,
      });
    } finally {
      clearTimeout(timer);
    }
  }

  async stop(): Promise<void> {
    await this.#qmp.command('stop');
  }

  async cont(): Promise<void> {
    await this.#qmp.command('cont');
  }

  /** The right time, and random numbers that no other machine from the same image has. */
  async refresh(): Promise<void> {
    // A number of nanoseconds is more than a JSON number holds.
    const now = `${Date.now()}000000`;
    await this.warden.call('refresh', { now, seed: randomBytes(SEED_BYTES).toString('hex') });
  }

  /** Writes the machine, which stands still, into `sink`; `lean` leaves a kept or copied memory out. */
  async save(sink: Writable, lean: boolean): Promise<void> {
    const name = `save-${randomBytes(4).toString('hex')}.sock`;
    const path = this.#path(name);
    const server = createServer();
    const received = new Promise<void>((resolve, reject) => {
      server.on('error', reject);
      server.once('connection', (socket) => pipeline(socket, sink).then(resolve, reject));
    });
    received.catch(() => {});
    await new Promise<void>((resolve) => server.listen(path, resolve));
    try {
      if (this.#uid !== null) chownSync(path, this.#uid, 0);
      else chmodSync(path, 0o600);
      await this.#lean(lean);
      await this.#qmp.migration(() => this.#qmp.command('migrate', { uri: `unix:${name}` }));
      await received;
    } finally {
      server.close();
    }
  }

  /** Takes the state that `save` wrote; the machine then stands still where it was. */
  async load(source: Readable, lean: boolean): Promise<void> {
    await this.#lean(lean);
    const begin = async () => {
      await this.#qmp.command('migrate-incoming', { uri: 'unix:load.sock' });
      const socket = connect(this.#path('load.sock'));
      // QEMU closes its end once it has all: what it makes of it is told by its event.
      pipeline(source, socket).catch(() => {});
    };
    await this.#qmp.migration(begin);
  }

  #lean(state: boolean): Promise<unknown> {
    return this.#qmp.command('migrate-set-capabilities', {
      capabilities: [{ capability: 'x-ignore-shared', state }],
    });
  }

  /** A new connection to the agent's port, for a new agent. */
  async reconnect(): Promise<AgentStream> {
    this.stream.destroy();
    const gone = () => (this.#end ? new Error(this.#end.detail) : null);
    this.stream = new AgentStream(await connectTo(this.#path('agent.sock'), gone));
    return this.stream;
  }

  /** Sends the machine a signal that its kernel does not know, which makes it panic. */
  async interrupt(): Promise<void> {
    await this.#qmp.command('inject-nmi');
  }

  /** Ends QEMU, whatever the machine does. Idempotent. */
  async kill(): Promise<void> {
    if (this.#child && !this.#end) {
      this.#child.kill('SIGKILL');
      await this.ended;
    }
    this.warden?.destroy();
    this.stream?.destroy();
    if (this.#folderFd === null) return;
    closeSync(this.#folderFd);
    this.#folderFd = null;
    rmSync(this.#folder, { recursive: true, force: true });
  }
}
