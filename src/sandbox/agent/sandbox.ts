import { constants as osConstants } from 'node:os';
import type { Readable } from 'node:stream';
import {
  type CodeRequest,
  type ExecRequest,
  type ExecResult,
  type FileEntry,
  type FileKind,
  type FileStat,
  LonghaulError,
  type ReadOptions,
  type SandboxPath,
  type SandboxProcess,
  type ToolSandbox,
} from '../../core/index.ts';
import { packWorkspace, unpackInto } from './archive.ts';
import { type AgentChannel, type Frame, frameParts } from './channel.ts';
import { AgentProcess } from './process.ts';
import {
  codeHeaders,
  commandHeader,
  type Evidence,
  execResults,
  KILLED,
  lostResult,
  MAX_TRANSFER_BYTES,
  pathHeader,
} from './requests.ts';

const DEFAULT_EXEC_TIMEOUT_MS = 60_000;
const DEFAULT_READ_LIMIT = 1024 * 1024;
/** How long the agent may take past a deadline before it is ended from outside. */
export const GRACE_MS = 10_000;

/** Why an agent did not answer, where that was the guest's doing. A new one is in its place. */
export type Lost = 'out_of_memory' | 'timeout';

/**
 * The calls of a sandbox whose processes an agent inside starts (agent.py). Drivers add how the agent got
 * there, layers and limits. Calls queue: one runs at a time; processes go on beside them.
 */
export abstract class AgentSandbox implements ToolSandbox {
  protected channel: AgentChannel | null = null;
  protected broken: LonghaulError | null = null;
  protected paused = false;
  protected diskBytes = 0;
  readonly #processes = new Set<AgentProcess>();
  #queue: Promise<unknown> = Promise.resolve();
  #queued = 0;

  /** Kernel counters since the last time, of what the guest ran into. */
  protected abstract evidence(): Evidence;
  /**
   * After a call got no answer. Throws `SandboxBroken` where the host is to blame; otherwise puts a new
   * agent in place and says why the old one is gone. `late`: it was ended for being silent too long.
   */
  protected abstract replaceAgent(late: boolean, error: Error): Promise<Lost>;
  /** Ends the agent from outside: the answer that is waited for then fails. */
  protected abstract endAgent(): void;
  /** Before each job of the queue. */
  protected async wake(): Promise<void> {}
  /** The queue has run empty. */
  protected rest(): void {}

  // The queue

  get idle(): boolean {
    return this.#queued === 0;
  }

  /** Runs `job` after all earlier ones. A failure of one does not stop the next. */
  protected enqueue<T>(job: () => Promise<T>): Promise<T> {
    this.#queued++;
    const result = this.#queue.then(async () => {
      this.#usable();
      await this.wake();
      try {
        return await job();
      } catch (error) {
        // Whatever failed on the way: the sandbox is gone, and that is what the caller must know.
        throw this.broken ?? error;
      }
    });
    const done = () => {
      if (--this.#queued === 0) this.rest();
    };
    this.#queue = result.then(done, done);
    return result;
  }

  #usable(): void {
    if (this.broken) throw this.broken;
    if (this.paused)
      throw new LonghaulError('SandboxBusy', 'the sandbox is paused', {
        next: 'Call resume() first.',
      });
  }

  protected breakWith(message: string): LonghaulError {
    this.broken ??= new LonghaulError('SandboxBroken', message);
    this.channel?.destroy();
    for (const process of this.#processes) process.lost(this.broken);
    this.#processes.clear();
    return this.broken;
  }

  /** Processes that were started and whose agent is gone: the guest's doing, or the owner's wish. */
  protected loseProcesses(cause: ExecResult['cause']): void {
    for (const process of this.#processes) process.ended(lostResult(cause, process.ageMs));
    this.#processes.clear();
  }

  /** One conversation with the agent; the reason where it was lost to the guest. `limitMs` null: no limit. */
  protected async call(
    header: Record<string, unknown>,
    parts: readonly Uint8Array[],
    limitMs: number | null,
    id?: number,
  ): Promise<Frame | Lost> {
    const channel = this.channel!;
    let late = false;
    const timer =
      limitMs === null
        ? null
        : setTimeout(() => {
            late = true;
            this.endAgent();
          }, limitMs + GRACE_MS);
    try {
      const frame = await channel.call(header, parts, id);
      this.diskBytes = Number(frame.header.disk);
      if (frame.header.broken !== undefined)
        throw this.breakWith(`the agent inside cannot go on: ${frame.header.broken}`);
      return frame;
    } catch (error) {
      if (this.broken) throw this.broken;
      const why = await this.replaceAgent(late, error as Error);
      this.loseProcesses(why === 'timeout' ? 'killed' : why);
      return why;
    } finally {
      if (timer) clearTimeout(timer);
    }
  }

  // Commands

  async exec(request: ExecRequest): Promise<ExecResult> {
    const timeoutMs = request.timeoutMs ?? DEFAULT_EXEC_TIMEOUT_MS;
    const header = commandHeader(request, timeoutMs);
    return this.enqueue(async () => {
      if (request.signal?.aborted) return lostResult('killed', 0);
      const started = performance.now();
      const channel = this.channel!;
      const id = channel.reserve();
      const tag = request.onOutput ? { tag: id } : {};
      const abort = () => {
        channel.call({ op: 'kill', process: id, signal: KILLED }).catch(() => {});
      };
      let thrown: { error: unknown } | null = null;
      if (request.onOutput)
        channel.listen(id, (frame) => {
          try {
            if (thrown === null)
              request.onOutput!(frame.header.stream === 0 ? 'stdout' : 'stderr', frame.body);
          } catch (error) {
            thrown = { error };
            abort();
          }
        });
      request.signal?.addEventListener('abort', abort, { once: true });
      try {
        const stdin = Buffer.from((request.stdin as string) ?? '');
        const frame = await this.call({ op: 'exec', ...header, ...tag }, [stdin], timeoutMs, id);
        if (typeof frame === 'string') return lostResult(frame, performance.now() - started);
        this.refused(frame, request.argv[0]!);
        const [result] = execResults(frame, this.evidence());
        if (thrown !== null) throw (thrown as { error: unknown }).error;
        return result!;
      } finally {
        request.signal?.removeEventListener('abort', abort);
        channel.unlisten(id);
      }
    });
  }

  async start(request: ExecRequest): Promise<SandboxProcess> {
    const header = commandHeader(request, request.timeoutMs ?? null);
    return this.enqueue(async () => {
      const channel = this.channel!;
      const id = channel.reserve();
      const process = new AgentProcess(channel, id, request, () => {
        this.#processes.delete(process);
        return this.evidence();
      });
      this.#processes.add(process);
      const frame = await this.call({ op: 'start', kind: 'exec', ...header, tag: id }, [], 0, id);
      if (typeof frame !== 'string' && request.stdin !== undefined) {
        // Not waited for: a process that does not read would hold up every other call.
        const { stdin } = request;
        void process
          .write(stdin)
          .then(() => process.end())
          .catch(() => {});
      }
      return process;
    });
  }

  async runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const foreign = requests.find((each) => each.language !== 'python');
    if (foreign)
      throw new LonghaulError(
        'CapabilityMissing',
        `this sandbox runs Python snippets, not ${foreign.language}`,
        { next: 'Ask for Python, or use the wasm driver for JavaScript.' },
      );
    if (requests.length === 0) return [];
    return this.enqueue(() => this.#batch(requests));
  }

  async #batch(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const started = performance.now();
    const { headers, parts, limitMs } = codeHeaders(requests);
    const frame = await this.call({ op: 'code', requests: headers }, parts, limitMs);
    if (typeof frame !== 'string') {
      this.refused(frame, 'snippet');
      return execResults(frame, this.evidence());
    }
    // Which snippet did it is known only when they run alone.
    if (requests.length === 1) return [lostResult(frame, performance.now() - started)];
    const results: ExecResult[] = [];
    for (const request of requests) results.push(...(await this.#batch([request])));
    return results;
  }

  // Files

  /** Throws what the agent refused: `NotFound` or `FileRefused`, both the caller's to correct. */
  protected refused(frame: Frame, path: SandboxPath): void {
    const code = frame.header.errno as number | undefined;
    if (code === undefined) return;
    const missing = code === osConstants.errno.ENOENT || code === osConstants.errno.ENOTDIR;
    throw new LonghaulError(
      missing ? 'NotFound' : 'FileRefused',
      `${shownPath(path)}: ${frame.header.message}`,
      missing ? { next: 'List the directory to see what exists.' } : {},
    );
  }

  async #fileCall(
    op: string,
    path: SandboxPath,
    fields: Record<string, unknown>,
    parts: Uint8Array[] = [],
  ): Promise<Frame> {
    const header = { op, ...pathHeader(path), ...fields };
    return this.enqueue(async () => {
      let frame = await this.call(header, parts, DEFAULT_EXEC_TIMEOUT_MS);
      // The agent was lost to what ran before, and is new now: file calls can be repeated.
      if (typeof frame === 'string')
        frame = await this.call(header, parts, DEFAULT_EXEC_TIMEOUT_MS);
      if (typeof frame === 'string')
        throw new LonghaulError('FileRefused', `${shownPath(path)}: ended by ${frame}`);
      this.refused(frame, path);
      return frame;
    });
  }

  async readFile(path: SandboxPath, options: number | ReadOptions = {}): Promise<Uint8Array> {
    const { limit = DEFAULT_READ_LIMIT, offset = 0 } =
      typeof options === 'number' ? { limit: options } : options;
    const frame = await this.#fileCall('read', path, {
      limit: Math.min(limit, MAX_TRANSFER_BYTES),
      offset,
    });
    return new Uint8Array(frameParts(frame)[0]!);
  }

  async writeFile(path: SandboxPath, data: Uint8Array | string): Promise<void> {
    await this.#fileCall('write', path, { mode: 0o644 }, [Buffer.from(data as Uint8Array)]);
  }

  async listFiles(path: SandboxPath): Promise<FileEntry[]> {
    const frame = await this.#fileCall('list', path, {});
    const entries = frame.header.entries as [string, string | null, FileKind, number][];
    return entries.map(([name, raw, kind, bytes]) => ({
      name,
      ...(raw !== null && { rawName: new Uint8Array(Buffer.from(raw, 'hex')) }),
      kind,
      bytes,
    }));
  }

  async stat(path: SandboxPath): Promise<FileStat> {
    const { kind, bytes, mode, modifiedMs, target } = (await this.#fileCall('stat', path, {}))
      .header as unknown as FileStat;
    return { kind, bytes, mode, modifiedMs, ...(target !== undefined && { target }) };
  }

  async putSecrets(secrets: Readonly<Record<string, string>>): Promise<void> {
    for (const name of Object.keys(secrets))
      if (!/^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$/.test(name))
        throw new LonghaulError(
          'ConfigInvalid',
          `${JSON.stringify(name)} is no name for a secret`,
          {
            next: 'Use letters, digits, "_", "-" and "."; it becomes a file name.',
          },
        );
    for (const [name, value] of Object.entries(secrets))
      await this.#fileCall('secret', name, {}, [Buffer.from(value)]);
  }

  // The state between calls

  /** A health probe for the pool: whether the agent answers. It makes ready for the next call. */
  async ping(): Promise<boolean> {
    try {
      await this.enqueue(() => this.call({ op: 'ping' }, [], 0));
      return true;
    } catch {
      return false;
    }
  }

  /** Whether processes are alive; with `stop` they are ended first. Within the queue. */
  protected async busy(stop: boolean): Promise<boolean> {
    const frame = await this.call({ op: 'quiesce', stop }, [], GRACE_MS);
    return typeof frame === 'string' ? false : (frame.header.busy as boolean);
  }

  /** CPU seconds of the agent and all processes that it saw end, and how many processes are its own. */
  protected async agentUsage(): Promise<{ cpuSeconds: number; own: number }> {
    const frame = await this.call({ op: 'usage' }, [], 0);
    if (typeof frame === 'string') return { cpuSeconds: 0, own: 1 };
    return { cpuSeconds: frame.header.cpuSeconds as number, own: frame.header.own as number };
  }

  /** The folder as an uncompressed tar. The queue is held until it has been read to its end. */
  pack(path: string): Readable {
    return packWorkspace((use) => this.enqueue(() => use(this.channel!)), path);
  }

  /** Unpacks a tar into a folder. `FileRefused` with the reason when the archive is at fault. */
  async unpack(source: AsyncIterable<Uint8Array>, path: string, whiteouts = false): Promise<void> {
    await this.enqueue(() => unpackInto(this.channel!, source, path, whiteouts));
  }
}

const shownPath = (path: SandboxPath) =>
  JSON.stringify(typeof path === 'string' ? path : Buffer.from(path).toString());
