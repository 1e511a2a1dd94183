import { randomBytes } from 'node:crypto';
import {
  closeSync,
  existsSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { availableParallelism } from 'node:os';
import { join, resolve } from 'node:path';
import {
  type CodeRequest,
  type ExecResult,
  type FileEntry,
  LonghaulError,
} from '../../core/index.ts';
import {
  DEFAULT_SPEC,
  type LayerId,
  type Sandbox,
  type SandboxCapabilities,
  type SandboxDriver,
  type SandboxSpec,
  type SandboxUsage,
  type SnapshotOptions,
} from '../contract.ts';
import { DEFAULT_KEEP_BYTES, outputText } from '../output.ts';
import {
  type MemoryFiles,
  memoryBytes,
  memoryList,
  memoryPath,
  memoryRead,
  memoryWrite,
} from './files.ts';
import { SnippetProcesses } from './process.ts';
import type { SnippetResult } from './protocol.ts';

export interface QuickJsOptions {
  /** Folder for durable layers. */
  dir: string;
  /** Processes that run snippets. Default: one per core, at most four. */
  processes?: number;
}

const DEFAULT_TIMEOUT_MS = 10_000;
const DEFAULT_READ_LIMIT = 1024 * 1024;
const MAX_PROCESSES = 4;
const DURABLE_ID = /^q-[0-9a-f]{24}$/;

/**
 * JavaScript in QuickJS (WebAssembly) in a process of its own, with files in memory. For machines
 * without bubblewrap: the boundary is the interpreter and Node's permission model, not the kernel.
 */
export class QuickJsDriver implements SandboxDriver {
  readonly name = 'quickjs';
  readonly capabilities: SandboxCapabilities = {
    isolation: 'process',
    languages: ['javascript'],
    exec: false,
    memory: 'runtime',
    cpu: 'none',
    pids: 'runtime',
    disk: 'runtime',
    layers: 'copy',
    ownUid: false,
  };
  readonly #processes: SnippetProcesses;
  readonly #dir: string;
  readonly #layers = new Map<LayerId, MemoryFiles>();

  private constructor(dir: string, processes: SnippetProcesses) {
    this.#dir = dir;
    this.#processes = processes;
  }

  /** Starts the first process; `SandboxUnavailable` when it does not run here. */
  static async open(options: QuickJsOptions): Promise<QuickJsDriver> {
    const dir = join(resolve(options.dir), 'quickjs-layers');
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    const count = options.processes ?? Math.min(availableParallelism(), MAX_PROCESSES);
    const processes = new SnippetProcesses(count);
    await processes.warm();
    return new QuickJsDriver(dir, processes);
  }

  async create(spec: Partial<SandboxSpec> = {}, from?: LayerId): Promise<Sandbox> {
    const full = { ...DEFAULT_SPEC, ...spec };
    if (full.image !== 'host' || full.network !== 'none')
      throw new LonghaulError(
        'CapabilityMissing',
        'QuickJS sandboxes have no image and no network',
      );
    if (full.cpus < 1)
      throw new LonghaulError('CapabilityMissing', 'QuickJS sandboxes take a whole core or none', {
        next: 'Ask for one cpu, or use bubblewrap with control groups.',
      });
    const files = from === undefined ? new Map() : this.#files(from);
    return new QuickJsSandbox(full, files, this.#processes, {
      save: (each, durable) => (durable ? this.#saveDurable(each) : this.#save(each)),
      load: (layer) => this.#files(layer),
    });
  }

  #save(files: MemoryFiles): LayerId {
    const id = `v-${randomBytes(12).toString('hex')}`;
    this.#layers.set(id, new Map(files));
    return id;
  }

  #saveDurable(files: MemoryFiles): LayerId {
    const id = `q-${randomBytes(12).toString('hex')}`;
    const entries = [...files].map(([path, data]) => [path, Buffer.from(data).toString('base64')]);
    const partial = join(this.#dir, `${id}.partial`);
    const fd = openSync(partial, 'wx', 0o600);
    try {
      writeFileSync(fd, JSON.stringify({ version: 1, files: entries }));
      fsyncSync(fd);
    } finally {
      closeSync(fd);
    }
    renameSync(partial, join(this.#dir, `${id}.json`));
    const folder = openSync(this.#dir, 'r');
    fsyncSync(folder);
    closeSync(folder);
    return id;
  }

  #durablePath(layer: LayerId): string | null {
    return DURABLE_ID.test(layer) ? join(this.#dir, `${layer}.json`) : null;
  }

  #files(layer: LayerId): MemoryFiles {
    const volatile = this.#layers.get(layer);
    if (volatile) return new Map(volatile);
    const path = this.#durablePath(layer);
    if (!path || !existsSync(path))
      throw new LonghaulError('NotFound', `workspace layer ${layer} does not exist`, {
        next: 'Volatile layers end with their driver; take a durable snapshot to keep one.',
      });
    const { files } = JSON.parse(readFileSync(path, 'utf8')) as { files: [string, string][] };
    return new Map(files.map(([name, content]) => [name, Buffer.from(content, 'base64')]));
  }

  async hasLayer(layer: LayerId): Promise<boolean> {
    const path = this.#durablePath(layer);
    return this.#layers.has(layer) || (path !== null && existsSync(path));
  }

  async dropLayer(layer: LayerId): Promise<void> {
    this.#layers.delete(layer);
    const path = this.#durablePath(layer);
    if (path) rmSync(path, { force: true });
  }

  async close(): Promise<void> {
    this.#processes.close();
    this.#layers.clear();
  }
}

interface LayerStore {
  save(files: MemoryFiles, durable: boolean): LayerId;
  load(layer: LayerId): MemoryFiles;
}

class QuickJsSandbox implements Sandbox {
  readonly id = randomBytes(5).toString('hex');
  readonly spec: SandboxSpec;
  readonly #processes: SnippetProcesses;
  readonly #layers: LayerStore;
  readonly #started = performance.now();
  #files: MemoryFiles;
  #queue: Promise<unknown> = Promise.resolve();
  #stopped = false;
  #cpuMs = 0;
  #oomKills = 0;
  #batches = 0;

  constructor(
    spec: SandboxSpec,
    files: MemoryFiles,
    processes: SnippetProcesses,
    layers: LayerStore,
  ) {
    this.spec = spec;
    this.#files = files;
    this.#processes = processes;
    this.#layers = layers;
  }

  #enqueue<T>(job: () => T | Promise<T>): Promise<T> {
    const result = this.#queue.then(() => {
      if (this.#stopped) throw new LonghaulError('SandboxBroken', 'the sandbox was stopped');
      return job();
    });
    this.#queue = result.catch(() => {});
    return result;
  }

  async exec(): Promise<ExecResult> {
    throw new LonghaulError(
      'CapabilityMissing',
      'the QuickJS sandbox runs JavaScript snippets only, no commands',
      { next: 'Install bubblewrap (`apt-get install bubblewrap`) for commands and Python.' },
    );
  }

  async runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]> {
    const foreign = requests.find((each) => each.language !== 'javascript');
    if (foreign)
      throw new LonghaulError(
        'CapabilityMissing',
        `the QuickJS sandbox runs JavaScript, not ${foreign.language}`,
        { next: 'Install bubblewrap (`apt-get install bubblewrap`) for Python.' },
      );
    if (requests.length === 0) return [];
    return this.#enqueue(async () => {
      const results = await this.#processes.run(
        {
          id: ++this.#batches,
          memoryBytes: this.spec.memoryBytes,
          diskBytes: this.spec.diskBytes,
          inodes: this.spec.inodes,
          keepBytes: DEFAULT_KEEP_BYTES,
          files: [...this.#files].map(([path, data]) => [
            path,
            Buffer.from(data).toString('base64'),
          ]),
          snippets: requests.map((request) => ({
            source: request.source,
            stdin: request.stdin ?? '',
            timeoutMs: request.timeoutMs ?? DEFAULT_TIMEOUT_MS,
          })),
        },
        (answer) => {
          for (const [path, content] of answer.written)
            memoryWrite(this.#files, path, Buffer.from(content, 'base64'), this.spec);
        },
      );
      return results.map((result) => this.#result(result));
    });
  }

  #result(raw: SnippetResult): ExecResult {
    this.#cpuMs += raw.ms;
    if (raw.cause === 'out_of_memory') this.#oomKills++;
    const text = (part: SnippetResult['stdout']) =>
      outputText(Buffer.from(part.head, 'base64'), Buffer.from(part.tail, 'base64'), part.total);
    return {
      cause: raw.cause,
      code: raw.code,
      signal: raw.code === null ? 'SIGKILL' : null,
      stdout: text(raw.stdout),
      stderr: text(raw.stderr),
      stdoutBytes: raw.stdout.total,
      stderrBytes: raw.stderr.total,
      durationMs: raw.ms,
    };
  }

  readFile(path: string, limit = DEFAULT_READ_LIMIT): Promise<Uint8Array> {
    return this.#enqueue(() => memoryRead(this.#files, path, limit));
  }

  writeFile(path: string, data: Uint8Array | string): Promise<void> {
    const bytes = Uint8Array.from(Buffer.from(data as Uint8Array));
    return this.#enqueue(() => memoryWrite(this.#files, memoryPath(path), bytes, this.spec));
  }

  listFiles(path: string): Promise<FileEntry[]> {
    return this.#enqueue(() => memoryList(this.#files, path));
  }

  snapshot(options: SnapshotOptions = {}): Promise<LayerId> {
    return this.#enqueue(() => this.#layers.save(this.#files, options.durable ?? false));
  }

  rollback(layer: LayerId): Promise<void> {
    return this.#enqueue(() => {
      this.#files = this.#layers.load(layer);
    });
  }

  /** From the files as they are now: a snippet in flight has not changed them yet. */
  async fork(count: number): Promise<Sandbox[]> {
    if (this.#stopped) throw new LonghaulError('SandboxBroken', 'the sandbox was stopped');
    return Array.from(
      { length: count },
      () => new QuickJsSandbox(this.spec, new Map(this.#files), this.#processes, this.#layers),
    );
  }

  usage(): Promise<SandboxUsage> {
    return this.#enqueue(() => ({
      cpuSeconds: this.#cpuMs / 1000,
      peakMemoryBytes: null,
      diskBytes: memoryBytes(this.#files),
      wallSeconds: (performance.now() - this.#started) / 1000,
      oomKills: this.#oomKills,
    }));
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#files = new Map();
  }
}
