import type { ToolSandbox } from '../../core/index.ts';
import { LonghaulError } from '../../core/index.ts';
import { type BundleEntry, readEntry } from './bundle.ts';

/** An entry of a bundle and where it goes, relative to the directory that is filled. */
export interface Placed {
  entry: BundleEntry;
  /** Directory on this machine that `entry.path` is relative to. */
  root: string;
  path: string;
}

/** Archive bytes sent with one command: bounds memory on both sides. */
const CHUNK_BYTES = 8 * 1024 * 1024;

/** What every command of Longhaul's own inside a sandbox runs with: nothing of the agent's. */
export const CLEAN_ENV = {
  PATH: '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
  LANG: 'C.UTF-8',
  LC_ALL: 'C.UTF-8',
  TZ: 'UTC',
} as const;

/**
 * Puts entries below `target` inside the sandbox, modes and links kept, as few archives through one
 * command's standard input each: hundreds of files take one round trip. There is no host mount.
 * Throws `CapabilityMissing` if the directory cannot be written, with what the sandbox said.
 */
export async function upload(
  sandbox: ToolSandbox,
  target: string,
  placed: readonly Placed[],
): Promise<void> {
  await send(sandbox, target, []);
  let blocks: Buffer[] = [];
  let size = 0;
  for (const item of placed) {
    const content = item.entry.kind === 'file' ? await readEntry(item.root, item.entry) : EMPTY;
    const record = tarRecord(item, content);
    blocks.push(...record);
    size += record.reduce((sum, block) => sum + block.length, 0);
    if (size < CHUNK_BYTES) continue;
    await send(sandbox, target, blocks);
    blocks = [];
    size = 0;
  }
  if (blocks.length > 0) await send(sandbox, target, blocks);
}

async function send(sandbox: ToolSandbox, target: string, blocks: Buffer[]): Promise<void> {
  const script =
    // A driver may give a directory outside of the workspace as a link to where it can be written.
    blocks.length === 0
      ? 'd=$(readlink -m -- "$0" 2>/dev/null) || d=$0; mkdir -p -- "$d"'
      : 'exec tar -x -p --no-same-owner -f - -C "$0"';
  const result = await sandbox.exec({
    argv: ['/bin/sh', '-c', script, target],
    cwd: '/',
    env: CLEAN_ENV,
    ...(blocks.length > 0 && { stdin: Buffer.concat([...blocks, Buffer.alloc(1024)]) }),
    keepBytes: 4096,
  });
  if (result.cause === 'exited' && result.code === 0) return;
  const said = result.stderr.trim() || `ended by ${result.cause}, code ${result.code}`;
  throw new LonghaulError(
    'CapabilityMissing',
    `cannot put files into ${target} of the sandbox: ${said}`,
    { next: `Use a sandbox driver whose ${target} can be written and that has sh and tar.` },
  );
}

const EMPTY = Buffer.alloc(0);
const BLOCK = 512;
/** 2020-01-01: fixed, so that equal tasks give equal workspaces. Not 0: zip and make dislike it. */
const MTIME = 1_577_836_800;

/** Header and content of one member: POSIX ustar, with a pax record before it for long names. */
function tarRecord(item: Placed, content: Buffer): Buffer[] {
  const { entry, path } = item;
  const link = entry.kind === 'symlink' ? entry.target : '';
  const out: Buffer[] = [];
  const pax: string[] = [];
  if (Buffer.byteLength(path) > 100) pax.push(paxLine('path', path));
  if (Buffer.byteLength(link) > 100) pax.push(paxLine('linkpath', link));
  if (pax.length > 0) {
    const body = Buffer.from(pax.join(''));
    out.push(header('pax', 'x', 0o644, body.length, ''), padded(body));
  }
  const type = { file: '0', symlink: '2', directory: '5' }[entry.kind];
  // A read-only directory could not be filled by the archives after this one.
  const mode =
    entry.kind === 'symlink' ? 0o777 : entry.kind === 'directory' ? entry.mode | 0o700 : entry.mode;
  out.push(header(path, type, mode, content.length, link));
  if (content.length > 0) out.push(padded(content));
  return out;
}

function header(path: string, type: string, mode: number, size: number, link: string): Buffer {
  const block = Buffer.alloc(BLOCK);
  const octal = (value: number, at: number, width: number) =>
    block.write(`${value.toString(8).padStart(width - 1, '0')}\0`, at, 'latin1');
  block.write(path, 0, 100);
  octal(mode, 100, 8);
  octal(0, 108, 8);
  octal(0, 116, 8);
  octal(size, 124, 12);
  octal(MTIME, 136, 12);
  block.fill(' ', 148, 156);
  block.write(type, 156, 'latin1');
  block.write(link, 157, 100);
  block.write('ustar\x0000', 257, 'latin1');
  const sum = block.reduce((total, byte) => total + byte, 0);
  block.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
  return block;
}

/** `LENGTH KEY=VALUE\n`, where LENGTH counts itself. */
function paxLine(key: string, value: string): string {
  const rest = Buffer.byteLength(` ${key}=${value}\n`);
  let length = rest + String(rest).length;
  length = rest + String(length).length;
  return `${length} ${key}=${value}\n`;
}

function padded(content: Buffer): Buffer {
  const surplus = content.length % BLOCK;
  return surplus === 0 ? content : Buffer.concat([content, Buffer.alloc(BLOCK - surplus)]);
}
