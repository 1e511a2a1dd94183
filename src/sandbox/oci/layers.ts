import { createHash, randomBytes } from 'node:crypto';
import {
  closeSync,
  createReadStream,
  createWriteStream,
  fsyncSync,
  linkSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { type Readable, Transform } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { createZstdCompress, createZstdDecompress } from 'node:zlib';
import { attribute, LonghaulError } from '../../core/index.ts';
import type { LayerId, PruneReport } from '../contract.ts';

/** `layer.json` beside a durable layer's archive. */
interface LayerMeta {
  version: 1;
  id: LayerId;
  /** Of the archive, and its length. */
  sha256: string;
  bytes: number;
  createdAt: string;
}

/** An archive that stays readable until it is released, whoever drops the layer meanwhile. */
export interface HeldLayer {
  path: string;
  sha256: string;
  release(): void;
}

const FRESH_MS = 3_600_000;
const DURABLE_ID = /^d-[0-9a-f]{24}$/;
const ARCHIVE = 'workspace.tar.zst';

/**
 * Layers as whole archives (tar, zstd), the form that layers are exported in. Volatile ones lie in the
 * owner's folder and go with it; durable ones in a folder that every process on it finds.
 */
export class ArchiveLayers {
  readonly #layers: string;
  readonly #own: string;
  readonly #owner: string;
  readonly #volatile = new Map<LayerId, { path: string; sha256: string }>();
  #held = 0;

  constructor(layersDir: string, ownerDir: string, owner: string) {
    this.#layers = layersDir;
    this.#own = join(ownerDir, 'archives');
    this.#owner = owner;
    mkdirSync(this.#own, { recursive: true, mode: 0o700 });
  }

  /** Stores a workspace's tar stream. `DiskFull` when the host's disk is. Nothing half-written is ever found. */
  async save(tar: Readable, durable: boolean): Promise<LayerId> {
    const id = `${durable ? 'd' : 'v'}-${randomBytes(12).toString('hex')}`;
    const partial = durable
      ? join(this.#layers, `partial-${this.#owner}-${id}`)
      : join(this.#own, `partial-${id}`);
    try {
      mkdirSync(partial, { mode: 0o700 });
      const { sha256, bytes } = await writeArchive(tar, join(partial, ARCHIVE));
      if (!durable) {
        const path = join(this.#own, id);
        renameSync(join(partial, ARCHIVE), path);
        rmSync(partial, { recursive: true });
        this.#volatile.set(id, { path, sha256 });
        return id;
      }
      const createdAt = new Date().toISOString();
      const meta: LayerMeta = { version: 1, id, sha256, bytes, createdAt };
      writeFileSync(join(partial, 'layer.json'), JSON.stringify(meta), { flush: true });
      sync(join(partial, ARCHIVE));
      sync(partial);
      renameSync(partial, join(this.#layers, id));
      sync(this.#layers);
      return id;
    } catch (error) {
      rmSync(partial, { recursive: true, force: true });
      const code = (error as NodeJS.ErrnoException).code;
      if (code !== 'ENOSPC' && code !== 'EDQUOT') throw error;
      throw new LonghaulError('DiskFull', 'no room on disk for a workspace layer', {
        cause: error,
      });
    }
  }

  #meta(id: LayerId): LayerMeta | null {
    if (!DURABLE_ID.test(id)) return null;
    try {
      return JSON.parse(readFileSync(join(this.#layers, id, 'layer.json'), 'utf8'));
    } catch {
      return null;
    }
  }

  has(id: LayerId): boolean {
    return this.#volatile.has(id) || this.#meta(id) !== null;
  }

  /** `NotFound` when the layer was dropped, never existed, or was volatile and went with its driver. */
  hold(id: LayerId): HeldLayer {
    const volatile = this.#volatile.get(id);
    const meta = volatile ? null : this.#meta(id);
    const sha256 = volatile?.sha256 ?? meta?.sha256;
    const path = join(this.#own, `held-${++this.#held}`);
    try {
      if (sha256 === undefined) throw new Error('no such layer');
      // A link of its own: dropping the layer leaves it.
      linkSync(volatile?.path ?? join(this.#layers, id, ARCHIVE), path);
    } catch (error) {
      throw new LonghaulError('NotFound', `workspace layer ${id} does not exist`, {
        next: 'Volatile layers end with their driver; take a durable snapshot to keep one.',
        cause: error,
      });
    }
    return { path, sha256, release: () => rmSync(path, { force: true }) };
  }

  /** Idempotent. */
  drop(id: LayerId): void {
    const volatile = this.#volatile.get(id);
    if (volatile) {
      this.#volatile.delete(id);
      rmSync(volatile.path, { force: true });
    } else if (this.#meta(id)) this.#remove(id);
  }

  /** Renamed first, so that a half-removed layer is never found. */
  #remove(id: LayerId): void {
    const aside = join(this.#layers, `partial-${this.#owner}-${id}`);
    try {
      renameSync(join(this.#layers, id), aside);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'ENOENT') return; // another process was faster
      throw attribute(error, 'SandboxUnavailable');
    }
    rmSync(aside, { recursive: true, force: true });
  }

  /** See `SandboxDriver.prune`. A live sandbox has a link of its own to what it needs. */
  async prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport> {
    const metas = () =>
      readdirSync(this.#layers)
        .map((name) => this.#meta(name))
        .filter((meta) => meta !== null);
    const candidates = metas().filter(
      (meta) => Date.now() - Date.parse(meta.createdAt) >= FRESH_MS,
    );
    const keep = await named();
    const removed = candidates.filter(({ id }) => !keep.has(id));
    for (const { id } of removed) this.#remove(id);
    return {
      removed: removed.map(({ id }) => id),
      bytesFreed: removed.reduce((sum, { bytes }) => sum + bytes, 0),
      kept: metas().length,
    };
  }
}

function sync(path: string): void {
  const fd = openSync(path, 'r');
  fsyncSync(fd);
  closeSync(fd);
}

/** Passes bytes on and sums them up. */
function digest() {
  const hash = createHash('sha256');
  let bytes = 0;
  const through = new Transform({
    transform(chunk: Buffer, _, done) {
      hash.update(chunk);
      bytes += chunk.length;
      done(null, chunk);
    },
  });
  return { through, ended: () => ({ sha256: hash.digest('hex'), bytes }) };
}

async function writeArchive(tar: Readable, path: string) {
  const { through, ended } = digest();
  await pipeline(tar, createZstdCompress(), through, createWriteStream(path, { mode: 0o600 }));
  return ended();
}

/**
 * Hands a layer's tar to `use`. Throws `SandboxUnavailable` when the archive is not what was written:
 * `use` has then seen only what came before the damage, or all of it.
 */
export async function readArchive(
  layer: HeldLayer,
  use: (tar: AsyncIterable<Uint8Array>) => Promise<void>,
): Promise<void> {
  const { through, ended } = digest();
  let used: { error: unknown } | null = null;
  const damaged = (cause?: unknown) =>
    new LonghaulError('SandboxUnavailable', 'a workspace layer on disk is damaged', {
      next: 'Drop the layer and resume from an earlier one.',
      cause,
    });
  try {
    await pipeline(createReadStream(layer.path), through, createZstdDecompress(), async (tar) => {
      try {
        await use(tar);
      } catch (error) {
        used = { error };
        throw error;
      }
    });
  } catch (error) {
    const zstd = (error as NodeJS.ErrnoException).code?.startsWith('Z');
    if (used && !zstd) throw (used as { error: unknown }).error;
    throw damaged(error);
  }
  if (ended().sha256 !== layer.sha256) throw damaged();
}
