import { posix } from 'node:path';
import { LonghaulError } from '../../../core/index.ts';
import { type BuildSandbox, once } from '../import.ts';
import { directoryEntry, MODIFIED, TAR_END, tarHeader, tarPadding } from '../tar-writer.ts';
import type { BuildContext, ContextEntry, CopiedEntry } from './context.ts';
import { dockerfileError, type Instruction, jsonForm } from './dockerfile.ts';
import { hasGlob } from './glob.ts';
import { expandWord, expandWords, type Variables } from './words.ts';

/** One COPY or ADD, its words read and nothing looked at yet. */
export interface CopyPlan {
  sources: string[];
  /** Absolute. */
  target: string;
  /** The target is a folder by its spelling, whatever lies there. */
  intoFolder: boolean;
  /** Files whose content stands in the Dockerfile, by name. */
  inline: Map<string, string>;
  from: string | null;
  mode: number | null;
}

const ARCHIVE = /\.(tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lzma))$/i;
const READ_CHUNK = 32 * 1024 * 1024;
const MAX_LINKS = 20;
const FLAGS = new Set(['chmod', 'chown', 'from', 'link']);

export function planCopy(
  instruction: Instruction,
  workdir: string,
  variables: Variables,
  escapedBy: string,
): CopyPlan {
  const { keyword, line, flags, heredocs } = instruction;
  for (const name of flags.keys())
    if (!FLAGS.has(name) || (keyword === 'ADD' && name === 'from'))
      throw dockerfileError(line, `${keyword} --${name} is not supported`);
  const words =
    jsonForm(instruction.rest)?.map((word) => expandWord(word, variables, escapedBy)) ??
    expandWords(instruction.rest, variables, escapedBy);
  const last = words.at(-1);
  if (words.length < 2 || last === undefined)
    throw dockerfileError(line, `expected ${keyword} SOURCE … TARGET`);
  if ([...words, ...flags.values()].some((word) => word.includes('\0')))
    throw dockerfileError(line, 'a path holds a NUL character');
  const inline = new Map<string, string>();
  const sources: string[] = [];
  for (const word of words.slice(0, -1)) {
    const heredoc = heredocs.find(
      (each) => word === `<<${each.name}` || word === `<<-${each.name}`,
    );
    if (heredoc)
      inline.set(
        heredoc.name,
        heredoc.expand ? expandText(heredoc.content, variables) : heredoc.content,
      );
    else sources.push(word);
  }
  if (keyword === 'ADD') requireLocalFiles(sources, line);
  const target = posix.resolve(workdir, last);
  if (/^\/(proc|dev)(\/|$)/.test(target))
    throw dockerfileError(line, `${target} belongs to the kernel`, 'Choose another target.');
  const intoFolder = last.endsWith('/') || /(^|\/)\.$/.test(last);
  if (sources.length + inline.size > 1 && !intoFolder)
    throw dockerfileError(line, `with several sources the target of ${keyword} must end in /`);
  const mode = flags.get('chmod') ?? null;
  if (mode !== null && !/^0?[0-7]{3}$/.test(mode))
    throw dockerfileError(line, `--chmod=${mode}: expected three octal digits`);
  return {
    sources,
    target,
    intoFolder,
    inline,
    from: flags.get('from') ?? null,
    mode: mode === null ? null : Number.parseInt(mode, 8),
  };
}

function requireLocalFiles(sources: readonly string[], line: number): void {
  for (const source of sources) {
    if (/^[a-z][a-z0-9+.-]*:\/\/|^git@|\.git(#|$)/i.test(source))
      throw dockerfileError(
        line,
        `ADD ${source}: builds fetch nothing`,
        'Download it into the context, pin its checksum there, and COPY it.',
      );
    if (ARCHIVE.test(source))
      throw dockerfileError(
        line,
        `ADD ${source}: archives are not unpacked`,
        'COPY it and unpack it with RUN tar -xf, or COPY the unpacked folder.',
      );
  }
}

/** `$NAME` and `${NAME}` of a heredoc; quotes mean nothing there. */
function expandText(text: string, variables: Variables): string {
  return text.replace(/(\\?)\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))/g, (whole, escaped, a, b) =>
    escaped ? whole.slice(1) : Object.hasOwn(variables, a ?? b) ? variables[a ?? b]! : '',
  );
}

/** Whether a path of the image is a folder, links followed. */
export async function isFolder(sandbox: BuildSandbox, path: string): Promise<boolean> {
  try {
    await sandbox.listFiles(path);
    return true;
  } catch (error) {
    if (error instanceof LonghaulError && /^(NotFound|FileRefused)$/.test(error.code)) return false;
    throw error;
  }
}

/** Paths in archives are relative to the root. */
const relative = (path: string) => path.replace(/^\/+/, '');

export async function makeFolder(sandbox: BuildSandbox, path: string): Promise<void> {
  if (path === '/' || (await isFolder(sandbox, path))) return;
  await sandbox.unpack(once([directoryEntry(relative(path)), TAR_END]), '/', true);
}

/** What COPY takes from the context, for its key: names, modes, contents. */
export async function selectCopy(
  plan: CopyPlan,
  context: BuildContext,
): Promise<{ copied: CopiedEntry[]; folders: boolean; digest: string }> {
  const copied: CopiedEntry[] = [];
  let folders = false;
  const add = (entry: ContextEntry, to: string) =>
    copied.push({ entry, to, mode: plan.mode ?? entry.mode });
  for (const source of plan.sources)
    for (const { top, below } of await context.select(source)) {
      if (top.kind !== 'directory') add(top, posix.basename(top.path));
      else folders = true;
      // Docker's rule: what is in a folder is copied, not the folder.
      const prefix = top.path === '' ? 0 : top.path.length + 1;
      for (const entry of below) add(entry, entry.path.slice(prefix));
    }
  return { copied, folders, digest: await context.digest(copied) };
}

/** Puts what was selected where the plan says. Links of the image on the way are followed below its root. */
export async function copyIn(
  sandbox: BuildSandbox,
  plan: CopyPlan,
  selected: Awaited<ReturnType<typeof selectCopy>>,
  context: BuildContext,
): Promise<void> {
  const { copied, folders, digest } = selected;
  const into = plan.intoFolder || folders || (await isFolder(sandbox, plan.target));
  if (into) await makeFolder(sandbox, plan.target);
  const place = (to: string) => relative(into ? posix.join(plan.target, to) : plan.target);
  if (copied.length > 0) await sandbox.unpack(context.tar(copied, digest, place), '/', true);
  for (const [name, content] of plan.inline)
    await sandbox.unpack(
      once(fileTar(place(name), plan.mode ?? 0o644, Buffer.from(content))),
      '/',
      true,
    );
}

function fileTar(path: string, mode: number, content: Uint8Array): Uint8Array[] {
  const size = content.length;
  const header = tarHeader({ path, kind: 'file', mode, size, modified: MODIFIED, target: '' });
  return [header, content, tarPadding(size), TAR_END];
}

/** Puts files of another image where the plan says; `open` gives a sandbox with that image as its root. */
export async function copyAcross(
  sandbox: BuildSandbox,
  plan: CopyPlan,
  line: number,
  open: (asWorkspace: boolean) => Promise<BuildSandbox>,
): Promise<void> {
  for (const source of plan.sources) {
    const path = posix.resolve('/', source);
    if (hasGlob(source)) throw dockerfileError(line, 'patterns in COPY --from are not supported');
    if (/^\/(proc|dev)(\/|$)/.test(path)) throw dockerfileError(line, `${path} is in no image`);
    // The root as a workspace: without what is mounted over it.
    const other = await open(path === '/');
    try {
      if (await isFolder(other, path)) {
        if (plan.mode !== null)
          throw dockerfileError(line, '--chmod of a folder from another image is not supported');
        await makeFolder(sandbox, plan.target);
        await sandbox.unpack(other.pack(path === '/' ? '/workspace' : path), plan.target, true);
        continue;
      }
      const into = plan.intoFolder || (await isFolder(sandbox, plan.target));
      if (into) await makeFolder(sandbox, plan.target);
      const to = relative(into ? posix.join(plan.target, posix.basename(path)) : plan.target);
      await sandbox.unpack(fileOf(other, path, to, plan.mode, line), '/', true);
    } finally {
      await other.stop();
    }
  }
}

async function* fileOf(
  other: BuildSandbox,
  path: string,
  to: string,
  mode: number | null,
  line: number,
): AsyncGenerator<Uint8Array> {
  let at = path;
  let info = await other.stat(at);
  for (let links = 0; info.kind === 'symlink' && links < MAX_LINKS; links++) {
    at = posix.resolve(posix.dirname(at), info.target!);
    info = await other.stat(at);
  }
  if (info.kind !== 'file') throw dockerfileError(line, `${path} is no regular file`);
  const { bytes: size } = info;
  yield tarHeader({
    path: to,
    kind: 'file',
    mode: mode ?? info.mode & 0o777,
    size,
    modified: Math.floor(info.modifiedMs / 1000),
    target: '',
  });
  for (let offset = 0; offset < size; ) {
    const chunk = await other.readFile(at, { offset, limit: READ_CHUNK });
    if (chunk.length === 0) throw dockerfileError(line, `${path} changed while it was read`);
    yield chunk;
    offset += chunk.length;
  }
  yield tarPadding(size);
  yield TAR_END;
}
