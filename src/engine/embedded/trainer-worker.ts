import type { AdamParams, Datum, Loss, ModelConfig } from '../contract.ts';
import { loadCheckpoint, saveCheckpoint } from './checkpoint.ts';
import type { SessionOptions } from './graph/session.ts';
import { checkConfig, initialise } from './layout.ts';
import { serve } from './rpc.ts';
import { Training } from './training.ts';

/** The thread of one trainer. Calls run one after another, in the order they came. */

export type TrainerSource = { config: ModelConfig; seed: number } | { checkpoint: string };

let training: Training | null = null;
let queue: Promise<unknown> = Promise.resolve();

function inOrder<P>(work: (payload: P) => unknown): (payload: P) => Promise<unknown> {
  return (payload) => {
    const result = queue.then(() => work(payload));
    queue = result.catch(() => {});
    return result;
  };
}

function current(): Training {
  if (!training) throw new Error('the trainer was not started');
  return training;
}

async function start({ from, options }: { from: TrainerSource; options: SessionOptions }) {
  if ('checkpoint' in from) {
    const { config, weights, optimiser } = await loadCheckpoint(from.checkpoint);
    training = new Training(config, weights, optimiser, options);
  } else {
    checkConfig(from.config);
    training = new Training(from.config, initialise(from.config, from.seed), null, options);
  }
  return training.config;
}

serve({
  start: inOrder(start),
  forward: inOrder((data: readonly Datum[]) => current().forward(data)),
  forwardBackward: inOrder(({ data, loss }: { data: readonly Datum[]; loss: Loss }) =>
    current().forwardBackward(data, loss),
  ),
  optimStep: inOrder((adam: AdamParams) => current().optimStep(adam)),
  save: inOrder((folder: string) => {
    const { config, weights, optimiser } = current();
    return saveCheckpoint(folder, { config, weights }, optimiser);
  }),
  // Shared memory crosses threads without a copy; ONNX Runtime wants unshared inputs, so each sampler
  // copies it once.
  publish: inOrder(() => {
    const { weights, optimiser } = current();
    const shared = new Float32Array(new SharedArrayBuffer(weights.byteLength));
    shared.set(weights);
    return { step: optimiser.step, weights: shared };
  }),
  close: inOrder(() => training?.dispose()),
});
