import { LonghaulError } from '../../core/index.ts';

interface Waiter {
  grant(): void;
}

/** At most so many machines at once; who comes later waits in turn. */
export class Places {
  readonly #limit: number;
  readonly #waitMs: number;
  readonly #waiters: Waiter[] = [];
  #taken = 0;

  constructor(limit: number, waitMs: number) {
    this.#limit = limit;
    this.#waitMs = waitMs;
  }

  /** `SandboxUnavailable` when no place became free in time. */
  async take(): Promise<void> {
    if (this.#taken < this.#limit) {
      this.#taken++;
      return;
    }
    await new Promise<void>((resolve, reject) => {
      const waiter = {
        grant: () => {
          clearTimeout(timer);
          resolve();
        },
      };
      const timer = setTimeout(() => {
        this.#waiters.splice(this.#waiters.indexOf(waiter), 1);
        reject(
          new LonghaulError(
            'SandboxUnavailable',
            `all ${this.#limit} machines were in use for ${this.#waitMs} ms`,
            { next: 'Stop sandboxes that are no longer needed, or raise maxLive.' },
          ),
        );
      }, this.#waitMs);
      this.#waiters.push(waiter);
    });
  }

  give(): void {
    const next = this.#waiters.shift();
    if (next) next.grant();
    else this.#taken--;
  }
}
