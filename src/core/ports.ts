import type { ArtifactRef, Event, NewEvent } from './event.ts';
import type { RunKind, RunSpec, RunStatus } from './run.ts';

/** Time as rooms see it: injected, so that tests can move it. */
export interface Clock {
  now(): number;
  sleep(ms: number, signal?: AbortSignal): Promise<void>;
}

/** Projection of a run: written in the statement that appends, equal to the fold. */
export interface RunRow {
  runId: string;
  kind: RunKind;
  status: RunStatus;
  head: number;
  task: string;
  model: string;
  reward: number | null;
  createdAt: string;
  updatedAt: string;
  /** Worker that holds an unexpired lease, else null. */
  worker: string | null;
}

/** The right to append. `token` grows with every acquisition; `head` is the last seq this holder knows. */
export interface Lease {
  runId: string;
  worker: string;
  token: number;
  head: number;
}

export interface InboxRow {
  id: number;
  key: string;
  signal: 'stop' | 'answer';
  data: unknown;
}

/** Truth about runs. Only a lease holder appends; everybody else writes to the inbox. */
export interface RunLog {
  /** Creates a run with its first event. Usage error if the id exists. */
  create(runId: string, spec: RunSpec, more?: NewEvent[]): Promise<void>;
  /** Takes the lease if nobody holds an unexpired one; null otherwise. NotFound for an unknown run. */
  acquire(runId: string, worker: string, ttlMs: number): Promise<Lease | null>;
  /** Frees a lease whose worker is known to be dead, without waiting for it to run out. */
  evict(runId: string, worker: string): Promise<void>;
  /** Extends the lease. LeaseLost if it is no longer ours. */
  renew(lease: Lease, ttlMs: number): Promise<void>;
  release(lease: Lease): Promise<void>;
  /**
   * Appends atomically in one statement, fenced by (token, head), and moves `lease.head`. LeaseLost if
   * another holder or another append came first: nothing was written. A connection that breaks in the
   * middle is the store's matter: the events are appended once. `StoreUnavailable` if it stays away.
   */
  append(lease: Lease, events: readonly NewEvent[]): Promise<Event[]>;
  /** Events in order of seq, `from` included, `to` included. */
  read(runId: string, from?: number, to?: number): Promise<Event[]>;
  row(runId: string): Promise<RunRow | null>;
  list(filter?: { kind?: RunKind; status?: RunStatus; limit?: number }): Promise<RunRow[]>;
  /** Idempotent by key: a second row with the same key is dropped. */
  post(
    runId: string,
    signal: { key: string; signal: InboxRow['signal']; data: unknown },
  ): Promise<void>;
  inbox(runId: string): Promise<InboxRow[]>;
  /** Removes rows that the holder has moved into the log. */
  drain(lease: Lease, ids: readonly number[]): Promise<void>;
}

/** What logs say about workspace layers. */
export interface LayerNames {
  /** Every layer that an event of any run names, whatever became of the run: none of them may be removed. */
  namedLayers(): Promise<ReadonlySet<string>>;
}

/** Bytes by hash. */
export interface ArtifactStore {
  put(bytes: Uint8Array): Promise<ArtifactRef>;
  /** NotFound for an unknown hash; Internal if the stored bytes no longer match it. */
  get(sha256: string): Promise<Uint8Array>;
}

/** Where a training job writes what it measured: one flat record a step. */
export interface MetricSink {
  write(record: { job: string; step: number; values: Record<string, number> }): Promise<void>;
}
