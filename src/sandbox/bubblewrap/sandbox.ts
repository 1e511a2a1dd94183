import { constants as osConstants } from 'node:os';
import {
  attribute,
  type CodeRequest,
  type ExecRequest,
  type ExecResult,
  type FileEntry,
  LonghaulError,
} from '../../core/index.ts';
import type { LayerId, Sandbox, SandboxSpec, SandboxUsage, SnapshotOptions } from '../contract.ts';
import { DEFAULT_KEEP_BYTES, outputText } from '../output.ts';
import type { Cgroup } from './cgroup.ts';
import { AgentChannel, type Frame, frameParts } from './channel.ts';
import type { AgentLimits } from './command.ts';
import { bubblewrapCommand } from './command.ts';
import { type LayerRegistry, type LayerStack, newDurableId, type Weight } from './layers.ts';
import {
  adviseOn,
  type LayerRef,
  layerOwner,
  type SandboxExit,
  type Supervisor,
} from './supervisor.ts';

const DEFAULT_EXEC_TIMEOUT_MS = 60_000;
const DEFAULT_CODE_TIMEOUT_MS = 10_000;
const DEFAULT_READ_LIMIT = 1024 * 1024;
/** Most bytes of a file or an output stream that one call carries. */
const MAX_TRANSFER_BYTES = 128 * 1024 * 1024;
const START_TIMEOUT_MS = 30_000;
/** How long the agent may take past a deadline before the sandbox is restarted from outside. */
const GRACE_MS = 10_000;
/** Opening a missing name costs one look-up a layer; figures in docs show where that begins to hurt. */
const SQUASH_DEPTH = 32;
/** The agent and its spare fork, which the guest's process limit leaves room for. */
const OWN_INSIDE = 2;

const SIGNALS = new Map(
  Object.entries(osConstants.signals).map(([name, number]) => [number as number, name]),
);

/** What a sandbox needs of its driver. */
export interface SandboxHost {
  supervisor: Supervisor;
  registry: LayerRegistry;
  python: string;
  uidBase: number;
  /** New sandboxes with the same spec over a stack of layers. */
  spawn(spec: SandboxSpec, stack: LayerStack): Promise<Sandbox>;
  /** The sandbox is gone: free its uid and its place. */
  released(sandbox: BubblewrapSandbox): void;
}

interface RawResult {
  cause: ExecResult['cause'];
  code: number | null;
  signal: number | null;
  totals: [number, number];
  ms: number;
}

const KILLED_CODE = 128 + osConstants.signals.SIGKILL;

/** One bubblewrap process tree with an overlay workspace. Calls queue: one runs at a time. */
export class BubblewrapSandbox implements Sandbox {
  readonly id: string;
  readonly spec: SandboxSpec;
  readonly uid: number;
  readonly #host: SandboxHost;
  readonly #cgroup: Cgroup | null;
  readonly #started = performance.now();
  #channel: AgentChannel | null = null;
  #exit: Promise<SandboxExit> | null = null;
  #broken: LonghaulError | null = null;
  #stopping: Promise<void> | null = null;
  #queue: Promise<unknown> = Promise.resolve();
  #queued = 0;
  #stack: LayerStack = [];
  #upper = '';
  #uppers = 0;
  #diskBytes = 0;
  #oomSeen = 0;
  /** The last command ran out of memory: the agent may have been killed just after it answered. */
  #oomBefore = false;

  constructor(options: {
    id: string;
    spec: SandboxSpec;
    uid: number;
    host: SandboxHost;
    cgroup: Cgroup | null;
  }) {
    this.id = options.id;
    this.spec = options.spec;
    this.uid = options.uid;
    this.#host = options.host;
    this.#cgroup = options.cgroup;
  }

  get stack(): LayerStack {
    return this.#stack;
  }

  /** Opens the file systems, starts the agent and mounts the workspace. */
  async start(stack: LayerStack): Promise<void> {
    const { supervisor } = this.#host;
    await supervisor.request('open', {
      sid: this.id,
      uid: this.uid,
      bytes: this.spec.diskBytes,
      inodes: this.spec.inodes,
    });
    await this.#launch();
    await this.#mount(stack);
  }

  async #launch(): Promise<void> {
    const limits: AgentLimits = this.#cgroup
      ? {}
      : { processes: this.spec.pids + OWN_INSIDE, data: this.spec.memoryBytes };
    let ended!: (exit: SandboxExit) => void;
    this.#exit = new Promise((resolve) => {
      ended = resolve;
    });
    const socket = await this.#host.supervisor.launch(
      this.id,
      bubblewrapCommand(this.id, this.#host.python, limits),
      this.#cgroup?.directories ?? [],
      ended,
    );
    const channel = new AgentChannel(socket);
    this.#channel = channel;
    const timer = setTimeout(() => channel.destroy(), START_TIMEOUT_MS);
    try {
      await channel.receive();
    } catch (error) {
      const exit = await this.#ended(5000);
      const text = exit
        ? exit.stderr.trim() || `exit ${exit.status}`
        : `no answer within ${START_TIMEOUT_MS} ms`;
      throw new LonghaulError('SandboxUnavailable', `bubblewrap did not start: ${text}`, {
        next: adviseOn(text),
        cause: error,
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
    registry.hold(stack);
    const upper = `u${++this.#uppers}`;
    const weight = registry.weight(stack);
    try {
      await supervisor.request('workspace', {
        sid: this.id,
        lower: stack,
        upper,
        ...options,
        // What durable layers hold on disk counts too; there is always room for a little.
        bytes: Math.max(this.spec.diskBytes - weight.bytes, 64 * 1024),
        inodes: Math.max(this.spec.inodes - weight.inodes, 64),
      });
    } catch (error) {
      registry.release(stack);
      throw error;
    }
    const old = this.#stack;
    this.#stack = stack;
    this.#upper = upper;
    registry.release(old);
  }

  /** A ready sandbox takes the workspace of `stack` before anybody has used it. */
  adopt(stack: LayerStack): Promise<void> {
    return this.#enqueue(() => this.#mount(stack, { freshTmp: true, discard: this.#upper }));
  }

  // Calls

  /** Runs `job` after all earlier ones. A failure of one does not stop the next. */
  #enqueue<T>(job: () => Promise<T>): Promise<T> {
    this.#queued++;
    const result = this.#queue.then(async () => {
      if (this.#broken) throw this.#broken;
      return job();
    });
    this.#queue = result.then(
      () => this.#queued--,
      () => this.#queued--,
    );
    return result;
  }

  #break(message: string): LonghaulError {
    this.#broken ??= new LonghaulError('SandboxBroken', message);
    this.#channel?.destroy();
    return this.#broken;
  }

  /** One conversation with the agent; null when the agent died of the guest's own memory use. */
  async #call(
    header: Record<string, unknown>,
    parts: readonly Uint8Array[],
    limitMs: number,
  ): Promise<Frame | 'out_of_memory' | 'timeout'> {
    const channel = this.#channel!;
    let late = false;
    const timer = setTimeout(() => {
      late = true;
      void this.#host.supervisor.request('kill', { sid: this.id }).catch(() => {});
    }, limitMs + GRACE_MS);
    try {
      const frame = await channel.call(header, parts);
      this.#oomBefore = false;
      this.#diskBytes = Number(frame.header.disk);
      if (frame.header.broken !== undefined)
        throw this.#break(`the agent inside cannot go on: ${frame.header.broken}`);
      return frame;
    } catch (error) {
      if (error === this.#broken) throw error;
      if (this.#stopping) throw this.#break('the sandbox was stopped');
      const exit = await this.#ended(5000);
      const oom = this.#newOomKills() > 0 || this.#oomBefore;
      if (!oom && !late) {
        const detail = exit
          ? exit.stderr.trim().split('\n').at(-1) || `exit ${exit.status}`
          : String((error as Error).message);
        throw this.#break(`the sandbox ended from outside: ${detail}`);
      }
      await this.#restart();
      return oom ? 'out_of_memory' : 'timeout';
    } finally {
      clearTimeout(timer);
    }
  }

  /** A new process tree over the same files: what the guest did to the old one is its own doing. */
  async #restart(): Promise<void> {
    try {
      this.#channel?.destroy();
      await this.#host.supervisor.request('bare', { sid: this.id });
      await this.#launch();
      const frozen: LayerRef = { home: this.id, name: this.#upper, uid: this.uid };
      await this.#mount([frozen, ...this.#stack], { retired: this.#upper });
    } catch (error) {
      throw this.#break(attribute(error, 'SandboxUnavailable').message);
    }
  }

  #newOomKills(): number {
    const seen = this.#cgroup?.oomKills() ?? 0;
    const fresh = seen - this.#oomSeen;
    this.#oomSeen = seen;
    return fresh;
  }

  #results(frame: Frame): ExecResult[] {
    const raws = frame.header.results as RawResult[];
    const parts = frameParts(frame);
    const killed = (raw: RawResult) =>
      raw.cause !== 'timeout' &&
      (raw.signal === osConstants.signals.SIGKILL || raw.code === KILLED_CODE);
    const oom = raws.some(killed) && this.#newOomKills() > 0;
    this.#oomBefore = oom;
    return raws.map((raw, index) => {
      const [head, tail, errHead, errTail] = parts.slice(index * 4, index * 4 + 4);
      return {
        cause: oom && killed(raw) ? 'out_of_memory' : raw.cause,
        code: raw.code,
        signal: raw.signal === null ? null : (SIGNALS.get(raw.signal) ?? `SIG${raw.signal}`),
        stdout: outputText(head!, tail!, raw.totals[0]),
        stderr: outputText(errHead!, errTail!, raw.totals[1]),
        stdoutBytes: raw.totals[0],
        stderrBytes: raw.totals[1],
        durationMs: raw.ms,
      };
    });
  }

  /** The result of a command whose whole process tree had to be replaced. */
  #lost(cause: 'out_of_memory' | 'timeout', durationMs: number): ExecResult {
    return {
      cause,
      code: null,
      signal: 'SIGKILL',
      stdout: '',
      stderr: '',
      stdoutBytes: 0,
      stderrBytes: 0,
      durationMs,
    };
  }

  exec(request: ExecRequest): Promise<ExecResult> {
    if (request.argv.length === 0)
      return Promise.reject(
        new LonghaulError('ConfigInvalid', 'exec needs a command', {
          next: 'Give argv with at least one element.',
        }),
      );
    const timeoutMs = request.timeoutMs ?? DEFAULT_EXEC_TIMEOUT_MS;
    return this.#enqueue(async () => {
      const started = performance.now();
      const header = {
        op: 'exec',
        argv: request.argv,
        cwd: request.cwd ?? '',
        env: request.env ?? {},
        timeout: timeoutMs / 1000,
        keep: Math.min(request.keepBytes ?? DEFAULT_KEEP_BYTES, MAX_TRANSFER_BYTES),
      };
      const frame = await this.#call(header, [Buffer.from(request.stdin ?? '')], timeoutMs);
      if (typeof frame === 'string') return this.#lost(frame, performance.now() - started);
      this.#guestError(frame, request.argv[0]!);
      return this.#results(frame)[0]!;
    });
  }

  runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const foreign = requests.find((each) => each.language !== 'python');
    if (foreign)
      return Promise.reject(
        new LonghaulError(
          'CapabilityMissing',
          `bubblewrap sandboxes run Python snippets, not ${foreign.language}`,
          { next: 'Ask for Python, or use the QuickJS driver for JavaScript.' },
        ),
      );
    if (requests.length === 0) return Promise.resolve([]);
    return this.#enqueue(async () => {
      const results: ExecResult[] = [];
      // After a restart the rest of the batch goes to the new agent.
      while (results.length < requests.length) {
        const rest = requests.slice(results.length);
        results.push(...(await this.#codeBatch(rest)));
      }
      return results;
    });
  }

  async #codeBatch(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const started = performance.now();
    const parts: Buffer[] = [];
    let limitMs = 0;
    const headers = requests.map((request) => {
      const source = Buffer.from(request.source);
      const stdin = Buffer.from(request.stdin ?? '');
      parts.push(source, stdin);
      const timeoutMs = request.timeoutMs ?? DEFAULT_CODE_TIMEOUT_MS;
      limitMs += timeoutMs;
      return {
        source: source.length,
        stdin: stdin.length,
        timeout: timeoutMs / 1000,
        keep: DEFAULT_KEEP_BYTES,
      };
    });
    const frame = await this.#call({ op: 'code', requests: headers }, parts, limitMs);
    if (typeof frame !== 'string') {
      this.#guestError(frame, 'snippet');
      return this.#results(frame);
    }
    // Which snippet did it is known only when they run alone.
    if (requests.length === 1) return [this.#lost(frame, performance.now() - started)];
    const results: ExecResult[] = [];
    for (const request of requests) results.push(...(await this.#codeBatch([request])));
    return results;
  }

  /** Throws what the agent refused: `NotFound` or `FileRefused`, both the caller's to correct. */
  #guestError(frame: Frame, path: string): void {
    const code = frame.header.errno as number | undefined;
    if (code === undefined) return;
    const missing = code === osConstants.errno.ENOENT || code === osConstants.errno.ENOTDIR;
    throw new LonghaulError(
      missing ? 'NotFound' : 'FileRefused',
      `${JSON.stringify(path)}: ${frame.header.message}`,
      missing ? { next: 'List the directory to see what exists.' } : {},
    );
  }

  async #fileCall(
    op: string,
    path: string,
    fields: Record<string, unknown>,
    parts: Uint8Array[] = [],
  ): Promise<Frame> {
    const attempt = () => this.#call({ op, path, ...fields }, parts, DEFAULT_EXEC_TIMEOUT_MS);
    let frame = await attempt();
    // The agent was lost to what ran before, and is new now: file calls can be repeated.
    if (typeof frame === 'string') frame = await attempt();
    if (typeof frame === 'string')
      throw new LonghaulError('FileRefused', `${JSON.stringify(path)}: ended by ${frame}`);
    this.#guestError(frame, path);
    return frame;
  }

  readFile(path: string, limit = DEFAULT_READ_LIMIT): Promise<Uint8Array> {
    return this.#enqueue(async () => {
      const frame = await this.#fileCall('read', path, {
        limit: Math.min(limit, MAX_TRANSFER_BYTES),
      });
      return new Uint8Array(frameParts(frame)[0]!);
    });
  }

  writeFile(path: string, data: Uint8Array | string): Promise<void> {
    return this.#enqueue(async () => {
      await this.#fileCall('write', path, {}, [Buffer.from(data as Uint8Array)]);
    });
  }

  listFiles(path: string): Promise<FileEntry[]> {
    return this.#enqueue(async () => {
      const frame = await this.#fileCall('list', path, {});
      const entries = frame.header.entries as [string, FileEntry['kind'], number][];
      return entries.map(([name, kind, bytes]) => ({ name, kind, bytes }));
    });
  }

  /** A health probe for the pool: whether the agent answers. */
  async ping(): Promise<boolean> {
    try {
      await this.#enqueue(() => this.#call({ op: 'ping' }, [], 0));
      return true;
    } catch {
      return false;
    }
  }

  // Layers

  /** Whether processes are alive; with `stop` they are ended first. */
  async #busy(stop: boolean): Promise<boolean> {
    const frame = await this.#call({ op: 'quiesce', stop }, [], GRACE_MS);
    return typeof frame === 'string' ? false : (frame.header.busy as boolean);
  }

  snapshot(options: SnapshotOptions = {}): Promise<LayerId> {
    return this.#enqueue(async () => {
      if (await this.#busy(options.onBusy === 'stop'))
        throw new LonghaulError(
          'SandboxBusy',
          'processes are still running in the sandbox and would write into the snapshot',
          { next: "End them, or snapshot with onBusy: 'stop'." },
        );
      if (options.durable) return this.#freezeDurable();
      await this.#freeze();
      return this.#host.registry.addVolatile(this.#stack);
    });
  }

  /** The upper layer becomes the top of the stack; a fresh one is mounted over it. */
  async #freeze(): Promise<void> {
    const { supervisor } = this.#host;
    if (this.#stack.length >= SQUASH_DEPTH) {
      const name = `q${++this.#uppers}`;
      await supervisor.request('squash', { sid: this.id, name });
      const whole: LayerRef = { home: this.id, name, uid: this.uid };
      await this.#mount([whole], { discard: this.#upper });
      return;
    }
    const frozen: LayerRef = { home: this.id, name: this.#upper, uid: this.uid };
    await this.#mount([frozen, ...this.#stack], { retired: this.#upper });
  }

  /** Every volatile layer of the stack is copied to disk, the upper one last: it names the others. */
  async #freezeDurable(): Promise<LayerId> {
    const { supervisor } = this.#host;
    const shows = await this.#shows();
    const whole = shows === 'garbage' || this.#stack.length >= SQUASH_DEPTH;
    if (whole || !supervisor.ready.stackable) {
      const copy = await this.#copy({ merged: true }, [], false);
      await this.#mount([copy], { discard: this.#upper });
      return copy.durable;
    }
    let below: { durable: string; uid: number }[] = [];
    for (const ref of [...this.#stack].reverse()) {
      const durable = 'durable' in ref ? ref : await this.#copy(ref, below, true);
      below = [durable, ...below];
    }
    const top = await this.#copy({ home: this.id, name: this.#upper }, below, false, shows);
    await this.#mount([top, ...below], { discard: this.#upper });
    return top.durable;
  }

  /**
   * What the workspace shows, counted once the layers below might hold much more than that; null before.
   * `garbage` when they do: then a whole copy frees more than half the disk limit, so copies write at
   * most twice what the guest wrote. A workspace that is merely full is never copied whole for it.
   */
  async #shows(): Promise<Weight | 'garbage' | null> {
    const { registry, supervisor } = this.#host;
    const { bytes, inodes } = registry.held(this.#stack);
    const light =
      bytes + this.#diskBytes <= this.spec.diskBytes / 2 && inodes <= this.spec.inodes / 2;
    if (bytes === 0 || light) return null;
    const shown = (await supervisor.request('count', { sid: this.id })) as Weight;
    const garbage =
      bytes - shown.bytes > this.spec.diskBytes / 2 || inodes - shown.inodes > this.spec.inodes / 2;
    return garbage ? 'garbage' : shown;
  }

  async #copy(
    source: { home: string; name: string } | { merged: true },
    below: { durable: string }[],
    internal: boolean,
    shows: Weight | null = null,
  ): Promise<{ durable: string; uid: number }> {
    const { supervisor, uidBase } = this.#host;
    const id = newDurableId();
    const uid = layerOwner({ uidBase }, supervisor.ready.root);
    await supervisor.request('copy', {
      ...('merged' in source
        ? { sid: this.id, merged: true }
        : { sid: source.home, name: source.name }),
      target: `partial-${supervisor.owner}-${id}`,
      final: id,
      uid,
      meta: {
        version: 1,
        id,
        uid,
        parents: below.map((ref) => ref.durable),
        createdAt: new Date().toISOString(),
        internal,
        ...(shows && { shows }),
      },
    });
    return { durable: id, uid };
  }

  rollback(layer: LayerId): Promise<void> {
    return this.#enqueue(async () => {
      const stack = this.#host.registry.stack(layer);
      if (await this.#busy(true))
        throw this.#break('processes in the sandbox could not be ended for a rollback');
      await this.#mount(stack, { freshTmp: true, discard: this.#upper });
    });
  }

  /** With a call in flight or processes alive, from the last layer; otherwise from the files as they are. */
  async fork(count: number): Promise<Sandbox[]> {
    let stack = this.#stack;
    if (this.#queued === 0) {
      stack = await this.#enqueue(async () => {
        if (!(await this.#busy(false))) await this.#freeze();
        return this.#stack;
      });
    }
    if (this.#broken) throw this.#broken;
    this.#host.registry.hold(stack);
    const made = await Promise.allSettled(
      Array.from({ length: count }, () => this.#host.spawn(this.spec, stack)),
    );
    this.#host.registry.release(stack);
    const failed = made.find((each) => each.status === 'rejected');
    const children = made.flatMap((each) => (each.status === 'fulfilled' ? [each.value] : []));
    if (!failed) return children;
    await Promise.all(children.map((child) => child.stop()));
    throw failed.reason;
  }

  usage(): Promise<SandboxUsage> {
    return this.#enqueue(async () => {
      const frame = await this.#call({ op: 'usage' }, [], 0);
      const cpu = typeof frame === 'string' ? 0 : (frame.header.cpuSeconds as number);
      return {
        cpuSeconds: this.#cgroup?.cpuSeconds() ?? cpu,
        peakMemoryBytes: this.#cgroup?.peakMemoryBytes() ?? null,
        diskBytes: typeof frame === 'string' ? this.#diskBytes : Number(frame.header.disk),
        wallSeconds: (performance.now() - this.#started) / 1000,
        oomKills: this.#cgroup?.oomKills() ?? 0,
      };
    });
  }

  stop(): Promise<void> {
    this.#stopping ??= this.#stop();
    return this.#stopping;
  }

  async #stop(): Promise<void> {
    const { supervisor, registry } = this.#host;
    this.#break('the sandbox was stopped');
    const stack = this.#stack;
    this.#stack = [];
    registry.release(stack);
    const keep = registry.usedNames(this.id);
    try {
      await supervisor.request('close', { sid: this.id, keep });
      await this.#ended(5000);
    } catch (error) {
      if (!supervisor.gone) throw error;
    } finally {
      supervisor.forget(this.id);
      await this.#cgroup?.remove();
      this.#host.released(this);
    }
  }
}
