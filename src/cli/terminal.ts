import type { Writable } from 'node:stream';
import { TextDecoder } from 'node:util';
import { printable } from './output.ts';

/**
 * Passes a guest's output on to a stream. Where that is a terminal, control characters are shown instead
 * of obeyed: they could move the cursor, set a title, fill the clipboard or answer in the user's name.
 * Elsewhere the bytes go through as they are.
 */
export class GuestOutput {
  readonly #to: Writable;
  readonly #decoder: TextDecoder | null;
  /** A line was begun and not ended. */
  #open = false;

  constructor(to: Writable & { isTTY?: boolean }) {
    this.#to = to;
    this.#decoder = to.isTTY ? new TextDecoder('utf-8', { ignoreBOM: true }) : null;
  }

  write(chunk: Uint8Array): void {
    if (chunk.length === 0) return;
    if (this.#decoder === null) this.#to.write(Buffer.from(chunk));
    else this.#show(this.#decoder.decode(chunk, { stream: true }));
  }

  /** What an incomplete last character left, and on a terminal the end of an open line. */
  end(): void {
    if (this.#decoder === null) return;
    this.#show(this.#decoder.decode());
    if (this.#open) this.#to.write('\n');
    this.#open = false;
  }

  #show(text: string): void {
    const safe = printable(text);
    if (safe === '') return;
    this.#to.write(safe);
    this.#open = !safe.endsWith('\n');
  }
}
