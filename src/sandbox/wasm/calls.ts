import {
  type FileEntry,
  type FileStat,
  LonghaulError,
  type ReadOptions,
  type SandboxPath,
} from '../../core/index.ts';
import { byteString, FileFault, type MemoryFiles, type MemoryNode } from './files.ts';

/** File calls on a sandbox's tree, with the errors that the contract names. */

const DEFAULT_READ_LIMIT = 1024 * 1024;

const shown = (path: SandboxPath) =>
  JSON.stringify(typeof path === 'string' ? path : Buffer.from(path).toString());

function named<T>(path: SandboxPath, call: (bytes: string) => T): T {
  try {
    return call(byteString(path));
  } catch (error) {
    if (!(error instanceof FileFault)) throw error;
    if (error.errno === 'ENOENT' || error.errno === 'ENOTDIR')
      throw new LonghaulError('NotFound', `${shown(path)}: ${error.message}`, {
        next: 'List the directory to see what exists.',
      });
    throw new LonghaulError('FileRefused', `${shown(path)}: ${error.message}`);
  }
}

export function readContent(
  files: MemoryFiles,
  path: SandboxPath,
  options: number | ReadOptions,
): Uint8Array {
  const { limit = DEFAULT_READ_LIMIT, offset = 0 } =
    typeof options === 'number' ? { limit: options } : options;
  return named(path, (name) => {
    const node = files.node(files.resolve(name, true));
    if (node.kind !== 'file')
      throw new LonghaulError('FileRefused', `${shown(path)}: not a regular file`);
    return new Uint8Array(node.data.subarray(offset, offset + limit));
  });
}

/** Directories on the way are made. The data is the tree's from now on. */
export function writeContent(files: MemoryFiles, path: SandboxPath, data: Uint8Array): void {
  try {
    named(path, (name) => {
      const full = files.resolveNew(name);
      const before = files.at(full);
      if (before?.kind === 'null') throw new FileFault('EINVAL');
      const mode = before?.kind === 'file' ? before.mode : 0o644;
      files.set(full, { kind: 'file', data, mode, modifiedMs: Date.now() });
    });
  } catch (error) {
    if (error instanceof LonghaulError && error.code === 'NotFound')
      throw new LonghaulError('FileRefused', error.message);
    throw error;
  }
}

function entryOf(name: string, node: MemoryNode): FileEntry {
  const raw = Buffer.from(name, 'latin1');
  const text = raw.toString();
  return {
    name: text,
    ...(!Buffer.from(text).equals(raw) && { rawName: new Uint8Array(raw) }),
    kind: node.kind === 'null' ? 'other' : node.kind,
    bytes: node.kind === 'file' ? node.data.length : 0,
  };
}

export function listEntries(files: MemoryFiles, path: SandboxPath): FileEntry[] {
  return named(path, (name) => {
    const full = files.resolve(name, true);
    const entries = files.list(full).map((each) => {
      return entryOf(each, files.node(full === '/' ? `/${each}` : `${full}/${each}`));
    });
    return entries.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
  });
}

export function statOf(files: MemoryFiles, path: SandboxPath): FileStat {
  return named(path, (name) => {
    const node = files.node(files.resolve(name, false));
    switch (node.kind) {
      case 'file': {
        const { kind, mode, modifiedMs } = node;
        return { kind, bytes: node.data.length, mode, modifiedMs };
      }
      case 'directory':
        return { kind: node.kind, bytes: 0, mode: node.mode, modifiedMs: node.modifiedMs };
      case 'symlink': {
        const { kind, modifiedMs } = node;
        const target = Buffer.from(node.target, 'latin1').toString();
        return { kind, bytes: node.target.length, mode: 0o777, modifiedMs, target };
      }
      case 'null':
        return { kind: 'other', bytes: 0, mode: 0o666, modifiedMs: 0 };
    }
  });
}
