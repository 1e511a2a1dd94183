import { InferenceSession, Tensor } from 'onnxruntime-node';
import type { Graph } from './graph.ts';

export interface SessionOptions {
  /** Threads inside an operation. */
  threads: number;
  /** Idle threads spin: up to a fifth faster, but they burn a shared machine. */
  spinning: boolean;
}

export type Feed = Float32Array | Int32Array | BigInt64Array;

const TYPE_NAMES = {
  Float32Array: 'float32',
  Int32Array: 'int32',
  BigInt64Array: 'int64',
} as const;

export type Tensors = Record<string, Tensor>;

/** Wraps an array (or a view into a larger one: nothing is copied) as an input of a session. */
export function tensor(data: Feed, shape: readonly number[]): Tensor {
  const type = TYPE_NAMES[data.constructor.name as keyof typeof TYPE_NAMES];
  return new Tensor(type as 'float32', data as Float32Array, shape);
}

/**
 * A graph compiled by ONNX Runtime. Its `run` blocks the thread it is called on: sessions live in
 * workers.
 */
export class Session {
  readonly #session: InferenceSession;

  private constructor(session: InferenceSession) {
    this.#session = session;
  }

  static async compile(graph: Graph, options: SessionOptions): Promise<Session> {
    const session = await InferenceSession.create(graph.encode(), {
      executionProviders: ['cpu'],
      intraOpNumThreads: options.threads,
      interOpNumThreads: 1,
      executionMode: 'sequential',
      graphOptimizationLevel: 'all',
      logSeverityLevel: 3,
      extra: {
        session: {
          intra_op: { allow_spinning: options.spinning ? '1' : '0' },
          // Softmax under a causal mask yields denormals, on which it runs eight times slower. This
          // holds for the pool's threads, and for the calling thread only in the process's first session.
          set_denormal_as_zero: '1',
        },
      },
    });
    return new Session(session);
  }

  /** Outputs by name, in fresh arrays. */
  async run(feeds: Readonly<Tensors>): Promise<Tensors> {
    return (await this.#session.run(feeds)) as Tensors;
  }

  async dispose(): Promise<void> {
    await this.#session.release();
  }
}
