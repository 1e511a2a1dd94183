import { stat } from 'node:fs/promises';
import { join, resolve } from 'node:path';
import type { BuildRequest, LoadOptions, TaskImage } from '../env/harbor/index.ts';
import type { NetworkRule } from '../sandbox/contract.ts';
import type { BuildOptions, BuildResult, ImageRecord, ImageStore } from '../sandbox/index.ts';
import { SPEC_IMAGE } from './commands/sandbox-options.ts';
import { onInterrupt } from './interrupt.ts';
import { type Output, printable } from './output.ts';
import type { Platform } from './platform.ts';
import { GuestOutput } from './terminal.ts';

/** Where commands start in an image that says nothing of it. */
const DEFAULT_WORKDIR = '/workspace';

/** How Harbor tasks get their images: built, or found, in the image store of this home. */
export function taskImages(platform: Platform): Pick<LoadOptions, 'buildImage' | 'resolveImage'> {
  return {
    buildImage: (request) =>
      platform.remember(JSON.stringify(request), () => build(platform, request)),
    resolveImage: async (name) => taskImage(await (await platform.images()).get(name), []),
  };
}

async function build(platform: Platform, request: BuildRequest): Promise<TaskImage> {
  const { context, dockerfile, runTimeoutMs, allow } = request;
  const store = await platform.images();
  const interrupt = onInterrupt(() => platform.output.say('\nstopping the image build'));
  try {
    const { image, notes } = await buildShown(platform.output, store, {
      context,
      dockerfile,
      runTimeoutMs,
      ...(allow.length > 0 && { network: { allow } }),
      signal: interrupt.signal,
    });
    return taskImage(
      image,
      notes.map((note) => `${context}/${dockerfile}: ${note}`),
    );
  } finally {
    interrupt.dispose();
  }
}

function taskImage(record: ImageRecord, notes: readonly string[]): TaskImage {
  const { digest, config } = record;
  return { image: `rootfs:${digest}`, workdir: config.workdir ?? DEFAULT_WORKDIR, notes };
}

/** Builds while a person watches. An aborted build keeps the steps it finished, and no image. */
async function buildShown(
  output: Output,
  store: ImageStore,
  options: BuildOptions,
): Promise<BuildResult> {
  const shown = new GuestOutput(process.stderr);
  output.say(`image  ${printable(options.context)}`);
  try {
    return await store.build({ ...options, onProgress: (text) => shown.write(Buffer.from(text)) });
  } finally {
    shown.end();
  }
}

/**
 * What a person names with `--image`, as a sandbox is told: a directory with a Dockerfile is built, an OCI
 * layout or an archive is added to the store, another directory is used as it is, a name is looked up. As
 * with a container, all of such an image can be written. `NotFound` for a name that there is not.
 */
export async function specImage(
  text: string,
  options: {
    output: Output;
    store: () => ImageStore;
    allow: readonly NetworkRule[];
    signal: AbortSignal;
  },
): Promise<string> {
  if (SPEC_IMAGE.test(text)) return text;
  const { output, store, allow, signal } = options;
  const path = resolve(text);
  const info = await stat(path).catch(() => null);
  if (info === null) return `rootfs:${(await store().get(text)).digest}`;
  if (info.isDirectory() && (await isFile(join(path, 'Dockerfile')))) {
    const network = allow.length > 0 ? { network: { allow } } : {};
    const built = await buildShown(output, store(), { context: path, signal, ...network });
    for (const note of built.notes) output.say(`note   ${printable(note)}`);
    return `rootfs:${built.image.digest}`;
  }
  if (info.isDirectory() && !(await isFile(join(path, 'index.json')))) return `dir:${path}`;
  return `rootfs:${(await store().add(path, { signal })).digest}`;
}

async function isFile(path: string): Promise<boolean> {
  return (await stat(path).catch(() => null))?.isFile() ?? false;
}
