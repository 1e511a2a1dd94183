import { styleText } from 'node:util';
import type { LonghaulError } from '../core/index.ts';

/** Words for people go to stderr, documents for programs to stdout. */
export class Output {
  readonly json: boolean;

  constructor(json: boolean) {
    this.json = json;
  }

  /** Progress and explanations. */
  say(line = ''): void {
    process.stderr.write(`${line}\n`);
  }

  /** The answer a person asked for. With --json nothing is printed: `document` speaks then. */
  print(line = ''): void {
    if (!this.json) process.stdout.write(`${line}\n`);
  }

  /** One JSON document, or one line of several. */
  document(value: unknown): void {
    if (this.json) process.stdout.write(`${JSON.stringify(value)}\n`);
  }

  fail(error: LonghaulError): void {
    this.say(
      `${style('red', `error: ${printable(error.message)}`)} ${style('dim', `(${error.code})`)}`,
    );
    this.say(`next:  ${printable(error.next)}`);
    this.document({ error: error.toJSON() });
  }
}

type Style = Parameters<typeof styleText>[0];

/** Colour where stderr is a terminal that wants it. */
export function style(format: Style, text: string): string {
  return styleText(format, text, { stream: process.stderr });
}

/**
 * Text from a model or a tool, safe to print: control characters cannot move the cursor or set a title,
 * and bidirectional ones cannot reorder what is read.
 */
export function printable(text: string): string {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (char) => (char === '\r' ? '' : `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`),
  );
}

/** First lines of a text, for a list of steps. */
export function excerpt(text: string, lines = 6, width = 160): string[] {
  const all = printable(text).trimEnd().split('\n');
  const shown = all
    .slice(0, lines)
    .map((line) => (line.length > width ? `${line.slice(0, width - 1)}…` : line));
  if (all.length > lines) shown.push(`… ${all.length - lines} more lines`);
  return shown;
}

/** `1.2 s`, `3 min 5 s`. */
export function duration(ms: number): string {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}
