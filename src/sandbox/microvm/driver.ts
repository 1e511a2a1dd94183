import { createHash, randomBytes, randomInt } from 'node:crypto';
import { existsSync, mkdirSync, readFileSync, renameSync, statSync, writeFileSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import type { Readable } from 'node:stream';
import { attribute, LonghaulError } from '../../core/index.ts';
import { AgentChannel } from '../agent/channel.ts';
import { exportArchive, importArchive } from '../agent/layer-archive.ts';
import {
  DEFAULT_SPEC,
  type LayerId,
  type PruneReport,
  type Sandbox,
  type SandboxCapabilities,
  type SandboxDriver,
  type SandboxSpec,
} from '../contract.ts';
import { MemoryImage } from './image.ts';
import { type LayerMeta, LayerStore, type SavedMachine } from './layers.ts';
import { Machine, type MachineHost, type MachineSize, PROCESSOR } from './machine.ts';
import { Owner } from './owner.ts';
import { Places } from './places.ts';
import { MicroVmSandbox, type Origin, type Running, startAgent } from './sandbox.ts';
import { guestSystem } from './system.ts';
import { findProgram, qemuVersion } from './tools.ts';

export interface MicroVmOptions {
  /** Folder for durable layers, templates and what runs; shared by processes that resume each other's runs. */
  dir: string;
  /** A Linux kernel for x86-64 with virtio, as `test/setup-microvm.ts` gets Debian's. */
  kernel: string;
  /** Folder of the kernel's virtio modules. Default: `modules` beside the kernel, where there is one. */
  modules?: string;
  /** `kvm` needs /dev/kvm. `tcg` emulates the processor: everywhere, ten times slower. Default `tcg`. */
  accel?: 'kvm' | 'tcg';
  /** `microvm` starts faster under KVM; under emulation it hangs in some boots. Default `q35`. */
  machine?: 'q35' | 'microvm';
  /** QEMU's program. Default: `qemu-system-x86_64` on the path. */
  qemu?: string;
  /** Machines alive at once; requests beyond it wait. Default 16. */
  maxLive?: number;
  /** How long a request waits for a place. Default 60 s. */
  waitMs?: number;
  /** As root: first of the million host uids of which each machine's QEMU gets one. Default 2000000. */
  uidBase?: number;
}

const DEFAULT_MAX_LIVE = 16;
const DEFAULT_WAIT_MS = 60_000;
const DEFAULT_UID_BASE = 2_000_000;
const UIDS = 1_000_000;
const MIN_MEMORY_BYTES = 32 * 2 ** 20;
const MIN_DISK_BYTES = 256 * 1024;
const MIN_INODES = 64;
const MAX_CPUS = 64;
const MEBIBYTE = 2 ** 20;
/** The kernel, the guest's system as files in memory, and the first process. */
const OVERHEAD_MEBIBYTES = 256;
/** The smallest machine holds two to the power of this many MiB of memory and files. */
const MIN_SIZE = 9;
/** The agent and its spare fork, which the guest's limits leave room for. */
const OWN_PROCESSES = 2;
const OWN_BYTES = 32 * MEBIBYTE;
const WARM_COMMAND = {
  ...{ op: 'exec', argv: ['true'], cwd: '', env: {}, timeout: 60, keep: 1024 },
};

/** Sandboxes that are virtual machines of QEMU, made by restoring one that has booted. */
export class MicroVmDriver implements SandboxDriver {
  readonly name = 'microvm';
  readonly capabilities: SandboxCapabilities;
  readonly #machines: MachineHost;
  readonly #owner: Owner;
  readonly #store: LayerStore;
  readonly #system: string;
  readonly #uidBase: number;
  readonly #places: Places;
  readonly #templates = new Map<string, Promise<MemoryImage>>();
  readonly #sandboxes = new Set<MicroVmSandbox>();
  readonly #uids = new Set<number>();
  #closing: Promise<void> | null = null;

  private constructor(parts: {
    options: MicroVmOptions;
    machines: MachineHost;
    owner: Owner;
    store: LayerStore;
    system: string;
  }) {
    const { options } = parts;
    this.#machines = parts.machines;
    this.#owner = parts.owner;
    this.#store = parts.store;
    this.#system = parts.system;
    this.#uidBase = options.uidBase ?? DEFAULT_UID_BASE;
    this.capabilities = {
      isolation: 'vm',
      languages: ['python'],
      exec: true,
      processes: true,
      pause: 'machine',
      network: 'none',
      images: ['host'],
      memory: 'machine',
      cpu: 'machine',
      pids: 'machine',
      disk: 'filesystem',
      layers: 'machine',
      ownUid: parts.machines.gid !== null,
    };
    this.#places = new Places(
      options.maxLive ?? DEFAULT_MAX_LIVE,
      options.waitMs ?? DEFAULT_WAIT_MS,
    );
  }

  /**
   * Makes the guest's system and cleans up after owners that are gone; boots nothing yet.
   * `SandboxUnavailable` with the reason where QEMU, Python or the kernel is missing.
   */
  static async open(options: MicroVmOptions): Promise<MicroVmDriver> {
    const dir = resolve(options.dir);
    const accel = options.accel ?? 'tcg';
    const machine = options.machine ?? 'q35';
    const qemu = findProgram('qemu', options.qemu ?? 'qemu-system-x86_64', 'qemu-system-x86');
    const python = findProgram('Python', '/usr/bin/python3', 'python3');
    const version = qemuVersion(qemu);
    if (!existsSync(options.kernel))
      throw new LonghaulError('SandboxUnavailable', `microvm: no kernel at ${options.kernel}`, {
        next: "Get Debian's: `node test/setup-microvm.ts DIR`, then kernel DIR/vmlinuz.",
      });
    const beside = join(dirname(resolve(options.kernel)), 'modules');
    const modules = options.modules ?? (existsSync(beside) ? beside : null);
    const guest = guestSystem(python, modules);
    const kernel = readFileSync(options.kernel);
    const kernelDigest = createHash('sha256').update(kernel).digest('hex');
    const files = join(dir, 'system');
    mkdirSync(files, { recursive: true, mode: 0o700 });
    const root = process.getuid?.() === 0;
    const machines: MachineHost = {
      ...{ qemu, python, accel, machine },
      kernel: keep(files, kernel, kernelDigest),
      initrd: keep(files, guest.archive, guest.digest),
      gid: root ? (options.uidBase ?? DEFAULT_UID_BASE) : null,
      groups: accel === 'kvm' ? [statSync('/dev/kvm', { throwIfNoEntry: false })?.gid ?? 0] : [],
    };
    const system = createHash('sha256')
      .update(JSON.stringify([kernelDigest, guest.digest, version, PROCESSOR[accel], machine]))
      .digest('hex');
    const owner = await Owner.claim(dir);
    const store = new LayerStore(dir, owner.folder, owner.name);
    for (const name of await Owner.dead(dir)) {
      store.clean(name);
      Owner.remove(dir, name);
    }
    return new MicroVmDriver({ options, machines, owner, store, system });
  }

  // Machines

  #takeUid(): number | null {
    if (this.#machines.gid === null) return null;
    for (;;) {
      const uid = this.#uidBase + 1 + randomInt(UIDS);
      if (this.#uids.has(uid)) continue;
      this.#uids.add(uid);
      return uid;
    }
  }

  async #start(
    size: MachineSize,
    more: Pick<Parameters<typeof Machine.start>[1], 'memory' | 'boot' | 'partial'>,
  ): Promise<Machine> {
    const uid = this.#takeUid();
    const folder = join(this.#owner.folder, `m-${randomBytes(6).toString('hex')}`);
    const machine = await Machine.start(this.#machines, { folder, size, uid, ...more });
    void machine.ended.then(() => uid !== null && this.#uids.delete(uid));
    return machine;
  }

  async #restore(origin: Origin, spec: SandboxSpec): Promise<Running> {
    const image = 'image' in origin ? origin.image : null;
    const saved: SavedMachine = image
      ? image.saved
      : this.#layer(this.#store.meta((origin as { layer: LayerId }).layer, true));
    const size = sizeOf(saved.spec);
    const asked = sizeOf(spec);
    if (size.mebibytes !== asked.mebibytes || size.processors !== asked.processors)
      throw new LonghaulError(
        'ConfigInvalid',
        `the layer is a machine of ${described(size)}, and ${described(asked)} were asked for`,
        { next: 'Leave the spec out, or give the one that the layer was saved with.' },
      );
    const machine = await this.#start(size, {
      memory: image ? { kind: 'from', path: image.path } : { kind: 'own' },
      boot: false,
      partial: Buffer.from(saved.partial, 'base64'),
    });
    try {
      if (image) await machine.load(image.devices(), true);
      else await this.#load(machine, (origin as { layer: LayerId }).layer);
      const channel = new AgentChannel(machine.stream);
      machine.warden.onAgentEnded = () => machine.stream.destroy();
      // Processes that came along have numbers of their own: new ones must not meet them.
      while (channel.reserve() < saved.nextId);
      await machine.cont();
      await machine.refresh();
      if (keyOf(spec) !== keyOf(saved.spec)) await machine.warden.call('limit', guestLimits(spec));
      await machine.warden.call('thaw');
      return { machine, channel, saved };
    } catch (error) {
      await machine.kill();
      if (error instanceof LonghaulError) throw error;
      throw new LonghaulError(
        'SandboxUnavailable',
        `microvm: no restore: ${(error as Error).message}`,
        {
          cause: error,
        },
      );
    }
  }

  /** A layer that this driver's system can go on with. */
  #layer(meta: LayerMeta): LayerMeta {
    if (meta.system === this.#system) return meta;
    throw new LonghaulError(
      'CapabilityMissing',
      `layer ${meta.id} is a machine with another kernel, agent or QEMU than this driver's`,
      { next: 'Export it with the installation that made it, and import the archive here.' },
    );
  }

  async #load(machine: Machine, id: LayerId): Promise<void> {
    const { state, intact } = this.#store.open(this.#layer(this.#store.meta(id, true)));
    // What QEMU makes of a damaged state is no news to the one who hears of the damage.
    await machine.load(state, false).catch(async (error) => {
      await intact;
      throw error;
    });
    await intact;
  }

  // Templates

  #template(spec: SandboxSpec): Promise<MemoryImage> {
    const size = JSON.stringify(sizeOf(spec));
    const key = createHash('sha256').update(`${this.#system} ${size}`).digest('hex');
    const known = this.#templates.get(key);
    if (known) return known;
    const made = this.#makeTemplate(spec, `t-${key.slice(0, 24)}`);
    this.#templates.set(key, made);
    made.catch(() => this.#templates.delete(key));
    return made;
  }

  async #makeTemplate(spec: SandboxSpec, id: LayerId): Promise<MemoryImage> {
    try {
      return await this.#image(id);
    } catch (error) {
      // None yet, or a damaged one: only the first is usual, both are mended by a boot.
      if (!(error instanceof LonghaulError)) throw error;
      this.#store.drop(id);
    }
    const size = sizeOf(spec);
    const image = await MemoryImage.make(this.#machines.python, size);
    let machine: Machine | null = null;
    try {
      machine = await this.#start(size, { memory: { kind: 'kept', path: image.path }, boot: true });
      await machine.boot();
      await machine.refresh();
      await machine.warden.call('setup');
      await machine.warden.call('limit', guestLimits(spec));
      const channel = await startAgent(machine);
      await channel.call(WARM_COMMAND, [new Uint8Array()]);
      await channel.call({ op: 'ping' });
      const counters = await machine.warden.count();
      await machine.warden.call('freeze');
      await machine.stop();
      await machine.stream.settle();
      const partial = machine.stream.partial.toString('base64');
      const saved = { spec, system: this.#system, partial, nextId: channel.reserve(), counters };
      const booted = machine;
      await this.#store.write('template', saved, (sink) => booted.save(sink, false), id);
      // QEMU saves a machine once between two runs; nothing of the guest runs now.
      await machine.cont();
      await machine.stop();
      await machine.stream.settle();
      await image.seal(machine, saved);
      return image;
    } catch (error) {
      image.discard();
      await machine?.kill();
      throw error;
    }
  }

  /** An image of a saved machine, from which several start. */
  async #image(id: LayerId): Promise<MemoryImage> {
    const meta = this.#layer(this.#store.meta(id, true));
    const size = sizeOf(meta.spec);
    const image = await MemoryImage.make(this.#machines.python, size);
    let machine: Machine | null = null;
    try {
      machine = await this.#start(size, {
        memory: { kind: 'kept', path: image.path },
        boot: false,
      });
      await this.#load(machine, id);
      await image.seal(machine, meta);
      return image;
    } catch (error) {
      image.discard();
      await machine?.kill();
      throw error;
    }
  }

  // Sandboxes

  #spec(spec: Partial<SandboxSpec>): SandboxSpec {
    const full = { ...DEFAULT_SPEC, ...spec };
    if (full.image !== 'host' || full.network !== 'none')
      throw new LonghaulError(
        'CapabilityMissing',
        'microvm sandboxes have image host and no network',
      );
    const low =
      full.memoryBytes < MIN_MEMORY_BYTES ||
      full.diskBytes < MIN_DISK_BYTES ||
      full.inodes < MIN_INODES ||
      !(full.pids >= 1) ||
      !(full.cpus >= 0.01 && full.cpus <= MAX_CPUS);
    if (low)
      throw new LonghaulError(
        'ConfigInvalid',
        `sandbox limits are out of range: ${JSON.stringify(full)}`,
        { next: 'Give at least 32 MiB of memory, 256 KiB and 64 inodes of disk, one process.' },
      );
    return full;
  }

  async create(spec: Partial<SandboxSpec> = {}, from?: LayerId): Promise<Sandbox> {
    if (this.#closing) throw new LonghaulError('SandboxUnavailable', 'the driver is closed');
    if (from === undefined) {
      const full = this.#spec(spec);
      return this.#sandbox(full, async () => ({ image: await this.#template(full) }), null);
    }
    const saved = this.#layer(this.#store.meta(from)).spec;
    return this.#sandbox(this.#spec({ ...saved, ...spec }), async () => ({ layer: from }), from);
  }

  async #sandbox(
    spec: SandboxSpec,
    origin: () => Promise<Origin>,
    base: LayerId | null,
  ): Promise<MicroVmSandbox> {
    await this.#places.take();
    let running: Running;
    try {
      if (this.#closing) throw new LonghaulError('SandboxUnavailable', 'the driver is closed');
      running = await this.#restore(await origin(), spec);
      if (this.#closing) {
        await running.machine.kill();
        throw new LonghaulError('SandboxUnavailable', 'the driver was closed');
      }
    } catch (error) {
      this.#places.give();
      throw attribute(error, 'SandboxUnavailable');
    }
    const sandbox = new MicroVmSandbox({
      id: randomBytes(5).toString('hex'),
      spec,
      running,
      base,
      host: {
        store: this.#store,
        system: this.#system,
        restore: (each, limits) => this.#restore(each, limits),
        template: (each) => this.#template(each),
        spawn: (each, layer, count) => this.#fork(each, layer, count),
        released: (gone) => {
          this.#sandboxes.delete(gone);
          this.#places.give();
        },
      },
    });
    this.#sandboxes.add(sandbox);
    return sandbox;
  }

  async #fork(spec: SandboxSpec, layer: LayerId | null, count: number): Promise<Sandbox[]> {
    // Reading the layer once is worth it from the second child on.
    const image = layer !== null && count > 1 ? await this.#image(layer) : null;
    const origin =
      layer === null ? { image: await this.#template(spec) } : image ? { image } : { layer };
    const made = await Promise.allSettled(
      Array.from({ length: count }, () => this.#sandbox(spec, async () => origin, layer)),
    );
    image?.discard();
    const failed = made.find((each) => each.status === 'rejected');
    const children = made.flatMap((each) => (each.status === 'fulfilled' ? [each.value] : []));
    if (!failed) return children;
    await Promise.all(children.map((child) => child.stop()));
    throw failed.reason;
  }

  // Layers

  async hasLayer(layer: LayerId): Promise<boolean> {
    return this.#store.named(layer);
  }

  async dropLayer(layer: LayerId): Promise<void> {
    this.#store.drop(layer);
  }

  async exportLayer(layer: LayerId): Promise<Readable> {
    return exportArchive(this, layer);
  }

  async importLayer(archive: Readable, spec: Partial<SandboxSpec> = {}): Promise<LayerId> {
    return importArchive(this, archive, spec);
  }

  async prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport> {
    return this.#store.prune(named, this.#system);
  }

  close(): Promise<void> {
    this.#closing ??= (async () => {
      await Promise.all([...this.#sandboxes].map((sandbox) => sandbox.stop()));
      for (const made of await Promise.allSettled(this.#templates.values()))
        if (made.status === 'fulfilled') made.value.discard();
      this.#owner.release();
    })();
    return this.#closing;
  }
}

const keyOf = (spec: SandboxSpec) => JSON.stringify(spec, Object.keys(DEFAULT_SPEC));

/**
 * The hard outer bound: what QEMU gives the machine, whatever goes on inside. In powers of two, so that
 * specs share templates: the guest's kernel enforces what is less.
 */
function sizeOf(spec: SandboxSpec): MachineSize {
  const mebibytes = (spec.memoryBytes + spec.diskBytes) / MEBIBYTE;
  return {
    mebibytes: 2 ** Math.max(MIN_SIZE, Math.ceil(Math.log2(mebibytes))) + OVERHEAD_MEBIBYTES,
    processors: Math.ceil(spec.cpus),
  };
}

const described = ({ mebibytes, processors }: MachineSize) =>
  `${mebibytes} MiB and ${processors} processors`;

/** Files are in memory too: as with bubblewrap, the group's bound is the sum. */
function guestLimits(spec: SandboxSpec): Record<string, number> {
  return {
    memory: spec.memoryBytes + spec.diskBytes + OWN_BYTES,
    diskBytes: spec.diskBytes,
    inodes: spec.inodes,
    pids: spec.pids + OWN_PROCESSES,
    cpus: spec.cpus,
  };
}

/** A file that QEMU's user may read, named by its content. */
function keep(folder: string, data: Buffer, digest: string): string {
  const path = join(folder, digest);
  if (existsSync(path)) return path;
  const partial = `${path}.${randomBytes(6).toString('hex')}`;
  writeFileSync(partial, data, { mode: 0o644, flush: true });
  renameSync(partial, path);
  return path;
}
