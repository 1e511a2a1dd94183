import type { CodeRequest, ExecResult } from '../../core/index.ts';
import { attribute, LonghaulError } from '../../core/index.ts';
import { AgentChannel } from '../agent/channel.ts';
import type { Evidence } from '../agent/requests.ts';
import { AgentSandbox, type Lost } from '../agent/sandbox.ts';
import type {
  ForkOptions,
  LayerId,
  NetworkAttempt,
  Sandbox,
  SandboxSpec,
  SandboxUsage,
  SnapshotOptions,
} from '../contract.ts';
import { proxyEnvironment } from '../network/environment.ts';
import type { NetworkHandle } from '../network/proxy.ts';
import type { Cgroup } from './cgroup.ts';
import { bubblewrapCommand } from './command.ts';
import { freezeDurable, LEAST_MERGED } from './durable.ts';
import type { DurableRef, LayerRegistry, LayerStack, Weight } from './layers.ts';
import { HOST_DEFAULTS, type SandboxRoot } from './root.ts';
import {
  adviseOn,
  type LayerRef,
  layerOwner,
  RETRY_MS,
  type SandboxExit,
  type Supervisor,
  saidExhausted,
} from './supervisor.ts';

const START_TIMEOUT_MS = 30_000;
/** Opening a missing name costs one look-up a layer; figures in docs show where that begins to hurt. */
const SQUASH_DEPTH = 32;
/** The agent, its nursery and a spare, which the guest's process limit leaves room for. */
const OWN_INSIDE = 3;

/** What a sandbox needs of its driver. */
export interface SandboxHost {
  supervisor: Supervisor;
  registry: LayerRegistry;
  uidBase: number;
  /** A sandbox without a call or a process for so long lets its agent go. */
  idleMs: number;
  /** New sandboxes with the same spec over a stack of layers. */
  spawn(spec: SandboxSpec, stack: Promise<LayerStack>): Promise<Sandbox>;
  /** The sandbox is gone: free its place and, if nothing of it can still run, its uid. */
  released(sandbox: BubblewrapSandbox, clean: boolean): void;
}

/** One bubblewrap process tree with an overlay workspace. */
export class BubblewrapSandbox extends AgentSandbox implements Sandbox {
  readonly id: string;
  readonly spec: SandboxSpec;
  readonly uid: number;
  readonly #host: SandboxHost;
  readonly #cgroup: Cgroup | null;
  readonly #network: NetworkHandle | null;
  readonly #root: SandboxRoot | null;
  #rootHeld: LayerStack = [];
  #pythonSeen = false;
  readonly #started = performance.now();
  #exit: Promise<SandboxExit> | null = null;
  #stopping: Promise<void> | null = null;
  #stack: LayerStack = [];
  #upper = '';
  #uppers = 0;
  #seen: Evidence = { oomKills: 0, pidsRefused: 0 };
  /** The last command ran out of memory: the agent may have been killed just after it answered. */
  #oomBefore = false;
  #asleep = false;
  #freezing: Promise<void> | null = null;
  #idleTimer: NodeJS.Timeout | null = null;

  constructor(options: {
    id: string;
    spec: SandboxSpec;
    uid: number;
    host: SandboxHost;
    cgroup: Cgroup | null;
    network: NetworkHandle | null;
    root: SandboxRoot | null;
  }) {
    super();
    this.id = options.id;
    this.spec = options.spec;
    this.uid = options.uid;
    this.#host = options.host;
    this.#cgroup = options.cgroup;
    this.#network = options.network;
    this.#root = options.root;
  }

  get stack(): LayerStack {
    return this.#stack;
  }

  /** Opens the file systems, starts the process tree and mounts the workspace. */
  async boot(stack: LayerStack): Promise<void> {
    await this.#host.supervisor.request('open', {
      sid: this.id,
      uid: this.uid,
      bytes: this.spec.diskBytes,
      inodes: this.spec.inodes,
    });
    if (this.#root) await this.#mountRoot(this.#root);
    if (!this.#root?.writable) await this.#connect();
    await this.#mount(stack);
    this.rest();
  }

  async #mountRoot(root: SandboxRoot): Promise<void> {
    const { supervisor, registry } = this.#host;
    registry.hold(root.layers);
    this.#rootHeld = root.layers;
    const { writable, host, layers: lower, dir } = root;
    await supervisor.request('root', { sid: this.id, root: { writable, host, lower, dir } });
  }

  /** Has an agent sent in. `fresh`: bubblewrap is started, over directories that nothing is mounted on. */
  async #connect(fresh = true): Promise<void> {
    const limits = this.#cgroup
      ? {}
      : { processes: this.spec.pids + OWN_INSIDE, data: this.spec.memoryBytes };
    const defaults = this.#root?.agent ?? HOST_DEFAULTS;
    const { socket, exit } = await this.#host.supervisor.launch(this.id, {
      argv: bubblewrapCommand(this.id, this.#root),
      fresh,
      network: this.#network !== null,
      agent: {
        cgroups: this.#cgroup?.directories ?? [],
        limits,
        agent: { ...defaults, env: { ...defaults.env, ...(this.#network && proxyEnvironment) } },
      },
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
        ? gone.stderr.trim() || `exit ${gone.status}`
        : this.#host.supervisor.said || 'the agent did not answer';
      throw new LonghaulError('SandboxUnavailable', `bubblewrap did not start: ${text}`, {
        next: adviseOn(text),
        cause: error,
        retryAfterMs: saidExhausted(text) ? RETRY_MS : undefined,
      });
    } finally {
      clearTimeout(timer);
    }
  }

  /** The exit of the process tree, or null when it has not been seen within `ms`. */
  async #ended(ms: number): Promise<SandboxExit | null> {
    let timer!: NodeJS.Timeout;
    const late = new Promise<null>((resolve) => {
      timer = setTimeout(resolve, ms, null);
    });
    const exit = await Promise.race([this.#exit, late]);
    clearTimeout(timer);
    return exit;
  }

  /** Mounts a fresh upper layer over `stack`, and takes the stack into use in place of the old one. */
  async #mount(
    stack: LayerStack,
    options: { freshTmp?: boolean; discard?: string; retired?: string } = {},
  ): Promise<void> {
    const { registry, supervisor } = this.#host;
    const weight = this.#weight(stack);
    registry.hold(stack);
    const upper = `u${++this.#uppers}`;
    try {
      if (this.#root?.writable) await this.#endTree();
      const used = await supervisor.request('workspace', {
        sid: this.id,
        lower: stack,
        upper,
        ...options,
        ...this.#room(weight),
      });
      if (options.retired !== undefined && stack[0]) registry.noteUsed(stack[0], used as Weight);
      if (!weight.counted && this.#heavy(weight)) {
        const shows = (await supervisor.request('count', { sid: this.id })) as Weight;
        registry.noteShown(stack, shows);
        await supervisor.request('resize', { sid: this.id, ...this.#room(this.#own(shows)) });
      }
    } catch (error) {
      registry.release(stack);
      throw error;
    }
    const old = this.#stack;
    this.#stack = stack;
    this.#upper = upper;
    registry.release(old);
    if (this.#root?.writable) await this.#connect();
  }

  /** What a stack takes of the disk limit. */
  #weight(stack: LayerStack): Weight & { counted: boolean } {
    const weight = this.#host.registry.weight(stack, this.id);
    return { ...this.#own(weight), counted: weight.counted };
  }

  /** Less the image that the workspace began as, which is not the guest's. */
  #own(weight: Weight): Weight {
    if (!this.#root?.writable) return weight;
    const image = this.#host.registry.weight(this.#root.layers, this.id);
    return {
      bytes: Math.max(0, weight.bytes - image.bytes),
      inodes: Math.max(0, weight.inodes - image.inodes),
    };
  }

  /** A root cannot be exchanged below processes: a new tree starts over the new one. */
  async #endTree(): Promise<void> {
    if (!this.#exit) return;
    this.channel?.destroy();
    const cgroups = this.#cgroup?.directories ?? [];
    await this.#host.supervisor.request('kill', { sid: this.id, cgroups });
    if (!(await this.#ended(5000)))
      throw new LonghaulError('SandboxUnavailable', 'the process tree did not end');
  }

  /** What layers hold that are not on the sandbox's own file system counts too; there is always room for a little. */
  #room(weight: Weight): Weight {
    return {
      bytes: Math.max(this.spec.diskBytes - weight.bytes, 64 * 1024),
      inodes: Math.max(this.spec.inodes - weight.inodes, 64),
    };
  }

  /** Whether counting what is shown may free much. */
  #heavy(weight: Weight): boolean {
    return weight.bytes > this.spec.diskBytes / 2 || weight.inodes > this.spec.inodes / 2;
  }

  /** A ready sandbox takes the workspace of `stack` before anybody has used it. */
  adopt(stack: LayerStack): Promise<void> {
    return this.enqueue(() => this.#mount(stack, { discard: this.#upper }));
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
    const cgroups = this.#cgroup?.directories ?? [];
    void this.#host.supervisor.request('kill', { sid: this.id, cgroups }).catch(() => {});
  }

  protected async replaceAgent(late: boolean, error: Error): Promise<Lost> {
    if (this.#stopping) throw this.breakWith('the sandbox was stopped');
    const before = this.#oomBefore;
    const oom = this.evidence().oomKills > 0 || before;
    if (!oom && !late) {
      const exit = await this.#ended(2000);
      const detail = exit
        ? exit.stderr.trim().split('\n').at(-1) || `exit ${exit.status}`
        : error.message;
      throw this.breakWith(`the sandbox ended from outside: ${detail}`);
    }
    await this.#restart(late);
    return oom ? 'out_of_memory' : 'timeout';
  }

  /** Its process tree is process 1 alone from here on, some 150 KB; a new agent comes with the next call. */
  protected override rest(): void {
    if (this.#asleep || this.broken || this.paused) return;
    if (this.#idleTimer) this.#idleTimer.refresh();
    else {
      this.#idleTimer = setTimeout(() => {
        if (this.idle && !this.broken && !this.#asleep) this.#fallAsleep().catch(() => {});
      }, this.#host.idleMs);
      this.#idleTimer.unref();
    }
  }

  #fallAsleep(): Promise<void> {
    return this.enqueue(async () => {
      if (await this.busy(false)) return;
      this.#asleep = true;
      this.channel!.destroy();
    });
  }

  protected override async wake(): Promise<void> {
    if (!this.#asleep) return;
    await this.#restart(false);
    this.#asleep = false;
  }

  /** A new agent and, where the process tree went down too, a new tree over the same files. */
  async #restart(ended: boolean): Promise<void> {
    const { supervisor } = this.#host;
    this.channel?.destroy();
    if (!ended) {
      try {
        return await this.#connect(false);
      } catch {
        // Process 1 was ended as well: below.
      }
    }
    try {
      await supervisor.request('kill', { sid: this.id, cgroups: this.#cgroup?.directories ?? [] });
      await this.#ended(5000);
      if (!this.#root?.writable) {
        await supervisor.request('bare', { sid: this.id });
        await this.#connect();
      }
      await this.#mount([this.#frozen(), ...this.#stack], { retired: this.#upper });
    } catch (error) {
      throw this.breakWith(attribute(error, 'SandboxUnavailable').message);
    }
  }

  // Snippets

  /**
   * Snippets run in the agent's interpreter, or in the image's own. `CapabilityMissing` where it has none:
   * looked for before the first snippet, so that none can pretend it.
   */
  override async runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const python = this.#root?.agent.python;
    if (python && !this.#pythonSeen && requests.length > 0) {
      const argv = [python, '-I', '-S', '-c', ''];
      const result = await this.exec({ argv, cwd: '/', timeoutMs: START_TIMEOUT_MS });
      if (result.code !== 0)
        throw new LonghaulError(
          'CapabilityMissing',
          `image ${this.spec.image} cannot run Python snippets: ${result.stderr.trim().split('\n').at(-1) || result.cause}`,
          { next: 'Use an image with python3 on its PATH, or run its own commands with exec.' },
        );
      this.#pythonSeen = true;
    }
    return super.runCode(requests);
  }

  // Layers

  #layer(name: string): LayerRef {
    const { supervisor, uidBase } = this.#host;
    return { home: this.id, name, uid: layerOwner(supervisor.ready, uidBase) };
  }

  #frozen(): LayerRef {
    return this.#layer(this.#upper);
  }

  snapshot(options: SnapshotOptions = {}): Promise<LayerId> {
    return this.enqueue(async () => {
      if (await this.busy(options.onBusy === 'stop'))
        throw new LonghaulError(
          'SandboxBusy',
          'processes are still running in the sandbox and would write into the snapshot',
          { next: "End them, or snapshot with onBusy: 'stop'." },
        );
      if (!options.durable) {
        await this.#freeze();
        return this.#host.registry.addVolatile(this.#stack);
      }
      const { supervisor, registry, uidBase } = this.#host;
      const made: DurableRef[] = [];
      try {
        const freezing = {
          sid: this.id,
          stack: this.#stack,
          upper: this.#upper,
          uid: this.uid,
          diskBytes: this.diskBytes,
          limit: { bytes: this.spec.diskBytes, inodes: this.spec.inodes },
          supervisor,
          registry,
          uidBase,
        };
        const stack = await freezeDurable(freezing, made);
        await this.#mount(stack, { discard: this.#upper });
        return stack[0]!.durable;
      } finally {
        for (const ref of made) registry.release([ref]);
      }
    });
  }

  /** The upper layer becomes the top of the stack; a fresh one is mounted over it. */
  async #freeze(): Promise<void> {
    const stack = [this.#frozen(), ...this.#stack];
    if (stack.length <= SQUASH_DEPTH) return this.#mount(stack, { retired: this.#upper });
    const name = `q${++this.#uppers}`;
    const durable = stack.findIndex((ref) => 'durable' in ref);
    const sources = durable < 0 ? stack : stack.slice(0, durable);
    const merged = (await this.#host.supervisor.request('squash', {
      sid: this.id,
      name,
      sources,
      based: sources.length < stack.length,
      least: LEAST_MERGED,
    })) as number;
    const squashed = this.#layer(name);
    await this.#mount([squashed, ...stack.slice(merged)], { discard: this.#upper });
  }

  rollback(layer: LayerId): Promise<void> {
    return this.enqueue(async () => {
      const stack = this.#host.registry.stack(layer);
      if (await this.busy(true))
        throw this.breakWith('processes in the sandbox could not be ended for a rollback');
      await this.#mount(stack, { freshTmp: true, discard: this.#upper });
    });
  }

  /** With a call in flight or processes alive, from the last layer; otherwise from the files as they are. */
  async fork(count: number, options: ForkOptions = {}): Promise<Sandbox[]> {
    if (!((options.moreDiskBytes ?? 0) >= 0))
      throw new LonghaulError('ConfigInvalid', `moreDiskBytes is ${options.moreDiskBytes}`);
    const { registry } = this.#host;
    const freeze = async () => {
      let stack = this.#stack;
      if (this.idle || options.stopProcesses) {
        stack = await this.enqueue(async () => {
          const busy = await this.busy(options.stopProcesses ?? false);
          if (busy && options.stopProcesses)
            throw this.breakWith('processes in the sandbox could not be ended for a fork');
          if (!busy) await this.#freeze();
          return this.#stack;
        });
      }
      if (this.broken) throw this.broken;
      registry.hold(stack);
      return stack;
    };
    // The new ones are handed out meanwhile.
    const frozen = freeze();
    frozen.catch(() => {}); // heard of below
    const spec = { ...this.spec, diskBytes: this.spec.diskBytes + (options.moreDiskBytes ?? 0) };
    const made = await Promise.allSettled(
      Array.from({ length: count }, () => this.#host.spawn(spec, frozen)),
    );
    registry.release(await frozen);
    const failed = made.find((each) => each.status === 'rejected');
    const children = made.flatMap((each) => (each.status === 'fulfilled' ? [each.value] : []));
    if (!failed) return children;
    await Promise.all(children.map((child) => child.stop()));
    throw failed.reason;
  }

  // The sandbox as a whole

  pause(): Promise<void> {
    return this.enqueue(async () => {
      if (!this.#cgroup?.canFreeze)
        throw new LonghaulError('CapabilityMissing', 'no control group here can freeze processes', {
          next: 'Run as root or with a delegated cgroup; `longhaul sandbox doctor` says more.',
        });
      const cgroup = this.#cgroup;
      this.paused = true;
      this.#freezing = cgroup.freeze(true);
      try {
        await this.#freezing;
      } catch (error) {
        await cgroup.freeze(false).catch(() => {});
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
    await this.#cgroup!.freeze(false);
    this.paused = false;
  }

  networkAttempts(): readonly NetworkAttempt[] {
    return this.#network?.attempts() ?? [];
  }

  usage(): Promise<SandboxUsage> {
    return this.enqueue(async () => {
      const { cpuSeconds, own } = await this.agentUsage();
      const pids = this.#cgroup?.pids() ?? null;
      return {
        cpuSeconds: this.#cgroup?.cpuSeconds() ?? cpuSeconds,
        peakMemoryBytes: this.#cgroup?.peakMemoryBytes() ?? null,
        diskBytes: this.diskBytes,
        // bubblewrap's two processes, a relay and the agent's are not the guest's.
        pids: pids === null ? null : Math.max(0, pids - (this.#network ? 3 : 2) - own),
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
    const { supervisor, registry } = this.#host;
    this.breakWith('the sandbox was stopped');
    if (this.#idleTimer) clearTimeout(this.#idleTimer);
    this.#network?.close();
    const stack = this.#stack;
    this.#stack = [];
    // What an earlier supervisor counted went with it.
    if (!supervisor.gone) {
      registry.release(stack);
      registry.release(this.#rootHeld);
    }
    this.#rootHeld = [];
    const keep = registry.usedNames(this.id);
    const cgroups = this.#cgroup?.directories ?? [];
    let clean = false;
    try {
      // Frozen processes of a version 1 group do not even die.
      await this.#freezing?.catch(() => {});
      if (this.paused) await this.#cgroup?.freeze(false).catch(() => {});
      await supervisor.request('close', { sid: this.id, keep });
      clean = (await this.#ended(5000)) !== null;
    } catch (error) {
      if (!supervisor.gone) throw error;
    } finally {
      if (this.#cgroup && !(await this.#cgroup.remove())) {
        await supervisor.request('kill', { sid: this.id, cgroups }).catch(() => {});
        clean = (await this.#cgroup.remove()) && clean;
      }
      supervisor.forget(this.id);
      this.#host.released(this, clean);
    }
  }
}
