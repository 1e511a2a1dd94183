import { createHash, randomBytes } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type { LayerId } from '../contract.ts';
import type { LayerRef } from './supervisor.ts';

/** Layers of a workspace, topmost first. */
export type LayerStack = readonly LayerRef[];
export type DurableRef = Extract<LayerRef, { durable: string }>;
export type VolatileRef = Extract<LayerRef, { home: string }>;

export interface Weight {
  bytes: number;
  inodes: number;
}

/** `layer.json` beside a durable layer's files; written by layerstore.py. */
export interface DurableMeta {
  version: 1 | 2;
  id: LayerId;
  uid: number;
  /** Every layer below, topmost first. */
  parents: LayerId[];
  bytes: number;
  inodes: number;
  /** What the workspace shows through this layer and all below it, where it was counted. */
  shows?: Weight;
  createdAt: string;
  /** Never handed out: kept only while a layer above needs it, unless it was saved as such since. */
  internal: boolean;
  /** sha256 of the content and of what is below (layercopy.py); the id says the same. From version 2 on. */
  digest?: string;
  /** Boot of the machine in which it was written. */
  boot?: string;
}

/** What is known of a durable layer. */
export interface LayerReport {
  id: LayerId;
  /**
   * `whole`: its content is what was saved, as far as was looked. `unverified`: nobody has looked since the
   * machine started; its next use does. `unverifiable`: of version 1, which kept no hash. `damaged`: it
   * cannot be used; `detail` says why.
   */
  state: 'whole' | 'unverified' | 'unverifiable' | 'damaged';
  detail?: string;
  bytes?: number;
  createdAt?: string;
  parents?: readonly LayerId[];
  /** Kept only for the layers that stand on it. */
  needed?: 'internal' | 'dropped';
}

const FRESH_MS = 3_600_000;
/** 24 digits: of version 1, made by chance. */
const DURABLE_ID = /^d-(?:[0-9a-f]{24}|[0-9a-f]{64})$/;
const SEALED = /^(.*),"sum":"([0-9a-f]{64})"\}\n?$/s;

const newVolatileId = (): LayerId => `v-${randomBytes(12).toString('hex')}`;

const refKey = (ref: LayerRef) => ('durable' in ref ? ref.durable : `${ref.home}/${ref.name}`);

/**
 * Which layers exist and who needs them. Volatile layers are directories on the tmpfs of the sandbox
 * that made them and are counted here; durable ones are folders on disk and found by every process.
 */
export class LayerRegistry {
  readonly #dir: string;
  readonly #volatile = new Map<LayerId, LayerStack>();
  /**
   * Uses of each volatile directory and of the topmost durable layer of each stack, which keeps those below
   * it, by named layers and live workspaces.
   */
  readonly #uses = new Map<string, number>();
  readonly #used = new Map<string, Weight>();
  readonly #shows = new Map<string, Weight>();
  readonly #onUnused: (ref: LayerRef) => void;

  constructor(dir: string, onUnused: (ref: LayerRef) => void) {
    this.#dir = join(dir, 'layers');
    this.#onUnused = onUnused;
  }

  hold(stack: LayerStack): void {
    for (const ref of held(stack)) {
      this.#uses.set(refKey(ref), (this.#uses.get(refKey(ref)) ?? 0) + 1);
    }
  }

  release(stack: LayerStack): void {
    for (const ref of held(stack)) {
      const left = (this.#uses.get(refKey(ref)) ?? 0) - 1;
      if (left > 0) this.#uses.set(refKey(ref), left);
      else {
        this.#uses.delete(refKey(ref));
        this.#used.delete(refKey(ref));
        this.#shows.delete(refKey(ref));
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

  /** All volatile layers are gone, because the supervisor that held them is; so are its locks. */
  forgetVolatile(): void {
    this.#volatile.clear();
    this.#uses.clear();
    this.#used.clear();
    this.#shows.clear();
  }

  /** Null where there is none. `LayerDamaged` where what describes it is not what was written. */
  meta(id: LayerId): DurableMeta | null {
    if (!DURABLE_ID.test(id)) return null;
    let text: string;
    try {
      text = readFileSync(join(this.#dir, id, 'layer.json'), 'utf8');
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
      if (!existsSync(join(this.#dir, id))) return null;
      throw damaged(id, 'its description is missing');
    }
    const [, sealed, sum] = SEALED.exec(text) ?? [];
    try {
      const meta = JSON.parse(text) as DurableMeta;
      const sound =
        sealed !== undefined && createHash('sha256').update(sealed).digest('hex') === sum;
      if (meta.id === id && (meta.version === 1 || sound)) return meta;
    } catch {
      // as below
    }
    throw damaged(id, 'its description was changed');
  }

  /** The meta of a layer that can be used, or null. */
  #found(id: LayerId): DurableMeta | null {
    try {
      return this.meta(id);
    } catch {
      return null;
    }
  }

  has(id: LayerId): boolean {
    return this.#volatile.has(id) || (this.#found(id) !== null && !this.dropped(id));
  }

  /**
   * `NotFound` when the layer was dropped, never existed, or was volatile and went with its driver;
   * `LayerDamaged` when it or one below it is there and cannot be used.
   */
  stack(id: LayerId): LayerStack {
    const volatile = this.#volatile.get(id);
    if (volatile) return volatile;
    const meta = this.meta(id);
    if (!meta)
      throw new LonghaulError('NotFound', `workspace layer ${id} does not exist`, {
        next: 'Volatile layers end with their driver; take a durable snapshot to keep one.',
      });
    return [id, ...meta.parents].map((each) => {
      const found = each === id ? meta : this.meta(each);
      if (!found) throw damaged(id, `${each}, on which it stands, is missing`);
      return { durable: each, uid: found.uid };
    });
  }

  /** What the durable layers of a stack hold on disk, with what later layers replace or remove. */
  held(stack: LayerStack): Weight {
    return this.#sum(stack, false);
  }

  /** What the sandbox's file system held when this layer was frozen on it, other layers included. */
  noteUsed(ref: LayerRef, used: Weight): void {
    if (this.#uses.has(refKey(ref))) this.#used.set(refKey(ref), used);
  }

  /** What a workspace shows, counted, by its topmost layer. */
  noteShown(stack: LayerStack, shows: Weight): void {
    if (stack[0] && this.#uses.has(refKey(stack[0]))) this.#shows.set(refKey(stack[0]), shows);
  }

  /**
   * What a stack counts for in the disk limit of the sandbox `home`, its own volatile layers left out,
   * since they are on its own file system: no less than it shows. `counted`: exactly that.
   */
  weight(stack: LayerStack, home: string): Weight & { counted: boolean } {
    const foreign = stack.filter((ref) => 'home' in ref && ref.home !== home) as VolatileRef[];
    const shows = stack[0] && this.#shows.get(refKey(stack[0]));
    if (shows && foreign.length > 0) return { ...shows, counted: true };
    const weight = this.#sum(stack, true);
    const seen = new Set<string>();
    for (const ref of foreign) {
      if (seen.has(ref.home)) continue;
      seen.add(ref.home); // the topmost one of each: it was frozen last
      const used = this.#used.get(refKey(ref));
      weight.bytes += used?.bytes ?? 0;
      weight.inodes += used?.inodes ?? 0;
    }
    return { ...weight, counted: foreign.length === 0 };
  }

  #sum(stack: LayerStack, shown: boolean): Weight {
    let bytes = 0;
    let inodes = 0;
    for (const ref of stack) {
      const meta = 'durable' in ref ? this.meta(ref.durable) : null;
      const counted = (shown && meta?.shows) || meta;
      bytes += counted?.bytes ?? 0;
      inodes += counted?.inodes ?? 0;
      if (shown && meta?.shows) break; // speaks for everything below
    }
    return { bytes, inodes };
  }

  dropped(id: LayerId): boolean {
    return existsSync(join(this.#dir, id, 'dropped'));
  }

  /** Forgets a volatile layer. False for any other. */
  dropVolatile(id: LayerId): boolean {
    const stack = this.#volatile.get(id);
    if (!stack) return false;
    this.#volatile.delete(id);
    this.release(stack);
    return true;
  }

  /** Ids of all durable layers, damaged ones too. */
  durable(): LayerId[] {
    return readdirSync(this.#dir).filter((name) => DURABLE_ID.test(name));
  }

  /** Without reading its files; null where it has gone. */
  report(id: LayerId): LayerReport | null {
    try {
      const meta = this.meta(id);
      if (!meta) return null;
      this.stack(id); // every layer below is there
      const { bytes, createdAt, parents } = meta;
      const here = (mark: string) => existsSync(join(this.#dir, id, mark));
      const needed = here('dropped') ? 'dropped' : meta.internal && !here('public') && 'internal';
      const state = meta.version === 1 ? 'unverifiable' : this.#seen(meta) ? 'whole' : 'unverified';
      return { id, state, bytes, createdAt, parents, ...(needed && { needed }) };
    } catch (error) {
      return { id, state: 'damaged', detail: (error as Error).message };
    }
  }

  /** Whether it was written or verified in this boot of the machine. */
  #seen(meta: DurableMeta): boolean {
    const boot = readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim();
    if (meta.boot === boot) return true;
    try {
      return readFileSync(join(this.#dir, meta.id, 'verified'), 'utf8') === boot;
    } catch {
      return false;
    }
  }

  /** Durable layers that may go unless somebody names them: none that was saved within the last hour. */
  candidates(): LayerId[] {
    return this.durable().filter((id) => {
      const info = statSync(join(this.#dir, id), { throwIfNoEntry: false });
      return info !== undefined && Date.now() - info.mtimeMs > FRESH_MS;
    });
  }
}

/** What of a stack is counted: a durable layer keeps all that it stands on. */
function held(stack: LayerStack): LayerRef[] {
  const top = stack.findIndex((ref) => 'durable' in ref);
  return top < 0 ? [...stack] : stack.slice(0, top + 1);
}

function damaged(id: LayerId, why: string): LonghaulError {
  return new LonghaulError('LayerDamaged', `workspace layer ${id} is damaged: ${why}`);
}
