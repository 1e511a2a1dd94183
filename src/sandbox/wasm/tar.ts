import { FileFault, type MemoryNode } from './files.ts';

/**
 * POSIX pax archives of a workspace (IEEE Std 1003.1, `pax`, "ustar" and "pax" interchange formats).
 * Written here rather than with a package because names are bytes: packages decode them as UTF-8 and
 * lose those that are not.
 */

const BLOCK = 512;
const MAX_USTAR_NAME = 100;
const MAX_USTAR_NUMBER = 0o77777777777;
/** Extended headers are small; a larger one is refused. */
const MAX_EXTENDED_BYTES = 1024 * 1024;

export class ArchiveFault extends Error {}

const isUtf8 = (bytes: Uint8Array) => {
  try {
    new TextDecoder('utf-8', { fatal: true }).decode(bytes);
    return true;
  } catch {
    return false;
  }
};

const padding = (length: number) => Buffer.alloc((BLOCK - (length % BLOCK)) % BLOCK);

function header(
  name: Buffer,
  type: string,
  size: number,
  mode: number,
  seconds: number,
  link = Buffer.alloc(0),
) {
  const block = Buffer.alloc(BLOCK);
  const number = (value: number, at: number, length: number) =>
    block.write(value.toString(8).padStart(length - 1, '0'), at, 'latin1');
  name.copy(block, 0, 0, MAX_USTAR_NAME);
  number(mode, 100, 8);
  number(0, 108, 8);
  number(0, 116, 8);
  number(Math.min(size, MAX_USTAR_NUMBER), 124, 12);
  number(Math.min(Math.max(0, Math.floor(seconds)), MAX_USTAR_NUMBER), 136, 12);
  block.fill(' ', 148, 156);
  block.write(type, 156, 'latin1');
  link.copy(block, 157, 0, MAX_USTAR_NAME);
  block.write('ustar\x0000', 257, 'latin1');
  const sum = block.reduce((total, byte) => total + byte, 0);
  block.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
  return block;
}

/** `LENGTH KEY=VALUE\n`, where the length counts itself. */
function record(key: string, value: Buffer): Buffer {
  const rest = Buffer.concat([Buffer.from(` ${key}=`), value, Buffer.from('\n')]);
  let length = rest.length;
  while (String(length).length + rest.length !== length)
    length = String(length).length + rest.length;
  return Buffer.concat([Buffer.from(String(length)), rest]);
}

/** The archive in parts; names are relative to `prefix`. Parents come first, as they are given. */
export function* packTar(
  nodes: Iterable<[path: string, node: MemoryNode]>,
  prefix: string,
): Generator<Uint8Array> {
  for (const [path, node] of nodes) {
    if (node.kind === 'null') continue;
    const name = Buffer.from(path.slice(prefix.length), 'latin1');
    const shown = node.kind === 'directory' ? Buffer.concat([name, Buffer.from('/')]) : name;
    const link = Buffer.from(node.kind === 'symlink' ? node.target : '', 'latin1');
    const data = node.kind === 'file' ? node.data : new Uint8Array();
    const records = [record('mtime', Buffer.from((node.modifiedMs / 1000).toFixed(3)))];
    if (!isUtf8(shown) || !isUtf8(link))
      records.unshift(record('hdrcharset', Buffer.from('BINARY')));
    const plain = (text: Buffer) =>
      text.length <= MAX_USTAR_NAME && text.every((byte) => byte < 128);
    if (!plain(shown)) records.push(record('path', shown));
    if (!plain(link)) records.push(record('linkpath', link));
    if (data.length > MAX_USTAR_NUMBER) records.push(record('size', Buffer.from(`${data.length}`)));
    const extended = Buffer.concat(records);
    yield header(Buffer.from('./PaxHeaders/x'), 'x', extended.length, 0o644, 0);
    yield extended;
    yield padding(extended.length);
    const type = { file: '0', directory: '5', symlink: '2' }[node.kind];
    const mode = node.kind === 'symlink' ? 0o777 : node.mode;
    yield header(shown, type, data.length, mode, node.modifiedMs / 1000, link);
    yield data;
    yield padding(data.length);
  }
  yield Buffer.alloc(2 * BLOCK);
}

/** `LENGTH KEY=VALUE\n` records of an extended header. */
function readRecords(bytes: Buffer): Map<string, Buffer> {
  const records = new Map<string, Buffer>();
  for (let at = 0; at < bytes.length; ) {
    const space = bytes.indexOf(0x20, at);
    const length = Number(bytes.toString('latin1', at, space));
    const equals = bytes.indexOf(0x3d, space);
    const end = at + length;
    if (space < 0 || equals < 0 || !(length > 0) || end > bytes.length || equals >= end)
      throw new ArchiveFault('an extended header is malformed');
    records.set(bytes.toString('latin1', space + 1, equals), bytes.subarray(equals + 1, end - 1));
    at = end;
  }
  return records;
}

/** A numeric field: octal text, or base 256 where its first bit is set (GNU). */
function readNumber(field: Buffer): number {
  if (field[0]! & 0x80) {
    let value = field[0]! & 0x7f;
    for (const byte of field.subarray(1)) value = value * 256 + byte;
    return value;
  }
  const text = field
    .toString('latin1')
    .replace(/[\0 ]+$/, '')
    .trimStart();
  if (!/^[0-7]*$/.test(text)) throw new ArchiveFault('a number in a header is malformed');
  return text === '' ? 0 : Number.parseInt(text, 8);
}

const cString = (field: Buffer) => {
  const end = field.indexOf(0);
  return field.toString('latin1', 0, end < 0 ? field.length : end);
};

/** Where a member goes; refused where it is absolute, leads upward or has no name. Null: the root itself. */
function memberPath(name: string, prefix: string): string | null {
  if (name.startsWith('/')) throw new ArchiveFault('a member has an absolute name');
  const parts = name.split('/').filter((part) => part !== '' && part !== '.');
  if (parts.includes('..')) throw new ArchiveFault('a member has .. in its name');
  if (name === '') throw new ArchiveFault('a member has no name');
  return parts.length === 0 ? null : prefix + parts.join('/');
}

/**
 * The members of an archive below `prefix`, with byte strings as names. Sockets, pipes and devices are
 * left out. `ArchiveFault` for what is cut short or malformed, for names that are absolute, have `..`
 * or come twice, and for hard links to what the archive has not shown before. A symbolic link is only
 * text: nothing is resolved here.
 */
export function unpackTar(
  archive: Uint8Array,
  { prefix }: { prefix: string },
): [string, MemoryNode][] {
  const bytes = Buffer.from(archive.buffer, archive.byteOffset, archive.length);
  const found = new Map<string, MemoryNode>();
  let global = new Map<string, Buffer>();
  let local = new Map<string, Buffer>();
  for (let at = 0; ; ) {
    if (at + BLOCK > bytes.length) throw new ArchiveFault('the archive is cut short');
    const block = bytes.subarray(at, at + BLOCK);
    at += BLOCK;
    if (block.every((byte) => byte === 0)) return [...found];
    let sum = 8 * 0x20;
    for (const [i, byte] of block.entries()) if (i < 148 || i >= 156) sum += byte;
    if (sum !== readNumber(block.subarray(148, 156)))
      throw new ArchiveFault('a header has a wrong checksum');
    const type = String.fromCharCode(block[156]!).replace('\0', '0');
    const extended = type === 'x' || type === 'g';
    const field = (key: string) => (extended ? undefined : (local.get(key) ?? global.get(key)));
    const size = field('size')
      ? Number(field('size')!.toString())
      : readNumber(block.subarray(124, 136));
    const links = type === '1' || type === '2' || type === '5';
    const length = links ? 0 : size;
    if (!Number.isSafeInteger(length) || length < 0 || at + length > bytes.length)
      throw new ArchiveFault('the archive is cut short');
    const data = bytes.subarray(at, at + length);
    at += Math.ceil(length / BLOCK) * BLOCK;
    if (extended) {
      if (length > MAX_EXTENDED_BYTES) throw new ArchiveFault('an extended header is too long');
      if (type === 'g') global = new Map([...global, ...readRecords(data)]);
      else local = readRecords(data);
      continue;
    }
    const ustarPrefix = cString(block.subarray(345, 500));
    const ustarName = cString(block.subarray(0, MAX_USTAR_NAME));
    const isUstar = block.toString('latin1', 257, 263) === 'ustar\0';
    const ownName = isUstar && ustarPrefix !== '' ? `${ustarPrefix}/${ustarName}` : ustarName;
    const name = field('path')?.toString('latin1') ?? ownName;
    const target = field('linkpath')?.toString('latin1') ?? cString(block.subarray(157, 257));
    const seconds = field('mtime')
      ? Number(field('mtime')!.toString('latin1'))
      : readNumber(block.subarray(136, 148));
    const modifiedMs = Number.isFinite(seconds) ? seconds * 1000 : 0;
    const mode = readNumber(block.subarray(100, 108)) & 0o7777;
    local = new Map();
    const path = memberPath(name, prefix);
    if (path === null) continue;
    if (found.has(path)) throw new ArchiveFault('a member comes twice');
    switch (type) {
      case '0':
      case '7':
        found.set(path, { kind: 'file', data: new Uint8Array(data), mode, modifiedMs });
        break;
      case '1': {
        const to = memberPath(target, prefix);
        const node = to === null ? undefined : found.get(to);
        if (node?.kind !== 'file') throw new ArchiveFault('a hard link leads outside the archive');
        found.set(path, { ...node });
        break;
      }
      case '2':
        if (target === '') throw new ArchiveFault('a symbolic link has no target');
        found.set(path, { kind: 'symlink', target, modifiedMs });
        break;
      case '5':
        found.set(path, { kind: 'directory', mode, modifiedMs });
        break;
      case '3':
      case '4':
      case '6':
        break;
      default:
        throw new ArchiveFault(`members of type ${JSON.stringify(type)} are not known`);
    }
  }
}

/** A tree's nodes of what an archive holds: parents that it does not name are made, and come first. */
export function withParents(
  nodes: readonly [string, MemoryNode][],
  root: string,
): [string, MemoryNode][] {
  const all = new Map(nodes);
  for (const [path] of nodes) {
    for (
      let up = path.slice(0, path.lastIndexOf('/'));
      up.length > root.length;
      up = up.slice(0, up.lastIndexOf('/'))
    ) {
      const node = all.get(up);
      if (!node) all.set(up, { kind: 'directory', mode: 0o755, modifiedMs: Date.now() });
      // Written through a link it would lie elsewhere than its name says.
      else if (node.kind !== 'directory') throw new FileFault('ENOTDIR');
    }
  }
  return [...all].sort(([a], [b]) => (a < b ? -1 : 1));
}
