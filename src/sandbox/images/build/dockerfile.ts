import { LonghaulError } from '../../../core/index.ts';

export interface Heredoc {
  name: string;
  content: string;
  /** The word was not quoted: variables in the content stand for their values. */
  expand: boolean;
}

export interface Instruction {
  /** Line where it begins, from 1. */
  line: number;
  keyword: string;
  flags: Map<string, string>;
  /** What follows keyword and flags, continuation lines joined, nothing expanded. */
  rest: string;
  heredocs: Heredoc[];
}

export interface Dockerfile {
  instructions: Instruction[];
  /** The character that continues a line and takes a meaning away: `\`, or as a directive says. */
  escapedBy: string;
}

const NEXT =
  'docs/sandbox.md lists what builds support; otherwise build with docker or podman and add the saved archive.';

export function dockerfileError(line: number, message: string, next = NEXT): LonghaulError {
  return new LonghaulError('ConfigInvalid', `Dockerfile line ${line}: ${message}`, { next });
}

const WITH_HEREDOCS = new Set(['RUN', 'COPY', 'ADD']);
const HEREDOC = /<<(-?)(["']?)([A-Za-z_][A-Za-z0-9_]*)\2/g;

/** Splits a Dockerfile into instructions. `ConfigInvalid` with the line for what has no end or no keyword. */
export function parseDockerfile(text: string): Dockerfile {
  const lines = text.replace(/^\uFEFF/, '').split(/\r?\n/);
  const escapedBy = directive(lines, 'escape') ?? '\\';
  if (escapedBy !== '\\' && escapedBy !== '`')
    throw dockerfileError(1, `escape=${escapedBy} is neither \\ nor \``);
  const instructions: Instruction[] = [];
  for (let at = 0; at < lines.length; ) {
    const start = at;
    let whole = '';
    let goesOn = true;
    while (goesOn && at < lines.length) {
      const line = lines[at++]!;
      if (/^\s*(#|$)/.test(line)) {
        if (whole === '') break; // before the first line of an instruction
        continue;
      }
      goesOn =
        line.trimEnd().endsWith(escapedBy) && !line.trimEnd().endsWith(escapedBy + escapedBy);
      whole += goesOn ? line.trimEnd().slice(0, -1) : line;
    }
    whole = whole.trim();
    if (whole === '') continue;
    const [, word, after] = /^(\S+)\s*([\s\S]*)$/.exec(whole)!;
    const keyword = word!.toUpperCase();
    if (!/^[A-Z]+$/.test(keyword))
      throw dockerfileError(start + 1, `expected an instruction, not ${word!.slice(0, 40)}`);
    const { flags, rest } = takeFlags(after!);
    const heredocs: Heredoc[] = [];
    if (WITH_HEREDOCS.has(keyword))
      for (const found of outsideQuotes(rest).matchAll(HEREDOC)) {
        const [, dash, , name] = found;
        const quoted =
          rest.slice(found.index).startsWith(`<<${dash}"`) ||
          rest.slice(found.index).startsWith(`<<${dash}'`);
        const content: string[] = [];
        for (;;) {
          const line = lines[at++];
          if (line === undefined)
            throw dockerfileError(start + 1, `the heredoc ${name} has no end`);
          const bare = dash ? line.replace(/^\t+/, '') : line;
          if (bare === name) break;
          content.push(`${bare}\n`);
        }
        heredocs.push({ name: name!, content: content.join(''), expand: !quoted });
      }
    instructions.push({ line: start + 1, keyword, flags, rest, heredocs });
  }
  return { instructions, escapedBy };
}

/** `# NAME=VALUE` before anything else. */
function directive(lines: readonly string[], name: string): string | null {
  for (const line of lines) {
    const match = /^\s*#\s*([a-zA-Z]+)\s*=\s*(.+?)\s*$/.exec(line);
    if (!match) return null;
    if (match[1]!.toLowerCase() === name) return match[2]!;
  }
  return null;
}

/** The text with what lies between quotes blanked out, but for the quotes of a heredoc's own word. */
function outsideQuotes(text: string): string {
  return text.replace(/(<<-?)?(["'])(?:(?!\2)[\s\S])*\2/g, (part, heredoc) =>
    heredoc ? part : ' '.repeat(part.length),
  );
}

function takeFlags(text: string): { flags: Map<string, string>; rest: string } {
  const flags = new Map<string, string>();
  let rest = text;
  for (;;) {
    const match = /^--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)/.exec(rest);
    if (!match) return { flags, rest };
    flags.set(match[1]!, match[2] ?? '');
    rest = rest.slice(match[0].length);
  }
}

/** `["a", "b"]`; null where it is the shell form. */
export function jsonForm(rest: string): string[] | null {
  if (!rest.startsWith('[')) return null;
  try {
    const value: unknown = JSON.parse(rest);
    if (Array.isArray(value) && value.every((each) => typeof each === 'string')) return value;
  } catch {
    // Docker too takes what is no JSON as the shell form.
  }
  return null;
}
