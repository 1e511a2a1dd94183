import { createHash, randomBytes } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs';
import { open, rename } from 'node:fs/promises';
import { join, resolve } from 'node:path';
import { promisify } from 'node:util';
import { zstdCompress, zstdDecompressSync } from 'node:zlib';
import { attribute, LonghaulError } from '../../core/index.ts';
import type { LayerId, PruneReport } from '../contract.ts';
import { MemoryFiles, type MemoryLimits, WORKSPACE } from './files.ts';
import { packTar, unpackTar } from './tar.ts';

const DURABLE_ID = /^w-[0-9a-f]{24}$/;
const SUFFIX = '.layer';
const PARTIAL = 'partial-';
/** The first line of a durable layer's file; the digest is of what follows it. */
const HEADER = /^longhaul-layer 1 sha256=([0-9a-f]{64})\n/;
const HEADER_BYTES = 'longhaul-layer 1 sha256='.length + 64 + 1;
/** Younger layers may belong to a run that has not named them yet. */
const FRESH_MS = 3_600_000;

const compress = promisify(zstdCompress);
const archive = (files: MemoryFiles): Promise<Buffer> =>
  compress(Buffer.concat([...packTar(files.workspace(), `${WORKSPACE}/`)]));

/**
 * The layers of a driver: volatile ones in memory, durable ones as files that every process finds. A
 * durable layer is a compressed archive of the workspace with its digest; it appears by a rename, so
 * that it is never half there.
 */
export class MemoryLayers {
  readonly #dir: string;
  readonly #volatile = new Map<LayerId, MemoryFiles>();

  constructor(dir: string) {
    this.#dir = join(resolve(dir), 'wasm-layers');
    mkdirSync(this.#dir, { recursive: true, mode: 0o700 });
  }

  /** Keeps a copy of the workspace. `DiskFull` when a durable one cannot be written. */
  async save(files: MemoryFiles, durable: boolean): Promise<LayerId> {
    if (durable) return this.#write(await archive(files));
    const id = `v-${randomBytes(12).toString('hex')}`;
    this.#volatile.set(id, files.copy());
    return id;
  }

  async #write(content: Uint8Array): Promise<LayerId> {
    const id = `w-${randomBytes(12).toString('hex')}`;
    const partial = join(this.#dir, `${PARTIAL}${id}`);
    const digest = createHash('sha256').update(content).digest('hex');
    try {
      const file = await open(partial, 'wx', 0o600);
      try {
        await file.writeFile(`longhaul-layer 1 sha256=${digest}\n`);
        await file.writeFile(content);
        await file.sync();
      } finally {
        await file.close();
      }
      await rename(partial, this.#path(id));
      const folder = await open(this.#dir, 'r');
      await folder.sync();
      await folder.close();
    } catch (error) {
      rmSync(partial, { force: true });
      throw attribute(error, 'SandboxUnavailable', 'a workspace layer cannot be written');
    }
    return id;
  }

  #path(layer: LayerId): string {
    return join(this.#dir, `${layer}${SUFFIX}`);
  }

  has(layer: LayerId): boolean {
    return this.#volatile.has(layer) || (DURABLE_ID.test(layer) && existsSync(this.#path(layer)));
  }

  drop(layer: LayerId): void {
    this.#volatile.delete(layer);
    if (DURABLE_ID.test(layer)) rmSync(this.#path(layer), { force: true });
  }

  #missing(layer: LayerId): LonghaulError {
    return new LonghaulError('NotFound', `workspace layer ${layer} does not exist`, {
      next: 'Volatile layers end with their driver; take a durable snapshot to keep one.',
    });
  }

  /** A durable layer's archive, found whole by its digest. */
  #read(layer: LayerId): Buffer {
    if (!this.has(layer)) throw this.#missing(layer);
    const file = readFileSync(this.#path(layer));
    const digest = HEADER.exec(file.toString('latin1', 0, HEADER_BYTES))?.[1];
    const content = file.subarray(HEADER_BYTES);
    if (digest !== createHash('sha256').update(content).digest('hex'))
      throw new LonghaulError('SandboxUnavailable', `workspace layer ${layer} is damaged on disk`, {
        next: 'Import it again from where it was exported to, or go on from an earlier layer.',
      });
    return content;
  }

  /** The workspace of a layer in a tree of its own. `NotFound`; `FileRefused` when it does not fit. */
  load(layer: LayerId, limits: MemoryLimits): MemoryFiles {
    try {
      const volatile = this.#volatile.get(layer);
      if (volatile) return volatile.copy(limits);
      const tar = zstdDecompressSync(this.#read(layer));
      return MemoryFiles.of(unpackTar(tar, { prefix: `${WORKSPACE}/` }), limits);
    } catch (error) {
      throw attribute(error, 'FileRefused', `workspace layer ${layer} does not fit the sandbox`);
    }
  }

  /** The layer as a compressed archive. */
  async archive(layer: LayerId): Promise<Uint8Array> {
    const volatile = this.#volatile.get(layer);
    return volatile ? archive(volatile) : this.#read(layer);
  }

  /** Durable layers that nobody names; what a crash left half written goes too. */
  async prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport> {
    const old = readdirSync(this.#dir).filter((name) => {
      const found = statSync(join(this.#dir, name), { throwIfNoEntry: false });
      return found !== undefined && Date.now() - found.mtimeMs > FRESH_MS;
    });
    const keep = await named();
    const removed: LayerId[] = [];
    let bytesFreed = 0;
    for (const name of old) {
      const layer = name.slice(0, -SUFFIX.length);
      const whole = name.endsWith(SUFFIX) && DURABLE_ID.test(layer);
      if (whole ? keep.has(layer) : !name.startsWith(PARTIAL)) continue;
      bytesFreed += statSync(join(this.#dir, name), { throwIfNoEntry: false })?.size ?? 0;
      rmSync(join(this.#dir, name), { force: true });
      if (whole) removed.push(layer);
    }
    const kept = readdirSync(this.#dir).filter((name) => name.endsWith(SUFFIX)).length;
    return { removed, bytesFreed, kept };
  }

  /** Forgets the volatile layers. */
  close(): void {
    this.#volatile.clear();
  }
}
