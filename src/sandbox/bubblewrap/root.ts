import { realpathSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type { LayerId } from '../contract.ts';
import { digestHex, readImage } from '../images/record.ts';
import type { RootShape } from './command.ts';
import type { LayerStack } from './layers.ts';

/** What the agent starts processes with: see process.py. */
export interface AgentDefaults {
  env: Readonly<Record<string, string>>;
  cwd: string;
  /** The interpreter of snippets, found in the image; null: the agent's own, which is the host's. */
  python: string | null;
}

export const HOST_DEFAULTS: AgentDefaults = { env: {}, cwd: '/workspace', python: null };

/** A root file system that is not simply the host's. */
export interface SandboxRoot extends RootShape {
  /** Durable layers of the image, topmost first; where the root is writable, what it starts from. */
  layers: LayerStack;
  dir: string | null;
  agent: AgentDefaults;
}

const READ_AND_ENTER = 0o5;

/**
 * The name of an image as sandboxes are told apart by it: links of directories resolved, digests in one
 * form. `ConfigInvalid` for what names none, `NotFound` for one that is not there.
 */
export function canonicalImage(image: string, dir: string): string {
  const [kind, rest] = [image.slice(0, image.indexOf(':')), image.slice(image.indexOf(':') + 1)];
  if (image === 'host' || image === 'build:scratch' || image === 'build:host') return image;
  if (kind === 'dir') return `dir:${directory(rest)}`;
  if (kind === 'image' || kind === 'rootfs') {
    const hex = digestHex(rest);
    if (hex && readImage(dir, hex)) return `${kind}:sha256:${hex}`;
    throw new LonghaulError('NotFound', `the image store has no image ${JSON.stringify(rest)}`, {
      next: 'Add it with `ImageStore.add` or `ImageStore.build` and use the digest of what they return.',
    });
  }
  throw new LonghaulError('ConfigInvalid', `${JSON.stringify(image)} names no image`, {
    next: "Use 'host', 'dir:PATH', 'image:DIGEST' or 'rootfs:DIGEST'.",
  });
}

function directory(path: string): string {
  try {
    const real = realpathSync(path);
    if (statSync(real).isDirectory()) return real;
  } catch {
    // as one that is no directory
  }
  throw new LonghaulError('NotFound', `image dir:${path}: no such directory`, {
    next: 'Name a directory that holds a root file system: usr, bin, lib, …',
  });
}

/** The root of a canonical image; null for the host's own. */
export function sandboxRoot(
  image: string,
  options: { dir: string; ownUid: boolean; stackOf(layer: LayerId): LayerStack },
): SandboxRoot | null {
  if (image === 'host') return null;
  const plain = { layers: [], dir: null, writable: false, host: false, sharedTmp: false };
  if (image.startsWith('build:')) {
    const host = image === 'build:host';
    const agent = { ...HOST_DEFAULTS, cwd: '/', python: host ? null : 'python3' };
    return { ...plain, writable: true, host, sharedTmp: true, agent };
  }
  if (image.startsWith('dir:')) {
    const dir = image.slice('dir:'.length);
    if (options.ownUid) requireReadable(dir);
    return { ...plain, dir, agent: { ...HOST_DEFAULTS, python: 'python3' } };
  }
  const record = readImage(options.dir, image.slice(image.indexOf(':') + 1));
  if (!record) throw new LonghaulError('NotFound', `the image store no longer has ${image}`);
  return {
    ...plain,
    writable: image.startsWith('rootfs:'),
    host: record.host,
    layers: record.layer === null ? [] : options.stackOf(record.layer),
    agent: {
      env: record.config.env,
      cwd: record.config.workdir ?? '/workspace',
      python: record.host ? null : 'python3',
    },
  };
}

/**
 * Sandboxes have uids that own nothing of the host, so such a tree must be readable by all. It is not
 * mapped to the sandbox's uid: that would hand out what only its owner may read.
 */
function requireReadable(dir: string): void {
  for (const name of ['', 'bin', 'etc', 'lib', 'usr', 'usr/bin', 'usr/lib']) {
    const path = join(dir, name);
    let mode: number;
    try {
      const info = statSync(path);
      if (!info.isDirectory()) continue;
      mode = info.mode;
    } catch {
      continue;
    }
    if ((mode & READ_AND_ENTER) !== READ_AND_ENTER)
      throw new LonghaulError(
        'ConfigInvalid',
        `image dir:${dir}: the sandbox's uid cannot read ${path} (mode ${(mode & 0o7777).toString(8)})`,
        {
          next: `Make the tree readable by all (chmod -R o+rX ${dir}), or add it to the image store.`,
        },
      );
  }
}
