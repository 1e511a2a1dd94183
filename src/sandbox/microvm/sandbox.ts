import { randomBytes } from 'node:crypto';
import { attribute, LonghaulError } from '../../core/index.ts';
import { AgentChannel, type Frame } from '../agent/channel.ts';
import type { Evidence } from '../agent/requests.ts';
import { AgentSandbox, type Lost } from '../agent/sandbox.ts';
import { seccompFilter } from '../bubblewrap/seccomp.ts';
import type {
  ForkOptions,
  LayerId,
  NetworkAttempt,
  Sandbox,
  SandboxSpec,
  SandboxUsage,
  SnapshotOptions,
} from '../contract.ts';
import type { MemoryImage } from './image.ts';
import type { LayerStore, SavedMachine } from './layers.ts';
import type { Machine } from './machine.ts';
import type { Counters } from './warden.ts';

/** How long the machine's own kernel may take to end the guest's processes. */
const STOP_MS = 15_000;
/** QEMU's end is seen some time after its sockets close. */
const END_MS = 2_000;
const START_MS = 60_000;
const MARKER_BYTES = 32;

/** What a machine starts from: an image in memory, or a layer on disk. */
export type Origin = { image: MemoryImage } | { layer: LayerId };

/** A machine that runs, and how to speak to its agent. */
export interface Running {
  machine: Machine;
  channel: AgentChannel;
  saved: SavedMachine;
}

/** What a sandbox needs of its driver. */
export interface MicroVmHost {
  store: LayerStore;
  system: string;
  /** A running machine that went on from `origin`, with its own time and random numbers. */
  restore(origin: Origin, spec: SandboxSpec): Promise<Running>;
  /** The image that sandboxes of this spec start from. */
  template(spec: SandboxSpec): Promise<MemoryImage>;
  spawn(spec: SandboxSpec, layer: LayerId | null, count: number): Promise<Sandbox[]>;
  released(sandbox: MicroVmSandbox): void;
}

/** Starts an agent in a machine that has none. */
export async function startAgent(machine: Machine): Promise<AgentChannel> {
  const channel = new AgentChannel(machine.stream);
  machine.warden.onAgentEnded = () => machine.stream.destroy();
  const marker = randomBytes(MARKER_BYTES);
  machine.stream.write(marker);
  await machine.warden.call('start', {
    marker: marker.toString('hex'),
    seccomp: seccompFilter('x64').toString('hex'),
    config: { env: {}, cwd: '/workspace', python: null, limits: {} },
  });
  const timer = setTimeout(() => channel.destroy(), START_MS);
  try {
    await channel.hello;
  } finally {
    clearTimeout(timer);
  }
  return channel;
}

/**
 * A virtual machine. Its snapshots hold the whole machine, memory and processes included: nothing has to
 * be quiescent for one, and processes go on in what is made of it.
 */
export class MicroVmSandbox extends AgentSandbox implements Sandbox {
  readonly id: string;
  readonly spec: SandboxSpec;
  readonly #host: MicroVmHost;
  readonly #started = performance.now();
  #machine: Machine;
  /** The last layer that this machine was saved to or made of; null: the template. */
  #base: LayerId | null;
  #stopping: Promise<void> | null = null;
  #secrets = false;
  #seen: Evidence;
  #events: Evidence = { oomKills: 0, pidsRefused: 0 };
  /** Of the machine when it was saved, and of earlier machines of this sandbox. */
  #countersBefore: Counters;
  #cpuBefore = 0;

  constructor(options: {
    id: string;
    spec: SandboxSpec;
    host: MicroVmHost;
    running: Running;
    base: LayerId | null;
  }) {
    super();
    this.id = options.id;
    this.spec = options.spec;
    this.#host = options.host;
    this.#base = options.base;
    if (this.#base) this.#host.store.hold(this.#base);
    const { machine, channel, saved } = options.running;
    this.#machine = machine;
    this.channel = channel;
    this.#countersBefore = saved.counters;
    this.#seen = saved.counters;
  }

  /** QEMU's process, for figures and tests. */
  get machine(): Machine {
    return this.#machine;
  }

  // What the agent's calls need

  protected override async call(
    header: Record<string, unknown>,
    parts: readonly Uint8Array[],
    limitMs: number | null,
    id?: number,
  ): Promise<Frame | Lost> {
    const frame = await super.call(header, parts, limitMs, id);
    // The warden tells of limits by itself, but perhaps later than the agent tells of the end.
    const results = typeof frame === 'string' ? [] : (frame.header.results as { code: number }[]);
    if (results?.some(({ code }) => code !== 0)) await this.#machine.warden.count().catch(() => {});
    return frame;
  }

  protected evidence(): Evidence {
    const now = this.#machine.warden.events;
    const fresh = {
      oomKills: Math.max(0, now.oomKills - this.#seen.oomKills),
      pidsRefused: Math.max(0, now.pidsRefused - this.#seen.pidsRefused),
    };
    this.#seen = now;
    this.#events = {
      oomKills: this.#events.oomKills + fresh.oomKills,
      pidsRefused: this.#events.pidsRefused + fresh.pidsRefused,
    };
    return fresh;
  }

  protected endAgent(): void {
    this.#machine.stream.destroy();
  }

  protected async replaceAgent(late: boolean, error: Error): Promise<Lost> {
    if (this.#stopping) throw this.breakWith('the sandbox was stopped');
    const end = await this.#ended(late ? 0 : END_MS);
    if (end) {
      if (end.by === 'host') throw this.breakWith(end.detail);
      // The guest brought its own kernel down, and the files since the last snapshot with it.
      await this.#replaceMachine();
      return end.memory ? 'out_of_memory' : 'timeout';
    }
    try {
      await this.#machine.warden.call('stop', {}, STOP_MS);
      await this.#machine.warden.count();
    } catch {
      // Its kernel is stuck or gone: nothing of the host's keeps it from answering.
      await this.#replaceMachine();
      return 'timeout';
    }
    const oom = this.evidence().oomKills > 0;
    if (!oom && !late) throw this.breakWith(`the agent inside ended: ${error.message}`);
    try {
      await this.#machine.reconnect();
      this.channel = await startAgent(this.#machine);
    } catch (cause) {
      throw this.breakWith(attribute(cause, 'SandboxUnavailable').message);
    }
    return oom ? 'out_of_memory' : 'timeout';
  }

  async #ended(ms: number) {
    let timer!: NodeJS.Timeout;
    const late = new Promise<null>((resolve) => {
      timer = setTimeout(resolve, ms, null);
    });
    const end = await Promise.race([this.#machine.ended, late]);
    clearTimeout(timer);
    return end;
  }

  async #replaceMachine(): Promise<void> {
    try {
      await this.#machine.kill();
      const { store } = this.#host;
      const layer = this.#base !== null && store.has(this.#base) ? this.#base : null;
      await this.#become(
        layer ? { layer } : { image: await this.#host.template(this.spec) },
        layer,
      );
    } catch (error) {
      throw this.breakWith(attribute(error, 'SandboxUnavailable').message);
    }
  }

  /** Another machine in place of this one. */
  async #become(origin: Origin, base: LayerId | null): Promise<void> {
    const used = this.#machine.end ? null : await this.#machine.warden.count().catch(() => null);
    const { machine, channel, saved } = await this.#host.restore(origin, this.spec);
    if (this.#stopping) {
      await machine.kill();
      throw this.broken!;
    }
    const old = this.#machine;
    if (used) this.#cpuBefore += used.cpuSeconds - this.#countersBefore.cpuSeconds;
    this.loseProcesses('killed');
    this.channel?.destroy();
    this.#machine = machine;
    this.channel = channel;
    this.#countersBefore = saved.counters;
    this.#seen = saved.counters;
    this.#secrets = false;
    this.#rebase(base);
    await old.kill();
  }

  #rebase(layer: LayerId | null): void {
    if (layer) this.#host.store.hold(layer);
    if (this.#base) this.#host.store.release(this.#base);
    this.#base = layer;
  }

  // Layers

  /** Within the queue. The machine stands still for as long as it takes to write it. */
  async #save(kind: 'durable' | 'volatile'): Promise<LayerId> {
    if (this.#secrets)
      throw new LonghaulError(
        'CapabilityMissing',
        'a saved machine would hold the secrets that were put into this one in its memory',
        {
          next: 'Take the snapshot before putSecrets, or use a driver whose layers hold files only.',
        },
      );
    // A guest that has brought its machine down meanwhile gets its new one first.
    if (this.channel!.closed) await super.call({ op: 'ping' }, [], 0);
    const machine = this.#machine;
    const channel = this.channel!;
    try {
      // Answered in order: after it the agent has read all of what it was sent before.
      const answered = channel.call({ op: 'ping' });
      machine.stream.hold();
      await answered;
      const counters = await machine.warden.count();
      await machine.warden.call('freeze');
      await machine.stop();
      await machine.stream.settle();
      const saved = {
        spec: this.spec,
        system: this.#host.system,
        partial: machine.stream.partial.toString('base64'),
        nextId: channel.reserve(),
        counters,
      };
      try {
        return await this.#host.store.write(kind, saved, (sink) => machine.save(sink, false));
      } finally {
        await machine.cont();
        await machine.refresh();
        await machine.warden.call('thaw');
      }
    } catch (error) {
      throw this.#attributed(error);
    } finally {
      machine.stream.release();
    }
  }

  /** Why the machine did not do what it was told. */
  #attributed(error: unknown): LonghaulError {
    if (this.broken) return this.broken;
    const { end } = this.#machine;
    return end ? this.breakWith(end.detail) : attribute(error, 'SandboxUnavailable');
  }

  /** `onBusy` has no meaning here: processes are part of the snapshot. */
  snapshot(options: SnapshotOptions = {}): Promise<LayerId> {
    return this.enqueue(async () => {
      const layer = await this.#save(options.durable ? 'durable' : 'volatile');
      this.#rebase(layer);
      return layer;
    });
  }

  rollback(layer: LayerId): Promise<void> {
    return this.enqueue(async () => {
      this.#host.store.meta(layer);
      await this.#become({ layer }, layer);
    });
  }

  /** Whole machines, processes included; with a call in flight, from the last snapshot or a fresh one. */
  async fork(count: number, options: ForkOptions = {}): Promise<Sandbox[]> {
    if (this.broken) throw this.broken;
    if (options.moreDiskBytes)
      throw new LonghaulError(
        'CapabilityMissing',
        'a fork of a machine has the disk that the machine has',
        { next: 'Give the machine more disk from the start.' },
      );
    if (!this.idle && !options.stopProcesses) return this.#host.spawn(this.spec, this.#base, count);
    return this.enqueue(async () => {
      if (options.stopProcesses && (await this.busy(true)))
        throw new LonghaulError('SandboxBusy', 'processes could not be ended for a fork');
      const layer = await this.#save('volatile');
      try {
        return await this.#host.spawn(this.spec, layer, count);
      } finally {
        this.#host.store.drop(layer); // the children hold it as long as they need it
      }
    });
  }

  override async putSecrets(secrets: Readonly<Record<string, string>>): Promise<void> {
    this.#secrets ||= Object.keys(secrets).length > 0;
    await super.putSecrets(secrets);
  }

  // The sandbox as a whole

  pause(): Promise<void> {
    return this.enqueue(async () => {
      await this.#machine.stop().catch((error) => {
        throw this.#attributed(error);
      });
      this.paused = true;
    });
  }

  async resume(): Promise<void> {
    if (this.broken) throw this.broken;
    if (!this.paused) return;
    try {
      await this.#machine.cont();
      await this.#machine.refresh();
    } catch (error) {
      throw this.#attributed(error);
    }
    this.paused = false;
  }

  networkAttempts(): readonly NetworkAttempt[] {
    return [];
  }

  usage(): Promise<SandboxUsage> {
    return this.enqueue(async () => {
      const { own } = await this.agentUsage();
      const counters = await this.#machine.warden.count().catch((error) => {
        throw this.#attributed(error);
      });
      this.evidence();
      return {
        cpuSeconds: this.#cpuBefore + counters.cpuSeconds - this.#countersBefore.cpuSeconds,
        peakMemoryBytes: counters.peakMemoryBytes,
        diskBytes: this.diskBytes,
        pids: Math.max(0, counters.pids - own),
        wallSeconds: (performance.now() - this.#started) / 1000,
        ...this.#events,
      };
    });
  }

  stop(): Promise<void> {
    this.#stopping ??= (async () => {
      this.breakWith('the sandbox was stopped');
      this.#rebase(null);
      await this.#machine.kill();
      this.#host.released(this);
    })();
    return this.#stopping;
  }
}
