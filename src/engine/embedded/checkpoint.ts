import { randomBytes } from 'node:crypto';
import { mkdir, open, readFile, rename, rm, stat } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';
import { z } from 'zod';
import { attribute, LonghaulError } from '../../core/index.ts';
import type { ModelConfig } from '../contract.ts';
import type { OptimiserState } from './adamw.ts';
import { checkConfig, layoutOf } from './layout.ts';
import { type NamedTensor, readSafetensors, writeSafetensors } from './safetensors.ts';

/**
 * A checkpoint folder: `config.json` and `model.safetensors` as Hugging Face's LlamaForCausalLM reads
 * them, `optimizer.safetensors` with the moments and the step.
 */

const CONFIG_FILE = 'config.json';
const MODEL_FILE = 'model.safetensors';
const OPTIMISER_FILE = 'optimizer.safetensors';
const MAX_CONFIG_BYTES = 2 ** 20;

/** The fields of a Hugging Face Llama configuration that this engine reads. */
const LlamaConfig = z.object({
  model_type: z.literal('llama'),
  hidden_act: z.literal('silu'),
  attention_bias: z.literal(false).default(false),
  mlp_bias: z.literal(false).default(false),
  rope_scaling: z.null().default(null),
  vocab_size: z.number(),
  hidden_size: z.number(),
  intermediate_size: z.number(),
  num_hidden_layers: z.number(),
  num_attention_heads: z.number(),
  num_key_value_heads: z.number(),
  max_position_embeddings: z.number(),
  rope_theta: z.number(),
  rms_norm_eps: z.number(),
  tie_word_embeddings: z.boolean(),
});

export interface Checkpoint {
  config: ModelConfig;
  weights: Float32Array;
}

/** Writes the folder beside its place, syncs it and renames it there. An older one is replaced. */
export async function saveCheckpoint(
  folder: string,
  checkpoint: Checkpoint,
  optimiser: OptimiserState,
): Promise<void> {
  const parent = dirname(folder);
  const staging = join(parent, `.${basename(folder)}.${randomBytes(6).toString('hex')}.tmp`);
  try {
    await mkdir(staging, { recursive: true });
    const { config, weights } = checkpoint;
    const step = String(optimiser.step);
    await writeSynced(join(staging, CONFIG_FILE), JSON.stringify(toLlama(config), null, 2));
    await writeSafetensors(join(staging, MODEL_FILE), weightTensors(config, weights), { step });
    const moments = momentTensors(config, optimiser);
    await writeSafetensors(join(staging, OPTIMISER_FILE), moments, { step });
    await syncFolder(staging);
    await replaceFolder(staging, folder);
    await syncFolder(parent);
  } catch (error) {
    // Why saving failed matters more than a staging folder that cannot be removed either.
    await rm(staging, { recursive: true, force: true }).catch(() => {});
    const full = (error as NodeJS.ErrnoException).code === 'ENOSPC';
    throw attribute(error, full ? 'DiskFull' : 'EngineFailed', `saving ${folder}`);
  }
}

/** The older folder stands under this name while the new one takes its place. */
function previousName(folder: string): string {
  return `${folder}.previous`;
}

async function replaceFolder(staging: string, folder: string): Promise<void> {
  const previous = previousName(folder);
  if (await exists(folder)) {
    await rm(previous, { recursive: true, force: true });
    await rename(folder, previous);
  }
  await rename(staging, folder);
  await rm(previous, { recursive: true, force: true });
}

async function exists(path: string): Promise<boolean> {
  return stat(path).then(
    () => true,
    () => false,
  );
}

/** The folder itself, or the one it was replacing when the process died between two renames. */
async function findFolder(folder: string): Promise<string> {
  const previous = previousName(folder);
  return !(await exists(folder)) && (await exists(previous)) ? previous : folder;
}

/** `CheckpointInvalid` says what is wrong with the folder; nothing of it is used then. */
export async function loadWeights(folder: string): Promise<Checkpoint & { step: number }> {
  const found = await findFolder(folder);
  const config = await loadConfig(join(found, CONFIG_FILE));
  const path = join(found, MODEL_FILE);
  const { total } = layoutOf(config);
  // A configuration alone may not make us allocate: its weights must be there.
  const bytes = await stat(path).then(
    ({ size }) => size,
    () => 0,
  );
  if (bytes < 4 * total)
    throw new LonghaulError(
      'CheckpointInvalid',
      `${path} has ${bytes} bytes; ${total} weights of ${CONFIG_FILE} take more`,
    );
  const weights = new Float32Array(total);
  const metadata = await readSafetensors(path, weightTensors(config, weights));
  return { config, weights, step: stepOf(metadata, path) };
}

/** Weights and optimiser state, to train on as if never interrupted. */
export async function loadCheckpoint(
  folder: string,
): Promise<Checkpoint & { optimiser: OptimiserState }> {
  const { config, weights, step } = await loadWeights(folder);
  const { total } = layoutOf(config);
  const optimiser = { m: new Float32Array(total), v: new Float32Array(total), step };
  const path = join(await findFolder(folder), OPTIMISER_FILE);
  const metadata = await readSafetensors(path, momentTensors(config, optimiser));
  if (stepOf(metadata, path) !== step)
    throw new LonghaulError(
      'CheckpointInvalid',
      `${path} and ${MODEL_FILE} are of different steps`,
    );
  if (optimiser.v.some((value) => value < 0))
    throw new LonghaulError('CheckpointInvalid', `${path} holds a negative second moment`);
  return { config, weights, optimiser };
}

function weightTensors(config: ModelConfig, weights: Float32Array): NamedTensor[] {
  return layoutOf(config).tensors.map(({ name, shape, offset, size }) => ({
    name,
    shape,
    data: weights.subarray(offset, offset + size),
  }));
}

function momentTensors(config: ModelConfig, { m, v }: OptimiserState): NamedTensor[] {
  const named = (prefix: string, data: Float32Array) =>
    weightTensors(config, data).map((tensor) => ({ ...tensor, name: `${prefix}.${tensor.name}` }));
  return [...named('exp_avg', m), ...named('exp_avg_sq', v)];
}

function stepOf(metadata: Record<string, string>, path: string): number {
  const step = Number(metadata.step ?? Number.NaN);
  if (!Number.isSafeInteger(step) || step < 0)
    throw new LonghaulError('CheckpointInvalid', `${path} does not say its step`);
  return step;
}

function toLlama(config: ModelConfig): Record<string, unknown> {
  return {
    architectures: ['LlamaForCausalLM'],
    model_type: 'llama',
    hidden_act: 'silu',
    attention_bias: false,
    mlp_bias: false,
    rope_scaling: null,
    torch_dtype: 'float32',
    vocab_size: config.vocabSize,
    hidden_size: config.dim,
    intermediate_size: config.ffnDim,
    num_hidden_layers: config.layers,
    num_attention_heads: config.heads,
    num_key_value_heads: config.kvHeads,
    max_position_embeddings: config.maxLength,
    rope_theta: config.ropeTheta,
    rms_norm_eps: config.normEps,
    tie_word_embeddings: config.tiedHead,
  };
}

async function loadConfig(path: string): Promise<ModelConfig> {
  try {
    if ((await stat(path)).size > MAX_CONFIG_BYTES) throw new Error('too large');
    const llama = LlamaConfig.parse(JSON.parse(await readFile(path, 'utf8')));
    const config: ModelConfig = {
      vocabSize: llama.vocab_size,
      dim: llama.hidden_size,
      layers: llama.num_hidden_layers,
      heads: llama.num_attention_heads,
      kvHeads: llama.num_key_value_heads,
      ffnDim: llama.intermediate_size,
      maxLength: llama.max_position_embeddings,
      ropeTheta: llama.rope_theta,
      normEps: llama.rms_norm_eps,
      tiedHead: llama.tie_word_embeddings,
    };
    checkConfig(config);
    return config;
  } catch (error) {
    const text = error instanceof z.ZodError ? z.prettifyError(error) : (error as Error).message;
    throw new LonghaulError('CheckpointInvalid', `${path}: ${text}`, { cause: error });
  }
}

async function writeSynced(path: string, text: string): Promise<void> {
  const file = await open(path, 'wx');
  try {
    await file.writeFile(`${text}\n`);
    await file.sync();
  } finally {
    await file.close();
  }
}

async function syncFolder(path: string): Promise<void> {
  const folder = await open(path, 'r');
  try {
    await folder.sync();
  } finally {
    await folder.close();
  }
}
