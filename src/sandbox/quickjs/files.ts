import { posix } from 'node:path';
import { type FileEntry, LonghaulError } from '../../core/index.ts';

const WORKSPACE = '/workspace';
const MAX_NAME_BYTES = 255;

/**
 * Files in memory: absolute path to content. Contents are never changed in place, so copying the map
 * copies the workspace. Directories exist by the files below them.
 */
export type MemoryFiles = Map<string, Uint8Array>;

export interface MemoryLimits {
  diskBytes: number;
  inodes: number;
}

/** Absolute and without dots; relative paths start at the workspace. */
export function memoryPath(path: string): string {
  const full = posix.resolve(WORKSPACE, path);
  const tooLong = full.split('/').some((name) => Buffer.byteLength(name) > MAX_NAME_BYTES);
  if (path === '' || path.includes('\0') || tooLong)
    throw new LonghaulError('FileRefused', `${JSON.stringify(path)}: not a usable name`);
  return full;
}

const isDirectory = (files: MemoryFiles, path: string) =>
  path === WORKSPACE ||
  path === '/' ||
  [...files.keys()].some((each) => each.startsWith(`${path}/`));

export function memoryBytes(files: MemoryFiles): number {
  let sum = 0;
  for (const [path, data] of files) sum += path.length + data.length;
  return sum;
}

export function memoryRead(files: MemoryFiles, path: string, limit: number): Uint8Array {
  const full = memoryPath(path);
  const data = files.get(full);
  if (data) return data.slice(0, limit);
  if (isDirectory(files, full))
    throw new LonghaulError('FileRefused', `${JSON.stringify(path)}: not a regular file`);
  throw new LonghaulError('NotFound', `${JSON.stringify(path)}: no such file`, {
    next: 'List the directory to see what exists.',
  });
}

export function memoryWrite(
  files: MemoryFiles,
  path: string,
  data: Uint8Array,
  limits: MemoryLimits,
): void {
  const full = memoryPath(path);
  const parents = full.split('/').slice(1, -1);
  const underFile = parents.some((_, i) => files.has(`/${parents.slice(0, i + 1).join('/')}`));
  if (underFile || isDirectory(files, full))
    throw new LonghaulError('FileRefused', `${JSON.stringify(path)}: not a regular file`);
  const before = files.get(full)?.length ?? 0;
  const tooMuch = memoryBytes(files) - before + data.length > limits.diskBytes;
  if (tooMuch || (!files.has(full) && files.size >= limits.inodes))
    throw new LonghaulError('FileRefused', `${JSON.stringify(path)}: no space left`);
  files.set(full, data);
}

export function memoryList(files: MemoryFiles, path: string): FileEntry[] {
  const full = memoryPath(path);
  if (files.has(full) || !isDirectory(files, full))
    throw new LonghaulError('NotFound', `${JSON.stringify(path)}: no such directory`);
  const prefix = full === '/' ? '/' : `${full}/`;
  const found = new Map<string, FileEntry>();
  for (const [each, data] of files) {
    if (!each.startsWith(prefix)) continue;
    const [name, ...deeper] = each.slice(prefix.length).split('/') as [string, ...string[]];
    found.set(
      name,
      deeper.length > 0
        ? { name, kind: 'directory', bytes: 0 }
        : { name, kind: 'file', bytes: data.length },
    );
  }
  return [...found.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}
