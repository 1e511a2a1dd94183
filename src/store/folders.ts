import { lstatSync, statSync } from 'node:fs';
import { mkdir, open } from 'node:fs/promises';
import { dirname } from 'node:path';
import { LonghaulError } from '../core/index.ts';
import { codeOf, fileError } from './failures.ts';

/**
 * Creates a folder and those above it, closed to others; an existing one is left as it is. Step by step,
 * since Node's own recursive mkdir reports a read-only file system as a missing folder, and never returns
 * below /proc. `StoreReadOnly`, `DiskFull`, or `ConfigInvalid` where a file is in the way.
 */
export async function makeFolder(path: string): Promise<void> {
  try {
    if (statSync(path, { throwIfNoEntry: false })?.isDirectory()) return;
    if (dirname(path) !== path) await makeFolder(dirname(path));
    await mkdir(path, { mode: 0o700 });
  } catch (thrown) {
    if (codeOf(thrown) === 'EEXIST' && exists(path) && statSync(path).isDirectory()) return;
    if (codeOf(thrown) === 'ENOENT')
      throw new LonghaulError('StoreReadOnly', `no folder can be created at ${path}`, {
        cause: thrown,
      });
    throw fileError(thrown, path);
  }
}

/** A folder, not a link, that belongs to us and is closed to others: what is in it was put there by us. */
export function isPrivateFolder(folder: string): boolean {
  try {
    const stat = lstatSync(folder);
    const ours = process.getuid === undefined || stat.uid === process.getuid();
    return stat.isDirectory() && ours && (stat.mode & 0o077) === 0;
  } catch {
    return false;
  }
}

export function exists(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false }) !== undefined;
}

/** Makes the names in a folder survive a power failure. */
export async function syncFolder(folder: string): Promise<void> {
  const handle = await open(folder, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}
