import { createHash, randomBytes } from 'node:crypto';
import {
  closeSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  utimesSync,
  writeSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { attribute, LonghaulError } from '../../core/index.ts';
import type { LayerId } from '../contract.ts';

/** What an image says of the processes in it. */
export interface ImageConfig {
  env: Record<string, string>;
  /** Where commands start; null: the image says nothing. */
  workdir: string | null;
  /** Recorded only: everything in a sandbox runs under one uid. */
  user: string | null;
  /** Recorded only: an agent starts its own commands. */
  entrypoint: string[] | null;
  cmd: string[] | null;
  labels: Record<string, string>;
  exposed: string[];
}

export const EMPTY_CONFIG: ImageConfig = {
  env: {},
  workdir: null,
  user: null,
  entrypoint: null,
  cmd: null,
  labels: {},
  exposed: [],
};

/** An image of the store: its root file system is a durable workspace layer with all below it. */
export interface ImageRecord {
  version: 1;
  /** `sha256:HEX`: of the image's configuration where it came with one, otherwise of content and settings. */
  digest: string;
  /** Null: nothing but what lies below it (`host`), or nothing at all. */
  layer: LayerId | null;
  /** /usr and the other system directories are the host's, bound read-only over it. */
  host: boolean;
  /** `linux/amd64`; null where its source does not say. */
  platform: string | null;
  config: ImageConfig;
  history: string[];
  /** Where it came from, for people. */
  source: string;
  createdAt: string;
}

const DIGEST = /^(?:sha256:)?([0-9a-f]{64})$/;
/** Docker's rule for references, with a tag; a registry's port makes it three parts. */
const NAME =
  /^[a-z0-9][a-z0-9._-]*(?::[0-9]+)?(?:\/[a-z0-9][a-z0-9._-]*)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$/;

/** The hexadecimal digits of a digest with or without `sha256:`; null for anything else. */
export function digestHex(text: string): string | null {
  return DIGEST.exec(text)?.[1] ?? null;
}

export function sha256(text: string | Uint8Array): string {
  return createHash('sha256').update(text).digest('hex');
}

/** `NAME` is `NAME:latest`. `ConfigInvalid` for what is no name. */
export function imageName(text: string): string {
  if (text.length > 255 || !NAME.test(text))
    throw new LonghaulError('ConfigInvalid', `${JSON.stringify(text)} is no image name`, {
      next: 'Use lower-case letters, digits, ".", "_", "-" and "/", and a tag after ":".',
    });
  return /:[^/]+$/.test(text) ? text : `${text}:latest`;
}

const imagesDir = (dir: string) => join(dir, 'images');
const recordFile = (dir: string, hex: string) => join(imagesDir(dir), `${hex}.json`);
/** Names hold slashes and file systems may ignore case: hexadecimal keeps both apart. */
const nameFile = (dir: string, name: string) =>
  join(imagesDir(dir), 'names', `${Buffer.from(imageName(name)).toString('hex')}`);
const stepFile = (dir: string, key: string) => join(imagesDir(dir), 'steps', `${key}.json`);

/** Either the old content or all of the new, after a crash too. `DiskFull` or `StoreReadOnly` otherwise. */
function writeAtomically(file: string, text: string): void {
  const partial = `${file}.${randomBytes(6).toString('hex')}.partial`;
  try {
    mkdirSync(dirname(file), { recursive: true, mode: 0o700 });
    const fd = openSync(partial, 'wx', 0o600);
    try {
      writeSync(fd, text);
      fsyncSync(fd);
    } finally {
      closeSync(fd);
    }
    renameSync(partial, file);
    const folder = openSync(dirname(file), 'r');
    fsyncSync(folder);
    closeSync(folder);
  } catch (error) {
    rmSync(partial, { force: true });
    throw attribute(error, 'StoreUnavailable', 'image record');
  }
}

function readJson<T>(file: string): T | null {
  try {
    return JSON.parse(readFileSync(file, 'utf8')) as T;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
    throw error;
  }
}

/** The record of a digest; null where the store has none. `dir` is the driver's. */
export function readImage(dir: string, digest: string): ImageRecord | null {
  const hex = digestHex(digest);
  return hex === null ? null : readJson<ImageRecord>(recordFile(dir, hex));
}

export function writeImage(dir: string, record: ImageRecord): void {
  writeAtomically(recordFile(dir, digestHex(record.digest)!), `${JSON.stringify(record)}\n`);
}

function filesOf(folder: string): string[] {
  try {
    return readdirSync(folder).filter((name) => !name.endsWith('.partial'));
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return [];
    throw error;
  }
}

export function listImages(dir: string): ImageRecord[] {
  return filesOf(imagesDir(dir))
    .filter((name) => name.endsWith('.json'))
    .map((name) => readImage(dir, name.slice(0, -'.json'.length)))
    .filter((record) => record !== null)
    .sort((a, b) => a.createdAt.localeCompare(b.createdAt));
}

export function removeImage(dir: string, digest: string): void {
  rmSync(recordFile(dir, digestHex(digest)!), { force: true });
}

/** Layers that images of this driver's folder stand on, topmost of each. */
export function imageLayers(dir: string): Set<LayerId> {
  return new Set(listImages(dir).flatMap((record) => record.layer ?? []));
}

export function writeName(dir: string, name: string, digest: string): void {
  writeAtomically(nameFile(dir, name), digest);
}

export function readName(dir: string, name: string): string | null {
  try {
    return readFileSync(nameFile(dir, name), 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
    throw error;
  }
}

/** Every name and the digest it stands for. */
export function listNames(dir: string): Map<string, string> {
  const names = filesOf(join(imagesDir(dir), 'names')).map((hex) =>
    Buffer.from(hex, 'hex').toString(),
  );
  return new Map(names.flatMap((name) => [[name, readName(dir, name)!]]));
}

export function removeName(dir: string, name: string): void {
  rmSync(nameFile(dir, name), { force: true });
}

/**
 * The layer that a build step left behind, by the step's key; it may be gone. It counts as made now, so that
 * it outlasts a prune until an image names it.
 */
export function readStep(dir: string, key: string): LayerId | null {
  const layer = readJson<{ layer: LayerId }>(stepFile(dir, key))?.layer ?? null;
  const now = new Date();
  try {
    if (layer !== null) utimesSync(join(dir, 'layers', layer), now, now);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
    throw error;
  }
  return layer;
}

export function writeStep(dir: string, key: string, layer: LayerId): void {
  writeAtomically(stepFile(dir, key), JSON.stringify({ layer }));
}
