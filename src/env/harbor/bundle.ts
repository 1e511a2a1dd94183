import { createHash } from 'node:crypto';
import { constants } from 'node:fs';
import { type FileHandle, lstat, open, readdir, readlink, realpath } from 'node:fs/promises';
import { isAbsolute, join, relative, sep } from 'node:path';
import { taskInvalid } from './invalid.ts';

/** Bounds of a bundle. What is larger belongs into an image, not into a task directory. */
export const BUNDLE_LIMITS = {
  fileBytes: 16 * 1024 * 1024,
  totalBytes: 64 * 1024 * 1024,
  entries: 5_000,
  depth: 32,
} as const;

/** One file, directory or link of a bundle. `path` is relative to the part it lies in, with `/`. */
export type BundleEntry =
  | { kind: 'directory'; path: string; mode: number }
  | { kind: 'symlink'; path: string; target: string }
  | { kind: 'file'; path: string; mode: number; bytes: number; sha256: string };

/** Left behind by tools that ran in the directory; in neither the hash nor the sandbox. */
const IGNORED = new Set(['__pycache__', '.DS_Store']);

/**
 * Lists one part of a task (`environment/`, `tests/`, `solution/`) in a fixed order. Links must stay
 * inside the part. `TaskInvalid` for links that lead outside, special files and what is too large.
 * Returns null if the part does not exist.
 */
export async function scanPart(taskDir: string, part: string): Promise<BundleEntry[] | null> {
  const root = join(taskDir, part);
  const stat = await lstat(root).catch(() => null);
  if (stat === null) return null;
  if (!stat.isDirectory()) throw taskInvalid(root, null, 'expected a directory');
  const entries: BundleEntry[] = [];
  const totals = { bytes: 0 };
  await walk(root, '', 0, entries, totals);
  return entries.sort((a, b) => (a.path < b.path ? -1 : 1));
}

async function walk(
  root: string,
  inside: string,
  depth: number,
  entries: BundleEntry[],
  totals: { bytes: number },
): Promise<void> {
  if (depth > BUNDLE_LIMITS.depth)
    throw taskInvalid(join(root, inside), null, `nested deeper than ${BUNDLE_LIMITS.depth} levels`);
  for (const name of await readdir(join(root, inside))) {
    if (IGNORED.has(name)) continue;
    const path = inside === '' ? name : `${inside}/${name}`;
    const full = join(root, path);
    if (entries.length >= BUNDLE_LIMITS.entries)
      throw taskInvalid(root, null, `more than ${BUNDLE_LIMITS.entries} files`);
    const stat = await lstat(full);
    if (stat.isSymbolicLink()) {
      entries.push({ kind: 'symlink', path, target: await checkedTarget(root, full) });
    } else if (stat.isDirectory()) {
      entries.push({ kind: 'directory', path, mode: stat.mode & 0o777 });
      await walk(root, path, depth + 1, entries, totals);
    } else if (stat.isFile()) {
      const content = await readWhole(full);
      totals.bytes += content.length;
      if (totals.bytes > BUNDLE_LIMITS.totalBytes)
        throw taskInvalid(root, null, `more than ${BUNDLE_LIMITS.totalBytes >> 20} MiB in all`);
      entries.push({
        kind: 'file',
        path,
        mode: stat.mode & 0o777,
        bytes: content.length,
        sha256: sha256(content),
      });
    } else {
      throw taskInvalid(full, null, 'expected a file, directory or symlink');
    }
  }
}

/** Target of a link if it stays inside `root`. */
async function checkedTarget(root: string, link: string): Promise<string> {
  const target = await readlink(link);
  const outside = taskInvalid(
    link,
    null,
    `symlink to ${target}: expected a relative link to something inside ${root}`,
  );
  if (isAbsolute(target)) throw outside;
  const real = await realpath(link).catch(() => null);
  if (real === null || !isInside(await realpath(root), real)) throw outside;
  return target;
}

export function isInside(root: string, path: string): boolean {
  const way = relative(root, path);
  return way === '' || (way !== '..' && !way.startsWith(`..${sep}`) && !isAbsolute(way));
}

/**
 * Reads a regular file of a task whole. Neither a link nor a pipe put in its place is followed.
 * `TaskInvalid` for those and for more than `limit` bytes; the system's error if it is missing.
 */
export async function readWhole(
  path: string,
  limit: number = BUNDLE_LIMITS.fileBytes,
): Promise<Buffer> {
  let handle: FileHandle;
  try {
    handle = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
  } catch (thrown) {
    if ((thrown as NodeJS.ErrnoException).code === 'ELOOP')
      throw taskInvalid(path, null, 'expected a regular file, found a symlink');
    throw thrown;
  }
  try {
    const stat = await handle.stat();
    if (!stat.isFile()) throw taskInvalid(path, null, 'expected a regular file');
    if (stat.size > limit)
      throw taskInvalid(path, null, `too large: ${stat.size} bytes, at most ${limit} are read`);
    return await handle.readFile();
  } finally {
    await handle.close();
  }
}

/** Content of an entry, which must still be what it was when the task was opened. */
export async function readEntry(
  root: string,
  entry: BundleEntry & { kind: 'file' },
): Promise<Buffer> {
  const path = join(root, entry.path);
  const content = await readWhole(path);
  if (sha256(content) !== entry.sha256)
    throw taskInvalid(path, null, 'changed since the task was opened; open it again');
  return content;
}

/**
 * Hash of a bundle: hex SHA-256 over paths, kinds, modes and contents in path order. Independent of
 * where the directory lies, of file times and of the order in which the file system lists it.
 */
export function hashBundle(
  texts: Readonly<Record<string, string>>,
  parts: Readonly<Record<string, readonly BundleEntry[]>>,
): string {
  const lines: string[][] = [];
  for (const [name, text] of Object.entries(texts)) lines.push([name, 'file', '644', sha256(text)]);
  for (const [part, entries] of Object.entries(parts))
    for (const entry of entries) {
      const path = `${part}/${entry.path}`;
      if (entry.kind === 'directory') lines.push([path, 'directory']);
      else if (entry.kind === 'symlink') lines.push([path, 'symlink', entry.target]);
      // Only whether it can be executed: version control keeps no more of the mode than that.
      else lines.push([path, 'file', entry.mode & 0o100 ? '755' : '644', entry.sha256]);
    }
  const text = lines.map((line) => JSON.stringify(line)).sort();
  return sha256(text.join('\n'));
}

function sha256(data: string | Uint8Array): string {
  return createHash('sha256').update(data).digest('hex');
}
