/**
 * Files in memory, shared by both interpreters and by the file calls. Nothing of it is a path of the
 * host: a name that leads out of the tree does not exist. Names are bytes; here they are strings of one
 * character a byte ("byte strings"), so that every name can be a key and none is changed.
 */

export const WORKSPACE = '/workspace';
/** The only places where a guest may write. */
const WRITABLE = [WORKSPACE, '/tmp'];
const MAX_NAME_BYTES = 255;
const MAX_PATH_BYTES = 4096;
/** Symbolic links followed in one path, as in Linux. */
const MAX_LINKS = 40;

export interface FileNode {
  kind: 'file';
  data: Uint8Array;
  mode: number;
  modifiedMs: number;
  /** `data` is the start of a larger buffer that is this node's alone. */
  spare?: boolean;
  /** Descriptors that are open on it, and whether its last name is gone. */
  opens?: number;
  nameless?: boolean;
}

export type MemoryNode =
  | FileNode
  | { kind: 'directory'; mode: number; modifiedMs: number }
  | { kind: 'symlink'; target: string; modifiedMs: number }
  /** Reads as empty, swallows what is written. */
  | { kind: 'null' };

export interface MemoryLimits {
  diskBytes: number;
  inodes: number;
}

export type Errno =
  | 'EBADF'
  | 'EBUSY'
  | 'EEXIST'
  | 'EINVAL'
  | 'EISDIR'
  | 'ELOOP'
  | 'EMFILE'
  | 'ENAMETOOLONG'
  | 'ENOENT'
  | 'ENOSPC'
  | 'ENOTDIR'
  | 'ENOTEMPTY'
  | 'ENOTSUP'
  | 'EROFS'
  | 'ESPIPE';

const TEXT: Record<Errno, string> = {
  EBADF: 'not open for this',
  EBUSY: 'in use',
  EEXIST: 'exists already',
  EINVAL: 'not a usable name',
  EISDIR: 'is a directory',
  ELOOP: 'too many symbolic links',
  EMFILE: 'too many open files',
  ENAMETOOLONG: 'name too long',
  ENOENT: 'no such file or directory',
  ENOSPC: 'no space left',
  ENOTDIR: 'not a directory',
  ENOTEMPTY: 'directory not empty',
  ENOTSUP: 'not supported',
  EROFS: 'read-only',
  ESPIPE: 'cannot seek',
};

/** A file operation that cannot be done, as the guest's own doing. */
export class FileFault extends Error {
  readonly errno: Errno;

  constructor(errno: Errno) {
    super(TEXT[errno]);
    this.errno = errno;
  }
}

/** A path as byte string; `EINVAL` for an empty one or one with NUL. */
export function byteString(path: string | Uint8Array): string {
  const bytes = typeof path === 'string' ? Buffer.from(path) : Buffer.from(path);
  if (bytes.length === 0 || bytes.includes(0)) throw new FileFault('EINVAL');
  return bytes.toString('latin1');
}

export const parentOf = (path: string) => path.slice(0, path.lastIndexOf('/')) || '/';
const nameOf = (path: string) => path.slice(path.lastIndexOf('/') + 1);
const within = (path: string, folder: string) => path === folder || path.startsWith(`${folder}/`);
const childOf = (folder: string, name: string) =>
  folder === '/' ? `/${name}` : `${folder}/${name}`;
const directory = (): MemoryNode => ({ kind: 'directory', mode: 0o755, modifiedMs: Date.now() });

/** What a node counts for in the disk limit: its content and its name. */
const weightOf = (path: string, node: MemoryNode) =>
  path.length +
  (node.kind === 'file' ? node.data.length : node.kind === 'symlink' ? node.target.length : 0);

/** Names below each directory. */
function indexOf(nodes: Iterable<string>): Map<string, Set<string>> {
  const index = new Map<string, Set<string>>();
  for (const path of nodes) {
    if (path === '/') continue;
    const names = index.get(parentOf(path));
    if (names) names.add(nameOf(path));
    else index.set(parentOf(path), new Set([nameOf(path)]));
  }
  return index;
}

/** Read-only files below `/`: a null device, and secrets. */
export class FixedFiles {
  readonly nodes = new Map<string, MemoryNode>();
  readonly index: Map<string, Set<string>>;

  constructor(files: Iterable<[path: string, node: MemoryNode]> = []) {
    for (const [path, node] of [['/dev/null', { kind: 'null' }] as const, ...files]) {
      this.nodes.set(path, node);
      for (let up = parentOf(path); !this.nodes.has(up); up = parentOf(up))
        this.nodes.set(up, directory());
    }
    this.index = indexOf(this.nodes.keys());
  }
}

/**
 * A tree of files under limits. Contents are never changed in place where two trees may share them
 * (`copy`); the interpreters' own tree is changed in place, and says what changed (`takeChanges`).
 */
export class MemoryFiles {
  readonly limits: MemoryLimits;
  fixed: FixedFiles;
  readonly #nodes = new Map<string, MemoryNode>();
  #index: Map<string, Set<string>> | null = null;
  #bytes = 0;
  #touched = new Set<string>();
  #dirty = new Set<FileNode>();

  constructor(limits: MemoryLimits, fixed = new FixedFiles()) {
    this.limits = limits;
    this.fixed = fixed;
    for (const path of WRITABLE) this.#put(path, directory());
    this.takeChanges();
  }

  get bytes(): number {
    return this.#bytes;
  }

  get inodes(): number {
    return this.#nodes.size;
  }

  /** The workspace's nodes, parents before what they hold; the workspace itself is left out. */
  workspace(): [path: string, node: MemoryNode][] {
    return [...this.#nodes].filter(([path]) => path.startsWith(`${WORKSPACE}/`)).sort(byPath);
  }

  /** Everything, to compare one state with another. */
  nodes(): ReadonlyMap<string, MemoryNode> {
    return this.#nodes;
  }

  /** Without following a link at the end; undefined where nothing is. The path is canonical. */
  at(path: string): MemoryNode | undefined {
    return this.#nodes.get(path) ?? this.fixed.nodes.get(path);
  }

  /** At the end of a path, or `ENOENT`. */
  node(path: string): MemoryNode {
    const node = this.at(path);
    if (!node) throw new FileFault('ENOENT');
    return node;
  }

  /**
   * The canonical form of a path: no dots and no links, but for the last name where `follow` is false.
   * The last name need not exist. Relative paths begin at `from`.
   */
  resolve(path: string, follow: boolean, from = WORKSPACE): string {
    if (path.length > MAX_PATH_BYTES) throw new FileFault('ENAMETOOLONG');
    if (path === '' || path.includes('\0')) throw new FileFault('EINVAL');
    const rest = path.split('/').reverse();
    let here = path.startsWith('/') ? '/' : from;
    let links = 0;
    while (rest.length > 0) {
      const name = rest.pop()!;
      if (name === '' || name === '.') continue;
      if (name.length > MAX_NAME_BYTES) throw new FileFault('ENAMETOOLONG');
      if (this.node(here).kind !== 'directory') throw new FileFault('ENOTDIR');
      if (name === '..') {
        here = parentOf(here);
        continue;
      }
      const next = childOf(here, name);
      const node = this.at(next);
      const last = rest.every((each) => each === '');
      if (node?.kind === 'symlink' && (follow || !last)) {
        if (++links > MAX_LINKS) throw new FileFault('ELOOP');
        if (node.target.startsWith('/')) here = '/';
        rest.push(...node.target.split('/').reverse());
        continue;
      }
      here = next;
    }
    // A name with a slash at its end is a directory, or nothing.
    if (path.endsWith('/') && this.at(here) && this.node(here).kind !== 'directory')
      throw new FileFault('ENOTDIR');
    return here;
  }

  /** Names in a directory, in the order of their bytes. The path is canonical. */
  list(path: string): string[] {
    if (this.node(path).kind !== 'directory') throw new FileFault('ENOTDIR');
    this.#index ??= indexOf(this.#nodes.keys());
    const names = new Set(this.#index.get(path));
    for (const name of this.fixed.index.get(path) ?? []) names.add(name);
    return [...names].sort();
  }

  #check(path: string): void {
    if (!WRITABLE.some((folder) => path !== folder && within(path, folder)))
      throw new FileFault(WRITABLE.includes(path) ? 'EBUSY' : 'EROFS');
    const parent = this.node(parentOf(path));
    if (parent.kind !== 'directory') throw new FileFault('ENOTDIR');
  }

  #put(path: string, node: MemoryNode): void {
    const before = this.#nodes.get(path);
    if (before) this.#bytes -= weightOf(path, before);
    this.#nodes.set(path, node);
    this.#bytes += weightOf(path, node);
    this.#touched.add(path);
    if (!this.#index || before) return;
    const names = this.#index.get(parentOf(path));
    if (names) names.add(nameOf(path));
    else this.#index.set(parentOf(path), new Set([nameOf(path)]));
  }

  #take(path: string): MemoryNode {
    const node = this.#nodes.get(path)!;
    this.#nodes.delete(path);
    this.#bytes -= weightOf(path, node);
    this.#touched.add(path);
    this.#index?.get(parentOf(path))?.delete(nameOf(path));
    return node;
  }

  /** Puts a node at a canonical path, in place of a file or link that is there. */
  set(path: string, node: MemoryNode): void {
    this.#check(path);
    const before = this.#nodes.get(path);
    if (before?.kind === 'directory') throw new FileFault('EISDIR');
    const more = weightOf(path, node) - (before ? weightOf(path, before) : 0);
    if (this.#bytes + more > this.limits.diskBytes) throw new FileFault('ENOSPC');
    if (!before && this.#nodes.size >= this.limits.inodes) throw new FileFault('ENOSPC');
    if (before) this.#leave(before);
    else this.#stampParent(path);
    this.#put(path, node);
  }

  makeDirectory(path: string, mode = 0o755): void {
    if (this.at(path)) throw new FileFault('EEXIST');
    this.set(path, { kind: 'directory', mode, modifiedMs: Date.now() });
  }

  /**
   * The canonical path of a file to be written, whose parents are made where they are missing.
   * `EISDIR` where a directory is.
   */
  resolveNew(path: string): string {
    const parts = path.split('/');
    for (let i = 1; i < parts.length; i++) {
      const parent = parts.slice(0, i).join('/');
      if (parent === '') continue;
      const full = this.resolve(parent, true);
      if (!this.at(full)) this.makeDirectory(full);
    }
    const full = this.resolve(path, true);
    if (path.endsWith('/') || this.at(full)?.kind === 'directory') throw new FileFault('EISDIR');
    return full;
  }

  /** A file that is still open goes on to count until it is closed. */
  #leave(node: MemoryNode): void {
    if (node.kind !== 'file' || !node.opens) return;
    node.nameless = true;
    this.#bytes += node.data.length;
  }

  remove(path: string, kind: 'directory' | 'file'): void {
    const node = this.node(path);
    this.#check(path);
    if (kind === 'directory') {
      if (node.kind !== 'directory') throw new FileFault('ENOTDIR');
      if (this.list(path).length > 0) throw new FileFault('ENOTEMPTY');
    } else if (node.kind === 'directory') throw new FileFault('EISDIR');
    this.#leave(this.#take(path));
    this.#stampParent(path);
  }

  rename(from: string, to: string): void {
    const node = this.node(from);
    this.#check(from);
    this.#check(to);
    if (from === to) return;
    const before = this.at(to);
    if (node.kind === 'directory' && within(to, from)) throw new FileFault('EINVAL');
    const moved = [from];
    if (node.kind === 'directory')
      for (const path of this.#nodes.keys()) if (path.startsWith(`${from}/`)) moved.push(path);
    const longer = (to.length - from.length) * moved.length;
    if (this.#bytes + longer > this.limits.diskBytes) throw new FileFault('ENOSPC');
    if (before) {
      if (node.kind === 'directory' && before.kind !== 'directory') throw new FileFault('ENOTDIR');
      this.remove(to, node.kind === 'directory' ? 'directory' : 'file');
    }
    const taken = moved.map((path) => [to + path.slice(from.length), this.#take(path)] as const);
    for (const [path, each] of taken) this.#put(path, each);
    for (const path of [from, to]) this.#stampParent(path);
  }

  /** Programs that remember what a directory holds look at its time. */
  #stampParent(path: string): void {
    const parent = this.#nodes.get(parentOf(path));
    if (parent?.kind !== 'directory') return;
    const modifiedMs = Math.max(Date.now(), parent.modifiedMs + 1);
    this.#nodes.set(parentOf(path), { ...parent, modifiedMs });
  }

  open(node: FileNode): void {
    node.opens = (node.opens ?? 0) + 1;
  }

  close(node: FileNode): void {
    node.opens = (node.opens ?? 1) - 1;
    if (node.nameless && node.opens === 0) this.#bytes -= node.data.length;
  }

  /** Grows or cuts the content in place. New bytes are zero. */
  resize(node: FileNode, length: number): void {
    const more = length - node.data.length;
    if (more > 0 && this.#bytes + more > this.limits.diskBytes) throw new FileFault('ENOSPC');
    if (more > 0 && !(node.spare && length <= node.data.buffer.byteLength)) {
      const room = Math.min(Math.max(length, 2 * node.data.length), this.limits.diskBytes);
      const data = new Uint8Array(Math.max(room, length));
      data.set(node.data);
      node.data = data;
      node.spare = true;
    } else if (more > 0) {
      new Uint8Array(node.data.buffer, node.data.length, more).fill(0);
    }
    node.data = node.spare
      ? new Uint8Array(node.data.buffer, 0, length)
      : node.data.subarray(0, length);
    this.#bytes += more;
    this.changed(node);
  }

  /** Says that a file's content or times were changed in place. */
  changed(node: FileNode): void {
    node.modifiedMs = Date.now();
    this.#dirty.add(node);
  }

  /** What was put or changed since the last call, parents first, and what is no longer there. */
  takeChanges(): { put: [path: string, node: MemoryNode][]; removed: string[] } {
    const put: [string, MemoryNode][] = [];
    const removed: string[] = [];
    for (const path of this.#touched) {
      const node = this.#nodes.get(path);
      if (node) put.push([path, node]);
      else removed.push(path);
    }
    if (this.#dirty.size > 0)
      for (const [path, node] of this.#nodes)
        if (node.kind === 'file' && this.#dirty.has(node) && !this.#touched.has(path))
          put.push([path, node]);
    this.#touched = new Set();
    this.#dirty = new Set();
    return { put: put.sort(byPath), removed };
  }

  /**
   * What another process says has changed, believed as far as it is a possible change. `FileFault` when
   * it is none; the tree is then of no use.
   */
  apply(put: readonly [path: string, node: MemoryNode][], removed: readonly string[]): void {
    // What a directory holds goes before it.
    for (const path of [...removed].sort().reverse()) {
      if (!this.#nodes.has(path)) continue;
      this.#check(path);
      this.#take(path);
    }
    for (const [path, node] of [...put].sort(byPath)) {
      if (this.resolve(path, false, '/') !== path) throw new FileFault('EINVAL');
      const before = this.#nodes.get(path);
      if (!(node.kind === 'directory' && before?.kind === 'directory')) this.#check(path);
      this.#put(path, node);
    }
    for (const path of [...removed, ...put.map(([each]) => each)])
      if (this.at(path)?.kind !== 'directory' && this.#hasBelow(path))
        throw new FileFault('EINVAL');
    const { diskBytes, inodes } = this.limits;
    if (this.#bytes > diskBytes || this.#nodes.size > inodes) throw new FileFault('ENOSPC');
    this.takeChanges();
  }

  #hasBelow(path: string): boolean {
    this.#index ??= indexOf(this.#nodes.keys());
    return (this.#index.get(path)?.size ?? 0) > 0;
  }

  /** The workspace alone, in a tree of its own that shares the contents. `ENOSPC` when it does not fit. */
  copy(limits = this.limits): MemoryFiles {
    const files = new MemoryFiles(limits);
    for (const [path, node] of this.#nodes) {
      if (!within(path, WORKSPACE)) continue;
      if (path !== WORKSPACE) files.#bytes += weightOf(path, node);
      files.#nodes.set(path, node);
    }
    if (files.#bytes > limits.diskBytes || files.inodes > limits.inodes)
      throw new FileFault('ENOSPC');
    return files;
  }

  /** A tree of nodes, parents first. `ENOSPC` when they do not fit. */
  static of(nodes: readonly [path: string, node: MemoryNode][], limits: MemoryLimits): MemoryFiles {
    const files = new MemoryFiles(limits);
    for (const [path, node] of nodes) files.set(path, node);
    // As they were, not as putting files into them has made them.
    for (const [path, node] of nodes) if (node.kind === 'directory') files.#nodes.set(path, node);
    files.takeChanges();
    return files;
  }
}

function byPath([a]: readonly [string, unknown], [b]: readonly [string, unknown]): number {
  return a < b ? -1 : a > b ? 1 : 0;
}
