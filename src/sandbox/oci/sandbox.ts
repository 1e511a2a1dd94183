import { attribute, LonghaulError } from '../../core/index.ts';
import { clearFolder, packWorkspace, unpackInto } from '../agent/archive.ts';
import { AgentChannel } from '../agent/channel.ts';
import type { Evidence } from '../agent/requests.ts';
import { AgentSandbox, type Lost } from '../agent/sandbox.ts';
import type { Cgroup } from '../bubblewrap/cgroup.ts';
import type {
  ForkOptions,
  LayerId,
  NetworkAttempt,
  Sandbox,
  SandboxCapabilities,
  SandboxSpec,
  SandboxUsage,
  SnapshotOptions,
} from '../contract.ts';
import { type AgentLimits, bundleConfig, guestId, type RootLayout } from './bundle.ts';
import { type ArchiveLayers, type HeldLayer, readArchive } from './layers.ts';
import type { OciRuntime } from './runtimes.ts';
import type { ContainerExit, Supervisor } from './supervisor.ts';

const START_TIMEOUT_MS = 60_000;
const WORKSPACE = '/workspace';
/** The agent and its spare fork, which the guest's process limit leaves room for. */
const OWN_INSIDE = 2;

/** What a sandbox needs of its driver. */
export interface OciHost {
  supervisor: Supervisor;
  runtime: OciRuntime;
  layers: ArchiveLayers;
  capabilities: SandboxCapabilities;
  /** A new sandbox with the same spec, with the workspace of a layer or an empty one. */
  spawn(spec: SandboxSpec, from: HeldLayer | null): Promise<Sandbox>;
  /** The sandbox is gone: free its uids and its place. */
  released(sandbox: OciSandbox): void;
}

/** A container of an OCI runtime, its files on a tmpfs that the driver mounted. */
export class OciSandbox extends AgentSandbox implements Sandbox {
  readonly id: string;
  readonly spec: SandboxSpec;
  readonly ids: { root: number; guest: number } | null;
  readonly #host: OciHost;
  readonly #layout: RootLayout;
  readonly #cgroup: Cgroup | null;
  readonly #started = performance.now();
  #launches = 0;
  #exit: Promise<ContainerExit> | null = null;
  #stopping: Promise<void> | null = null;
  #freezing: Promise<void> | null = null;
  /** The workspace's last quiescent state, for forks while processes run; null: it was empty. */
  #base: HeldLayer | null = null;
  #seen: Evidence = { oomKills: 0, pidsRefused: 0 };
  /** The last command ran out of memory: the agent may have been killed just after it answered. */
  #oomBefore = false;

  constructor(options: {
    id: string;
    spec: SandboxSpec;
    ids: { root: number; guest: number } | null;
    layout: RootLayout;
    host: OciHost;
    cgroup: Cgroup | null;
  }) {
    super();
    this.id = options.id;
    this.spec = options.spec;
    this.ids = options.ids;
    this.#layout = options.layout;
    this.#host = options.host;
    this.#cgroup = options.cgroup;
  }

  get supervisor(): Supervisor {
    return this.#host.supervisor;
  }

  get #container(): string {
    return `${this.id}-${this.#launches}`;
  }

  /** Mounts the files and starts the container. */
  async boot(): Promise<void> {
    const { supervisor, runtime } = this.#host;
    await supervisor.request('open', {
      sid: this.id,
      // Seen from where the tmpfs is mounted: a caller that is not root is root of its own namespace there.
      uid: this.ids?.guest ?? 0,
      runtimeUid: runtime.inUserNamespace ? (this.ids?.root ?? 0) : 0,
      bytes: this.spec.diskBytes,
      inodes: this.spec.inodes,
      root: this.#layout.skeleton,
      image: this.#layout.image,
    });
    await this.#connect();
  }

  #limits(): AgentLimits {
    const { capabilities } = this.#host;
    // gVisor's agent has another uid, and it counts one less than there are.
    const own = capabilities.isolation === 'gvisor' ? 0 : OWN_INSIDE;
    return {
      ...(capabilities.pids === 'rlimit' && { processes: this.spec.pids + own }),
      // gVisor does not count RLIMIT_DATA.
      ...(capabilities.memory === 'rlimit' && {
        [capabilities.isolation === 'gvisor' ? 'address' : 'data']: this.spec.memoryBytes,
      }),
    };
  }

  async #connect(): Promise<void> {
    const { supervisor, runtime } = this.#host;
    this.#launches++;
    const config = bundleConfig({
      sid: this.id,
      spec: this.spec,
      runtime,
      layout: this.#layout,
      ids: this.ids,
      limits: this.#limits(),
      cgroupsPath: supervisor.ready.root
        ? `/longhaul-${supervisor.owner}/runtime-${this.#container}`
        : null,
    });
    const map: [number, number][] | null =
      runtime.inUserNamespace && this.ids
        ? [
            [0, this.ids.root],
            [guestId(this.ids), this.ids.guest],
          ]
        : null;
    const { socket, exit } = await supervisor.launch({
      sid: this.id,
      container: this.#container,
      config,
      cgroups: this.#cgroup?.directories ?? [],
      detached: runtime.detached,
      map,
    });
    this.#exit = exit;
    const channel = new AgentChannel(socket);
    this.channel = channel;
    const timer = setTimeout(() => channel.destroy(), START_TIMEOUT_MS);
    try {
      await channel.hello;
    } catch (error) {
      const gone = await this.#ended(1000);
      const text = gone
        ? gone.stderr.trim().split('\n').at(-1) || `exit ${gone.status}`
        : supervisor.said || 'the agent did not answer';
      throw new LonghaulError('SandboxUnavailable', `${runtime.binary} did not start: ${text}`, {
        next: 'Run the runtime by hand, or choose another; `longhaul sandbox doctor` says what works here.',
        cause: error,
      });
    } finally {
      clearTimeout(timer);
    }
  }

  /** The container's end, or null when it has not been seen within `ms`. */
  async #ended(ms: number): Promise<ContainerExit | null> {
    let timer!: NodeJS.Timeout;
    const late = new Promise<null>((resolve) => {
      timer = setTimeout(resolve, ms, null);
    });
    const exit = await Promise.race([this.#exit, late]);
    clearTimeout(timer);
    return exit;
  }

  /** The supervisor is gone, on the host's account, and cannot end the container: closing the connection does. */
  lose(reason: string): void {
    this.breakWith(reason);
  }

  // What the agent's calls need

  protected evidence(): Evidence {
    const now = {
      oomKills: this.#cgroup?.oomKills() ?? 0,
      pidsRefused: this.#cgroup?.pidsRefused() ?? 0,
    };
    const fresh = {
      oomKills: now.oomKills - this.#seen.oomKills,
      pidsRefused: now.pidsRefused - this.#seen.pidsRefused,
    };
    this.#seen = now;
    this.#oomBefore = fresh.oomKills > 0;
    return fresh;
  }

  protected endAgent(): void {
    this.channel?.destroy();
    void this.#kill().catch(() => {});
  }

  #kill(): Promise<void> {
    const cgroups = this.#cgroup?.directories ?? [];
    return this.#host.supervisor.request('kill', { sid: this.id, cgroups });
  }

  protected async replaceAgent(late: boolean, error: Error): Promise<Lost> {
    if (this.#stopping) throw this.breakWith('the sandbox was stopped');
    const exit = late ? null : await this.#ended(5000);
    const before = this.#oomBefore;
    const oom = this.evidence().oomKills > 0 || before;
    if (!oom && !late) {
      const detail = exit
        ? exit.stderr.trim().split('\n').at(-1) || `exit ${exit.status}`
        : error.message;
      throw this.breakWith(`the container ended from outside: ${detail}`);
    }
    await this.#restart();
    return oom ? 'out_of_memory' : 'timeout';
  }

  /** A new container over the same workspace. */
  async #restart(): Promise<void> {
    const { supervisor } = this.#host;
    this.channel?.destroy();
    try {
      await this.#kill();
      if (!(await this.#ended(10_000))) throw new Error('the container does not end');
      await supervisor.request('delete', { sid: this.id });
      await supervisor.request('fresh', { sid: this.id });
      await this.#connect();
    } catch (error) {
      throw this.breakWith(attribute(error, 'SandboxUnavailable').message);
    }
  }

  // Layers

  /** Takes the workspace of a layer before anybody has used this sandbox. `layer` stays the caller's. */
  adopt(layer: HeldLayer): Promise<void> {
    return this.enqueue(() => this.#fill(layer));
  }

  #fill(layer: HeldLayer): Promise<void> {
    return readArchive(layer, (tar) => unpackInto(this.channel!, tar, WORKSPACE, false));
  }

  async #save(durable: boolean): Promise<LayerId> {
    const { layers } = this.#host;
    const tar = packWorkspace((use) => use(this.channel!), WORKSPACE);
    let id: LayerId;
    try {
      id = await layers.save(tar, durable);
    } catch (error) {
      await this.busy(true); // the archiver, whose output nobody takes any more
      throw error;
    }
    this.#rebase(layers.hold(id));
    return id;
  }

  #rebase(base: HeldLayer | null): void {
    this.#base?.release();
    this.#base = base;
  }

  snapshot(options: SnapshotOptions = {}): Promise<LayerId> {
    return this.enqueue(async () => {
      if (await this.busy(options.onBusy === 'stop'))
        throw new LonghaulError(
          'SandboxBusy',
          'processes are still running in the sandbox and would write into the snapshot',
          { next: "End them, or snapshot with onBusy: 'stop'." },
        );
      return this.#save(options.durable === true);
    });
  }

  rollback(layer: LayerId): Promise<void> {
    return this.enqueue(async () => {
      const held = this.#host.layers.hold(layer);
      try {
        if (await this.busy(true))
          throw this.breakWith('processes in the sandbox could not be ended for a rollback');
        for (const place of [WORKSPACE, '/tmp', '/dev/shm'])
          await clearFolder(this.channel!, place);
        await this.#fill(held);
      } catch (error) {
        held.release();
        throw this.breakWith(`rollback: ${attribute(error, 'SandboxUnavailable').message}`);
      }
      this.#rebase(held);
    });
  }

  /** With a call in flight or processes alive, from the last layer; otherwise from the files as they are. */
  async fork(count: number, options: ForkOptions = {}): Promise<Sandbox[]> {
    const spec = { ...this.spec, diskBytes: this.spec.diskBytes + (options.moreDiskBytes ?? 0) };
    const { layers } = this.#host;
    let own: LayerId | null = null;
    if (this.idle || options.stopProcesses) {
      const stop = options.stopProcesses ?? false;
      own = await this.enqueue(async () => {
        const busy = await this.busy(stop);
        if (busy && stop)
          throw this.breakWith('processes in the sandbox could not be ended for a fork');
        return busy ? null : this.#save(false);
      });
    }
    if (this.broken) throw this.broken;
    const from = this.#base;
    this.#base = null; // held by this call until the forks have it
    try {
      const made = await Promise.allSettled(
        Array.from({ length: count }, () => this.#host.spawn(spec, from)),
      );
      const failed = made.find((each) => each.status === 'rejected');
      const children = made.flatMap((each) => (each.status === 'fulfilled' ? [each.value] : []));
      if (!failed) return children;
      await Promise.all(children.map((child) => child.stop()));
      throw failed.reason;
    } finally {
      if (own) layers.drop(own);
      if (this.#base || this.#stopping) from?.release();
      else this.#base = from;
    }
  }

  // The sandbox as a whole

  pause(): Promise<void> {
    return this.enqueue(async () => {
      // Known before it is done: who stops it meanwhile has to wait for it and undo it.
      this.paused = true;
      this.#freezing = this.#freeze(true);
      try {
        await this.#freezing;
      } catch (error) {
        await this.#freeze(false).catch(() => {});
        this.paused = false;
        throw error;
      } finally {
        this.#freezing = null;
      }
    });
  }

  async resume(): Promise<void> {
    if (this.broken) throw this.broken;
    if (!this.paused) return;
    await this.#freeze(false);
    this.paused = false;
  }

  /** By the control group, or by the runtime's own command where its kernel is not the host's. */
  async #freeze(frozen: boolean): Promise<void> {
    const { capabilities, supervisor } = this.#host;
    if (capabilities.pause === 'freezer') return this.#cgroup!.freeze(frozen);
    if (capabilities.pause === 'machine')
      return supervisor.request('runtime', {
        sid: this.id,
        command: frozen ? 'pause' : 'resume',
        container: this.#container,
      });
    throw new LonghaulError('CapabilityMissing', 'no control group here can freeze processes', {
      next: 'Run as root or with a delegated cgroup; `longhaul sandbox doctor` says more.',
    });
  }

  networkAttempts(): readonly NetworkAttempt[] {
    return [];
  }

  usage(): Promise<SandboxUsage> {
    return this.enqueue(async () => {
      const { cpuSeconds, own } = await this.agentUsage();
      const pids =
        this.#host.capabilities.pids === 'cgroup' ? (this.#cgroup?.pids() ?? null) : null;
      return {
        cpuSeconds: this.#cgroup?.cpuSeconds() ?? cpuSeconds,
        peakMemoryBytes: this.#cgroup?.peakMemoryBytes() ?? null,
        diskBytes: this.diskBytes,
        pids: pids === null ? null : Math.max(0, pids - own),
        wallSeconds: (performance.now() - this.#started) / 1000,
        oomKills: this.#cgroup?.oomKills() ?? 0,
        pidsRefused: this.#cgroup?.pidsRefused() ?? 0,
      };
    });
  }

  stop(): Promise<void> {
    this.#stopping ??= this.#stop();
    return this.#stopping;
  }

  async #stop(): Promise<void> {
    const { supervisor } = this.#host;
    this.breakWith('the sandbox was stopped');
    this.#rebase(null);
    try {
      await this.#freezing?.catch(() => {});
      if (this.paused && this.#host.capabilities.pause === 'freezer')
        await this.#cgroup?.freeze(false).catch(() => {});
      await this.#kill();
      await supervisor.request('close', { sid: this.id });
    } catch (error) {
      if (!supervisor.gone) throw error;
    } finally {
      await this.#cgroup?.remove();
      this.#host.released(this);
    }
  }
}
