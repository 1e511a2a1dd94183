import { parentPort, Worker } from 'node:worker_threads';
import { attribute, type ErrorData, LonghaulError } from '../../core/index.ts';

/** Calls to a worker thread: a request with a number, an answer with the same number. */
interface Request {
  id: number;
  method: string;
  payload: unknown;
}
type Answer = { id: number; value: unknown } | { id: number; error: ErrorData };

interface Pending {
  resolve(value: unknown): void;
  reject(error: unknown): void;
}

/**
 * The calling side. A worker without open calls does not keep the process alive; one that dies fails
 * its open calls and every later one with `EngineFailed`.
 */
export class WorkerClient {
  readonly #worker: Worker;
  readonly #name: string;
  #pending = new Map<number, Pending>();
  #next = 1;
  #end: LonghaulError | null = null;

  /** `entry` is a module beside this one, without its extension: .ts in a checkout, .js when compiled. */
  constructor(entry: string, name: string) {
    this.#name = name;
    const extension = import.meta.url.endsWith('.ts') ? 'ts' : 'js';
    const url = new URL(`./${entry}.${extension}`, import.meta.url);
    // Flags of the main program, such as --input-type, are not meant for the worker's entry.
    this.#worker = new Worker(url, { name, execArgv: [] });
    this.#worker.unref();
    this.#worker.on('message', (answer: Answer) => this.#settle(answer));
    this.#worker.on('error', (error) => this.#fail(attribute(error, 'EngineFailed', name)));
    this.#worker.on('exit', (code) =>
      this.#fail(new LonghaulError('EngineFailed', `the ${name} thread ended with code ${code}`)),
    );
  }

  #settle(answer: Answer): void {
    const call = this.#pending.get(answer.id);
    this.#pending.delete(answer.id);
    if (this.#pending.size === 0) this.#worker.unref();
    if ('value' in answer) call?.resolve(answer.value);
    else call?.reject(new LonghaulError(answer.error.code, answer.error.message, answer.error));
  }

  #fail(error: LonghaulError): void {
    this.#end ??= error;
    const calls = [...this.#pending.values()];
    this.#pending.clear();
    for (const call of calls) call.reject(this.#end);
  }

  /** Calls reach the worker in order. Aborting sends `cancel` with the number of the call. */
  call<T>(method: string, payload: unknown, signal?: AbortSignal): Promise<T> {
    if (this.#end) return Promise.reject(this.#end);
    if (signal?.aborted)
      return Promise.reject(new LonghaulError('Interrupted', `${method} was cancelled`));
    const id = this.#next++;
    const { promise, resolve, reject } = Promise.withResolvers<unknown>();
    this.#pending.set(id, { resolve, reject });
    this.#worker.ref();
    this.#worker.postMessage({ id, method, payload } satisfies Request);
    if (!signal) return promise as Promise<T>;
    const abort = () =>
      this.#worker.postMessage({ id: 0, method: 'cancel', payload: id } satisfies Request);
    signal.addEventListener('abort', abort, { once: true });
    return promise.finally(() => signal.removeEventListener('abort', abort)) as Promise<T>;
  }

  /** Lets the worker release its sessions, then ends it. Safe to call twice. */
  async close(): Promise<void> {
    if (this.#end) return;
    const released = this.call('close', null).catch(() => {});
    this.#end = new LonghaulError('EngineFailed', `the ${this.#name} is closed`, {
      next: 'Create another one from the engine.',
    });
    await released;
    await this.#worker.terminate();
  }
}

/** Methods of a worker. `id` names the call, for a later `cancel`. */
export type Handlers = Record<string, (payload: never, id: number) => unknown>;

/** The worker's side: answers each message with what its handler returns or throws. */
export function serve(handlers: Handlers): void {
  const port = parentPort;
  if (!port) throw new Error('this module runs in a worker thread');
  port.on('message', async ({ id, method, payload }: Request) => {
    try {
      const handler = handlers[method];
      if (!handler) throw new Error(`no method ${method}`);
      const value = await handler(payload as never, id);
      if (id !== 0) port.postMessage({ id, value } satisfies Answer);
    } catch (error) {
      const data = attribute(error, 'EngineFailed', method).toJSON();
      if (id !== 0) port.postMessage({ id, error: data } satisfies Answer);
    }
  });
}
