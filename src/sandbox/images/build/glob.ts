/**
 * A pattern of paths as a regular expression. `*` and `?` stay within one part of a path, `[a-z]` is a
 * set, `**` (as .dockerignore has it) spans any number of parts. `\` takes a meaning away.
 */
export function globPattern(pattern: string): RegExp {
  let out = '';
  for (let at = 0; at < pattern.length; at++) {
    const character = pattern[at]!;
    if (pattern.startsWith('**/', at)) {
      out += '(?:[^/]+/)*';
      at += 2;
    } else if (pattern.startsWith('**', at)) {
      out += '.*';
      at += 1;
    } else if (character === '*') out += '[^/]*';
    else if (character === '?') out += '[^/]';
    else if (character === '[') {
      const set = /^\[(\^?)((?:\\.|[^\]\\])+)\]/.exec(pattern.slice(at));
      if (!set) throw new SyntaxError(`the [ of ${pattern} has no end`);
      const [whole, negated, members] = set;
      // A set is data of the pattern, not of the expression: all but ranges is quoted.
      const quoted = members!.replace(/\\(.)/g, '$1').replace(/[\\\]^[]/g, '\\$&');
      out += `(?!/)[${negated}${quoted}]`;
      at += whole!.length - 1;
    } else {
      const literal = character === '\\' ? (pattern[++at] ?? '\\') : character;
      out += literal.replace(/[.*+?^${}()|[\]\\/]/g, '\\$&');
    }
  }
  return new RegExp(`^${out}$`, 's');
}

export const hasGlob = (path: string) => /[*?[\\]/.test(path);

export interface Dockerignore {
  ignored(path: string): boolean;
  /** Whether something below an ignored folder may not be ignored. */
  exceptions: boolean;
}

/** Which paths of a context a .dockerignore leaves out: the last pattern that matches a path decides. */
export function dockerignore(text: string): Dockerignore {
  const rules = text
    .split(/\r?\n/)
    .map((line) => line.trim())
    .filter((line) => line !== '' && !line.startsWith('#'))
    .map((line) => {
      const keeps = line.startsWith('!');
      const path = (keeps ? line.slice(1) : line).trim().replace(/^\/+|\/+$/g, '');
      return { keeps, pattern: globPattern(path.replace(/^(\.\/)+/, '')) };
    });
  const ignored = (path: string) => {
    let out = false;
    const parts = path.split('/');
    for (const { keeps, pattern } of rules) {
      // A folder stands for all below it.
      const matches = parts.some((_, index) => pattern.test(parts.slice(0, index + 1).join('/')));
      if (matches) out = !keeps;
    }
    return out;
  };
  return { ignored, exceptions: rules.some((rule) => rule.keeps) };
}
