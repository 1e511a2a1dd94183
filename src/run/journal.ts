import {
  apply,
  type Clock,
  EVENT_VERSIONS,
  type Event,
  fold,
  type Lease,
  LonghaulError,
  type NewEvent,
  type Redactor,
  type RunLog,
  type RunSpec,
  type RunState,
} from '../core/index.ts';

/** A dead worker's run is free again after this long. */
export const LEASE_TTL_MS = 8_000;

/** A run's log as its executor sees it: append, and the state that follows. */
export interface Journal {
  readonly state: RunState;
  /** Atomic: all events or none. `LeaseLost` when another worker owns the run now. */
  append(events: readonly NewEvent[]): Promise<void>;
  /** Moves what others wrote for this run (stops, answers) into the log. */
  takeSignals(): Promise<void>;
}

/** The journal of a hosted run: every append is durable before the next call is made. */
export class LogJournal implements Journal {
  readonly #log: RunLog;
  readonly #lease: Lease;
  readonly #onEvent: (event: Event, state: RunState) => void;
  #state: RunState;

  private constructor(
    log: RunLog,
    lease: Lease,
    state: RunState,
    onEvent: (event: Event, state: RunState) => void,
  ) {
    this.#log = log;
    this.#lease = lease;
    this.#state = state;
    this.#onEvent = onEvent;
  }

  /** Reads and folds the run under a lease that was just acquired. */
  static async open(
    log: RunLog,
    lease: Lease,
    onEvent: (event: Event, state: RunState) => void = () => {},
  ): Promise<LogJournal> {
    return new LogJournal(log, lease, fold(await log.read(lease.runId)), onEvent);
  }

  get state(): RunState {
    return this.#state;
  }

  async append(events: readonly NewEvent[]): Promise<void> {
    for (const event of await this.#appendHeld(events)) {
      this.#state = apply(this.#state, event);
      this.#onEvent(event, this.#state);
    }
  }

  /** A lease that ran out while the machine slept, and that nobody took, is still ours. */
  async #appendHeld(events: readonly NewEvent[]): Promise<Event[]> {
    try {
      return await this.#log.append(this.#lease, events);
    } catch (error) {
      if (!(error instanceof LonghaulError) || error.code !== 'LeaseLost') throw error;
      await this.#log.renew(this.#lease, LEASE_TTL_MS);
      return this.#log.append(this.#lease, events);
    }
  }

  async takeSignals(): Promise<void> {
    const rows = await this.#log.inbox(this.#lease.runId);
    if (rows.length === 0) return;
    const fresh = rows.filter((row) => !this.#state.signals.has(row.key));
    await this.append(
      fresh.map((row) => ({
        type: 'signal.received' as const,
        data: { key: row.key, signal: row.signal, data: row.data },
      })),
    );
    await this.#log.drain(
      this.#lease,
      rows.map((row) => row.id),
    );
  }
}

/** The journal of a rollout: in memory, written to the store in batches once runs are over. */
export class MemoryJournal implements Journal {
  readonly events: Event[] = [];
  readonly #runId: string;
  readonly #clock: Clock;
  readonly #redactor: Redactor;
  #state: RunState | null = null;

  constructor(runId: string, spec: RunSpec, clock: Clock, redactor: Redactor) {
    this.#runId = runId;
    this.#clock = clock;
    this.#redactor = redactor;
    this.#push({ type: 'run.created', data: spec });
  }

  get state(): RunState {
    return this.#state!;
  }

  async append(events: readonly NewEvent[]): Promise<void> {
    for (const event of events) this.#push(event);
  }

  async takeSignals(): Promise<void> {}

  #push(event: NewEvent): void {
    const stored = {
      ...this.#redactor.event(event),
      runId: this.#runId,
      seq: this.events.length + 1,
      at: new Date(this.#clock.now()).toISOString(),
      v: EVENT_VERSIONS[event.type],
    } as Event;
    this.#state = apply(this.#state, stored);
    this.events.push(stored);
  }
}
