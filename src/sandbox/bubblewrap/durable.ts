import { type LayerRegistry, type LayerStack, newDurableId, type Weight } from './layers.ts';
import { type LayerRef, layerOwner, type Supervisor } from './supervisor.ts';

type DurableRef = Extract<LayerRef, { durable: string }>;

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
  /** Stacks this deep are copied as one layer. */
  squashDepth: number;
}

/** Copies the workspace to disk: the durable layers it stands on from then on, topmost first. */
export async function freezeDurable(freezing: Freezing): Promise<DurableRef[]> {
  const { stack, supervisor } = freezing;
  const shows = await shown(freezing);
  const whole = shows === 'garbage' || stack.length >= freezing.squashDepth;
  if (whole || !supervisor.ready.stackable)
    return [await copy(freezing, { merged: true }, [], false)];
  // Every volatile layer of the stack, the upper one last: it names the others.
  let below: DurableRef[] = [];
  for (const ref of [...stack].reverse()) {
    const durable = 'durable' in ref ? ref : await copy(freezing, ref, below, true);
    below = [durable, ...below];
  }
  const upper = { home: freezing.sid, name: freezing.upper };
  return [await copy(freezing, upper, below, false, shows), ...below];
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
  { sid, supervisor, uidBase }: Freezing,
  source: { home: string; name: string } | { merged: true },
  below: DurableRef[],
  internal: boolean,
  shows: Weight | null = null,
): Promise<DurableRef> {
  const id = newDurableId();
  const uid = layerOwner({ uidBase }, supervisor.ready.root);
  await supervisor.request('copy', {
    ...('merged' in source ? { sid, merged: true } : { sid: source.home, name: source.name }),
    target: `partial-${supervisor.owner}-${id}`,
    final: id,
    uid,
    meta: {
      version: 1,
      id,
      uid,
      parents: below.map((ref) => ref.durable),
      createdAt: new Date().toISOString(),
      internal,
      ...(shows && { shows }),
    },
  });
  return { durable: id, uid };
}
