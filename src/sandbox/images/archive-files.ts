import { constants } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { join } from 'node:path';
import { refused } from './refused.ts';

/** The files of an image archive, wherever they lie. Nothing of them is written to the host. */
export interface ArchiveFiles {
  /** Null where there is no such regular file. */
  size(path: string): Promise<number | null>;
  /** The file's bytes; `FileRefused` where there is none. */
  read(path: string): AsyncIterable<Uint8Array>;
  close(): Promise<void>;
}

/** JSON of an archive is small; layers are what is large. */
const JSON_BYTES = 8 * 1024 * 1024;

/** A small file as a whole. `FileRefused` when it is missing or larger than any image's would be. */
export async function readSmall(files: ArchiveFiles, path: string): Promise<Buffer> {
  const size = await files.size(path);
  if (size === null) throw refused(path, 'the archive has no such file');
  if (size > JSON_BYTES) throw refused(path, `${size} bytes, more than ${JSON_BYTES}`);
  const chunks: Uint8Array[] = [];
  for await (const chunk of files.read(path)) chunks.push(chunk);
  return Buffer.concat(chunks);
}

/** A folder as `skopeo copy … oci:FOLDER` writes it. Links are not followed. */
export class FolderFiles implements ArchiveFiles {
  readonly #root: string;

  constructor(root: string) {
    this.#root = root;
  }

  #open(path: string): Promise<FileHandle> {
    const flags = constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK;
    return open(join(this.#root, path), flags);
  }

  async size(path: string): Promise<number | null> {
    const handle = await this.#open(path).catch(() => null);
    if (!handle) return null;
    const info = await handle.stat();
    await handle.close();
    return info.isFile() ? info.size : null;
  }

  async *read(path: string): AsyncIterable<Uint8Array> {
    const handle = await this.#open(path);
    if (!(await handle.stat()).isFile()) {
      await handle.close();
      throw refused(path, 'not a regular file');
    }
    yield* handle.createReadStream();
  }

  async close(): Promise<void> {}
}

const BLOCK = 512;
const MAX_ENTRIES = 100_000;
const MAX_META_BYTES = 1 << 20;
const MAX_LINKS = 8;

interface Member {
  offset: number;
  size: number;
  /** Another member that this one is a link to. */
  link: string | null;
}

/**
 * A tar file (POSIX.1-2001 pax and GNU long names), read in place: one pass over the headers tells where
 * each member lies, since layers are needed in an order that is not the archive's.
 */
export class TarFiles implements ArchiveFiles {
  readonly #path: string;
  readonly #handle: FileHandle;
  readonly #members = new Map<string, Member>();

  private constructor(path: string, handle: FileHandle) {
    this.#path = path;
    this.#handle = handle;
  }

  /** `FileRefused` when the file is no uncompressed tar. */
  static async open(path: string): Promise<TarFiles> {
    const files = new TarFiles(path, await open(path, 'r'));
    try {
      await files.#index();
      return files;
    } catch (error) {
      await files.close();
      throw error;
    }
  }

  async #bytes(offset: number, length: number): Promise<Buffer> {
    const { buffer, bytesRead } = await this.#handle.read(Buffer.alloc(length), 0, length, offset);
    if (bytesRead < length) throw refused(this.#path, 'the tar is cut short');
    return buffer;
  }

  async #index(): Promise<void> {
    const end = (await this.#handle.stat()).size;
    let long: { path?: string; linkpath?: string; size?: number } = {};
    for (let at = 0, entries = 0; at + BLOCK <= end; entries++) {
      if (entries > MAX_ENTRIES) throw refused(this.#path, `more than ${MAX_ENTRIES} members`);
      const header = await this.#bytes(at, BLOCK);
      if (header.every((byte) => byte === 0)) break;
      if (!sumHolds(header)) throw refused(this.#path, notATar(header, at));
      const type = String.fromCharCode(header[156]!);
      const size = long.size ?? numberAt(header, 124, 12);
      if (!Number.isSafeInteger(size) || size < 0 || at + BLOCK + size > end)
        throw refused(this.#path, `the member at byte ${at} is cut short`);
      const offset = at + BLOCK;
      at = offset + Math.ceil(size / BLOCK) * BLOCK;
      if (type === 'x' || type === 'L' || type === 'K') {
        if (size > MAX_META_BYTES) throw refused(this.#path, 'a header of more than 1 MiB');
        const body = await this.#bytes(offset, size);
        if (type === 'x') long = { ...long, ...paxFields(body) };
        else long[type === 'L' ? 'path' : 'linkpath'] = textAt(body, 0, size);
        continue;
      }
      const prefix = textAt(header, 345, 155);
      const isPosix = header.subarray(257, 263).toString('latin1') === 'ustar\0';
      const short = textAt(header, 0, 100);
      const path = plain(long.path ?? (isPosix && prefix ? `${prefix}/${short}` : short));
      const target = long.linkpath ?? textAt(header, 157, 100);
      if (type === '0' || type === '\0' || type === '7')
        this.#members.set(path, { offset, size, link: null });
      else if (type === '1') this.#members.set(path, { offset, size, link: plain(target) });
      else if (type === '2') {
        const link = plain(join(path, '..', target));
        this.#members.set(path, { offset, size, link });
      }
      long = {};
    }
    if (this.#members.size === 0) throw refused(this.#path, 'no tar, or one without files');
  }

  #find(path: string): Member | null {
    let member = this.#members.get(plain(path));
    for (let links = 0; member?.link != null && links < MAX_LINKS; links++)
      member = this.#members.get(member.link);
    return member && member.link === null ? member : null;
  }

  async size(path: string): Promise<number | null> {
    return this.#find(path)?.size ?? null;
  }

  async *read(path: string): AsyncIterable<Uint8Array> {
    const member = this.#find(path);
    if (!member) throw refused(path, 'the archive has no such file');
    if (member.size === 0) return;
    const { offset: start, size } = member;
    const end = start + size - 1;
    yield* this.#handle.createReadStream({ autoClose: false, start, end, highWaterMark: 1 << 18 });
  }

  close(): Promise<void> {
    return this.#handle.close();
  }
}

const plain = (path: string) => path.replace(/^(\.?\/)+/, '').replace(/\/+$/, '');

/** Text up to the first NUL. */
function textAt(block: Buffer, start: number, length: number): string {
  const field = block.subarray(start, start + length);
  const end = field.indexOf(0);
  return field.subarray(0, end < 0 ? length : end).toString();
}

/** An octal number, or GNU's binary form where the first bit is set. */
function numberAt(block: Buffer, start: number, length: number): number {
  if (block[start]! & 0x80) {
    const value = block.readBigUInt64BE(start + length - 8);
    return value > BigInt(Number.MAX_SAFE_INTEGER) ? Number.NaN : Number(value);
  }
  const text = textAt(block, start, length).trim();
  return /^[0-7]*$/.test(text) ? Number.parseInt(text || '0', 8) : Number.NaN;
}

function sumHolds(header: Buffer): boolean {
  let sum = 8 * 0x20;
  for (let i = 0; i < BLOCK; i++) if (i < 148 || i >= 156) sum += header[i]!;
  return numberAt(header, 148, 8) === sum;
}

function notATar(header: Buffer, at: number): string {
  if (at > 0) return `the tar is damaged at byte ${at}`;
  if (header[0] === 0x1f && header[1] === 0x8b) return 'it is compressed: unpack it with gunzip';
  if (header.readUInt32LE(0) === 0xfd2fb528) return 'it is compressed: unpack it with `zstd -d`';
  return 'it is no tar archive';
}

/** Records `LENGTH KEY=VALUE\n` of a pax header. */
function paxFields(body: Buffer): { path?: string; linkpath?: string; size?: number } {
  const found: { path?: string; linkpath?: string; size?: number } = {};
  for (let at = 0; at < body.length; ) {
    const space = body.indexOf(0x20, at);
    const length = space < 0 ? 0 : Number(body.subarray(at, space).toString());
    if (!(length > space - at) || at + length > body.length) break;
    const record = body.subarray(space + 1, at + length - 1).toString();
    const equals = record.indexOf('=');
    const [key, value] = [record.slice(0, equals), record.slice(equals + 1)];
    if (key === 'path' || key === 'linkpath') found[key] = value;
    if (key === 'size') found.size = Number(value);
    at += length;
  }
  return found;
}
