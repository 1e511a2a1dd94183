import { createHash } from 'node:crypto';
import { constants } from 'node:fs';
import { lstat, open, readdir, readlink, realpath } from 'node:fs/promises';
import { join, posix } from 'node:path';
import { LonghaulError } from '../../../core/index.ts';
import { MAX_FILE_BYTES, TAR_END, tarHeader, tarPadding } from '../tar-writer.ts';
import { type Dockerignore, dockerignore, globPattern, hasGlob } from './glob.ts';

/** A file of the build context, seen once; its content is read when it is needed. */
export interface ContextEntry {
  /** Relative to the context, `/` between parts; empty for the context itself. */
  path: string;
  kind: 'file' | 'directory' | 'symlink';
  mode: number;
  bytes: number;
  target: string;
}

/** An entry and where it goes, relative to the target of its copy. */
export interface CopiedEntry {
  entry: ContextEntry;
  to: string;
  mode: number;
}

export interface ContextOptions {
  files?: number;
  bytes?: number;
  /** A whole root file system: its links may point anywhere, and no .dockerignore counts. */
  rootfs?: boolean;
}

const MAX_FILES = 200_000;
const MAX_BYTES = 16 * 1024 ** 3;
const IGNORE_FILE = '.dockerignore';

function contextError(message: string, next: string): LonghaulError {
  return new LonghaulError('ConfigInvalid', `build context: ${message}`, { next });
}

/**
 * The folder that COPY takes from. Links are copied as links and never followed; one that leads out of
 * the folder is refused, as are devices and sockets. What .dockerignore names is not there.
 */
export class BuildContext {
  readonly root: string;
  readonly #limits: { files: number; bytes: number };
  readonly #rootfs: boolean;
  readonly #ignore: Dockerignore;
  #entries: Map<string, ContextEntry> | null = null;

  private constructor(root: string, options: ContextOptions, ignore: Dockerignore) {
    this.root = root;
    this.#limits = { files: options.files ?? MAX_FILES, bytes: options.bytes ?? MAX_BYTES };
    this.#rootfs = options.rootfs ?? false;
    this.#ignore = ignore;
  }

  static async open(path: string, options: ContextOptions = {}): Promise<BuildContext> {
    const root = await realpath(path).catch(() => null);
    if (root === null || !(await lstat(root)).isDirectory())
      throw new LonghaulError('NotFound', `build context ${path}: no such directory`, {
        next: 'Name the folder that COPY takes its files from.',
      });
    const rules = options.rootfs ? null : await readIfThere(join(root, IGNORE_FILE), 1 << 20);
    return new BuildContext(root, options, dockerignore(rules ?? ''));
  }

  /** A file's text; null where there is none. `ConfigInvalid` when it is larger than `limit`. */
  async text(path: string, limit: number): Promise<string | null> {
    return readIfThere(join(this.root, path), limit);
  }

  async #scan(): Promise<Map<string, ContextEntry>> {
    if (this.#entries) return this.#entries;
    const found = new Map<string, ContextEntry>();
    const addFolder = (path: string, mode: number) =>
      found.set(path, { path, kind: 'directory', mode, bytes: 0, target: '' });
    /** Folders that are ignored, but hold an exception. */
    const withParents = async (folder: string) => {
      if (folder === '' || found.has(folder)) return;
      await withParents(folder.includes('/') ? posix.dirname(folder) : '');
      addFolder(folder, (await lstat(join(this.root, folder))).mode & 0o777);
    };
    const walk = async (folder: string) => {
      const names = await readdir(join(this.root, folder), { encoding: 'buffer' });
      for (const raw of names.sort(Buffer.compare)) {
        const name = raw.toString();
        if (!Buffer.from(name).equals(raw))
          throw contextError(`a name in ${folder || '.'} is not UTF-8`, 'Rename it.');
        const path = folder === '' ? name : `${folder}/${name}`;
        const info = await lstat(join(this.root, path));
        if (info.isDirectory()) {
          if (this.#ignore.ignored(path) && !this.#ignore.exceptions) continue;
          if (!this.#ignore.ignored(path)) addFolder(path, info.mode & 0o777);
          await walk(path);
        } else if (!this.#ignore.ignored(path)) {
          const kind = info.isFile() ? 'file' : info.isSymbolicLink() ? 'symlink' : null;
          if (kind === null) continue; // refused only where COPY names it: sockets lie about
          const target = kind === 'symlink' ? await readlink(join(this.root, path)) : '';
          await withParents(folder);
          found.set(path, { path, kind, mode: info.mode & 0o777, bytes: info.size, target });
        }
        if (found.size > this.#limits.files)
          throw contextError(`more than ${this.#limits.files} files`, SMALLER);
      }
    };
    await walk('');
    this.#entries = found;
    return found;
  }

  /** What a source of COPY names: itself, and all below it where it is a folder. */
  async select(source: string): Promise<{ top: ContextEntry; below: ContextEntry[] }[]> {
    const path = posix.normalize(source.replace(/^\/+/, '')).replace(/\/$/, '');
    if (path === '..' || path.startsWith('../'))
      throw contextError(`${source} leads out of it`, 'Copy the files into the context first.');
    const entries = await this.#scan();
    const all = [...entries.values()];
    const tops: ContextEntry[] = [];
    if (path === '.') tops.push({ path: '', kind: 'directory', mode: 0o755, bytes: 0, target: '' });
    else if (hasGlob(path)) {
      const pattern = globPattern(path);
      tops.push(...all.filter((entry) => pattern.test(entry.path)));
    } else if (entries.has(path)) tops.push(entries.get(path)!);
    if (tops.length === 0) {
      const why = this.#ignore.ignored(path)
        ? `${IGNORE_FILE} leaves ${source} out`
        : `no ${source} in it`;
      throw contextError(why, 'Name a file or a folder of the context.');
    }
    const chosen = tops.map((top) => {
      const prefix = top.path === '' ? '' : `${top.path}/`;
      const inside = top.kind === 'directory';
      return { top, below: inside ? all.filter((entry) => entry.path.startsWith(prefix)) : [] };
    });
    let bytes = 0;
    for (const { top, below } of chosen)
      for (const entry of [top, ...below]) {
        if (!this.#rootfs) requireInside(entry);
        requireName(entry);
        if (entry.bytes > MAX_FILE_BYTES) throw contextError(`${entry.path} is too large`, SMALLER);
        bytes += entry.bytes;
      }
    if (bytes > this.#limits.bytes)
      throw contextError(`${source} holds more than ${this.#limits.bytes} bytes`, SMALLER);
    return chosen;
  }

  /** Opens a file that the scan saw; a link in its place is refused. */
  async *#content(entry: ContextEntry): AsyncGenerator<Uint8Array> {
    const handle = await open(
      join(this.root, entry.path),
      constants.O_RDONLY | constants.O_NOFOLLOW,
    );
    if (!(await handle.stat()).isFile()) {
      await handle.close();
      throw changed(entry);
    }
    yield* handle.createReadStream({ highWaterMark: 1 << 18 });
  }

  /** Hexadecimal SHA-256 of everything that the copy puts into the image. */
  async digest(copied: readonly CopiedEntry[]): Promise<string> {
    const hash = createHash('sha256');
    for (const each of copied) hash.update(described(each, await this.#sum(each.entry)));
    return hash.digest('hex');
  }

  async #sum(entry: ContextEntry): Promise<string> {
    if (entry.kind !== 'file') return '';
    const hash = createHash('sha256');
    for await (const chunk of this.#content(entry)) hash.update(chunk);
    return hash.digest('hex');
  }

  /**
   * A tar of the copy, each entry at `place` of where it goes. It ends with an error where that is not
   * what `digest` told of before.
   */
  async *tar(
    copied: readonly CopiedEntry[],
    digest: string,
    place: (to: string) => string,
  ): AsyncGenerator<Uint8Array> {
    const whole = createHash('sha256');
    for (const { entry, to, mode } of copied) {
      const { kind, target, bytes } = entry;
      const size = kind === 'file' ? bytes : 0;
      const modified = Math.floor((await lstat(join(this.root, entry.path))).mtimeMs / 1000);
      yield tarHeader({ path: place(to), kind, mode, size, modified, target });
      const hash = createHash('sha256');
      let sent = 0;
      if (kind === 'file')
        for await (const chunk of this.#content(entry)) {
          sent += chunk.length;
          if (sent > size) break;
          hash.update(chunk);
          yield chunk;
        }
      if (sent !== size) throw changed(entry);
      yield tarPadding(size);
      whole.update(described({ entry, to, mode }, kind === 'file' ? hash.digest('hex') : ''));
    }
    if (whole.digest('hex') !== digest)
      throw contextError('it changed during the build', 'Build again.');
    yield TAR_END;
  }
}

const described = ({ entry, to, mode }: CopiedEntry, sum: string) =>
  `${JSON.stringify([entry.path, to, entry.kind, mode, entry.target, sum])}\n`;

const SMALLER = `Name fewer files in COPY, or leave some out with ${IGNORE_FILE}.`;

function changed(entry: ContextEntry): LonghaulError {
  return contextError(`${entry.path} changed during the build`, 'Build again.');
}

function requireName(entry: ContextEntry): void {
  if (entry.path.split('/').some((part) => part.startsWith('.wh.')))
    throw contextError(`${entry.path}: names that begin with .wh. mean removal`, 'Rename it.');
}

function requireInside(entry: ContextEntry): void {
  if (entry.kind !== 'symlink') return;
  const { target } = entry;
  const reached = posix.normalize(posix.join(posix.dirname(entry.path), target));
  if (posix.isAbsolute(target) || reached === '..' || reached.startsWith('../'))
    throw contextError(
      `the link ${entry.path} leads out of it, to ${target}`,
      'Copy the file in its place, or make the link with RUN ln -s.',
    );
}

async function readIfThere(path: string, limit: number): Promise<string | null> {
  const handle = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW).catch((error) => {
    if (error.code === 'ENOENT' || error.code === 'ENOTDIR') return null;
    throw contextError(`${path}: ${error.message}`, 'Make it a regular file that can be read.');
  });
  if (!handle) return null;
  try {
    const info = await handle.stat();
    if (!info.isFile() || info.size > limit)
      throw contextError(`${path}: no regular file, or larger than ${limit} bytes`, 'Shorten it.');
    return await handle.readFile('utf8');
  } finally {
    await handle.close();
  }
}
