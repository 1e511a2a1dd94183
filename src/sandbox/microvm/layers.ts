import { createHash, randomBytes } from 'node:crypto';
import {
  closeSync,
  createReadStream,
  createWriteStream,
  existsSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { PassThrough, type Readable, Transform, type Writable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { constants, createZstdCompress, createZstdDecompress } from 'node:zlib';
import { LonghaulError } from '../../core/index.ts';
import type { LayerId, PruneReport, SandboxSpec } from '../contract.ts';
import type { Counters } from './warden.ts';

const FRESH_MS = 3_600_000;
const DURABLE_ID = /^m-[0-9a-f]{24}$/;
const TEMPLATE_ID = /^t-[0-9a-f]{24}$/;

/** What is known of a saved machine besides its state. */
export interface SavedMachine {
  spec: SandboxSpec;
  /** The system that it runs: only the same QEMU, kernel and agent can go on with it. */
  system: string;
  /** What its agent had said of a frame, in base 64. */
  partial: string;
  /** The first number that its agent has not seen as a request's. */
  nextId: number;
  counters: Counters;
}

/** `layer.json` beside the state of a machine. */
export interface LayerMeta extends SavedMachine {
  version: 1;
  id: LayerId;
  /** Of the state file as it lies on the disk. */
  sha256: string;
  bytes: number;
  compressed: boolean;
  createdAt: string;
}

type Kind = 'durable' | 'volatile' | 'template';

const PREFIX: Record<Kind, string> = { durable: 'm', volatile: 'v', template: 't' };

function syncFolder(path: string): void {
  const fd = openSync(path, 'r');
  fsyncSync(fd);
  closeSync(fd);
}

/** Passes bytes on and counts and hashes them. */
function meter(): { through: Transform; sum: () => { sha256: string; bytes: number } } {
  const hash = createHash('sha256');
  let bytes = 0;
  const through = new Transform({
    highWaterMark: 1 << 20,
    transform(chunk: Buffer, _, done) {
      hash.update(chunk);
      bytes += chunk.length;
      done(null, chunk);
    },
  });
  return { through, sum: () => ({ sha256: hash.digest('hex'), bytes }) };
}

/**
 * Saved machines on disk: durable ones for every process that shares the folder, volatile ones in the
 * folder of one driver. A layer appears whole, by a rename, or not at all.
 */
export class LayerStore {
  readonly #durable: string;
  readonly #volatile: string;
  readonly #owner: string;
  /** Volatile layers: who else needs them, and whether they are still handed out. */
  readonly #uses = new Map<LayerId, { named: boolean; holds: number }>();

  constructor(dir: string, ownerFolder: string, owner: string) {
    this.#durable = join(dir, 'layers');
    this.#volatile = join(ownerFolder, 'layers');
    this.#owner = owner;
    for (const path of [this.#durable, this.#volatile])
      mkdirSync(path, { recursive: true, mode: 0o700 });
  }

  #folder(id: LayerId): string | null {
    if (DURABLE_ID.test(id) || TEMPLATE_ID.test(id)) return join(this.#durable, id);
    return this.#uses.has(id) ? join(this.#volatile, id) : null;
  }

  #meta(id: LayerId): LayerMeta | null {
    const folder = this.#folder(id);
    if (!folder) return null;
    try {
      return JSON.parse(readFileSync(join(folder, 'layer.json'), 'utf8'));
    } catch {
      return null;
    }
  }

  /** Saves a machine: `save` writes its state. `id` of a template: by what it was made of. */
  async write(
    kind: Kind,
    saved: SavedMachine,
    save: (sink: Writable) => Promise<void>,
    id = `${PREFIX[kind]}-${randomBytes(12).toString('hex')}`,
  ): Promise<LayerId> {
    const home = kind === 'volatile' ? this.#volatile : this.#durable;
    const partial = join(home, `partial-${this.#owner}-${id}`);
    mkdirSync(partial, { mode: 0o700 });
    try {
      const compressed = kind !== 'volatile';
      const { through, sum } = meter();
      const entry = compressed
        ? createZstdCompress({ params: { [constants.ZSTD_c_compressionLevel]: 1 } })
        : new PassThrough();
      const path = join(partial, 'machine');
      const file = createWriteStream(path, { mode: 0o600, flush: kind !== 'volatile' });
      const written = pipeline(entry, through, file);
      written.catch(() => {});
      try {
        await save(entry);
      } catch (error) {
        entry.destroy();
        await written.catch((cause) => {
          throw cause.code === 'ERR_STREAM_PREMATURE_CLOSE' ? error : cause; // a full disk, say
        });
        throw error;
      }
      await written;
      const meta: LayerMeta = {
        ...saved,
        ...sum(),
        ...{ version: 1, id, compressed, createdAt: new Date().toISOString() },
      };
      const text = openSync(join(partial, 'layer.json'), 'wx', 0o600);
      writeFileSync(text, JSON.stringify(meta));
      if (kind !== 'volatile') fsyncSync(text);
      closeSync(text);
      if (kind !== 'volatile') syncFolder(partial);
      try {
        renameSync(partial, join(home, id));
      } catch (error) {
        // Another process has made the same template meanwhile.
        if (kind !== 'template' || !this.#meta(id)) throw error;
        rmSync(partial, { recursive: true });
      }
      if (kind !== 'volatile') syncFolder(home);
    } catch (error) {
      rmSync(partial, { recursive: true, force: true });
      throw error;
    }
    if (kind === 'volatile') this.#uses.set(id, { named: true, holds: 0 });
    return id;
  }

  /**
   * `NotFound` when the layer was dropped, never existed, or was volatile and went with its driver.
   * `held`: a volatile one that was dropped will do, as long as a sandbox holds it.
   */
  meta(id: LayerId, held = false): LayerMeta {
    const there = this.named(id) || TEMPLATE_ID.test(id) || (held && this.#uses.has(id));
    const meta = there ? this.#meta(id) : null;
    if (meta) return meta;
    throw new LonghaulError('NotFound', `workspace layer ${id} does not exist`, {
      next: 'Volatile layers end with their driver; take a durable snapshot to keep one.',
    });
  }

  /** Whether it is there for those who were given its name. */
  named(id: LayerId): boolean {
    return this.#uses.get(id)?.named ?? (DURABLE_ID.test(id) && this.#meta(id) !== null);
  }

  /** Whether a sandbox that holds it can start from it again. */
  has(id: LayerId): boolean {
    return this.#uses.has(id) || this.named(id);
  }

  /** The state, and a promise that it is what was written: wait for it before the machine goes on. */
  open(meta: LayerMeta): { state: Readable; intact: Promise<void> } {
    const { through, sum } = meter();
    const out = meta.compressed ? createZstdDecompress() : new PassThrough();
    const path = join(this.#folder(meta.id)!, 'machine');
    const intact = pipeline(createReadStream(path, { highWaterMark: 1 << 20 }), through, out).then(
      () => {
        const { sha256 } = sum();
        if (sha256 !== meta.sha256)
          throw new LonghaulError('SandboxUnavailable', `layer ${meta.id} is damaged on disk`, {
            next: 'Go back to an earlier layer; check the disk.',
          });
      },
    );
    intact.catch(() => {});
    return { state: out, intact };
  }

  /** Keeps a volatile layer's file while a sandbox may have to start from it again. */
  hold(id: LayerId): void {
    const use = this.#uses.get(id);
    if (use) use.holds++;
  }

  release(id: LayerId): void {
    const use = this.#uses.get(id);
    if (!use) return;
    use.holds--;
    this.#sweep(id, use);
  }

  #sweep(id: LayerId, use: { named: boolean; holds: number }): void {
    if (use.named || use.holds > 0) return;
    this.#uses.delete(id);
    rmSync(join(this.#volatile, id), { recursive: true, force: true });
  }

  /** Idempotent. Running machines need no layer any more once they run. */
  drop(id: LayerId): void {
    const use = this.#uses.get(id);
    if (use) {
      use.named = false;
      this.#sweep(id, use);
    } else if (DURABLE_ID.test(id) || TEMPLATE_ID.test(id)) this.#remove(id);
  }

  /** First out of sight, then file by file. */
  #remove(id: LayerId): void {
    const gone = join(this.#durable, `partial-${this.#owner}-${id}`);
    try {
      renameSync(join(this.#durable, id), gone);
    } catch {
      return; // it is not there
    }
    syncFolder(this.#durable);
    rmSync(gone, { recursive: true, force: true });
  }

  /** Old layers that nobody names, and templates of another system than `system`. */
  async prune(named: () => Promise<ReadonlySet<LayerId>>, system: string): Promise<PruneReport> {
    const all = readdirSync(this.#durable)
      .map((name) => this.#meta(name))
      .filter((meta) => meta !== null);
    const metas = all.filter((meta) => !(TEMPLATE_ID.test(meta.id) && meta.system === system));
    const old = metas.filter((meta) => Date.now() - Date.parse(meta.createdAt) >= FRESH_MS);
    const keep = await named();
    const removed = old.filter((meta) => !keep.has(meta.id));
    for (const meta of removed) this.#remove(meta.id);
    return {
      removed: removed.map((meta) => meta.id),
      bytesFreed: removed.reduce((sum, meta) => sum + meta.bytes, 0),
      kept: metas.length - removed.length,
    };
  }

  /** What an owner that is gone had begun and not finished. */
  clean(owner: string): void {
    for (const name of existsSync(this.#durable) ? readdirSync(this.#durable) : [])
      if (name.startsWith(`partial-${owner}-`))
        rmSync(join(this.#durable, name), { recursive: true, force: true });
  }
}
