import { LonghaulError, Rng } from '../../core/index.ts';
import type { ModelConfig, SampleRequest, SampleResult } from '../contract.ts';
import { checkIds, invalid, planBatches } from './batches.ts';
import { choose } from './choose.ts';
import type { SessionOptions } from './graph/session.ts';
import { columnsFor, KvCache } from './kv-cache.ts';
import { LoadedModel, type WeightSet } from './loaded-model.ts';

/** Rows decoded together at most; what comes later waits. */
const MAX_ROWS = 256;
/** Floats the key-value cache may take: 512 MiB. One row is always let in. */
const CACHE_FLOATS = 2 ** 27;
/** Tokens of one prefill, padding included. */
const PREFILL_TOKENS = 4096;

/** One sequence in flight. */
interface Row {
  call: Call;
  index: number;
  request: SampleRequest;
  rng: Rng;
  ids: number[];
  logprobs: number[];
  /** Tokens it may still get, by its own limit and the model's length. */
  limit: number;
}

/** One `sample` call: done when all its rows are. */
interface Call {
  results: SampleResult[];
  left: number;
  cancelled: boolean;
  resolve(results: SampleResult[]): void;
  reject(error: unknown): void;
}

/**
 * Continuous batching on the thread it is called on: rows join when there is room and leave when they
 * are finished, between decode steps. `run` of a session lets messages in between, so calls overlap.
 */
export class Generation {
  #model: LoadedModel;
  readonly #options: SessionOptions;
  #waiting: Row[] = [];
  #active: Row[] = [];
  /** Calls made while a swap waits for the rows in flight. */
  #held: { call: Call; requests: readonly SampleRequest[] }[] = [];
  #swaps = 0;
  #loop: Promise<void> | null = null;
  /** Swaps and scoring, one after another. */
  #queue: Promise<unknown> = Promise.resolve();

  private constructor(model: LoadedModel, options: SessionOptions) {
    this.#model = model;
    this.#options = options;
  }

  static async create(weights: WeightSet, options: SessionOptions): Promise<Generation> {
    return new Generation(await LoadedModel.create(weights, options), options);
  }

  get config(): ModelConfig {
    return this.#model.config;
  }

  /** Decodes the requests with whatever else is in flight; cancelling rejects with `Interrupted`. */
  sample(requests: readonly SampleRequest[]): { done: Promise<SampleResult[]>; cancel(): void } {
    const { promise: done, resolve, reject } = Promise.withResolvers<SampleResult[]>();
    const call: Call = { results: [], left: requests.length, cancelled: false, resolve, reject };
    for (const [i, request] of requests.entries()) checkRequest(request, this.config, i);
    if (requests.length === 0) resolve([]);
    else if (this.#swaps > 0) this.#held.push({ call, requests });
    else this.#enqueue(call, requests);
    const cancel = () => {
      if (call.left === 0) return;
      call.cancelled = true;
      call.reject(new LonghaulError('Interrupted', 'sampling was cancelled'));
    };
    return { done, cancel };
  }

  #enqueue(call: Call, requests: readonly SampleRequest[]): void {
    const { config } = this;
    for (const [index, request] of requests.entries()) {
      const seed = request.sampling.seed ?? Math.floor(Math.random() * 2 ** 48);
      const limit = Math.min(request.maxTokens, config.maxLength - request.prompt.length);
      const rng = Rng.of(seed, 'sample');
      this.#waiting.push({ call, index, request, rng, ids: [], logprobs: [], limit });
    }
    this.#start();
  }

  /** Lets in what waited for a swap, if it fits the new model too. */
  #release(): void {
    for (const { call, requests } of this.#held.splice(0)) {
      try {
        for (const [i, request] of requests.entries()) checkRequest(request, this.config, i);
        this.#enqueue(call, requests);
      } catch (error) {
        call.reject(error);
      }
    }
  }

  #start(): void {
    if (this.#waiting.length === 0) return;
    this.#loop ??= this.#decodeAll().finally(() => {
      this.#loop = null;
      this.#start();
    });
  }

  async #decodeAll(): Promise<void> {
    const model = this.#model;
    try {
      while (this.#waiting.length > 0 || this.#active.length > 0) {
        this.#dropCancelled();
        await this.#admit(model);
        if (this.#active.length > 0) await this.#step(model);
      }
    } catch (error) {
      for (const row of [...this.#active, ...this.#waiting]) row.call.reject(error);
      this.#active = [];
      this.#waiting = [];
    }
    model.cache.clear();
  }

  #dropCancelled(): void {
    this.#waiting = this.#waiting.filter((row) => !row.call.cancelled);
    for (let i = this.#active.length - 1; i >= 0; i--)
      if (this.#active[i]!.call.cancelled) this.#remove(i);
  }

  #remove(position: number): void {
    this.#model.cache.removeRow(position);
    const last = this.#active.pop()!;
    if (position < this.#active.length) this.#active[position] = last;
  }

  /** Moves waiting rows into the batch while rows and cache allow; equal prompts are computed once. */
  async #admit(model: LoadedModel): Promise<void> {
    let longest = Math.max(0, ...this.#active.map(finalLength));
    let count = this.#active.length;
    const admitted: Row[] = [];
    const perToken = KvCache.floatsPerToken(model.config);
    while (this.#waiting.length > 0 && count < MAX_ROWS) {
      const next = Math.max(longest, finalLength(this.#waiting[0]!));
      if (count > 0 && (count + 1) * columnsFor(next) * perToken > CACHE_FLOATS) break;
      admitted.push(this.#waiting.shift()!);
      longest = next;
      count++;
    }
    if (admitted.length === 0) return;
    const groups = [...Map.groupBy(admitted, (row) => row.request.prompt.join()).values()];
    const lengths = groups.map((rows) => rows[0]!.request.prompt.length);
    model.cache.reserve(count, Math.max(...lengths, model.cache.longest) + 1, longest);
    for (const batch of planBatches(lengths, PREFILL_TOKENS)) {
      const prompts = batch.members.map((i) => groups[i]![0]!.request.prompt);
      const out = await model.prefill(prompts, batch.length);
      const logits = out.logits!.data as Float32Array;
      for (const [source, i] of batch.members.entries()) {
        for (const row of groups[i]!) {
          model.cache.addRow(out, source, batch.length, prompts[source]!.length);
          this.#active.push(row);
          this.#take(row, logits, source);
        }
      }
    }
    this.#retire();
  }

  async #step(model: LoadedModel): Promise<void> {
    const limit = Math.max(...this.#active.map(finalLength));
    model.cache.reserve(this.#active.length, model.cache.longest + 1, limit);
    const out = await model.decode(this.#active.map((row) => row.ids.at(-1)!));
    model.cache.append(out.cache!.data as Float32Array);
    const logits = out.logits!.data as Float32Array;
    for (const [i, row] of this.#active.entries()) this.#take(row, logits, i);
    this.#retire();
  }

  /** Draws a row's next token from row `at` of the logits. */
  #take(row: Row, logits: Float32Array, at: number): void {
    const { vocabSize } = this.#model.config;
    const line = logits.subarray(at * vocabSize, (at + 1) * vocabSize);
    const { id, logprob } = choose(line, row.request.sampling, row.rng);
    row.ids.push(id);
    row.logprobs.push(logprob);
  }

  #retire(): void {
    for (let i = this.#active.length - 1; i >= 0; i--) {
      const row = this.#active[i]!;
      const stopped = row.request.stopTokens.includes(row.ids.at(-1)!);
      if (!stopped && row.ids.length < row.limit) continue;
      this.#remove(i);
      row.call.results[row.index] = {
        ids: row.ids,
        logprobs: row.logprobs,
        logprobKind: 'raw',
        stopReason: stopped ? 'stop' : 'length',
        version: this.#model.version,
      };
      if (--row.call.left === 0) row.call.resolve(row.call.results);
    }
  }

  /** Log-prob of each token given those before it; 0 for the first. */
  async logprobs(sequences: readonly (readonly number[])[]): Promise<Float32Array[]> {
    const { config } = this;
    const data = sequences.map((sequence, i) => {
      if (sequence.length === 0) invalid(`sequence ${i} is empty`);
      if (sequence.length > config.maxLength + 1)
        invalid(
          `sequence ${i} has ${sequence.length} tokens; the model takes ${config.maxLength + 1}`,
        );
      checkIds(sequence, config, `sequence ${i}`);
      // A lone token predicts nothing: it is scored against itself and the score dropped.
      const tokens = Int32Array.from(sequence.length > 1 ? sequence.slice(0, -1) : sequence);
      const targets = Int32Array.from(sequence.length > 1 ? sequence.slice(1) : sequence);
      return { tokens, targets };
    });
    const scores = await this.#inOrder(() => this.#model.score(data));
    return scores.map((score, i) => {
      const out = new Float32Array(sequences[i]!.length);
      if (out.length > 1) out.set(score, 1);
      return out;
    });
  }

  #inOrder<T>(work: () => Promise<T>): Promise<T> {
    const result = this.#queue.then(work);
    this.#queue = result.catch(() => {});
    return result;
  }

  /** Waits for the rows in flight, then switches; calls made meanwhile wait for the new weights. */
  load(weights: WeightSet): Promise<void> {
    this.#swaps++;
    return this.#inOrder(async () => {
      try {
        while (this.#loop) await this.#loop;
        this.#model = await LoadedModel.create(weights, this.#options, this.#model);
      } finally {
        if (--this.#swaps === 0) this.#release();
      }
    });
  }

  /** Rejects what is in flight with `Interrupted`. */
  async dispose(): Promise<void> {
    const closed = new LonghaulError('Interrupted', 'the sampler was closed');
    for (const { call } of [...this.#active, ...this.#waiting, ...this.#held]) {
      call.cancelled = true;
      call.reject(closed);
    }
    while (this.#loop) await this.#loop;
    await this.#queue;
    await this.#model.dispose();
  }
}

/** Tokens of a row when it is done, prompt included. */
function finalLength(row: Row): number {
  return row.request.prompt.length + row.limit;
}

function checkRequest(request: SampleRequest, config: ModelConfig, index: number): void {
  const { prompt, maxTokens, stopTokens, sampling } = request;
  const at = `request ${index}`;
  if (prompt.length === 0) invalid(`${at} has an empty prompt`);
  if (prompt.length >= config.maxLength)
    invalid(`${at}: a prompt of ${prompt.length} tokens leaves no room in ${config.maxLength}`);
  checkIds(prompt, config, `${at}, prompt`);
  checkIds(stopTokens, config, `${at}, stop tokens`);
  if (!(Number.isInteger(maxTokens) && maxTokens > 0)) invalid(`${at}: maxTokens is ${maxTokens}`);
  const { temperature, topK = 0, topP = 1 } = sampling;
  if (!(temperature >= 0 && temperature < Infinity)) invalid(`${at}: temperature ${temperature}`);
  if (!(Number.isInteger(topK) && topK >= 0)) invalid(`${at}: topK ${topK}`);
  if (!(topP > 0 && topP <= 1)) invalid(`${at}: topP ${topP}`);
}
