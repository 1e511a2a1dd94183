/**
 * Batches the calls of concurrent async work in a way that does not depend on timing. Work announces
 * itself as a lane; when every live lane waits at some channel, all that waits is dispatched, one
 * batch a channel, ordered by lane. So equal work gives equal batches, and one lane alone never waits.
 */
export class Lockstep {
  #live = 0;
  #waiting = 0;
  readonly #channels: Channel<unknown, unknown>[] = [];

  /** `dispatch` gets the items in order of their lanes and answers in the same order. */
  channel<I, O>(dispatch: (items: I[]) => Promise<readonly O[]>): Channel<I, O> {
    const channel: Channel<I, O> = { dispatch, queue: [] };
    this.#channels.push(channel as Channel<unknown, unknown>);
    return channel;
  }

  /** Runs work as the lane of this index. Every call of the lane awaits the one before. */
  async run<T>(index: number, work: (lane: Lane) => Promise<T>): Promise<T> {
    this.#live += 1;
    try {
      return await work({
        call: (channel, item) => this.#call(index, channel, item),
      });
    } finally {
      this.#live -= 1;
      this.#flush();
    }
  }

  #call<I, O>(index: number, channel: Channel<I, O>, item: I): Promise<O> {
    return new Promise<O>((resolve, reject) => {
      channel.queue.push({ index, item, resolve, reject });
      this.#waiting += 1;
      this.#flush();
    });
  }

  #flush(): void {
    if (this.#waiting === 0 || this.#waiting < this.#live) return;
    this.#waiting = 0;
    for (const channel of this.#channels) {
      if (channel.queue.length > 0) void deliver(channel, channel.queue.splice(0));
    }
  }
}

/** A piece of concurrent work, as far as batching sees it. */
export interface Lane {
  call<I, O>(channel: Channel<I, O>, item: I): Promise<O>;
}

export interface Channel<I, O> {
  readonly dispatch: (items: I[]) => Promise<readonly O[]>;
  readonly queue: Waiting<I, O>[];
}
interface Waiting<I, O> {
  index: number;
  item: I;
  resolve: (value: O) => void;
  reject: (error: unknown) => void;
}

async function deliver<I, O>(channel: Channel<I, O>, waiting: Waiting<I, O>[]): Promise<void> {
  waiting.sort((a, b) => a.index - b.index);
  try {
    const results = await channel.dispatch(waiting.map((call) => call.item));
    waiting.forEach((call, i) => {
      call.resolve(results[i] as O);
    });
  } catch (error) {
    for (const call of waiting) call.reject(error);
  }
}
