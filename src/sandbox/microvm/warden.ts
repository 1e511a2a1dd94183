import type { Socket } from 'node:net';
import type { Evidence } from '../agent/requests.ts';
import { JsonLines } from './lines.ts';

/** What the guest's kernel counted. */
export interface Counters extends Evidence {
  cpuSeconds: number;
  peakMemoryBytes: number;
  /** Processes of the guest, the agent and its spare among them. */
  pids: number;
}

interface Waiting {
  resolve(message: Record<string, unknown>): void;
  reject(error: Error): void;
}

/** The host's end of warden.py, process 1 of the machine. */
export class Warden {
  readonly #lines: JsonLines;
  readonly #waiting = new Map<number, Waiting>();
  readonly hello: Promise<void>;
  #hear!: () => void;
  #ended: Error | null = null;
  #nextId = 1;
  #events: Evidence = { oomKills: 0, pidsRefused: 0 };
  /** Called when the agent has ended, whoever ended it. */
  onAgentEnded: () => void = () => {};

  constructor(socket: Socket) {
    let deaf!: (error: Error) => void;
    this.hello = new Promise((resolve, reject) => {
      this.#hear = resolve;
      deaf = reject;
    });
    this.hello.catch(() => {});
    this.#lines = new JsonLines(
      socket,
      (message) => this.#take(message),
      (error) => {
        this.#ended = error;
        deaf(error);
        for (const waiting of this.#waiting.values()) waiting.reject(error);
        this.#waiting.clear();
      },
    );
  }

  /** What the guest ran into since its machine was made, as far as it has been told. */
  get events(): Evidence {
    return this.#events;
  }

  #take(message: Record<string, unknown>): void {
    if (message.hello !== undefined) this.#hear();
    if (message.events !== undefined) this.#count(message.events as Evidence);
    if (message.ended !== undefined) this.onAgentEnded();
    const waiting = this.#waiting.get(message.id as number);
    this.#waiting.delete(message.id as number);
    if (message.error === undefined) waiting?.resolve(message);
    else waiting?.reject(new Error(String(message.error)));
  }

  #count({ oomKills, pidsRefused }: Evidence): void {
    this.#events = { oomKills: Number(oomKills), pidsRefused: Number(pidsRefused) };
  }

  /** Rejects when the machine ended, refused it, or said nothing for `timeoutMs`. */
  async call(
    op: string,
    args: Record<string, unknown> = {},
    timeoutMs = 60_000,
  ): Promise<Record<string, unknown>> {
    if (this.#ended) throw this.#ended;
    const id = this.#nextId++;
    let timer!: NodeJS.Timeout;
    const answer = new Promise<Record<string, unknown>>((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      timer = setTimeout(
        () => reject(new Error(`the machine did not answer ${op} in time`)),
        timeoutMs,
      );
    });
    this.#lines.send({ id, op, ...args });
    try {
      return await answer;
    } finally {
      clearTimeout(timer);
      this.#waiting.delete(id);
    }
  }

  async count(): Promise<Counters> {
    const counters = (await this.call('count')) as unknown as Counters;
    this.#count(counters);
    return counters;
  }

  destroy(): void {
    this.#lines.destroy();
  }
}
