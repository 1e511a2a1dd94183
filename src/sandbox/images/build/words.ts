/** Values that variables stand for. */
export type Variables = Readonly<Record<string, string>>;

/** A word that cannot be read; the message is for the Dockerfile's author. */
export class WordError extends Error {}

const NAME = /^[A-Za-z_][A-Za-z0-9_]*/;

/**
 * Docker's rules for words of ENV, ARG, COPY and others, which are not a shell's: quotes group, `'` keeps
 * everything, `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+other}` are replaced, and what they
 * stand for is never read again: neither split nor expanded. `escapedBy` takes the meaning of what follows.
 */
class Reader {
  readonly #text: string;
  readonly #variables: Variables;
  readonly #escape: string;
  #at = 0;

  constructor(text: string, variables: Variables, escapedBy: string) {
    this.#text = text;
    this.#variables = variables;
    this.#escape = escapedBy;
  }

  /** The whole text as one word. */
  whole(): string {
    return this.#until(() => false);
  }

  /** The next word of a list; null at the end. */
  next(): string | null {
    while (/\s/.test(this.#text[this.#at] ?? '')) this.#at++;
    if (this.#at >= this.#text.length) return null;
    return this.#until((character) => /\s/.test(character));
  }

  #until(ends: (character: string) => boolean): string {
    let out = '';
    while (this.#at < this.#text.length) {
      const character = this.#text[this.#at]!;
      if (ends(character)) break;
      this.#at++;
      if (character === "'") {
        const end = this.#text.indexOf("'", this.#at);
        if (end < 0) throw new WordError("a ' has no end");
        out += this.#text.slice(this.#at, end);
        this.#at = end + 1;
      } else if (character === '"') out += this.#quoted();
      else if (character === this.#escape) out += this.#text[this.#at++] ?? '';
      else if (character === '$') out += this.#variable();
      else out += character;
    }
    return out;
  }

  #quoted(): string {
    let out = '';
    for (;;) {
      const character = this.#text[this.#at++];
      if (character === undefined) throw new WordError('a " has no end');
      if (character === '"') return out;
      if (character === '$') out += this.#variable();
      else if (character === this.#escape) {
        const next = this.#text[this.#at] ?? '';
        if (next === '"' || next === '$' || next === this.#escape) this.#at++;
        out += next === '"' || next === '$' || next === this.#escape ? next : character;
      } else out += character;
    }
  }

  #variable(): string {
    const rest = this.#text.slice(this.#at);
    const plain = NAME.exec(rest);
    if (plain) {
      this.#at += plain[0].length;
      return this.#value(plain[0]) ?? '';
    }
    if (!rest.startsWith('{')) return '$';
    this.#at++;
    const name = NAME.exec(this.#text.slice(this.#at))?.[0];
    if (!name) throw new WordError(`\${ is followed by no name`);
    this.#at += name.length;
    const value = this.#value(name);
    if (this.#text[this.#at] === '}') {
      this.#at++;
      return value ?? '';
    }
    const operator = /^:?[-+?]/.exec(this.#text.slice(this.#at))?.[0];
    if (!operator) throw new WordError(`\${${name}… is not supported: only :-, :+ and :? are`);
    this.#at += operator.length;
    const other = this.#until((character) => character === '}');
    if (this.#text[this.#at++] !== '}') throw new WordError(`\${${name} has no end`);
    const present = value !== undefined && (value !== '' || !operator.startsWith(':'));
    if (operator.endsWith('+')) return present ? other : '';
    if (operator.endsWith('?') && !present) throw new WordError(`${name}: ${other || 'not set'}`);
    return present ? value : operator.endsWith('-') ? other : '';
  }

  #value(name: string): string | undefined {
    return Object.hasOwn(this.#variables, name) ? this.#variables[name] : undefined;
  }
}

/** The text as one word, quotes removed and variables replaced. */
export function expandWord(text: string, variables: Variables, escapedBy = '\\'): string {
  return new Reader(text, variables, escapedBy).whole();
}

/** The text as words. */
export function expandWords(text: string, variables: Variables, escapedBy = '\\'): string[] {
  const reader = new Reader(text, variables, escapedBy);
  const words: string[] = [];
  for (let word = reader.next(); word !== null; word = reader.next()) words.push(word);
  return words;
}

/** Words as they stand, with their quotes: to be cut at `=` before anything in them is replaced. */
export function rawWords(text: string, escapedBy = '\\'): string[] {
  const words: string[] = [];
  let word = '';
  let quote = '';
  for (let at = 0; at < text.length; at++) {
    const character = text[at]!;
    if (character === escapedBy && quote !== "'") word += character + (text[++at] ?? '');
    else if (quote === '' && /\s/.test(character)) {
      if (word !== '') words.push(word);
      word = '';
    } else {
      if (quote === character) quote = '';
      else if (quote === '' && (character === '"' || character === "'")) quote = character;
      word += character;
    }
  }
  if (quote !== '') throw new WordError(`a ${quote} has no end`);
  if (word !== '') words.push(word);
  return words;
}
