import { randomBytes } from 'node:crypto';
import { createReadStream, mkdirSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join, resolve } from 'node:path';
import type { Readable } from 'node:stream';
import { LonghaulError } from '../../core/index.ts';
import { importArchive } from '../agent/layer-archive.ts';
import { Cgroup, type CgroupHost, findCgroups } from '../bubblewrap/cgroup.ts';
import { hostArchitecture } from '../bubblewrap/seccomp.ts';
import {
  DEFAULT_SPEC,
  type LayerId,
  type PruneReport,
  type Sandbox,
  type SandboxCapabilities,
  type SandboxDriver,
  type SandboxSpec,
} from '../contract.ts';
import { Pool } from '../pool.ts';
import { type RootLayout, rootLayout } from './bundle.ts';
import { ArchiveLayers, type HeldLayer } from './layers.ts';
import { findRuntime, GVISOR_PLATFORMS, type OciRuntime, type OciRuntimeName } from './runtimes.ts';
import { type OciHost, OciSandbox } from './sandbox.ts';
import { Supervisor } from './supervisor.ts';

export interface OciOptions {
  /** Folder for durable layers and owner records; shared by processes that resume each other's runs. */
  dir: string;
  runtime: OciRuntimeName;
  /** gVisor only: how it intercepts system calls. Default: the first of systrap and ptrace that runs here. */
  platform?: 'systrap' | 'ptrace' | 'kvm';
  /** Sandboxes kept ready for each spec that is asked for. Default 1; 0 makes each when asked. */
  warm?: number;
  /** Sandboxes alive at once; requests beyond it wait. Default 64. */
  maxLive?: number;
  /** How long a request waits for a place. Default 60 s. */
  waitMs?: number;
  /** As root: first of the host uids that sandboxes run under. Default 200000. */
  uidBase?: number;
  /** False: rlimits even where control groups can be had. */
  cgroups?: boolean;
}

const DEFAULT_WARM = 1;
const DEFAULT_MAX_LIVE = 64;
const DEFAULT_WAIT_MS = 60_000;
const DEFAULT_UID_BASE = 200_000;
/** An agent needs this much to start at all. */
const MIN_MEMORY_BYTES = 32 * 1024 * 1024;
const MIN_DISK_BYTES = 256 * 1024;
const MIN_INODES = 64;
/** What bubblewrap's `Cgroup` adds to the limit for its own processes, over what runs here. */
const CGROUP_EXTRA_PIDS = 3;
const PYTHON = '/usr/bin/python3';

function capabilitiesOf(
  runtime: OciRuntime,
  cgroups: CgroupHost | null,
  root: boolean,
): SandboxCapabilities {
  const bases = cgroups?.bases ?? {};
  const freezer = cgroups?.version === 'v2' || bases.freezer !== undefined;
  const vm = runtime.isolation === 'vm';
  return {
    isolation: runtime.isolation,
    languages: ['python'],
    exec: true,
    processes: true,
    pause: runtime.hostKernel ? (freezer ? 'freezer' : 'none') : 'machine',
    network: 'none',
    images: ['host', 'dir'],
    memory: vm ? 'machine' : bases.memory ? 'cgroup' : 'rlimit',
    cpu: vm ? 'machine' : bases.cpu ? 'cgroup' : 'none',
    // Another kernel's processes are threads here or no processes at all: the host's groups cannot count them.
    pids: runtime.hostKernel && bases.pids ? 'cgroup' : 'rlimit',
    disk: 'filesystem',
    layers: 'copy',
    ownUid: root && !vm,
  };
}

/** Sandboxes by an OCI runtime: crun or runc (namespaces), runsc (gVisor), Kata (a machine of its own). */
export class OciDriver implements SandboxDriver {
  readonly name: string;
  readonly capabilities: SandboxCapabilities;
  /** Owners whose leftovers this start removed. */
  readonly cleaned: number;
  readonly #runtime: OciRuntime;
  readonly #options: OciOptions;
  readonly #cgroups: CgroupHost | null;
  readonly #pool: Pool<OciSandbox>;
  readonly #sandboxes = new Map<string, OciSandbox>();
  readonly #freeIds: { root: number; guest: number }[] = [];
  #supervisor: Supervisor;
  #layers: ArchiveLayers;
  #restarting: Promise<void> | null = null;
  #closing: Promise<void> | null = null;

  private constructor(parts: {
    options: OciOptions;
    runtime: OciRuntime;
    supervisor: Supervisor;
    cgroups: CgroupHost | null;
    cleaned: number;
  }) {
    const { options, runtime, supervisor, cgroups } = parts;
    this.name = options.runtime;
    this.#options = options;
    this.cleaned = parts.cleaned;
    this.#runtime = runtime;
    this.#cgroups = cgroups;
    this.#supervisor = supervisor;
    this.#layers = this.#ownLayers();
    this.#resetIds();
    this.#watch();
    this.capabilities = capabilitiesOf(runtime, cgroups, supervisor.ready.root);
    this.#pool = new Pool({
      make: (key) => this.#make(JSON.parse(key) as SandboxSpec, true),
      warm: options.warm ?? DEFAULT_WARM,
      maxLive: options.maxLive ?? DEFAULT_MAX_LIVE,
      waitMs: options.waitMs ?? DEFAULT_WAIT_MS,
    });
  }

  /**
   * Starts the driver and one container, which proves that the runtime works here; `SandboxUnavailable`
   * with the reason where it does not.
   */
  static async open(options: OciOptions): Promise<OciDriver> {
    const runtime = findRuntime(options.runtime);
    if (!hostArchitecture())
      throw new LonghaulError(
        'SandboxUnavailable',
        `${options.runtime}: no system call filter for ${process.arch}`,
      );
    if (options.platform !== undefined && runtime.isolation !== 'gvisor')
      throw new LonghaulError(
        'ConfigInvalid',
        `${options.runtime} has no platforms to choose from`,
      );
    const dir = resolve(options.dir);
    mkdirSync(dir, { recursive: true });
    const platforms =
      runtime.isolation === 'gvisor'
        ? (options.platform ? [options.platform] : GVISOR_PLATFORMS).map((name) => [
            `--platform=${name}`,
          ])
        : [[]];
    let failure: unknown;
    const cleaned = { owners: 0 }; // by each of the starts below
    for (const flags of platforms) {
      const chosen = { ...runtime, flags: [...runtime.flags, ...flags] };
      try {
        return await OciDriver.#proven({ ...options, dir }, chosen, cleaned);
      } catch (error) {
        failure = error;
      }
    }
    throw failure;
  }

  static async #proven(
    options: OciOptions,
    runtime: OciRuntime,
    cleaned: { owners: number },
  ): Promise<OciDriver> {
    const cgroups = options.cgroups === false ? null : findCgroups();
    const supervisor = await OciDriver.#supervise(options, runtime, cgroups);
    cleaned.owners += supervisor.ready.cleaned;
    const driver = new OciDriver({
      options,
      runtime,
      supervisor,
      cgroups,
      cleaned: cleaned.owners,
    });
    try {
      await (await driver.#make(DEFAULT_SPEC, false)).stop();
      return driver;
    } catch (error) {
      await driver.close();
      throw error;
    }
  }

  static #supervise(options: OciOptions, runtime: OciRuntime, cgroups: CgroupHost | null) {
    const uidBase = options.uidBase ?? DEFAULT_UID_BASE;
    return Supervisor.start({ dir: options.dir, python: PYTHON, runtime, cgroups, uidBase });
  }

  /** The process that mounts the files: its end ends every sandbox. */
  get supervisorPid(): number {
    return this.#supervisor.ready.pid;
  }

  /** The sandboxes of a supervisor end with it. */
  #watch(): void {
    const supervisor = this.#supervisor;
    void supervisor.ended.then((reason) => {
      for (const sandbox of this.#sandboxes.values())
        if (sandbox.supervisor === supervisor) sandbox.lose(reason);
    });
  }

  #ownLayers(): ArchiveLayers {
    const { ownerDir, owner } = this.#supervisor;
    return new ArchiveLayers(join(this.#options.dir, 'layers'), ownerDir, owner);
  }

  #resetIds(): void {
    const { firstUid, uids } = this.#supervisor.ready;
    this.#freeIds.length = 0;
    for (let i = 0; i + 1 < uids - 1; i += 2)
      this.#freeIds.push({ root: firstUid + i, guest: firstUid + i + 1 });
  }

  #layout(spec: SandboxSpec): RootLayout {
    if (spec.image === 'host' || spec.image.startsWith('dir:'))
      return rootLayout(spec.image, PYTHON);
    throw new LonghaulError(
      'CapabilityMissing',
      `${this.name} sandboxes have image host or dir:PATH, not ${spec.image}`,
    );
  }

  #spec(spec: Partial<SandboxSpec>): SandboxSpec {
    const full = { ...DEFAULT_SPEC, ...spec };
    if (full.network !== 'none')
      throw new LonghaulError('CapabilityMissing', `${this.name} sandboxes have no network`);
    const low =
      full.memoryBytes < MIN_MEMORY_BYTES ||
      full.diskBytes < MIN_DISK_BYTES ||
      full.inodes < MIN_INODES ||
      !(full.pids >= 1) ||
      !(full.cpus > 0);
    if (low)
      throw new LonghaulError(
        'ConfigInvalid',
        `sandbox limits are too low to start: ${JSON.stringify(full)}`,
        { next: 'Give at least 32 MiB of memory, 256 KiB and 64 inodes of disk, one process.' },
      );
    if (
      this.capabilities.cpu === 'none' &&
      full.cpus !== DEFAULT_SPEC.cpus &&
      full.cpus < availableParallelism()
    )
      throw new LonghaulError(
        'CapabilityMissing',
        `no control group for cpu can be made here, so ${full.cpus} cpus cannot be enforced`,
        { next: 'Run as root or with a delegated cgroup, or leave cpus out.' },
      );
    this.#layout(full); // refuses an image that there is not
    return full;
  }

  async create(spec: Partial<SandboxSpec> = {}, from?: LayerId): Promise<Sandbox> {
    const full = this.#spec(spec);
    await this.#alive();
    if (from === undefined) return this.#acquire(full);
    const layer = this.#layers.hold(from);
    try {
      return await this.#spawn(full, layer);
    } finally {
      layer.release();
    }
  }

  async #spawn(spec: SandboxSpec, from: HeldLayer | null): Promise<OciSandbox> {
    const sandbox = await this.#acquire(spec);
    if (!from) return sandbox;
    try {
      await sandbox.adopt(from);
      return sandbox;
    } catch (error) {
      await sandbox.stop();
      throw error;
    }
  }

  #acquire(spec: SandboxSpec): Promise<OciSandbox> {
    return this.#pool.acquire(JSON.stringify(spec, Object.keys(DEFAULT_SPEC)));
  }

  /** A supervisor that was killed took its sandboxes' files with it; durable layers stay. */
  async #alive(): Promise<void> {
    if (this.#closing) throw new LonghaulError('SandboxUnavailable', 'the driver is closed');
    if (!this.#supervisor.gone) return;
    this.#restarting ??= (async () => {
      this.#supervisor = await OciDriver.#supervise(this.#options, this.#runtime, this.#cgroups);
      this.#layers = this.#ownLayers();
      this.#resetIds();
      this.#watch();
    })().finally(() => {
      this.#restarting = null;
    });
    await this.#restarting;
  }

  #takeIds(): { root: number; guest: number } | null {
    if (!this.#supervisor.ready.root) return null;
    const ids = this.#freeIds.shift();
    if (!ids)
      throw new LonghaulError('SandboxUnavailable', 'every sandbox uid of this driver is in use');
    return ids;
  }

  #group(id: string, spec: SandboxSpec): Cgroup | null {
    if (!this.#cgroups) return null;
    const { pids: _, ...uncounted } = this.#cgroups.bases;
    const bases = this.#runtime.hostKernel ? this.#cgroups.bases : uncounted;
    const { overheadBytes, overheadPerProcess } = this.#runtime;
    return new Cgroup({ ...this.#cgroups, bases }, this.#supervisor.owner, id, {
      ...spec,
      memoryBytes: spec.memoryBytes + overheadBytes + overheadPerProcess * spec.pids,
      pids: spec.pids - CGROUP_EXTRA_PIDS,
    });
  }

  /** `pooled`: its place is the pool's, which gets it back when it stops. */
  async #make(spec: SandboxSpec, pooled: boolean): Promise<OciSandbox> {
    const supervisor = this.#supervisor;
    const id = randomBytes(5).toString('hex');
    const layout = this.#layout(spec);
    const ids = this.#takeIds();
    // Until it is ready the pool itself gives its place back.
    let ready = false;
    const host: OciHost = {
      supervisor,
      runtime: this.#runtime,
      layers: this.#layers,
      capabilities: this.capabilities,
      spawn: (childSpec, from) => this.#spawn(childSpec, from),
      released: (gone) => {
        this.#sandboxes.delete(gone.id);
        if (ids && supervisor === this.#supervisor) this.#freeIds.push(ids);
        if (ready) this.#pool.release();
      },
    };
    let sandbox: OciSandbox | null = null;
    try {
      const cgroup = this.#group(id, spec);
      sandbox = new OciSandbox({ id, spec, ids, layout, host, cgroup });
      this.#sandboxes.set(id, sandbox);
      await sandbox.boot();
      ready = pooled;
      return sandbox;
    } catch (error) {
      if (sandbox) await sandbox.stop();
      else if (ids) this.#freeIds.push(ids);
      throw error;
    }
  }

  async hasLayer(layer: LayerId): Promise<boolean> {
    return this.#layers.has(layer);
  }

  async dropLayer(layer: LayerId): Promise<void> {
    this.#layers.drop(layer);
  }

  async exportLayer(layer: LayerId): Promise<Readable> {
    const held = this.#layers.hold(layer);
    const stream = createReadStream(held.path);
    stream.once('close', held.release);
    return stream;
  }

  async importLayer(archive: Readable, spec: Partial<SandboxSpec> = {}): Promise<LayerId> {
    return importArchive(this, archive, spec);
  }

  async prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport> {
    return this.#layers.prune(named);
  }

  close(): Promise<void> {
    this.#closing ??= (async () => {
      await this.#pool.close();
      await Promise.all([...this.#sandboxes.values()].map((sandbox) => sandbox.stop()));
      await this.#supervisor.close();
    })();
    return this.#closing;
  }
}
