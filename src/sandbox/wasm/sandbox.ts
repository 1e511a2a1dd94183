import { randomBytes } from 'node:crypto';
import {
  type CodeRequest,
  type ExecResult,
  type ExitCause,
  type FileEntry,
  type FileStat,
  LonghaulError,
  type ReadOptions,
  type SandboxPath,
  type SandboxProcess,
} from '../../core/index.ts';
import type {
  ForkOptions,
  LayerId,
  NetworkAttempt,
  Sandbox,
  SandboxSpec,
  SandboxUsage,
  SnapshotOptions,
} from '../contract.ts';
import { DEFAULT_KEEP_BYTES, outputText } from '../output.ts';
import { listEntries, readContent, statOf, writeContent } from './calls.ts';
import { FixedFiles, type MemoryFiles, type MemoryNode } from './files.ts';
import type { MemoryLayers } from './layers.ts';
import { type EnginePool, type EngineProcess, PATIENCE_MS, type ProcessEnd } from './process.ts';
import { type Answer, readNodes, type Snippet, wireFiles } from './protocol.ts';

const DEFAULT_TIMEOUT_MS = 60_000;
/** QuickJS ends its own snippets at the deadline, which costs the process nothing. */
const JAVASCRIPT_GRACE_MS = 100;
const SECRET_NAME = /^(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}$/;
const NOT_IN_TURN = 'answered out of turn';
const NO_COMMANDS = 'Use bubblewrap or another driver that runs commands.';

const sizeOf = (parts: readonly Uint8Array[]) => parts.reduce((sum, { length }) => sum + length, 0);

type Ended = Extract<Answer, { kind: 'ended' }>;

/** What a driver gives its sandboxes. */
export interface SandboxHome {
  pool: EnginePool;
  layers: MemoryLayers;
  languages: readonly CodeRequest['language'][];
  /** What to do for a language that is missing. */
  languageNext: string;
}

/**
 * Interpreters in a process of its own and files in memory. The files are kept here, on the driver's
 * side: the process has a copy, which it can lose with no harm.
 */
export class WasmSandbox implements Sandbox {
  readonly id = randomBytes(5).toString('hex');
  readonly spec: SandboxSpec;
  readonly #home: SandboxHome;
  readonly #started = performance.now();
  #files: MemoryFiles;
  #secrets = new Map<string, string>();
  /** What the process has of the files. */
  #synced: { process: EngineProcess; nodes: Map<string, MemoryNode> } | null = null;
  #queue: Promise<unknown> = Promise.resolve();
  #gone: string | null = null;
  #cpuMs = 0;
  #peakBytes = 0;
  #oomKills = 0;

  constructor(spec: SandboxSpec, files: MemoryFiles, home: SandboxHome) {
    this.spec = spec;
    this.#files = files;
    this.#home = home;
  }

  #check(): void {
    if (this.#gone !== null) throw new LonghaulError('SandboxBroken', this.#gone);
  }

  #enqueue<T>(job: () => T | Promise<T>): Promise<T> {
    const result = this.#queue.then(() => {
      this.#check();
      return job();
    });
    this.#queue = result.catch(() => {});
    return result;
  }

  /** `CapabilityMissing`: there are no commands in WebAssembly. */
  async exec(): Promise<ExecResult> {
    this.#check();
    throw this.#cannot('runs snippets of code, no commands', NO_COMMANDS);
  }

  /** `CapabilityMissing`, as `exec`. */
  async start(): Promise<SandboxProcess> {
    this.#check();
    throw this.#cannot('runs snippets of code, no processes', NO_COMMANDS);
  }

  #cannot(what: string, next: string): LonghaulError {
    return new LonghaulError('CapabilityMissing', `the wasm sandbox ${what}`, { next });
  }

  /**
   * A snippet that is ended (its deadline, its memory) leaves the files as they were before it. When
   * the process is lost by no fault of a snippet the call throws `SandboxBroken`, with the files as the
   * last snippet that ended left them; the sandbox can be used further.
   */
  async runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    this.#check();
    const { languages, languageNext } = this.#home;
    const foreign = requests.find(({ language }) => !languages.includes(language));
    if (foreign) throw this.#cannot(`does not run ${foreign.language} here`, languageNext);
    if (requests.length === 0) return [];
    return this.#enqueue(async () => {
      const results: ExecResult[] = [];
      while (results.length < requests.length) {
        const rest = requests.slice(results.length);
        results.push(...(await this.#runSome(rest)));
        this.#check();
      }
      return results;
    });
  }

  /** Runs as many as one process can: all of them, unless one costs it its files or its life. */
  async #runSome(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const process = await this.#home.pool.acquire(this);
    try {
      // Stopped while it waited.
      this.#check();
      const snippets = requests.map(
        (request): Snippet => ({
          stdin: '',
          ...request,
          timeoutMs: request.timeoutMs ?? DEFAULT_TIMEOUT_MS,
        }),
      );
      if (snippets.some(({ language }) => language === 'python'))
        this.#home.pool.expectPython(this.spec.memoryBytes);
      const announced = this.#send(process, snippets);
      const results: ExecResult[] = [];
      for (const [index, snippet] of snippets.entries()) {
        const runs = !(announced && index === 0) && snippet.language === 'javascript';
        const { result, lost } = await this.#result(process, snippet, runs);
        results.push(result);
        if (lost) break;
      }
      return results;
    } finally {
      if (this.#gone === null) this.#home.pool.release(this);
      else this.#home.pool.forget(this);
    }
  }

  /**
   * What became of one snippet; it is ended here when it is past its deadline. `runs`: it does already,
   * and the process does not say so.
   */
  async #result(
    process: EngineProcess,
    { language, timeoutMs }: Snippet,
    runs: boolean,
  ): Promise<{ result: ExecResult; lost: boolean }> {
    const grace = language === 'javascript' ? JAVASCRIPT_GRACE_MS : 0;
    const printed: Record<1 | 2, Uint8Array[]> = { 1: [], 2: [] };
    let startedAt = runs ? performance.now() : null;
    for (;;) {
      const since = startedAt === null ? 0 : performance.now() - startedAt;
      const reply = await process.next(
        startedAt === null ? PATIENCE_MS : timeoutMs + grace - since,
      );
      this.#check();
      if (reply === null) {
        if (startedAt === null) throw this.#broken(process, 'did not answer');
        process.kill();
        const end = { own: true, signal: 'SIGKILL', memory: false, said: '' };
        return { result: this.#ended(end, 'timeout', startedAt, printed), lost: true };
      }
      if (!('header' in reply)) {
        const cause = reply.memory ? 'out_of_memory' : 'signalled';
        return { result: this.#ended(reply, cause, startedAt, printed), lost: true };
      }
      const { header, body } = reply;
      switch (header.kind) {
        case 'running':
          startedAt ??= performance.now();
          break;
        case 'printed':
          if (header.stream !== 1 && header.stream !== 2) throw this.#broken(process, NOT_IN_TURN);
          // No more than it may: the process may not be what it was.
          if (sizeOf(printed[header.stream]) < DEFAULT_KEEP_BYTES) {
            printed[header.stream].push(new Uint8Array(body.subarray(0, DEFAULT_KEEP_BYTES)));
          }
          break;
        case 'ended':
          return { result: this.#take(process, header, body), lost: header.lost };
        case 'failed':
          throw new LonghaulError('SandboxUnavailable', `the sandbox failed: ${header.message}`);
        default:
          throw this.#broken(process, NOT_IN_TURN);
      }
    }
  }

  /** Whether the process says when a first snippet of JavaScript runs. */
  #send(process: EngineProcess, snippets: readonly Snippet[]): boolean {
    const known = this.#synced?.process === process ? this.#synced.nodes : null;
    const nodes = this.#files.nodes();
    const put = [...nodes].filter(([path, node]) => known?.get(path) !== node);
    const removed = known ? [...known.keys()].filter((path) => !nodes.has(path)) : [];
    const { files, contents } = wireFiles(put, removed);
    const { diskBytes, inodes, memoryBytes } = this.spec;
    const announce = known === null || put.length > 0;
    process.send(
      {
        kind: 'run',
        limits: { diskBytes, inodes },
        memoryBytes,
        keepBytes: DEFAULT_KEEP_BYTES,
        announce,
        reset: known === null,
        files,
        secrets: [...this.#secrets],
        snippets: [...snippets],
      },
      contents,
    );
    this.#synced = { process, nodes: new Map(nodes) };
    return announce;
  }

  /** The process did something that it never does: it is not believed any further. */
  #broken(process: EngineProcess, what: string): LonghaulError {
    process.kill();
    return new LonghaulError('SandboxBroken', `the sandbox's process ${what}`);
  }

  /** The process is gone. By its own signal or for its deadline: the guest's doing; otherwise somebody's outside. */
  #ended(
    end: ProcessEnd,
    cause: ExitCause,
    startedAt: number | null,
    printed: Record<1 | 2, Uint8Array[]>,
  ): ExecResult {
    this.#synced = null;
    if (!end.own || startedAt === null)
      throw new LonghaulError(
        'SandboxBroken',
        `the sandbox's process ended (${end.signal ?? end.said.trim().split('\n').at(-1)})`,
      );
    const durationMs = performance.now() - startedAt;
    // By the clock: it cannot be asked any more.
    this.#cpuMs += durationMs;
    if (end.memory) this.#oomKills++;
    const [stdout, stderr] = [Buffer.concat(printed[1]), Buffer.concat(printed[2])];
    return {
      cause,
      code: null,
      signal: end.signal,
      stdout: outputText(stdout, Buffer.alloc(0), stdout.length),
      stderr: outputText(stderr, Buffer.alloc(0), stderr.length),
      stdoutBytes: stdout.length,
      stderrBytes: stderr.length,
      durationMs,
      ...(end.memory && { limitsHit: ['memory'] }),
    };
  }

  #take(process: EngineProcess, { result, output, files, lost, usage }: Ended, body: Uint8Array) {
    const bounds = [0];
    for (const length of output) bounds.push(bounds.at(-1)! + length);
    const part = (index: number) => body.subarray(bounds[index], bounds[index + 1]);
    let put: [string, MemoryNode][];
    try {
      put = readNodes(files.put, body, bounds[4]);
      if (!lost) this.#files.apply(put, files.removed);
    } catch {
      // A change that no guest can make: the copy that it was made in is not one any more.
      this.#gone = 'the sandbox claimed an impossible change of its files and was given up';
      throw this.#broken(process, 'claimed an impossible change of its files');
    }
    if (lost) this.#synced = null;
    for (const [path, node] of put) this.#synced?.nodes.set(path, node);
    for (const path of files.removed) this.#synced?.nodes.delete(path);
    this.#cpuMs += Math.max(0, usage.cpuMs - process.cpuMs);
    process.cpuMs = usage.cpuMs;
    process.heldBytes = usage.heldBytes;
    this.#peakBytes = Math.max(this.#peakBytes, usage.peakBytes);
    if (result.memory) this.#oomKills++;
    const [stdoutBytes, stderrBytes] = result.totals;
    return {
      cause: result.cause,
      code: result.code,
      signal: result.signal,
      stdout: outputText(part(0), part(1), stdoutBytes),
      stderr: outputText(part(2), part(3), stderrBytes),
      stdoutBytes,
      stderrBytes,
      durationMs: result.ms,
      ...(result.memory && { limitsHit: ['memory'] as const }),
    };
  }

  readFile(path: SandboxPath, options: number | ReadOptions = {}): Promise<Uint8Array> {
    return this.#enqueue(() => readContent(this.#files, path, options));
  }

  writeFile(path: SandboxPath, data: Uint8Array | string): Promise<void> {
    const bytes = Uint8Array.from(typeof data === 'string' ? Buffer.from(data) : data);
    return this.#enqueue(() => writeContent(this.#files, path, bytes));
  }

  listFiles(path: SandboxPath): Promise<FileEntry[]> {
    return this.#enqueue(() => listEntries(this.#files, path));
  }

  stat(path: SandboxPath): Promise<FileStat> {
    return this.#enqueue(() => statOf(this.#files, path));
  }

  /** Nothing is ever alive between calls, so it is never refused. */
  snapshot(options: SnapshotOptions = {}): Promise<LayerId> {
    return this.#enqueue(() => this.#home.layers.save(this.#files, options.durable ?? false));
  }

  rollback(layer: LayerId): Promise<void> {
    return this.#enqueue(() => {
      this.#files = this.#home.layers.load(layer, this.spec);
      this.#secrets.clear();
    });
  }

  /** From the files as the last snippet that ended left them. */
  async fork(count: number, options: ForkOptions = {}): Promise<Sandbox[]> {
    this.#check();
    const spec = { ...this.spec, diskBytes: this.spec.diskBytes + (options.moreDiskBytes ?? 0) };
    return Array.from(
      { length: count },
      () => new WasmSandbox(spec, this.#files.copy(spec), this.#home),
    );
  }

  /** `CapabilityMissing`: nothing is alive between calls that could be frozen. */
  async pause(): Promise<void> {
    this.#check();
    throw this.#cannot(
      'cannot pause',
      'Nothing runs in it between calls; take a snapshot instead.',
    );
  }

  /** `CapabilityMissing`, as `pause`. */
  async resume(): Promise<void> {
    this.#check();
    throw this.#cannot(
      'cannot pause',
      'Nothing runs in it between calls; take a snapshot instead.',
    );
  }

  putSecrets(secrets: Readonly<Record<string, string>>): Promise<void> {
    const entries = Object.entries(secrets);
    return this.#enqueue(() => {
      const bad = entries.find(([name]) => !SECRET_NAME.test(name));
      if (bad)
        throw new LonghaulError('ConfigInvalid', 'a secret has a name that is no file name', {
          next: 'Use letters, digits, dot, dash and underscore.',
        });
      for (const [name, value] of entries) this.#secrets.set(name, value);
      this.#files.fixed = new FixedFiles(
        [...this.#secrets].map(([name, value]): [string, MemoryNode] => [
          `/run/secrets/${name}`,
          { kind: 'file', data: Buffer.from(value), mode: 0o400, modifiedMs: Date.now() },
        ]),
      );
    });
  }

  /** None: there is no network inside. */
  networkAttempts(): readonly NetworkAttempt[] {
    return [];
  }

  usage(): Promise<SandboxUsage> {
    return this.#enqueue(() => ({
      cpuSeconds: this.#cpuMs / 1000,
      peakMemoryBytes: this.#peakBytes > 0 ? this.#peakBytes : null,
      diskBytes: this.#files.bytes,
      pids: 0,
      wallSeconds: (performance.now() - this.#started) / 1000,
      oomKills: this.#oomKills,
      pidsRefused: 0,
    }));
  }

  async stop(): Promise<void> {
    this.#gone ??= 'the sandbox was stopped';
    this.#home.pool.forget(this);
  }
}
