import { randomFillSync } from 'node:crypto';
import {
  type Errno,
  FileFault,
  type FileNode,
  type MemoryFiles,
  type MemoryNode,
} from './files.ts';

/**
 * WASI preview 1 (`wasi_snapshot_preview1`) over files in memory: no host path, socket, process or
 * environment variable is behind any of its calls. Every number from the guest is hostile; a pointer
 * outside its memory is EFAULT.
 */

/** Error numbers of preview 1. */
const ERRNO: Record<Errno | 'EFAULT' | 'EIO' | 'ENOMEM', number> = {
  EBADF: 8,
  EBUSY: 10,
  EEXIST: 20,
  EFAULT: 21,
  EINVAL: 28,
  EIO: 29,
  EISDIR: 31,
  ELOOP: 32,
  EMFILE: 33,
  ENAMETOOLONG: 37,
  ENOENT: 44,
  ENOMEM: 48,
  ENOSPC: 51,
  ENOTDIR: 54,
  ENOTEMPTY: 55,
  ENOTSUP: 58,
  EROFS: 69,
  ESPIPE: 70,
};

const FILETYPE = { null: 2, directory: 3, file: 4, symlink: 7 } as const;
const OPEN = { create: 1, directory: 2, exclusive: 4, truncate: 8 } as const;
const FDFLAG_APPEND = 1;
const RIGHT_READ = 1n << 1n;
const RIGHT_WRITE = 1n << 6n;
const ALL_RIGHTS = (1n << 30n) - 1n;
/** Set times: modification time given, or now. */
const SET_MODIFIED = 4;
const SET_MODIFIED_NOW = 8;

const ROOT_FD = 3;
const MAX_DESCRIPTORS = 1024;
const SUBSCRIPTION_BYTES = 48;
const EVENT_BYTES = 32;
const DIRENT_BYTES = 24;
const MAX_SUBSCRIPTIONS = 4096;
/** Milliseconds in one sleep, so that a sleep can be ended; the guest sleeps on. */
const MAX_SLEEP_MS = 2 ** 30;

interface Descriptor {
  kind: 'stdin' | 'stdout' | 'stderr' | 'node';
  node: MemoryNode;
  path: string;
  offset: number;
  read: boolean;
  write: boolean;
  append: boolean;
  /** Entries as they were when reading began, so that changes meanwhile neither skip nor repeat one. */
  entries?: string[];
}

/** Thrown through the guest by `proc_exit`. */
export class ProcessExit extends Error {
  readonly code: number;

  constructor(code: number) {
    super(`exit ${code}`);
    this.code = code;
  }
}

export interface WasiProcess {
  files: MemoryFiles;
  args: readonly string[];
  env: Readonly<Record<string, string>>;
  stdin: Uint8Array;
  output(stream: 1 | 2, chunk: Buffer): void;
}

/** Inode numbers: the same node has the same one as long as the interpreter lives. */
const inodes = new WeakMap<MemoryNode, bigint>();
let lastInode = 0n;

function inodeOf(node: MemoryNode): bigint {
  const known = inodes.get(node);
  if (known !== undefined) return known;
  inodes.set(node, ++lastInode);
  return lastInode;
}

const sleepCell = new Int32Array(new SharedArrayBuffer(4));
const count = (value: bigint): number => {
  if (value < 0n || value > BigInt(Number.MAX_SAFE_INTEGER)) throw new FileFault('EINVAL');
  return Number(value);
};
const nanoseconds = (ms: number) => BigInt(Math.round(ms * 1e6));
const sizeOf = (node: MemoryNode) =>
  node.kind === 'file' ? node.data.length : node.kind === 'symlink' ? node.target.length : 0;

/** The imports of one process; `attach` its memory before it runs. */
export class Wasi {
  readonly #process: WasiProcess;
  readonly #files: MemoryFiles;
  readonly #fds = new Map<number, Descriptor>();
  readonly #started = performance.now();
  #memory: WebAssembly.Memory | null = null;

  constructor(process: WasiProcess) {
    this.#process = process;
    this.#files = process.files;
    const standard = { node: { kind: 'null' } as const, path: '', offset: 0, append: false };
    this.#fds.set(0, { kind: 'stdin', ...standard, read: true, write: false });
    this.#fds.set(1, { kind: 'stdout', ...standard, read: false, write: true });
    this.#fds.set(2, { kind: 'stderr', ...standard, read: false, write: true });
    this.#fds.set(ROOT_FD, {
      ...standard,
      kind: 'node',
      node: this.#files.node('/'),
      path: '/',
      read: true,
      write: false,
    });
  }

  attach(memory: WebAssembly.Memory): void {
    this.#memory = memory;
  }

  /** Closes what the guest left open. */
  close(): void {
    for (const { node } of this.#fds.values()) if (node.kind === 'file') this.#files.close(node);
    this.#fds.clear();
  }

  get #view(): DataView {
    return new DataView(this.#memory!.buffer);
  }

  #bytes(pointer: number, length: number): Uint8Array {
    return new Uint8Array(this.#memory!.buffer, pointer >>> 0, length >>> 0);
  }

  #u32(pointer: number, value: number): void {
    this.#view.setUint32(pointer >>> 0, value, true);
  }

  #u64(pointer: number, value: bigint): void {
    this.#view.setBigUint64(pointer >>> 0, value, true);
  }

  #fd(fd: number): Descriptor {
    const found = this.#fds.get(fd);
    if (!found) throw new FileFault('EBADF');
    return found;
  }

  #file(fd: number): Descriptor & { node: FileNode } {
    const found = this.#fd(fd);
    if (found.node.kind === 'directory') throw new FileFault('EISDIR');
    if (found.kind !== 'node' || found.node.kind !== 'file') throw new FileFault('ESPIPE');
    return found as Descriptor & { node: FileNode };
  }

  #directory(fd: number): Descriptor {
    const found = this.#fd(fd);
    if (found.node.kind !== 'directory') throw new FileFault('ENOTDIR');
    return found;
  }

  #path(fd: number, pointer: number, length: number, follow: boolean): string {
    const from = this.#directory(fd).path;
    const text = Buffer.from(this.#bytes(pointer, length)).toString('latin1');
    return this.#files.resolve(text, follow, from);
  }

  #vectors(pointer: number, length: number): Uint8Array[] {
    const view = this.#view;
    const vectors: Uint8Array[] = [];
    for (let i = 0; i < length >>> 0; i++) {
      const at = (pointer >>> 0) + 8 * i;
      vectors.push(this.#bytes(view.getUint32(at, true), view.getUint32(at + 4, true)));
    }
    return vectors;
  }

  #stringsSize(strings: readonly string[], countPointer: number, sizePointer: number): void {
    this.#u32(countPointer, strings.length);
    this.#u32(
      sizePointer,
      strings.reduce((sum, each) => sum + Buffer.byteLength(each) + 1, 0),
    );
  }

  #strings(strings: readonly string[], pointers: number, buffer: number): void {
    let at = buffer >>> 0;
    for (const [i, each] of strings.entries()) {
      this.#u32((pointers >>> 0) + 4 * i, at);
      const bytes = Buffer.from(`${each}\0`);
      this.#bytes(at, bytes.length).set(bytes);
      at += bytes.length;
    }
  }

  #environment(): string[] {
    return Object.entries(this.#process.env).map(([name, value]) => `${name}=${value}`);
  }

  #readAt(from: Descriptor, vectors: readonly Uint8Array[], offset: number): number {
    if (!from.read) throw new FileFault('EBADF');
    const data = from.kind === 'stdin' ? this.#process.stdin : from.node;
    const content = 'kind' in data ? (data.kind === 'file' ? data.data : null) : data;
    if (content === null) {
      if (from.node.kind === 'directory') throw new FileFault('EISDIR');
      return 0;
    }
    let at = offset;
    for (const vector of vectors) {
      const part = content.subarray(at, at + vector.length);
      vector.set(part);
      at += part.length;
      if (part.length < vector.length) break;
    }
    return Math.max(0, at - offset);
  }

  #writeAt(to: Descriptor, vectors: readonly Uint8Array[], offset: number): number {
    if (!to.write) throw new FileFault('EBADF');
    const length = vectors.reduce((sum, vector) => sum + vector.length, 0);
    if (to.kind !== 'node') {
      const stream = to.kind === 'stdout' ? 1 : 2;
      for (const vector of vectors) this.#process.output(stream, Buffer.from(vector));
      return length;
    }
    const { node } = to;
    if (node.kind !== 'file' || length === 0) return length;
    if (offset + length > node.data.length) this.#files.resize(node, offset + length);
    let at = offset;
    for (const vector of vectors) {
      node.data.set(vector, at);
      at += vector.length;
    }
    this.#files.changed(node);
    return length;
  }

  #stat(node: MemoryNode, pointer: number): void {
    this.#bytes(pointer, 64).fill(0);
    const at = pointer >>> 0;
    const modified = 'modifiedMs' in node ? nanoseconds(node.modifiedMs) : 0n;
    this.#u64(at, 1n);
    this.#u64(at + 8, inodeOf(node));
    this.#view.setUint8(at + 16, FILETYPE[node.kind]);
    this.#u64(at + 24, 1n);
    this.#u64(at + 32, BigInt(sizeOf(node)));
    for (const offset of [40, 48, 56]) this.#u64(at + offset, modified);
  }

  #setTimes(node: MemoryNode, modified: bigint, flags: number): void {
    if (node.kind !== 'file') return;
    if (flags & (SET_MODIFIED | SET_MODIFIED_NOW)) this.#files.changed(node);
    if (flags & SET_MODIFIED) node.modifiedMs = count(modified) / 1e6;
  }

  #openPath(
    fd: number,
    lookup: number,
    [pointer, length]: readonly [number, number],
    flags: number,
    rights: bigint,
    fdflags: number,
  ): number {
    if (this.#fds.size >= MAX_DESCRIPTORS) throw new FileFault('EMFILE');
    const path = this.#path(fd, pointer, length, (lookup & 1) !== 0);
    const wantsWrite = (rights & RIGHT_WRITE) !== 0n;
    let node = this.#files.at(path);
    if (!node) {
      if (!(flags & OPEN.create)) throw new FileFault('ENOENT');
      node = { kind: 'file', data: new Uint8Array(), mode: 0o644, modifiedMs: Date.now() };
      this.#files.set(path, node);
    } else if (flags & OPEN.exclusive && flags & OPEN.create) throw new FileFault('EEXIST');
    if (node.kind === 'symlink') throw new FileFault('ELOOP');
    if (flags & OPEN.directory && node.kind !== 'directory') throw new FileFault('ENOTDIR');
    const changes = wantsWrite || (flags & OPEN.truncate) !== 0;
    if (changes && node.kind === 'directory') throw new FileFault('EISDIR');
    if (changes && node.kind === 'file' && this.#files.fixed.nodes.has(path))
      throw new FileFault('EROFS');
    if (flags & OPEN.truncate && node.kind === 'file') this.#files.resize(node, 0);
    if (node.kind === 'file') this.#files.open(node);
    let free = ROOT_FD + 1;
    while (this.#fds.has(free)) free++;
    this.#fds.set(free, {
      kind: 'node',
      node,
      path,
      offset: 0,
      read: node.kind === 'directory' || (rights & RIGHT_READ) !== 0n,
      write: wantsWrite,
      append: (fdflags & FDFLAG_APPEND) !== 0,
    });
    return free;
  }

  #readdir(fd: number, pointer: number, length: number, cookie: number): number {
    const from = this.#directory(fd);
    if (cookie === 0 || !from.entries) from.entries = ['.', '..', ...this.#files.list(from.path)];
    const out = this.#bytes(pointer, length);
    let used = 0;
    for (let i = cookie; i < from.entries.length && used < out.length; i++) {
      const name = Buffer.from(from.entries[i]!, 'latin1');
      const path = `${from.path === '/' ? '' : from.path}/${from.entries[i]}`;
      const node = i < 2 ? from.node : this.#files.at(path);
      if (!node) continue;
      const entry = Buffer.alloc(DIRENT_BYTES + name.length);
      entry.writeBigUInt64LE(BigInt(i + 1), 0);
      entry.writeBigUInt64LE(inodeOf(node), 8);
      entry.writeUInt32LE(name.length, 16);
      entry.writeUInt8(FILETYPE[node.kind], 20);
      entry.set(name, DIRENT_BYTES);
      const part = entry.subarray(0, out.length - used);
      out.set(part, used);
      used += part.length;
    }
    return used;
  }

  /** Sleeps until the first clock is due. Files and streams are always ready. */
  #poll(input: number, output: number, subscriptions: number): number {
    if (subscriptions === 0 || subscriptions >>> 0 > MAX_SUBSCRIPTIONS)
      throw new FileFault('EINVAL');
    const view = this.#view;
    const events: { userdata: bigint; type: number; inMs: number }[] = [];
    for (let i = 0; i < subscriptions; i++) {
      const at = (input >>> 0) + SUBSCRIPTION_BYTES * i;
      const type = view.getUint8(at + 8);
      let inMs = 0;
      if (type === 0) {
        const absolute = (view.getUint16(at + 40, true) & 1) !== 0;
        const ms = Number(view.getBigUint64(at + 24, true)) / 1e6;
        inMs = absolute ? ms - this.#clockMs(view.getUint32(at + 16, true)) : ms;
      }
      events.push({ userdata: view.getBigUint64(at, true), type, inMs });
    }
    const waitMs = Math.min(...events.map(({ inMs }) => inMs));
    if (waitMs > 0) Atomics.wait(sleepCell, 0, 0, Math.min(waitMs, MAX_SLEEP_MS));
    const due = events.filter(({ inMs }) => inMs <= Math.max(waitMs, 0));
    for (const [i, { userdata, type }] of due.entries()) {
      const at = (output >>> 0) + EVENT_BYTES * i;
      this.#bytes(at, EVENT_BYTES).fill(0);
      this.#u64(at, userdata);
      this.#view.setUint8(at + 10, type);
    }
    return due.length;
  }

  #clockMs(id: number): number {
    if (id === 0) return Date.now();
    return id === 1 ? performance.now() : performance.now() - this.#started;
  }

  /** The import object; each call answers an error number, 0 for none. */
  imports(): Record<string, unknown> {
    const guarded =
      <A extends unknown[]>(call: (...args: A) => void) =>
      (...args: A): number => {
        try {
          call(...args);
          return 0;
        } catch (error) {
          if (error instanceof ProcessExit) throw error;
          if (error instanceof FileFault) return ERRNO[error.errno];
          // Typed arrays and views refuse what lies outside the memory; large ones that cannot be had.
          if (error instanceof RangeError)
            return /allocation/i.test(error.message) ? ERRNO.ENOMEM : ERRNO.EFAULT;
          return ERRNO.EIO;
        }
      };
    const unsupported = guarded(() => {
      throw new FileFault('ENOTSUP');
    });
    const args = this.#process.args;
    const files = this.#files;
    return {
      args_sizes_get: guarded((n: number, size: number) => this.#stringsSize(args, n, size)),
      args_get: guarded((pointers: number, buffer: number) =>
        this.#strings(args, pointers, buffer),
      ),
      environ_sizes_get: guarded((n: number, size: number) =>
        this.#stringsSize(this.#environment(), n, size),
      ),
      environ_get: guarded((pointers: number, buffer: number) =>
        this.#strings(this.#environment(), pointers, buffer),
      ),
      clock_res_get: guarded((_id: number, out: number) => this.#u64(out, 1_000_000n)),
      clock_time_get: guarded((id: number, _precision: bigint, out: number) =>
        this.#u64(out, nanoseconds(this.#clockMs(id))),
      ),
      random_get: guarded((pointer: number, length: number) => {
        randomFillSync(this.#bytes(pointer, length));
      }),
      sched_yield: () => 0,
      proc_exit: (code: number) => {
        throw new ProcessExit(code & 0xff);
      },
      poll_oneoff: guarded((input: number, output: number, n: number, events: number) =>
        this.#u32(events, this.#poll(input, output, n)),
      ),
      fd_advise: guarded((fd: number) => void this.#fd(fd)),
      fd_sync: guarded((fd: number) => void this.#fd(fd)),
      fd_datasync: guarded((fd: number) => void this.#fd(fd)),
      fd_allocate: guarded((fd: number, offset: bigint, length: bigint) => {
        const { node, write } = this.#file(fd);
        if (!write) throw new FileFault('EBADF');
        const end = count(offset) + count(length);
        if (end > node.data.length) files.resize(node, end);
      }),
      fd_close: guarded((fd: number) => {
        const { node } = this.#fd(fd);
        if (node.kind === 'file') files.close(node);
        this.#fds.delete(fd);
      }),
      fd_fdstat_get: guarded((fd: number, out: number) => {
        const found = this.#fd(fd);
        const at = out >>> 0;
        this.#bytes(at, 24).fill(0);
        this.#view.setUint8(at, FILETYPE[found.node.kind]);
        this.#view.setUint16(at + 2, found.append ? FDFLAG_APPEND : 0, true);
        const file =
          ALL_RIGHTS & ~(found.read ? 0n : RIGHT_READ) & ~(found.write ? 0n : RIGHT_WRITE);
        this.#u64(at + 8, found.node.kind === 'directory' ? ALL_RIGHTS : file);
        this.#u64(at + 16, ALL_RIGHTS);
      }),
      fd_fdstat_set_flags: guarded((fd: number, flags: number) => {
        this.#fd(fd).append = (flags & FDFLAG_APPEND) !== 0;
      }),
      fd_filestat_get: guarded((fd: number, out: number) => this.#stat(this.#fd(fd).node, out)),
      fd_filestat_set_size: guarded((fd: number, size: bigint) => {
        const { node, write } = this.#file(fd);
        if (!write) throw new FileFault('EINVAL');
        files.resize(node, count(size));
      }),
      fd_filestat_set_times: guarded(
        (fd: number, _accessed: bigint, modified: bigint, flags: number) => {
          const { node, path } = this.#fd(fd);
          if (files.fixed.nodes.has(path)) throw new FileFault('EROFS');
          this.#setTimes(node, modified, flags);
        },
      ),
      fd_prestat_get: guarded((fd: number, out: number) => {
        if (fd !== ROOT_FD) throw new FileFault('EBADF');
        this.#u32(out, 0);
        this.#u32((out >>> 0) + 4, 1);
      }),
      fd_prestat_dir_name: guarded((fd: number, pointer: number, length: number) => {
        if (fd !== ROOT_FD || length < 1) throw new FileFault('EBADF');
        this.#bytes(pointer, 1)[0] = 0x2f;
      }),
      fd_read: guarded((fd: number, vectors: number, n: number, out: number) => {
        const from = this.#fd(fd);
        const length = this.#readAt(from, this.#vectors(vectors, n), from.offset);
        from.offset += length;
        this.#u32(out, length);
      }),
      fd_pread: guarded((fd: number, vectors: number, n: number, offset: bigint, out: number) =>
        this.#u32(out, this.#readAt(this.#file(fd), this.#vectors(vectors, n), count(offset))),
      ),
      fd_write: guarded((fd: number, vectors: number, n: number, out: number) => {
        const to = this.#fd(fd);
        if (to.append && to.node.kind === 'file') to.offset = to.node.data.length;
        const length = this.#writeAt(to, this.#vectors(vectors, n), to.offset);
        to.offset += length;
        this.#u32(out, length);
      }),
      fd_pwrite: guarded((fd: number, vectors: number, n: number, offset: bigint, out: number) =>
        this.#u32(out, this.#writeAt(this.#file(fd), this.#vectors(vectors, n), count(offset))),
      ),
      fd_readdir: guarded(
        (fd: number, pointer: number, length: number, cookie: bigint, out: number) =>
          this.#u32(out, this.#readdir(fd, pointer, length, count(cookie))),
      ),
      fd_renumber: unsupported,
      fd_seek: guarded((fd: number, offset: bigint, whence: number, out: number) => {
        const found = this.#file(fd);
        const base = [0, found.offset, found.node.data.length][whence];
        if (base === undefined) throw new FileFault('EINVAL');
        found.offset = count(BigInt(base) + offset);
        this.#u64(out, BigInt(found.offset));
      }),
      fd_tell: guarded((fd: number, out: number) => this.#u64(out, BigInt(this.#file(fd).offset))),
      path_create_directory: guarded((fd: number, pointer: number, length: number) =>
        files.makeDirectory(this.#path(fd, pointer, length, false)),
      ),
      path_filestat_get: guarded(
        (fd: number, lookup: number, pointer: number, length: number, out: number) =>
          this.#stat(files.node(this.#path(fd, pointer, length, (lookup & 1) !== 0)), out),
      ),
      path_filestat_set_times: guarded(
        (
          fd: number,
          lookup: number,
          pointer: number,
          length: number,
          _accessed: bigint,
          modified: bigint,
          flags: number,
        ) => {
          const path = this.#path(fd, pointer, length, (lookup & 1) !== 0);
          const node = files.node(path);
          if (files.fixed.nodes.has(path)) throw new FileFault('EROFS');
          this.#setTimes(node, modified, flags);
        },
      ),
      path_link: unsupported,
      path_open: guarded(
        (
          fd: number,
          lookup: number,
          pointer: number,
          length: number,
          flags: number,
          rights: bigint,
          _inheriting: bigint,
          fdflags: number,
          out: number,
        ) => this.#u32(out, this.#openPath(fd, lookup, [pointer, length], flags, rights, fdflags)),
      ),
      path_readlink: guarded(
        (
          fd: number,
          pointer: number,
          length: number,
          buffer: number,
          size: number,
          out: number,
        ) => {
          const node = files.node(this.#path(fd, pointer, length, false));
          if (node.kind !== 'symlink') throw new FileFault('EINVAL');
          const target = Buffer.from(node.target, 'latin1').subarray(0, size >>> 0);
          this.#bytes(buffer, target.length).set(target);
          this.#u32(out, target.length);
        },
      ),
      path_remove_directory: guarded((fd: number, pointer: number, length: number) =>
        files.remove(this.#path(fd, pointer, length, false), 'directory'),
      ),
      path_unlink_file: guarded((fd: number, pointer: number, length: number) =>
        files.remove(this.#path(fd, pointer, length, false), 'file'),
      ),
      path_rename: guarded(
        (fd: number, from: number, fromLength: number, toFd: number, to: number, length: number) =>
          files.rename(
            this.#path(fd, from, fromLength, false),
            this.#path(toFd, to, length, false),
          ),
      ),
      path_symlink: guarded(
        (target: number, targetLength: number, fd: number, pointer: number, length: number) => {
          const path = this.#path(fd, pointer, length, false);
          if (files.at(path)) throw new FileFault('EEXIST');
          const text = Buffer.from(this.#bytes(target, targetLength)).toString('latin1');
          if (text === '' || text.includes('\0')) throw new FileFault('EINVAL');
          if (text.length > 4096) throw new FileFault('ENAMETOOLONG');
          files.set(path, { kind: 'symlink', target: text, modifiedMs: Date.now() });
        },
      ),
      sock_accept: unsupported,
      sock_recv: unsupported,
      sock_send: unsupported,
      sock_shutdown: unsupported,
    };
  }
}
