import { LonghaulError } from '../../core/index.ts';
import type { Datum, Loss, ModelConfig } from '../contract.ts';

/** Sequences of similar length that run as one rectangle of `rows` × `length` tokens. */
export interface MicroBatch {
  /** Positions of the sequences in the caller's list, one a row. */
  members: readonly number[];
  length: number;
}

/** Lengths are rounded up to this, so that few distinct shapes occur and kernels stay full. */
const LENGTH_STEP = 8;

/**
 * Packs sequences into micro-batches of at most `maxTokens` tokens, padding included. Longest first:
 * neighbours have similar lengths, so little is padded. The plan depends on the lengths only.
 */
export function planBatches(lengths: readonly number[], maxTokens: number): MicroBatch[] {
  const order = lengths.map((_, i) => i);
  order.sort((a, b) => lengths[b]! - lengths[a]! || a - b);
  const batches: MicroBatch[] = [];
  for (let at = 0; at < order.length; ) {
    const longest = lengths[order[at]!]!;
    const length = Math.max(LENGTH_STEP, Math.ceil(longest / LENGTH_STEP) * LENGTH_STEP);
    const rows = Math.max(1, Math.floor(maxTokens / length));
    batches.push({ members: order.slice(at, at + rows), length });
    at += rows;
  }
  return batches;
}

/** Additive mask [length, length]: position i sees j ≤ i. */
export function causalMask(length: number): Float32Array {
  const mask = new Float32Array(length * length);
  for (let i = 0; i < length; i++) mask.fill(-Infinity, i * length + i + 1, (i + 1) * length);
  return mask;
}

/** `InputInvalid` names the first sequence that does not fit the model or the loss. */
export function checkData(data: readonly Datum[], config: ModelConfig, loss?: Loss): void {
  if (data.length === 0) invalid('the batch is empty');
  for (const [i, datum] of data.entries()) {
    const at = `datum ${i}`;
    const { length } = datum.tokens;
    if (length === 0) invalid(`${at} has no tokens`);
    if (length > config.maxLength)
      invalid(`${at} has ${length} tokens; the model takes ${config.maxLength}`);
    const needed = loss && loss.kind !== 'cross_entropy' ? ['logprobs', 'advantages'] : [];
    for (const name of ['targets', 'weights', 'logprobs', 'advantages'] as const) {
      const array = datum[name];
      if (array === undefined) {
        if (needed.includes(name)) invalid(`${at} has no ${name}, which ${loss?.kind} needs`);
      } else if (array.length !== length)
        invalid(`${at} has ${length} tokens and ${array.length} ${name}`);
    }
    checkIds(datum.tokens, config, `${at}, tokens`);
    checkIds(datum.targets, config, `${at}, targets`);
  }
  if (loss?.kind === 'ppo' && !(loss.clipLow <= 1 && 1 <= loss.clipHigh && loss.clipLow >= 0))
    invalid(`ppo clips ratios to [${loss.clipLow}, ${loss.clipHigh}], which must contain 1`);
}

/** `InputInvalid` for an id outside the vocabulary. */
export function checkIds(ids: ArrayLike<number>, config: ModelConfig, where: string): void {
  for (let i = 0; i < ids.length; i++) {
    const id = ids[i]!;
    if (!(Number.isInteger(id) && id >= 0 && id < config.vocabSize))
      invalid(`${where}: id ${id} at ${i} is outside the vocabulary of ${config.vocabSize}`);
  }
}

export function invalid(message: string): never {
  throw new LonghaulError('InputInvalid', message);
}
