import { mkdtemp, readdir, readFile, rename, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeEach, describe, expect, it } from 'vitest';
import { Rng } from '../../core/index.ts';
import type { ModelConfig } from '../contract.ts';
import { loadCheckpoint, loadWeights, saveCheckpoint } from './checkpoint.ts';
import { initialise, layoutOf } from './layout.ts';

const CONFIG: ModelConfig = {
  vocabSize: 5,
  dim: 8,
  layers: 1,
  heads: 2,
  kvHeads: 1,
  ffnDim: 6,
  maxLength: 16,
  ropeTheta: 10000,
  normEps: 1e-5,
  tiedHead: false,
};

const root = await mkdtemp(join(tmpdir(), 'longhaul-checkpoint-'));
afterAll(() => rm(root, { recursive: true, force: true }));

interface HeaderEntry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}
interface Header {
  'model.embed_tokens.weight': HeaderEntry;
  'lm_head.weight': HeaderEntry;
  [name: string]: unknown;
}

let folder = '';
let counter = 0;
const weights = initialise(CONFIG, 1);
const moments = (seed: number) => ({
  m: initialise(CONFIG, seed),
  v: initialise(CONFIG, seed + 1).map(Math.abs),
  step: seed,
});

beforeEach(async () => {
  folder = join(root, `run-${counter++}`, 'latest');
  await saveCheckpoint(folder, { config: CONFIG, weights }, moments(7));
});

/** Rewrites the header of the model file; the data stays. */
async function editHeader(edit: (header: Header) => unknown): Promise<void> {
  const path = join(folder, 'model.safetensors');
  const bytes = await readFile(path);
  const length = Number(bytes.readBigUInt64LE());
  const header = JSON.parse(bytes.subarray(8, 8 + length).toString());
  const edited = edit(header) ?? header;
  const text = Buffer.from(typeof edited === 'string' ? edited : JSON.stringify(edited));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  await writeFile(path, Buffer.concat([size, text, bytes.subarray(8 + length)]));
}

async function expectRefused(message: RegExp | string): Promise<void> {
  await expect(loadCheckpoint(folder)).rejects.toMatchObject({
    code: 'CheckpointInvalid',
    message: expect.stringMatching(message),
  });
}

describe('a checkpoint', () => {
  it('comes back byte for byte', async () => {
    const loaded = await loadCheckpoint(folder);
    expect(loaded.config).toEqual(CONFIG);
    expect(loaded.weights).toEqual(weights);
    expect(loaded.optimiser).toEqual(moments(7));
  });

  it('replaces an older one and leaves nothing else behind', async () => {
    await saveCheckpoint(folder, { config: CONFIG, weights }, moments(9));
    expect((await loadCheckpoint(folder)).optimiser).toEqual(moments(9));
    expect(await readdir(join(folder, '..'))).toEqual(['latest']);
  });

  it('is found when the process died between the two renames of a replacement', async () => {
    await rename(folder, `${folder}.previous`);
    expect((await loadCheckpoint(folder)).optimiser.step).toBe(7);
  });

  it('names tensors as Hugging Face Llama does, in a header any reader takes', async () => {
    const bytes = await readFile(join(folder, 'model.safetensors'));
    const length = Number(bytes.readBigUInt64LE());
    const header = JSON.parse(bytes.subarray(8, 8 + length).toString());
    expect(header['model.layers.0.self_attn.k_proj.weight']).toMatchObject({
      dtype: 'F32',
      shape: [4, 8],
    });
    expect(header['lm_head.weight'].shape).toEqual([5, 8]);
    expect((8 + length) % 8).toBe(0);
    const [start, end] = header['model.norm.weight'].data_offsets;
    expect(end - start).toBe(32);
    const norm = new Float32Array(
      bytes.buffer.slice(bytes.byteOffset + 8 + length + start).slice(0, 32),
    );
    expect([...norm]).toEqual(new Array(8).fill(1));
    const config = JSON.parse(await readFile(join(folder, 'config.json'), 'utf8'));
    expect(config).toMatchObject({ model_type: 'llama', num_key_value_heads: 1 });
  });

  it('saving where nothing can be written is an error and leaves nothing', async () => {
    await writeFile(join(root, 'file'), '');
    const failed = saveCheckpoint(join(root, 'file', 'x'), { config: CONFIG, weights }, moments(1));
    await expect(failed).rejects.toMatchObject({ code: 'EngineFailed' });
  });
});

describe('a hostile or damaged checkpoint is refused', () => {
  it('a missing folder', async () => {
    await expect(loadWeights(join(root, 'none'))).rejects.toMatchObject({
      code: 'CheckpointInvalid',
    });
  });

  it('a file cut at any length', async () => {
    const path = join(folder, 'model.safetensors');
    const whole = await readFile(path);
    for (const length of [0, 5, 8, 100, whole.length - 4, whole.length - 1]) {
      await writeFile(path, whole.subarray(0, length));
      await expectRefused('model.safetensors');
    }
  });

  it('bytes after the data', async () => {
    await writeFile(join(folder, 'optimizer.safetensors'), 'x', { flag: 'a' });
    await expectRefused('optimizer.safetensors: it holds');
  });

  it('a header length beyond the file or beyond reason', async () => {
    const path = join(folder, 'model.safetensors');
    const bytes = await readFile(path);
    for (const claim of [2n ** 64n - 1n, 2n ** 40n, BigInt(bytes.length)]) {
      bytes.writeBigUInt64LE(claim);
      await writeFile(path, bytes);
      await expectRefused('header claims');
    }
  });

  const edits: [string, (header: Header) => unknown, string][] = [
    ['no JSON', () => '{"a":', 'not JSON'],
    ['an array', () => [], 'no JSON object'],
    ['an entry that is a number', (h) => void (h.x = 3), 'x is no object'],
    ['another type', (h) => void (h['lm_head.weight'].dtype = 'F16'), 'F16'],
    ['a negative size', (h) => void (h['lm_head.weight'].shape = [-5, -8]), 'no valid shape'],
    ['a huge size', (h) => void (h['lm_head.weight'].shape = [2 ** 52, 2 ** 52]), 'its shape'],
    [
      'another shape of the same size',
      (h) => void (h['lm_head.weight'].shape = [8, 5]),
      'has shape',
    ],
    [
      'overlapping ranges',
      (h) => void (h['lm_head.weight'].data_offsets = h['model.embed_tokens.weight'].data_offsets),
      'starts at',
    ],
    [
      'a range outside the file',
      (h) => {
        const [start, end] = h['lm_head.weight'].data_offsets;
        h['lm_head.weight'].data_offsets = [start + 4096, end + 4096];
      },
      'starts at',
    ],
    [
      'a fractional offset',
      (h) => void (h['lm_head.weight'].data_offsets = [0.5, 160.5]),
      'offsets',
    ],
    [
      'another name',
      (h) => {
        const { 'lm_head.weight': head, ...rest } = h;
        return { ...rest, 'lm_tail.weight': head };
      },
      'no tensor lm_head.weight',
    ],
    [
      'an empty tensor more',
      (h) => void (h.extra = { dtype: 'F32', shape: [0], data_offsets: [0, 0] }),
      'holds 13 tensors',
    ],
    ['no step', (h) => void delete h.__metadata__, 'its step'],
  ];
  for (const [name, edit, message] of edits) {
    it(name, async () => {
      await editHeader(edit);
      await expectRefused(message);
    });
  }

  it('a value that is not finite', async () => {
    const path = join(folder, 'model.safetensors');
    const bytes = await readFile(path);
    bytes.writeFloatLE(Number.NaN, bytes.length - 4);
    await writeFile(path, bytes);
    await expectRefused('not finite');
  });

  it('a negative second moment, whose root would be no number', async () => {
    const bad = moments(7);
    bad.v[3] = -1;
    await saveCheckpoint(folder, { config: CONFIG, weights }, bad);
    await expectRefused('negative second moment');
  });

  it('weights and moments of different steps', async () => {
    const other = join(root, 'other');
    await saveCheckpoint(other, { config: CONFIG, weights }, moments(8));
    await rename(join(other, 'optimizer.safetensors'), join(folder, 'optimizer.safetensors'));
    await expectRefused('different steps');
  });

  it('a configuration that does not fit, or is none', async () => {
    const path = join(folder, 'config.json');
    const config = JSON.parse(await readFile(path, 'utf8'));
    for (const [text, message] of [
      ['{', 'config.json'],
      [JSON.stringify({ ...config, model_type: 'gpt2' }), 'model_type'],
      [JSON.stringify({ ...config, hidden_size: 2 ** 40 }), 'dim'],
      [JSON.stringify({ ...config, num_hidden_layers: 1e6 }), 'layers'],
      [JSON.stringify({ ...config, num_hidden_layers: 1000, hidden_size: 65536 }), 'parameters'],
      [JSON.stringify({ ...config, num_hidden_layers: 2 }), 'weights of config.json take more'],
      [JSON.stringify({ ...config, tie_word_embeddings: true }), 'tensors'],
      [JSON.stringify({ ...config, rope_scaling: { type: 'linear' } }), 'rope_scaling'],
    ] as const) {
      await writeFile(path, text);
      await expectRefused(message);
    }
  });

  it('random damage is refused by name or harmless, and never anything else', async () => {
    const rng = Rng.of(11, 'damage');
    for (const file of ['model.safetensors', 'config.json']) {
      const path = join(folder, file);
      const whole = await readFile(path);
      const head = Math.min(whole.length, 1600);
      for (let trial = 0; trial < 150; trial++) {
        const bytes = Buffer.from(whole);
        for (let n = rng.int(1, 4); n > 0; n--) bytes[rng.int(0, head - 1)] = rng.int(0, 255);
        await writeFile(path, bytes);
        const outcome = await loadWeights(folder).then(
          ({ weights: loaded }) => loaded.length,
          (error) => error.code,
        );
        expect(['CheckpointInvalid', weights.length]).toContain(outcome);
      }
      await writeFile(path, whole);
    }
  });

  it('the layout covers every float once', () => {
    const { tensors, total } = layoutOf(CONFIG);
    let at = 0;
    for (const { offset, size } of tensors) {
      expect(offset).toBe(at);
      at += size;
    }
    expect(at).toBe(total);
  });
});
