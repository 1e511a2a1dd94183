import { createHash } from 'node:crypto';
import {
  type ArtifactRef,
  type ArtifactStore,
  appendCall,
  decodeTokens,
  type Event,
  LonghaulError,
  type Reward,
  type RunSpec,
  type RunState,
  type Segment,
} from '../core/index.ts';
import type { RunContext } from './context.ts';
import { execute } from './executor.ts';
import { MemoryJournal } from './journal.ts';

/** Artifacts of rollouts, kept in memory until somebody decides which runs are worth storing. */
export class MemoryArtifacts implements ArtifactStore {
  readonly #bytes = new Map<string, Uint8Array>();

  async put(bytes: Uint8Array): Promise<ArtifactRef> {
    const sha256 = createHash('sha256').update(bytes).digest('hex');
    this.#bytes.set(sha256, bytes);
    return { sha256, bytes: bytes.length };
  }

  async get(sha256: string): Promise<Uint8Array> {
    const bytes = this.#bytes.get(sha256);
    if (bytes === undefined) throw new LonghaulError('NotFound', `no artifact ${sha256}`);
    return bytes;
  }

  /** Moves everything into a durable store, as part of storing the runs that name it. */
  async flush(store: ArtifactStore): Promise<void> {
    for (const bytes of this.#bytes.values()) await store.put(bytes);
    this.#bytes.clear();
  }
}

export interface Rollout {
  runId: string;
  spec: RunSpec;
  state: RunState;
  events: Event[];
  reward: Reward;
  artifacts: MemoryArtifacts;
}

/** One episode by the same executor that hosts runs; its log stays in memory. Never throws for the infrastructure. */
export async function rollout(
  runId: string,
  spec: RunSpec,
  context: Omit<RunContext, 'journal' | 'artifacts' | 'leaseToken' | 'saveWorkspace'>,
): Promise<Rollout> {
  const journal = new MemoryJournal(runId, spec, context.clock, context.redactor);
  const artifacts = new MemoryArtifacts();
  const state = await execute({
    ...context,
    journal,
    artifacts,
    leaseToken: 0,
    saveWorkspace: false,
  });
  const reward: Reward = state.reward ?? {
    status: 'env_error',
    value: null,
    components: {},
    reason: 'the rollout ended without a grade',
  };
  return { runId, spec, state, events: journal.events, reward, artifacts };
}

/**
 * The exact tokens of a run as append-only segments. Null where any model call has no exact tokens:
 * such a run cannot be trained on by RL.
 */
export async function segmentsOf(
  events: readonly Event[],
  artifacts: ArtifactStore,
): Promise<Segment[] | null> {
  const segments: Segment[] = [];
  for (const event of events) {
    if (event.type !== 'model.completed') continue;
    if (event.data.tokens === undefined || event.data.completion.provenance !== 'exact')
      return null;
    const tokens = decodeTokens(await artifacts.get(event.data.tokens.sha256));
    appendCall(segments, {
      promptIds: tokens.promptIds,
      ids: tokens.ids,
      logprobs: tokens.logprobs,
      version: tokens.versionSpans[0]?.version ?? 'unknown',
      modelCallId: event.data.callId,
    });
  }
  return segments;
}
