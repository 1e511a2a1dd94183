import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, realpathSync, statSync } from 'node:fs';
import { basename, join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import { type CpioEntry, cpioArchive } from './cpio.ts';

const AGENT = join(import.meta.dirname, '../agent');
const WARDEN = join(import.meta.dirname, 'warden.py');

/** Programs of this machine that a guest finds, where they exist here; the rest of it stays outside. */
const PROGRAMS = [
  ...['sh', 'bash', 'dash', 'env', 'true', 'false', 'test', '[', 'echo', 'printf', 'yes', 'sleep'],
  ...[
    'cat',
    'tac',
    'head',
    'tail',
    'tee',
    'wc',
    'sort',
    'uniq',
    'cut',
    'paste',
    'join',
    'tr',
    'nl',
  ],
  ...[
    'ls',
    'cp',
    'mv',
    'rm',
    'ln',
    'mkdir',
    'rmdir',
    'mkfifo',
    'mknod',
    'mktemp',
    'touch',
    'truncate',
    'dd',
  ],
  ...['stat', 'chmod', 'chown', 'install', 'readlink', 'realpath', 'basename', 'dirname', 'pwd'],
  ...['df', 'du', 'sync', 'date', 'id', 'whoami', 'uname', 'hostname', 'nproc', 'timeout', 'nohup'],
  ...['kill', 'nice', 'seq', 'expr', 'factor', 'shuf', 'split', 'comm', 'fold', 'fmt', 'od', 'xxd'],
  ...['base32', 'base64', 'md5sum', 'sha1sum', 'sha256sum', 'sha512sum', 'cksum', 'stty', 'tty'],
  ...['grep', 'sed', 'awk', 'mawk', 'gawk', 'find', 'xargs', 'diff', 'cmp', 'patch', 'file', 'bc'],
  ...[
    'tar',
    'gzip',
    'gunzip',
    'zcat',
    'bzip2',
    'xz',
    'zstd',
    'ps',
    'top',
    'free',
    'pgrep',
    'pkill',
  ],
  ...['setsid', 'unshare', 'mount', 'umount', 'dmesg', 'more', 'less', 'which', 'jq'],
];
/** Parts of Python's library that are large and of no use in a guest. */
const LEFT_OUT = /^(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data|config-.*)$/;
const FOLDERS = [
  ...['proc', 'sys', 'dev', 'run', 'tmp', 'root', 'etc', 'var', 'home', 'workspace', 'longhaul'],
  ...['longhaul/dev', 'longhaul/cgroup', 'longhaul/state', 'longhaul/agent', 'longhaul/modules'],
  ...['usr', 'usr/bin', 'usr/sbin', 'usr/lib', 'usr/lib64'],
];
const LINKS: Record<string, string> = {
  bin: 'usr/bin',
  sbin: 'usr/sbin',
  lib: 'usr/lib',
  lib64: 'usr/lib64',
  'run/secrets': '/tmp/.secrets',
  'var/tmp': '/tmp',
};
const FILES: Record<string, string> = {
  'etc/passwd':
    'root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:1000:1000:agent:/workspace:/bin/sh\n',
  'etc/group': 'root:x:0:\nagent:x:1000:\n',
  'etc/hosts': '127.0.0.1 localhost\n::1 localhost\n',
  'etc/nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n',
};
const DIRECTORY = 0o040755;
const SYMLINK = 0o120777;
const REGULAR = 0o100000;

/** What a machine boots into besides its kernel: an initial RAM file system and its fingerprint. */
export interface GuestSystem {
  archive: Buffer;
  digest: string;
}

function output(command: string, args: string[]): string {
  const { status, stdout, stderr, error } = spawnSync(command, args, { encoding: 'utf8' });
  if (status === 0) return stdout;
  const why = error?.message ?? stderr.trim().split('\n').at(-1);
  throw new LonghaulError('SandboxUnavailable', `microvm: ${command} failed: ${why}`);
}

/** Where a path of this machine lies in the guest, whose /lib and /bin are links into /usr. */
function inGuest(path: string): string {
  return path.replace(/^\/(bin|sbin|lib|lib64)\//, '/usr/$1/').slice(1);
}

class Collection {
  readonly #entries = new Map<string, CpioEntry>();

  add(name: string, mode: number, data: Uint8Array, modified = 0): void {
    this.#entries.set(name, { name, mode, modified, data });
  }

  folder(name: string): void {
    const parts = name.split('/');
    for (let i = 1; i <= parts.length; i++) {
      const path = parts.slice(0, i).join('/');
      if (!this.#entries.has(path)) this.add(path, DIRECTORY, new Uint8Array());
    }
  }

  /** A file of this machine, what a link of it leads to included. */
  file(path: string, name = inGuest(path)): void {
    const info = statSync(path);
    this.folder(name.slice(0, name.lastIndexOf('/')));
    const mode = REGULAR | (info.mode & 0o111 ? 0o755 : 0o644);
    this.add(name, mode, readFileSync(path), Math.floor(info.mtimeMs / 1000));
  }

  tree(path: string, leftOut: RegExp | null): void {
    for (const entry of readdirSync(path, { withFileTypes: true })) {
      if (leftOut?.test(entry.name)) continue;
      const full = join(path, entry.name);
      const info = statSync(full, { throwIfNoEntry: false });
      if (info?.isDirectory()) this.tree(full, null);
      else if (info?.isFile() && !entry.name.endsWith('.a')) this.file(full);
    }
  }

  archive(): Buffer {
    // A folder before what it holds: names in order.
    const sorted = [...this.#entries.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    return cpioArchive(sorted);
  }
}

/** The shared libraries that programs need, as `ldd` finds them; no program is run. */
function libraries(programs: readonly string[]): string[] {
  // Its status tells of scripts and static programs among them, which need none.
  const { stdout } = spawnSync('ldd', [...programs], { encoding: 'utf8' });
  const paths = (stdout ?? '').matchAll(/(?:=>\s+|^\s+)(\/\S+)\s+\(/gm);
  return [...new Set([...paths].map(([, path]) => path!))];
}

/**
 * A small system out of this machine's own: Python with its library, a shell and the usual programs, the
 * agent, and the modules of the guest's kernel (`modules`: a folder of .ko files). Owned by root, read-only.
 */
export function guestSystem(python: string, modules: string | null): GuestSystem {
  const collection = new Collection();
  for (const name of FOLDERS) collection.folder(name);
  for (const [name, target] of Object.entries(LINKS))
    collection.add(name, SYMLINK, Buffer.from(target));
  for (const [name, text] of Object.entries(FILES))
    collection.add(name, REGULAR | 0o644, Buffer.from(text));
  const library = output(python, ['-IS', '-c', 'import os; print(os.path.dirname(os.__file__))']);
  collection.tree(library.trim(), LEFT_OUT);
  const programs = PROGRAMS.map((name) => `/usr/bin/${name}`).filter((path) => existsSync(path));
  for (const path of programs) collection.file(path);
  collection.file(realpathSync(python), 'usr/bin/python3');
  collection.add('usr/bin/python', SYMLINK, Buffer.from('python3'));
  const extensions = join(library.trim(), 'lib-dynload');
  const loaded = existsSync(extensions)
    ? readdirSync(extensions).map((name) => join(extensions, name))
    : [];
  for (const path of libraries([python, ...programs, ...loaded])) collection.file(path);
  for (const name of readdirSync(AGENT).filter((each) => each.endsWith('.py')))
    collection.file(join(AGENT, name), `longhaul/agent/${name}`);
  if (modules)
    for (const name of readdirSync(modules).filter((each) => each.endsWith('.ko')))
      collection.file(join(modules, name), `longhaul/modules/${basename(name)}`);
  collection.add('init', REGULAR | 0o755, readFileSync(WARDEN));
  const archive = collection.archive();
  return { archive, digest: createHash('sha256').update(archive).digest('hex') };
}
