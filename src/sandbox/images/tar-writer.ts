/** Members of a tar archive: POSIX ustar, with a pax record before one whose names are long. */
export interface TarEntry {
  /** Relative, `/` between parts. */
  path: string;
  kind: 'file' | 'directory' | 'symlink';
  mode: number;
  size: number;
  /** Seconds since 1970. */
  modified: number;
  target: string;
}

const BLOCK = 512;
/** Eleven octal digits. */
export const MAX_FILE_BYTES = 8 ** 11 - 1;
export const TAR_END = Buffer.alloc(2 * BLOCK);
/** 2020-01-01: fixed, so that equal builds give equal layers. Not 0: zip and make dislike it. */
export const MODIFIED = 1_577_836_800;

/** What comes before a member's content. */
export function tarHeader(entry: TarEntry): Buffer {
  const pax: string[] = [];
  if (Buffer.byteLength(entry.path) > 100) pax.push(paxLine('path', entry.path));
  if (Buffer.byteLength(entry.target) > 100) pax.push(paxLine('linkpath', entry.target));
  const type = { file: '0', symlink: '2', directory: '5' }[entry.kind];
  const own = block(entry, type);
  if (pax.length === 0) return own;
  const body = Buffer.from(pax.join(''));
  const meta = { ...entry, path: 'pax', target: '', mode: 0o644, size: body.length };
  return Buffer.concat([block(meta, 'x'), body, tarPadding(body.length), own]);
}

/** What fills a content of `size` bytes up to a whole number of blocks. */
export function tarPadding(size: number): Buffer {
  return Buffer.alloc((BLOCK - (size % BLOCK)) % BLOCK);
}

export function directoryEntry(path: string, mode = 0o755): Buffer {
  return tarHeader({ path, kind: 'directory', mode, size: 0, modified: MODIFIED, target: '' });
}

function block(entry: TarEntry, type: string): Buffer {
  const header = Buffer.alloc(BLOCK);
  const octal = (value: number, at: number, width: number) =>
    header.write(`${value.toString(8).padStart(width - 1, '0')}\0`, at, 'latin1');
  header.write(entry.path, 0, 100);
  octal(entry.mode, 100, 8);
  octal(0, 108, 8);
  octal(0, 116, 8);
  octal(entry.size, 124, 12);
  octal(Math.max(0, entry.modified), 136, 12);
  header.fill(' ', 148, 156);
  header.write(type, 156, 'latin1');
  header.write(entry.target, 157, 100);
  header.write('ustar\x0000', 257, 'latin1');
  const sum = header.reduce((total, byte) => total + byte, 0);
  header.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
  return header;
}

/** `LENGTH KEY=VALUE\n`, where LENGTH counts itself. */
function paxLine(key: string, value: string): string {
  const rest = Buffer.byteLength(` ${key}=${value}\n`);
  let length = rest + String(rest).length;
  length = rest + String(length).length;
  return `${length} ${key}=${value}\n`;
}
