import type { Socket } from 'node:net';
import type { NetworkAttempt } from '../contract.ts';

const KEPT_ATTEMPTS = 1_000;
/** What a guest asked for may be long; a record keeps this much of it. */
const MAX_TEXT = 255;

/** One attempt while it goes on. It counts as failed until something else is known. */
export class Attempt {
  readonly #asked: Pick<NetworkAttempt, 'at' | 'host' | 'port' | 'method'>;
  #outcome: NetworkAttempt['outcome'] = 'failed';
  #detail = 'not connected yet';
  #socket: Socket | null = null;
  #bytesUp = 0;
  #bytesDown = 0;

  constructor(asked: { host: string; port: number; method: string }) {
    this.#asked = {
      at: Date.now(),
      host: asked.host.slice(0, MAX_TEXT),
      port: asked.port,
      method: asked.method.slice(0, MAX_TEXT),
    };
  }

  /** Bytes are those of the connection to the server, as they pass outside. */
  connected(socket: Socket, address: string): void {
    this.#socket = socket;
    socket.once('close', () => {
      this.#bytesUp = socket.bytesWritten;
      this.#bytesDown = socket.bytesRead;
      this.#socket = null;
    });
    this.end('allowed', address);
  }

  end(outcome: NetworkAttempt['outcome'], detail: string): void {
    this.#outcome = outcome;
    this.#detail = detail;
  }

  view(): NetworkAttempt {
    return {
      ...this.#asked,
      outcome: this.#outcome,
      detail: this.#detail,
      bytesUp: this.#socket?.bytesWritten ?? this.#bytesUp,
      bytesDown: this.#socket?.bytesRead ?? this.#bytesDown,
    };
  }
}

/** The last 1,000 attempts of a sandbox, oldest first. */
export class AttemptLog {
  readonly #attempts: Attempt[] = [];

  begin(asked: { host: string; port: number; method: string }): Attempt {
    const attempt = new Attempt(asked);
    this.#attempts.push(attempt);
    if (this.#attempts.length > KEPT_ATTEMPTS) this.#attempts.shift();
    return attempt;
  }

  view(): readonly NetworkAttempt[] {
    return this.#attempts.map((attempt) => attempt.view());
  }
}
