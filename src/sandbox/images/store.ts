import { stat } from 'node:fs/promises';
import { join, resolve } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type { NetworkPolicy, SandboxDriver, SandboxSpec } from '../contract.ts';
import { type ArchiveFiles, FolderFiles, TarFiles } from './archive-files.ts';
import { ImageBuilder } from './build/builder.ts';
import { BuildContext } from './build/context.ts';
import { unpackLayers } from './import.ts';
import { layerTar } from './layer-stream.ts';
import { hostPlatform, readArchive } from './oci.ts';
import {
  digestHex,
  EMPTY_CONFIG,
  type ImageRecord,
  imageName,
  listImages,
  listNames,
  readImage,
  readName,
  removeImage,
  removeName,
  sha256,
  writeImage,
  writeName,
} from './record.ts';
import { unreadable } from './refused.ts';

export interface ImageStoreOptions {
  /** Makes the layers, and gives its sandboxes to what unpacks and builds. */
  driver: SandboxDriver & { readonly dir: string };
  /** Limits of unpacking and building: an image must fit `diskBytes` and `inodes`. */
  spec?: Partial<Omit<SandboxSpec, 'image' | 'network'>>;
}

export interface AddOptions {
  /** What the image is to be called, beside the names that its archive gives it. */
  name?: string;
  /** Which image, where the archive holds several. */
  reference?: string;
  signal?: AbortSignal;
}

export interface BuildOptions {
  /** The folder that COPY takes from. */
  context: string;
  /** The Dockerfile, relative to the context. Default `Dockerfile`. */
  dockerfile?: string;
  buildArgs?: Readonly<Record<string, string>>;
  /** The stage to build, by name or number. Default: the last. */
  target?: string;
  name?: string;
  /** What RUN may reach; nothing by default. */
  network?: NetworkPolicy;
  /** Wall clock of one RUN. Default ten minutes. */
  runTimeoutMs?: number;
  signal?: AbortSignal;
  /** Told of each step and of what it prints, as the guest printed it: nothing to send to a terminal as it is. */
  onProgress?: (text: string) => void;
}

export interface BuildResult {
  image: ImageRecord;
  /** What was read and is not followed, one line each. */
  notes: string[];
  /** The steps that change files, and whether an earlier build had made them. */
  steps: { line: number; cached: boolean }[];
}

export interface StoredImage extends ImageRecord {
  names: string[];
}

const GIB = 1024 ** 3;
const DEFAULT_SPEC = {
  memoryBytes: 2 * GIB,
  diskBytes: 4 * GIB,
  inodes: 500_000,
  pids: 512,
};
const DOCKERFILE_BYTES = 1 << 20;
const DEFAULT_RUN_TIMEOUT_MS = 600_000;

/**
 * Images for sandboxes: root file systems with what their makers say of environment and working directory.
 * A root is a durable layer of the driver, so images share layers with each other and with workspaces.
 * Archives and Dockerfiles are hostile: files are unpacked and commands run inside sandboxes only.
 */
export class ImageStore {
  readonly #driver: SandboxDriver;
  readonly #dir: string;
  readonly #spec: Partial<SandboxSpec>;

  constructor(options: ImageStoreOptions) {
    this.#driver = options.driver;
    this.#dir = options.driver.dir;
    this.#spec = { ...DEFAULT_SPEC, ...options.spec };
  }

  /**
   * Takes an image in: `host`, a directory with a root file system, an OCI layout as a folder or a tar, or
   * what `docker save` writes. Sandboxes then name it as `image:DIGEST`. One that is there already is
   * returned as it is. `FileRefused` for a broken or hostile archive, `NotFound` for no such source;
   * nothing is left of either.
   */
  async add(source: string, options: AddOptions = {}): Promise<ImageRecord> {
    try {
      return await this.#add(source, options);
    } catch (error) {
      throw unreadable(error, source);
    }
  }

  async #add(source: string, options: AddOptions): Promise<ImageRecord> {
    const name = options.name === undefined ? [] : [imageName(options.name)];
    if (source === 'host') return this.#keep(this.#record('host', { host: true }), name);
    const path = resolve(source);
    const info = await stat(path).catch(() => null);
    if (!info?.isDirectory() && !info?.isFile())
      throw new LonghaulError('NotFound', `image source ${source}: no such file or directory`, {
        next: "Name an archive, a directory, or 'host'.",
      });
    if (info.isDirectory()) {
      const files = new FolderFiles(path);
      if ((await files.size('index.json')) !== null)
        return this.#addArchive(files, path, name, options);
      return this.#addDirectory(path, name, options.signal);
    }
    const files = await TarFiles.open(path);
    try {
      return await this.#addArchive(files, path, name, options);
    } finally {
      await files.close();
    }
  }

  async #addArchive(
    files: ArchiveFiles,
    source: string,
    names: string[],
    options: AddOptions,
  ): Promise<ImageRecord> {
    const { reference, signal } = options;
    const image = await readArchive(files, reference === undefined ? {} : { reference });
    const all = [...names, ...image.names.flatMap(asName)];
    const known = readImage(this.#dir, image.digest);
    if (known && (known.layer === null || (await this.#driver.hasLayer(known.layer))))
      return this.#keep(known, all);
    const maxBytes = 4 * (this.#spec.diskBytes ?? DEFAULT_SPEC.diskBytes);
    const tars = image.layers.map((layer) => layerTar(files, layer, maxBytes));
    const { workdir } = image.config;
    const layer = await this.#interruptible(signal, () =>
      unpackLayers(this.#driver, tars, { spec: this.#spec, workdir, signal }),
    );
    const { digest, platform, config, history } = image;
    return this.#keep(
      { ...this.#record(source, { layer, platform, config, history }), digest },
      all,
    );
  }

  async #addDirectory(
    path: string,
    names: string[],
    signal: AbortSignal | undefined,
  ): Promise<ImageRecord> {
    const tree = await BuildContext.open(path, { rootfs: true });
    const [all] = await tree.select('.');
    const entries = all!.below.map((entry) => ({ entry, to: entry.path, mode: entry.mode }));
    const content = await tree.digest(entries);
    const record = this.#record(path, { content, platform: null });
    const known = readImage(this.#dir, record.digest);
    if (known?.layer && (await this.#driver.hasLayer(known.layer))) return this.#keep(known, names);
    const tars = [tree.tar(entries, content, (to) => to)];
    const layer = await this.#interruptible(signal, () =>
      unpackLayers(this.#driver, tars, { spec: this.#spec, workdir: null, signal }),
    );
    return this.#keep({ ...record, layer }, names);
  }

  async #interruptible<T>(signal: AbortSignal | undefined, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      if (!signal?.aborted) throw error;
      throw new LonghaulError('Interrupted', 'taking in the image was cancelled', {
        next: 'Add it again.',
      });
    }
  }

  /** A record whose digest is that of its content and settings. */
  #record(source: string, parts: Partial<ImageRecord> & { content?: string }): ImageRecord {
    const { content, ...rest } = parts;
    const config = rest.config ?? EMPTY_CONFIG;
    const host = rest.host ?? false;
    return {
      version: 1,
      digest: `sha256:${sha256(JSON.stringify([host, content ?? null, config]))}`,
      layer: null,
      host,
      platform: hostPlatform(),
      config,
      history: [],
      source,
      createdAt: new Date().toISOString(),
      ...rest,
    };
  }

  /** The image is there from here on, all of it. */
  #keep(record: ImageRecord, names: readonly string[]): ImageRecord {
    const known = readImage(this.#dir, record.digest);
    const same = known !== null && known.layer === record.layer;
    if (!same) writeImage(this.#dir, record);
    for (const name of names) writeName(this.#dir, name, record.digest);
    return same ? known : record;
  }

  /**
   * Builds a Dockerfile: FROM (an image of the store, `scratch`, `host`, an earlier stage), ARG, ENV,
   * WORKDIR, USER, COPY, ADD of local files, RUN, SHELL, LABEL, EXPOSE, ENTRYPOINT, CMD. Anything else is
   * `ConfigInvalid` with its line, before the first command runs where it can be seen. A step whose
   * parent, command, variables and files are those of an earlier build is not run again.
   * `CapabilityMissing` where a command needs more than one user, a network or a writable /usr of the
   * host; `Interrupted` when `signal` says so. A build that ends with an error leaves no image, and keeps
   * the steps that it finished.
   */
  async build(options: BuildOptions): Promise<BuildResult> {
    try {
      return await this.#build(options);
    } catch (error) {
      throw unreadable(error, `of ${options.context}`);
    }
  }

  async #build(options: BuildOptions): Promise<BuildResult> {
    const name = options.name === undefined ? [] : [imageName(options.name)];
    const context = await BuildContext.open(options.context);
    const file = options.dockerfile ?? 'Dockerfile';
    const dockerfile = await context.text(file, DOCKERFILE_BYTES);
    if (dockerfile === null)
      throw new LonghaulError('NotFound', `${join(context.root, file)}: no such Dockerfile`, {
        next: 'Name it with `dockerfile`, relative to the context.',
      });
    const builder = new ImageBuilder({
      driver: this.#driver,
      dir: this.#dir,
      context,
      dockerfile,
      buildArgs: options.buildArgs ?? {},
      target: options.target,
      spec: this.#spec,
      network: options.network,
      runTimeoutMs: options.runTimeoutMs ?? DEFAULT_RUN_TIMEOUT_MS,
      signal: options.signal,
      onProgress: options.onProgress ?? (() => {}),
      image: (reference) => this.get(reference),
    });
    const { stage, notes, steps } = await builder.build();
    const { layer, host, config, history } = stage;
    const record = this.#record(context.root, { layer, host, config, history, content: stage.key });
    return { image: this.#keep(record, name), notes, steps };
  }

  /** An image by digest (with or without `sha256:`) or by name. `NotFound` where the store has none. */
  async get(reference: string): Promise<ImageRecord> {
    const digest = digestHex(reference) ?? readName(this.#dir, imageName(reference));
    const record = digest === null ? null : readImage(this.#dir, digest);
    if (record) return record;
    const names = [...listNames(this.#dir).keys()].slice(0, 20).join(', ');
    throw new LonghaulError('NotFound', `the image store has no ${reference}`, {
      next: `Save it with \`docker save ${reference} -o image.tar\` and add that with \`longhaul sandbox exec --image image.tar -- true\`; there is ${names || 'no image yet'}.`,
    });
  }

  /** Every image, oldest first. */
  async list(): Promise<StoredImage[]> {
    const names = [...listNames(this.#dir)];
    return listImages(this.#dir).map((record) => ({
      ...record,
      names: names.flatMap(([name, digest]) => (digest === record.digest ? [name] : [])).sort(),
    }));
  }

  /**
   * Removes an image and its names. Its layers go with the driver's next `prune`, unless another image, a
   * workspace or a log still needs them. Idempotent for digests; `NotFound` for a name that there is not.
   */
  async remove(reference: string): Promise<void> {
    const digest = digestHex(reference);
    const record = digest === null ? await this.get(reference) : readImage(this.#dir, digest);
    if (!record) return;
    for (const [name, named] of listNames(this.#dir))
      if (named === record.digest) removeName(this.#dir, name);
    removeImage(this.#dir, record.digest);
  }
}

/** A name that an archive gives: taken over where it is one. */
function asName(text: string): string[] {
  try {
    return [imageName(text)];
  } catch {
    return [];
  }
}
