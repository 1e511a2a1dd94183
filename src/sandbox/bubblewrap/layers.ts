import { randomBytes } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type { LayerId } from '../contract.ts';
import type { LayerRef } from './supervisor.ts';

/** Layers of a workspace, topmost first. */
export type LayerStack = readonly LayerRef[];

export interface Weight {
  bytes: number;
  inodes: number;
}

/** `layer.json` beside a durable layer's files. */
export interface DurableMeta {
  version: 1;
  id: LayerId;
  uid: number;
  /** Every layer below, topmost first. */
  parents: LayerId[];
  bytes: number;
  inodes: number;
  /** What the workspace shows through this layer and all below it, where it was counted. */
  shows?: Weight;
  createdAt: string;
  /** Never handed out: kept only while a layer above needs it. */
  internal: boolean;
}

const FRESH_MS = 3_600_000;
const DURABLE_ID = /^d-[0-9a-f]{24}$/;

export const newDurableId = (): LayerId => `d-${randomBytes(12).toString('hex')}`;
const newVolatileId = (): LayerId => `v-${randomBytes(12).toString('hex')}`;

const refKey = (ref: LayerRef) => ('durable' in ref ? ref.durable : `${ref.home}/${ref.name}`);

/**
 * Which layers exist and who needs them. Volatile layers are directories on the tmpfs of the sandbox
 * that made them and are counted here; durable ones are folders on disk and found by every process.
 */
export class LayerRegistry {
  readonly #dir: string;
  readonly #volatile = new Map<LayerId, LayerStack>();
  /** Uses of each volatile directory, by named layers and live workspaces. */
  readonly #uses = new Map<string, number>();
  readonly #onUnused: (ref: { home: string; name: string }) => void;

  constructor(dir: string, onUnused: (ref: { home: string; name: string }) => void) {
    this.#dir = join(dir, 'layers');
    this.#onUnused = onUnused;
  }

  hold(stack: LayerStack): void {
    for (const ref of stack) {
      if (!('home' in ref)) continue;
      this.#uses.set(refKey(ref), (this.#uses.get(refKey(ref)) ?? 0) + 1);
    }
  }

  release(stack: LayerStack): void {
    for (const ref of stack) {
      if (!('home' in ref)) continue;
      const left = (this.#uses.get(refKey(ref)) ?? 0) - 1;
      if (left > 0) this.#uses.set(refKey(ref), left);
      else {
        this.#uses.delete(refKey(ref));
        this.#onUnused(ref);
      }
    }
  }

  /** Names of a sandbox's layers that are still needed. */
  usedNames(home: string): string[] {
    const prefix = `${home}/`;
    return [...this.#uses.keys()]
      .filter((key) => key.startsWith(prefix))
      .map((key) => key.slice(prefix.length));
  }

  addVolatile(stack: LayerStack): LayerId {
    const id = newVolatileId();
    this.#volatile.set(id, stack);
    this.hold(stack);
    return id;
  }

  /** All volatile layers are gone, because the supervisor that held them is. */
  forgetVolatile(): void {
    this.#volatile.clear();
    this.#uses.clear();
  }

  #meta(id: LayerId): DurableMeta | null {
    if (!DURABLE_ID.test(id)) return null;
    try {
      return JSON.parse(readFileSync(join(this.#dir, id, 'layer.json'), 'utf8'));
    } catch {
      return null;
    }
  }

  has(id: LayerId): boolean {
    return this.#volatile.has(id) || (this.#meta(id) !== null && !this.#dropped(id));
  }

  /** `NotFound` when the layer was dropped, never existed, or was volatile and went with its driver. */
  stack(id: LayerId): LayerStack {
    const volatile = this.#volatile.get(id);
    if (volatile) return volatile;
    const meta = this.#meta(id);
    if (!meta)
      throw new LonghaulError('NotFound', `workspace layer ${id} does not exist`, {
        next: 'Volatile layers end with their driver; take a durable snapshot to keep one.',
      });
    return [id, ...meta.parents].map((each) => {
      const found = each === id ? meta : this.#meta(each);
      if (!found)
        throw new LonghaulError(
          'NotFound',
          `workspace layer ${id} is incomplete: ${each} is missing`,
        );
      return { durable: each, uid: found.uid };
    });
  }

  /** What the durable layers of a stack hold on disk, with what later layers replace or remove. */
  held(stack: LayerStack): Weight {
    return this.#sum(stack, false);
  }

  /** What the durable layers of a stack count for in the disk limit: no less than they show. */
  weight(stack: LayerStack): Weight {
    return this.#sum(stack, true);
  }

  #sum(stack: LayerStack, shown: boolean): Weight {
    let bytes = 0;
    let inodes = 0;
    for (const ref of stack) {
      const meta = 'durable' in ref ? this.#meta(ref.durable) : null;
      const counted = (shown && meta?.shows) || meta;
      bytes += counted?.bytes ?? 0;
      inodes += counted?.inodes ?? 0;
      if (shown && meta?.shows) break; // speaks for everything below
    }
    return { bytes, inodes };
  }

  #dropped(id: LayerId): boolean {
    return existsSync(join(this.#dir, id, 'dropped'));
  }

  /**
   * Idempotent. A durable layer's files stay until no layer above needs them: the answer names the
   * durable layers that are dropped or internal and that nothing stands on, for the caller to remove.
   */
  drop(id: LayerId, inUse: (id: LayerId) => boolean): LayerId[] {
    const stack = this.#volatile.get(id);
    if (stack) {
      this.#volatile.delete(id);
      this.release(stack);
      return [];
    }
    if (!this.#meta(id)) return [];
    writeFileSync(join(this.#dir, id, 'dropped'), '');
    return this.#unneeded(inUse);
  }

  #metas(): DurableMeta[] {
    return readdirSync(this.#dir)
      .map((name) => this.#meta(name))
      .filter((meta) => meta !== null);
  }

  #unneeded(inUse: (id: LayerId) => boolean): LayerId[] {
    const metas = this.#metas();
    const unwanted = (meta: DurableMeta) =>
      this.#dropped(meta.id) || (meta.internal && !fresh(meta));
    const needed = new Set(
      metas
        .filter((meta) => inUse(meta.id) || !unwanted(meta))
        .flatMap((meta) => [meta.id, ...meta.parents]),
    );
    return metas.filter((meta) => !needed.has(meta.id)).map((meta) => meta.id);
  }

  /** Durable layers that may go unless somebody names them. */
  candidates(): LayerId[] {
    return this.#metas()
      .filter((meta) => !fresh(meta))
      .map((meta) => meta.id);
  }

  /** The candidates that neither `wanted` nor a layer that stays stands on, for the caller to remove. */
  prune(candidates: readonly LayerId[], wanted: (id: LayerId) => boolean) {
    const metas = this.#metas();
    const going = new Set(candidates.filter((id) => !wanted(id)));
    const needed = new Set(
      metas.filter((meta) => !going.has(meta.id)).flatMap((meta) => [meta.id, ...meta.parents]),
    );
    const removed = metas.filter((meta) => !needed.has(meta.id));
    return {
      removed: removed.map((meta) => meta.id),
      bytesFreed: removed.reduce((sum, meta) => sum + meta.bytes, 0),
      kept: metas.length - removed.length,
    };
  }
}

/** A snapshot in the making writes its lower layers before the one that will name them, and a run its
 * layer before the event that does. */
function fresh(meta: DurableMeta): boolean {
  return Date.now() - Date.parse(meta.createdAt) < FRESH_MS;
}
