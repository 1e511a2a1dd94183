import { randomBytes } from 'node:crypto';
import { mkdirSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join, resolve } from 'node:path';
import type { Readable } from 'node:stream';
import { attribute, LonghaulError } from '../../core/index.ts';
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
import { imageLayers } from '../images/record.ts';
import { type NetworkHandle, NetworkProxy } from '../network/proxy.ts';
import { compilePolicy } from '../network/rules.ts';
import { Pool } from '../pool.ts';
import { Cgroup, type CgroupHost, findCgroups } from './cgroup.ts';
import { LayerRegistry, type LayerReport, type LayerStack } from './layers.ts';
import { canonicalImage, sandboxRoot } from './root.ts';
import { BubblewrapSandbox, type SandboxHost } from './sandbox.ts';
import { type LayerRef, RETRY_MS, Supervisor } from './supervisor.ts';
import { findTools } from './tools.ts';

export interface BubblewrapOptions {
  /** Folder for durable layers and owner records; shared by processes that resume each other's runs. */
  dir: string;
  /** Sandboxes kept ready for each spec that is asked for. Default 1; 0 makes each when asked. */
  warm?: number;
  /** Sandboxes alive at once; requests beyond it wait. Default 64. */
  maxLive?: number;
  /** How long a request waits for a place. Default 60 s. */
  waitMs?: number;
  /** A sandbox without a call or a process for so long keeps its files and no interpreter. Default 30 s. */
  idleMs?: number;
  /** As root: first of the host uids that sandboxes run under. Default 200000. */
  uidBase?: number;
  /** False: rlimits even where control groups can be had. */
  cgroups?: boolean;
}

const DEFAULT_WARM = 1;
const DEFAULT_MAX_LIVE = 64;
const DEFAULT_WAIT_MS = 60_000;
const DEFAULT_IDLE_MS = 30_000;
const DEFAULT_UID_BASE = 200_000;
/** An agent needs this much to start at all. */
const MIN_MEMORY_BYTES = 32 * 1024 * 1024;
const MIN_DISK_BYTES = 256 * 1024;
const MIN_INODES = 64;

/** Sandboxes by bubblewrap: namespaces, a system call filter, control groups, overlay layers. */
export class BubblewrapDriver implements SandboxDriver {
  readonly name = 'bubblewrap';
  readonly capabilities: SandboxCapabilities;
  readonly cgroups: CgroupHost | null;
  readonly #dir: string;
  readonly #python: string;
  readonly #bwrap: string;
  readonly #uidBase: number;
  readonly #idleMs: number;
  readonly #registry: LayerRegistry;
  readonly #pool: Pool<BubblewrapSandbox>;
  readonly #sandboxes = new Map<string, BubblewrapSandbox>();
  readonly #freeUids: number[] = [];
  #supervisor: Supervisor;
  #proxy: Promise<NetworkProxy> | null = null;
  #restarting: Promise<void> | null = null;
  #closing: Promise<void> | null = null;

  private constructor(parts: {
    options: BubblewrapOptions;
    supervisor: Supervisor;
    cgroups: CgroupHost | null;
    tools: { bwrap: string; python: string };
  }) {
    const { options, supervisor } = parts;
    this.#dir = options.dir;
    this.#bwrap = parts.tools.bwrap;
    this.#python = parts.tools.python;
    this.#uidBase = options.uidBase ?? DEFAULT_UID_BASE;
    this.#idleMs = options.idleMs ?? DEFAULT_IDLE_MS;
    this.cgroups = parts.cgroups;
    this.#supervisor = supervisor;
    this.#registry = new LayerRegistry(options.dir, (ref) => this.#unused(ref));
    this.#resetUids();
    const bases = parts.cgroups?.bases ?? {};
    this.capabilities = {
      isolation: 'namespaces',
      languages: ['python'],
      exec: true,
      processes: true,
      pause: parts.cgroups?.version === 'v2' || (bases.freezer && bases.pids) ? 'freezer' : 'none',
      network: 'proxy',
      images: ['host', 'dir', 'image'],
      memory: bases.memory ? 'cgroup' : 'rlimit',
      cpu: bases.cpu ? 'cgroup' : 'none',
      pids: bases.pids ? 'cgroup' : 'rlimit',
      disk: 'filesystem',
      layers: 'overlay',
      ownUid: supervisor.ready.root && supervisor.ready.idmap,
    };
    this.#pool = new Pool({
      make: (key) => this.#make(JSON.parse(key) as SandboxSpec),
      warm: options.warm ?? DEFAULT_WARM,
      maxLive: options.maxLive ?? DEFAULT_MAX_LIVE,
      waitMs: options.waitMs ?? DEFAULT_WAIT_MS,
    });
  }

  /** Starts the driver; `SandboxUnavailable` with the reason where this machine cannot run it. */
  static async open(options: BubblewrapOptions): Promise<BubblewrapDriver> {
    const dir = resolve(options.dir);
    const tools = findTools();
    mkdirSync(dir, { recursive: true });
    const cgroups = options.cgroups === false ? null : findCgroups();
    const supervisor = await Supervisor.start({
      dir,
      ...tools,
      cgroups,
      uidBase: options.uidBase ?? DEFAULT_UID_BASE,
    });
    return new BubblewrapDriver({ options: { ...options, dir }, supervisor, cgroups, tools });
  }

  /** The driver's folder, where the image store lies too. */
  get dir(): string {
    return this.#dir;
  }

  /** Owners whose leftovers this start removed. */
  get cleaned(): number {
    return this.#supervisor.ready.cleaned;
  }

  /** The process that holds the mounts: its end ends every sandbox. */
  get supervisorPid(): number {
    return this.#supervisor.ready.pid;
  }

  #resetUids(): void {
    const { firstUid, uids } = this.#supervisor.ready;
    this.#freeUids.length = 0;
    // The first of a block may be the layers' owner; the range starts after it.
    for (let i = 0; i < uids - 1; i++) this.#freeUids.push(firstUid + i);
  }

  #takeUid(): number {
    const { root, idmap } = this.#supervisor.ready;
    if (!root) return 0;
    // Without id-mapped mounts (kernel before 6.3) a fork could not read its parent's layers.
    if (!idmap) return this.#uidBase;
    const uid = this.#freeUids.pop();
    if (uid === undefined)
      throw new LonghaulError('SandboxUnavailable', 'every sandbox uid of this driver is in use', {
        retryAfterMs: RETRY_MS,
      });
    return uid;
  }

  #spec(spec: Partial<SandboxSpec>): SandboxSpec {
    const full = { ...DEFAULT_SPEC, ...spec };
    full.image = canonicalImage(full.image, this.#dir);
    if (full.network !== 'none') compilePolicy(full.network);
    const whole = [full.memoryBytes, full.diskBytes, full.inodes, full.pids];
    const low =
      !whole.every(Number.isSafeInteger) ||
      !Number.isFinite(full.cpus) ||
      full.memoryBytes < MIN_MEMORY_BYTES ||
      full.diskBytes < MIN_DISK_BYTES ||
      full.inodes < MIN_INODES ||
      !(full.pids >= 1) ||
      !(full.cpus > 0);
    if (low)
      throw new LonghaulError(
        'ConfigInvalid',
        `sandbox limits are too low to start, or no numbers: ${JSON.stringify(full)}`,
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
    return full;
  }

  async create(spec: Partial<SandboxSpec> = {}, from?: LayerId): Promise<Sandbox> {
    const full = this.#spec(spec);
    await this.#alive();
    const supervisor = this.#supervisor;
    try {
      return await this.#made(full, from);
    } catch (error) {
      // It was ended just before or meanwhile, and that was not known yet: once more, with a new one.
      if (!supervisor.gone || this.#closing) throw error;
      await this.#alive();
      return this.#made(full, from);
    }
  }

  async #made(spec: SandboxSpec, from: LayerId | undefined): Promise<Sandbox> {
    const stack = from === undefined ? null : this.#registry.stack(from);
    const sandbox = await this.#acquire(spec);
    return stack ? this.#adopted(sandbox, stack) : sandbox;
  }

  async #adopted(
    sandbox: BubblewrapSandbox,
    stack: LayerStack | Promise<LayerStack>,
  ): Promise<BubblewrapSandbox> {
    try {
      await sandbox.adopt(await stack);
      return sandbox;
    } catch (error) {
      await sandbox.stop();
      throw error;
    }
  }

  #acquire(spec: SandboxSpec): Promise<BubblewrapSandbox> {
    const ordered = Object.keys(DEFAULT_SPEC).map((key) => [key, spec[key as keyof SandboxSpec]]);
    return this.#pool.acquire(JSON.stringify(Object.fromEntries(ordered)));
  }

  /** A supervisor that was killed took its sandboxes and volatile layers with it; durable layers stay. */
  async #alive(): Promise<void> {
    if (this.#closing) throw new LonghaulError('SandboxUnavailable', 'the driver is closed');
    if (!this.#supervisor.gone) return;
    this.#restarting ??= (async () => {
      this.#registry.forgetVolatile();
      await this.#closeProxy();
      await this.#supervisor.close();
      this.#supervisor = await Supervisor.start({
        dir: this.#dir,
        bwrap: this.#bwrap,
        python: this.#python,
        cgroups: this.cgroups,
        uidBase: this.#uidBase,
      });
      this.#resetUids();
    })().finally(() => {
      this.#restarting = null;
    });
    await this.#restarting;
  }

  async #make(spec: SandboxSpec): Promise<BubblewrapSandbox> {
    const supervisor = this.#supervisor;
    const id = randomBytes(5).toString('hex');
    const uid = this.#takeUid();
    let cgroup: Cgroup | null = null;
    let network: NetworkHandle | null = null;
    let sandbox: BubblewrapSandbox | null = null;
    const host: SandboxHost = {
      supervisor,
      registry: this.#registry,
      uidBase: this.#uidBase,
      idleMs: this.#idleMs,
      spawn: async (childSpec, childStack) => {
        return this.#adopted(await this.#acquire(childSpec), childStack);
      },
      released: (gone, clean) => {
        this.#sandboxes.delete(gone.id);
        if (clean && supervisor === this.#supervisor && supervisor.ready.idmap)
          this.#freeUids.push(uid);
        if (ready) this.#pool.release();
      },
    };
    // Until it is ready the pool itself gives its place back.
    let ready = false;
    try {
      if (this.cgroups) cgroup = new Cgroup(this.cgroups, supervisor.owner, id, spec);
      const root = sandboxRoot(spec.image, {
        dir: this.#dir,
        ownUid: supervisor.ready.root,
        stackOf: (layer) => this.#registry.stack(layer),
      });
      if (spec.network !== 'none') network = (await this.#openProxy()).register(id, spec.network);
      sandbox = new BubblewrapSandbox({ id, spec, uid, host, cgroup, network, root });
      this.#sandboxes.set(id, sandbox);
      await sandbox.boot(root?.writable ? root.layers : []);
      ready = true;
      return sandbox;
    } catch (error) {
      if (!sandbox) {
        network?.close();
        await cgroup?.remove();
      }
      if (sandbox) await sandbox.stop();
      else if (uid > 0 && supervisor.ready.idmap) this.#freeUids.push(uid);
      throw error;
    }
  }

  /** Made for the first sandbox that has a network; it lives as long as its supervisor. */
  #openProxy(): Promise<NetworkProxy> {
    this.#proxy ??= NetworkProxy.open({ socketPath: join(this.#supervisor.ownerDir, 'proxy') });
    return this.#proxy;
  }

  async #closeProxy(): Promise<void> {
    const proxy = this.#proxy;
    this.#proxy = null;
    await (await proxy)?.close();
  }

  /** A volatile layer that nobody needs: its files go now, its tmpfs when the last one on it goes. */
  #unused(ref: LayerRef): void {
    const supervisor = this.#supervisor;
    const tell = (op: string, fields: Record<string, unknown>) => {
      supervisor.request(op, fields).catch(() => {});
    };
    if ('durable' in ref) tell('unhold', { layer: ref.durable });
    else if (this.#sandboxes.has(ref.home)) tell('discard', { sid: ref.home, name: ref.name });
    else tell('close', { sid: ref.home, keep: this.#registry.usedNames(ref.home) });
  }

  async hasLayer(layer: LayerId): Promise<boolean> {
    return this.#registry.has(layer);
  }

  async dropLayer(layer: LayerId): Promise<void> {
    if (this.#registry.dropVolatile(layer) || !this.#registry.durable().includes(layer)) return;
    await this.#collect({ drop: [layer], unnamed: [] });
  }

  async #collect(what: { drop: LayerId[]; unnamed: LayerId[] }): Promise<PruneReport> {
    await this.#alive();
    return (await this.#supervisor.request('collect', what)) as PruneReport;
  }

  async exportLayer(layer: LayerId): Promise<Readable> {
    return exportArchive(this, layer);
  }

  async importLayer(archive: Readable, spec: Partial<SandboxSpec> = {}): Promise<LayerId> {
    return importArchive(this, archive, spec);
  }

  async prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport> {
    const candidates = this.#registry.candidates();
    const keep = new Set([...(await named()), ...imageLayers(this.#dir)]);
    return this.#collect({ drop: [], unnamed: candidates.filter((id) => !keep.has(id)) });
  }

  /**
   * The durable layers and the state of each, for a person. `full` reads every file and holds it against
   * the layer's id; otherwise only what describes the layers is read.
   */
  async *verifyLayers(options: { full?: boolean } = {}): AsyncGenerator<LayerReport> {
    await this.#alive();
    for (const id of this.#registry.durable()) {
      const report = this.#registry.report(id);
      if (report?.state === 'damaged' || !options.full) {
        if (report) yield report;
        continue;
      }
      try {
        const known = await this.#supervisor.request('verify', { layer: id });
        if (report) yield { ...report, state: known ? 'whole' : 'unverifiable' };
      } catch (error) {
        const { code, message } = attribute(error, 'SandboxUnavailable');
        if (code === 'NotFound') continue; // removed meanwhile
        if (code !== 'LayerDamaged') throw error;
        yield { id, ...report, state: 'damaged', detail: message };
      }
    }
  }

  close(): Promise<void> {
    this.#closing ??= (async () => {
      await this.#pool.close();
      await Promise.all([...this.#sandboxes.values()].map((sandbox) => sandbox.stop()));
      await this.#closeProxy();
      await this.#supervisor.close();
    })();
    return this.#closing;
  }
}
