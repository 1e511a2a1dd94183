import { posix } from 'node:path';
import { notSupported, taskInvalid } from './invalid.ts';

/** The directory that a task fills where it needs no image of its own. */
export const WORKSPACE = '/workspace';

/** One COPY: sources are relative to `environment/`, `target` is absolute and inside the workspace. */
export interface CopyStep {
  sources: string[];
  target: string;
  /** Target ends in `/` or there are several sources: files go into it under their own names. */
  intoDirectory: boolean;
}

export interface ImagePlan {
  workdir: string;
  copies: CopyStep[];
  /** What was read and not followed, for the user to know. */
  notes: string[];
}

const IGNORED = new Set(['CMD', 'ENTRYPOINT', 'EXPOSE', 'LABEL', 'MAINTAINER', 'STOPSIGNAL']);
const KNOWN = new Set(
  'ADD ARG ENV HEALTHCHECK ONBUILD RUN SHELL USER VOLUME FROM WORKDIR COPY'.split(' '),
);

/**
 * Reads the part of a Dockerfile that needs no image build: `FROM`, `WORKDIR`, `COPY` inside the
 * workspace, and instructions without effect on files. `CapabilityMissing` with file and line for
 * the first that does need one; `TaskInvalid` for what Docker would refuse too.
 */
export function readDockerfile(text: string, file: string): ImagePlan {
  const plan: ImagePlan = { workdir: WORKSPACE, copies: [], notes: [] };
  let from = false;
  let workdirSet = false;
  for (const { line, instruction, rest } of instructions(text)) {
    const where = `line ${line}`;
    if (instruction === 'FROM') {
      if (from) throw notSupported(file, where, 'several stages need an image build', BUILD_NEXT);
      if (rest === '') throw taskInvalid(file, where, 'expected FROM IMAGE');
      from = true;
      plan.notes.push(`${file}: ${where}: FROM ${rest} is replaced by this machine's own system`);
    } else if (!from && instruction === 'ARG') {
      throw notSupported(file, where, 'ARG needs an image build', BUILD_NEXT);
    } else if (!from) {
      throw taskInvalid(file, where, `expected FROM as the first instruction, got ${instruction}`);
    } else if (instruction === 'WORKDIR') {
      if (rest === '') throw taskInvalid(file, where, 'expected WORKDIR DIRECTORY');
      const dir = posix.resolve(workdirSet ? plan.workdir : '/', unquote(rest));
      requireWorkspace(dir, file, where);
      plan.workdir = dir;
      workdirSet = true;
    } else if (instruction === 'COPY') {
      plan.copies.push(readCopy(rest, plan.workdir, file, where));
    } else if (IGNORED.has(instruction)) {
      plan.notes.push(`${file}: ${where}: ${instruction} is not used`);
    } else if (KNOWN.has(instruction)) {
      throw notSupported(file, where, `${instruction} needs an image build`, BUILD_NEXT);
    } else {
      throw taskInvalid(file, where, `unknown instruction ${instruction.slice(0, 40)}`);
    }
  }
  if (!from) throw taskInvalid(file, null, 'expected a FROM instruction');
  return plan;
}

const BUILD_NEXT =
  'Run it where bubblewrap works, which builds images, or keep the Dockerfile to FROM, WORKDIR and COPY below /workspace (docs/tasks.md).';

function readCopy(rest: string, workdir: string, file: string, where: string): CopyStep {
  let words: string[];
  if (rest.startsWith('[')) {
    const parsed = parseJson(rest);
    if (!Array.isArray(parsed) || !parsed.every((word) => typeof word === 'string'))
      throw taskInvalid(file, where, 'expected COPY ["SOURCE", …, "TARGET"]');
    words = parsed;
  } else {
    words = rest.split(/\s+/).filter((word) => word !== '');
  }
  const flags = words.filter((word) => word.startsWith('--'));
  for (const flag of flags)
    if (!flag.startsWith('--chown='))
      throw notSupported(file, where, `COPY ${flag} needs an image build`, BUILD_NEXT);
  words = words.filter((word) => !word.startsWith('--'));
  const last = words.at(-1);
  if (words.length < 2 || last === undefined)
    throw taskInvalid(file, where, 'expected COPY SOURCE … TARGET');
  const sources = words.slice(0, -1).map((source) => {
    if (/[*?[\]$<]/.test(source))
      throw notSupported(file, where, `${source} in COPY needs an image build`, BUILD_NEXT);
    const path = posix.normalize(source.replace(/^\/+/, ''));
    if (path === '..' || path.startsWith('../'))
      throw taskInvalid(file, where, `COPY ${source} leads out of environment/`);
    return path.replace(/\/$/, '');
  });
  const target = posix.resolve(workdir, last);
  requireWorkspace(target, file, where);
  const intoDirectory = last.endsWith('/') || last === '.' || last.endsWith('/.');
  if (sources.length > 1 && !intoDirectory)
    throw taskInvalid(file, where, 'with several sources the target of COPY must end in /');
  return { sources, target, intoDirectory };
}

function requireWorkspace(dir: string, file: string, where: string): void {
  if (dir === WORKSPACE || dir.startsWith(`${WORKSPACE}/`)) return;
  throw notSupported(
    file,
    where,
    `${dir} lies outside of ${WORKSPACE}: that needs an image build`,
    BUILD_NEXT,
  );
}

/** Logical lines: comments dropped, continuations joined. `line` is where the instruction starts. */
function* instructions(
  text: string,
): Generator<{ line: number; instruction: string; rest: string }> {
  const lines = text.split(/\r?\n/);
  for (let i = 0; i < lines.length; i++) {
    const first = lines[i]?.trim() ?? '';
    if (first === '' || first.startsWith('#')) continue;
    const start = i + 1;
    let whole = first;
    while (whole.endsWith('\\') && i + 1 < lines.length) {
      i += 1;
      const next = lines[i]?.trim() ?? '';
      if (next.startsWith('#')) continue;
      whole = `${whole.slice(0, -1).trimEnd()} ${next}`;
    }
    const [instruction = '', ...rest] = whole.split(/\s+/);
    yield { line: start, instruction: instruction.toUpperCase(), rest: rest.join(' ') };
  }
}

function unquote(word: string): string {
  return word.replace(/^"(.*)"$/, '$1');
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
