import { setTimeout as sleep } from 'node:timers/promises';
import { LonghaulError } from '../core/index.ts';

/** What the pool keeps ready. */
export interface Poolable {
  /** Whether it can be handed out. */
  ping(): Promise<boolean>;
  stop(): Promise<void>;
}

export interface PoolOptions<T> {
  /** Makes one for a key's spec. An error with `retryAfterMs` says that the machine is full just now. */
  make(key: string): Promise<T>;
  /** Members kept ready for each key that was asked for. */
  warm: number;
  /** Members alive at once, ready ones included. Requests beyond it wait in order. */
  maxLive: number;
  /** How long a request waits for a place before `SandboxUnavailable`. */
  waitMs: number;
}

interface Waiter<T> {
  key: string;
  /** Ends the wait: with a member, or with a free place to make one in. */
  grant(member: T | null): void;
}

/** Specs kept warm at once: tasks may each bring their own. */
const MAX_WARM_KEYS = 4;
const REFILL_AFTER_MS = 25;

/**
 * Warm pool with back-pressure. A request takes a ready member after a health probe, makes one where
 * there is a place, or waits its turn. Broken members are replaced; ready ones make way when the place
 * is needed for another spec.
 */
export class Pool<T extends Poolable> {
  readonly #options: PoolOptions<T>;
  readonly #ready = new Map<string, T[]>();
  readonly #refilling = new Map<string, Promise<void>>();
  readonly #waiters: Waiter<T>[] = [];
  #live = 0;
  #closed = false;

  constructor(options: PoolOptions<T>) {
    this.#options = options;
  }

  /** Members alive, ready or handed out. */
  get live(): number {
    return this.#live;
  }

  /** Ready members of a key. */
  ready(key: string): number {
    return this.#ready.get(key)?.length ?? 0;
  }

  /** Keeps a key warm from now on, without waiting for it; the key not asked for longest goes cold. */
  prepare(key: string): void {
    this.#touch(key);
    this.#refill(key);
  }

  #touch(key: string): void {
    const list = this.#ready.get(key) ?? [];
    this.#ready.delete(key);
    this.#ready.set(key, list);
    const [oldest] = this.#ready.keys();
    if (this.#ready.size > MAX_WARM_KEYS) {
      const members = this.#ready.get(oldest!)!;
      this.#ready.delete(oldest!);
      for (const member of members) void this.#discard(member);
    }
  }

  /** Not at once: making one would slow down the first use of the one just handed out. */
  #refillLater(key: string): void {
    setTimeout(() => this.#refill(key), REFILL_AFTER_MS).unref();
  }

  async acquire(key: string): Promise<T> {
    this.#touch(key);
    for (;;) {
      const member = this.#ready.get(key)?.shift();
      if (!member) break;
      if (await member.ping()) {
        this.#refillLater(key);
        return member;
      }
      await this.#discard(member);
    }
    const deadline = Date.now() + this.#options.waitMs;
    for (;;) {
      const waited = await this.#place(key, deadline);
      if (waited) return waited;
      try {
        const member = await this.#options.make(key);
        this.#refillLater(key);
        return member;
      } catch (error) {
        this.release();
        const retryMs = error instanceof LonghaulError ? error.retryAfterMs : undefined;
        // Full now: others are alive and will make room, idle ones of other specs first.
        if (retryMs === undefined || this.#live === 0 || Date.now() + retryMs > deadline)
          throw error;
        await this.#shedIdle(key);
        await sleep(retryMs);
      }
    }
  }

  /** Stops one ready member of another key, if there is one. */
  async #shedIdle(key: string): Promise<void> {
    const idle = [...this.#ready.entries()].find(([other, list]) => other !== key && list.length);
    const victim = idle?.[1].shift();
    if (victim) await this.#discard(victim);
  }

  /** A member that was handed out is gone: its place is free. */
  release(): void {
    this.#live--;
    if (this.#closed) return;
    const waiter = this.#waiters.shift();
    if (!waiter) return;
    this.#live++;
    waiter.grant(null);
  }

  async #discard(member: T): Promise<void> {
    try {
      await member.stop();
    } catch {
      // a broken member that cannot be stopped either: its owner's end removes it
    }
  }

  /** Takes a place, making room from idle members of other keys, or waits for one or for a member. */
  async #place(key: string, deadline: number): Promise<T | null> {
    if (this.#closed) throw closed();
    if (this.#live >= this.#options.maxLive) await this.#shedIdle(key);
    if (this.#live < this.#options.maxLive) {
      this.#live++;
      return null;
    }
    const member = await new Promise<T | null>((resolve, reject) => {
      const waiter: Waiter<T> = {
        key,
        grant: (granted) => {
          clearTimeout(timer);
          resolve(granted);
        },
      };
      const timer = setTimeout(() => {
        this.#waiters.splice(this.#waiters.indexOf(waiter), 1);
        reject(
          new LonghaulError(
            'SandboxUnavailable',
            `all ${this.#options.maxLive} sandboxes were in use for ${this.#options.waitMs} ms`,
            { next: 'Stop sandboxes that are no longer needed, or raise maxLive.' },
          ),
        );
      }, deadline - Date.now());
      this.#waiters.push(waiter);
    });
    if (this.#closed) throw closed();
    return member;
  }

  /** A member made ahead: to whoever waits for one, or to the shelf. */
  async #shelve(key: string, member: T): Promise<void> {
    const list = this.#ready.get(key);
    if (this.#closed || !list) return this.#discard(member);
    const index = this.#waiters.findIndex((waiter) => waiter.key === key);
    if (index >= 0) this.#waiters.splice(index, 1)[0]!.grant(member);
    else if (this.#waiters.length > 0) await this.#discard(member);
    else list.push(member);
  }

  /** One refill a key at a time; warm members never take a place that somebody waits for. */
  #refill(key: string): void {
    if (this.#closed || this.#refilling.has(key)) return;
    const wanted = () =>
      !this.#closed &&
      this.#ready.has(key) &&
      this.ready(key) < this.#options.warm &&
      this.#waiters.length === 0 &&
      this.#live < this.#options.maxLive;
    if (!wanted()) return;
    const work = async () => {
      while (wanted()) {
        this.#live++;
        try {
          const member = await this.#options.make(key);
          // The probe makes it ready for its first call.
          if (await member.ping()) await this.#shelve(key, member);
          else await this.#discard(member);
        } catch {
          // The next request makes one itself and gets the reason.
          this.release();
          break;
        }
      }
    };
    this.#refilling.set(
      key,
      work().finally(() => this.#refilling.delete(key)),
    );
  }

  /** Stops the ready members and ends all waiting. Handed-out ones are their holders' to stop. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const waiter of this.#waiters.splice(0)) waiter.grant(null);
    await Promise.all(this.#refilling.values());
    const members = [...this.#ready.values()].flat();
    this.#ready.clear();
    await Promise.all(members.map((member) => this.#discard(member)));
  }
}

const closed = () => new LonghaulError('SandboxUnavailable', 'the sandbox driver is closed');
