import type { Socket } from 'node:net';
import { JsonLines } from './lines.ts';

export interface QmpEvent {
  event: string;
  data: Record<string, unknown>;
}

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
}

/** The QEMU machine protocol (docs/interop/qmp-spec): commands in order, events beside them. */
export class Qmp {
  readonly #lines: JsonLines;
  readonly #waiting: Waiting[] = [];
  readonly #listeners = new Set<(event: QmpEvent) => void>();
  readonly #onEnd: (() => void)[] = [];
  #ended: Error | null = null;

  constructor(socket: Socket) {
    this.#lines = new JsonLines(
      socket,
      (message) => this.#take(message),
      (error) => {
        this.#ended = error;
        for (const waiting of this.#waiting.splice(0)) waiting.reject(error);
        for (const each of this.#onEnd.splice(0)) each();
      },
    );
  }

  #take(message: Record<string, unknown>): void {
    if (message.event !== undefined) {
      const event = {
        event: String(message.event),
        data: (message.data ?? {}) as QmpEvent['data'],
      };
      for (const listener of this.#listeners) listener(event);
      return;
    }
    if (message.QMP !== undefined) return;
    const waiting = this.#waiting.shift();
    const error = message.error as { desc?: string } | undefined;
    if (error) waiting?.reject(new Error(`QEMU: ${error.desc}`));
    else waiting?.resolve(message.return);
  }

  onEvent(listener: (event: QmpEvent) => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  command(execute: string, args: Record<string, unknown> = {}): Promise<unknown> {
    return new Promise((resolve, reject) => {
      if (this.#ended) return reject(this.#ended);
      this.#waiting.push({ resolve, reject });
      this.#lines.send({ execute, arguments: args });
    });
  }

  /** Runs a command that begins a migration and waits until it has been carried out. */
  async migration(begin: () => Promise<unknown>): Promise<void> {
    let off = () => {};
    const ended = new Promise<void>((resolve, reject) => {
      off = this.onEvent(({ event, data }) => {
        if (event !== 'MIGRATION') return;
        if (data.status === 'completed') resolve();
        if (data.status === 'failed') reject(new Error('QEMU: the migration failed'));
      });
      this.#onEnd.push(() => reject(new Error('QEMU ended during a migration')));
    });
    ended.catch(() => {});
    try {
      await begin();
      await ended;
    } finally {
      off();
    }
  }
}
