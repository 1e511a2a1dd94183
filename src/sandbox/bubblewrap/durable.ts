import type { DurableRef, LayerRegistry, LayerStack, Weight } from './layers.ts';
import { type LayerRef, layerOwner, type Supervisor } from './supervisor.ts';

/** Durable layers on each other before the topmost are merged. Short of where volatile ones are, so that
 * these always have room above them. */
const DURABLE_DEPTH = 24;
/** A merge takes at least this many, so that it is not soon due again. */
export const LEAST_MERGED = 8;

/** A workspace that is to be kept: the layers below it, and its upper layer. */
export interface Freezing {
  sid: string;
  stack: LayerStack;
  upper: string;
  uid: number;
  /** Bytes that the sandbox's own file system holds, and its limits. */
  diskBytes: number;
  limit: Weight;
  supervisor: Supervisor;
  registry: LayerRegistry;
  uidBase: number;
}

/**
 * Copies the workspace to disk: the durable layers it stands on from then on, topmost first. What was made
 * is added to `made` and held, also where a later copy fails.
 */
export async function freezeDurable(
  freezing: Freezing,
  made: DurableRef[],
): Promise<readonly DurableRef[]> {
  const { sid, stack, upper, uid, supervisor } = freezing;
  // Copies the layers that are not durable yet, lowest first: each names those below it.
  const settle = async (layers: LayerStack, merged: number, shows: Weight | null) => {
    const keep = async (sources: LayerStack, below: DurableRef[], top: boolean) => {
      const ref = await copy(freezing, sources, below, !top, top ? shows : null);
      made.push(ref);
      freezing.registry.hold([ref]);
      return [ref, ...below];
    };
    let below: DurableRef[] = [];
    for (const ref of layers.slice(merged).reverse())
      below = 'durable' in ref ? [ref, ...below] : await keep([ref], below, false);
    return keep(layers.slice(0, merged), below, true);
  };

  const unchanged =
    stack.length > 0 && (await supervisor.request('unchanged', { sid, upper })) === true;
  const layers: LayerStack = unchanged ? stack : [{ home: sid, name: upper, uid }, ...stack];
  if (layers.every((ref): ref is DurableRef => 'durable' in ref)) {
    await supervisor.request('renew', { layer: layers[0]!.durable });
    return layers;
  }
  const shows = await shown(freezing);
  if (shows === 'garbage' || !supervisor.ready.stackable)
    return settle(layers, layers.length, null);
  if (layers.length <= DURABLE_DEPTH) return settle(layers, 1, shows);
  const least = Math.max(LEAST_MERGED, layers.length - DURABLE_DEPTH + LEAST_MERGED);
  const merged = await supervisor.request('tier', { sources: layers, least });
  return settle(layers, merged as number, shows);
}

/**
 * What the workspace shows, counted once the layers below might hold much more than that; null before.
 * `garbage` when they do: then a whole copy frees more than half the disk limit, so copies write at
 * most twice what the guest wrote. A workspace that is merely full is never copied whole for it.
 */
async function shown(freezing: Freezing): Promise<Weight | 'garbage' | null> {
  const { registry, supervisor, limit } = freezing;
  const { bytes, inodes } = registry.held(freezing.stack);
  const light = bytes + freezing.diskBytes <= limit.bytes / 2 && inodes <= limit.inodes / 2;
  if (bytes === 0 || light) return null;
  const counted = (await supervisor.request('count', { sid: freezing.sid })) as Weight;
  const garbage =
    bytes - counted.bytes > limit.bytes / 2 || inodes - counted.inodes > limit.inodes / 2;
  return garbage ? 'garbage' : counted;
}

async function copy(
  { supervisor, uidBase }: Freezing,
  sources: readonly LayerRef[],
  below: readonly DurableRef[],
  internal: boolean,
  shows: Weight | null,
): Promise<DurableRef> {
  const uid = layerOwner(supervisor.ready, uidBase);
  const id = await supervisor.request('copy', {
    sources,
    meta: {
      uid,
      parents: below.map((ref) => ref.durable),
      createdAt: new Date().toISOString(),
      internal,
      ...(shows && { shows }),
    },
  });
  return { durable: id as string, uid };
}
