import { Writable } from 'node:stream';
import { expect, test } from 'vitest';
import { GuestOutput } from './terminal.ts';

/** A stream that remembers, in the place of a terminal or of a file. */
class Memory extends Writable {
  readonly isTTY: boolean;
  readonly #chunks: Buffer[] = [];

  constructor(isTTY: boolean) {
    super();
    this.isTTY = isTTY;
  }

  override _write(chunk: Buffer, _: string, done: () => void): void {
    this.#chunks.push(Buffer.from(chunk));
    done();
  }

  get bytes(): Buffer {
    return Buffer.concat(this.#chunks);
  }
}

const HOSTILE = [
  '\u001b]0;title\u0007',
  '\u001b]52;c;c3RvbGVu\u001b\\',
  '\u001b[2J\u001b[H',
  '\u009b31m',
  '\u001bP$q\u001b\\',
  'safe\rovr',
  '\u202egnp.exe',
  '\b\b\b',
  '\u007f',
  '\u0000',
];

test.each(HOSTILE)('a terminal is shown %j and does not obey it', (text) => {
  const memory = new Memory(true);
  const output = new GuestOutput(memory);
  // One byte at a time: no sequence may pass because it was cut.
  for (const byte of Buffer.from(text)) output.write(Uint8Array.of(byte));
  output.end();
  const shown = memory.bytes.toString();
  expect(shown).not.toMatch(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/);
  for (const word of text.match(/\w{3,}/g) ?? []) expect(shown).toContain(word);
});

test('bytes that are no UTF-8, alone or cut, are replaced on a terminal', () => {
  const memory = new Memory(true);
  const output = new GuestOutput(memory);
  output.write(Buffer.from([0x61, 0x9b, 0x62, 0xe2, 0x82]));
  output.end();
  expect(memory.bytes.toString()).toBe('a\ufffdb\ufffd\n');
});

test('a character in two chunks stays whole, and lines and tabs stay', () => {
  const memory = new Memory(true);
  const output = new GuestOutput(memory);
  const bytes = Buffer.from('a\t€\nb\n');
  output.write(bytes.subarray(0, 3));
  output.write(bytes.subarray(3));
  output.end();
  expect(memory.bytes.toString()).toBe('a\t€\nb\n');
});

test('what is no terminal gets the bytes as they are', () => {
  const memory = new Memory(false);
  const output = new GuestOutput(memory);
  const bytes = Buffer.from([0x1b, 0x5b, 0x32, 0x4a, 0x00, 0xff, 0x0d, 0x0a, 0xe2]);
  output.write(bytes);
  output.end();
  expect(memory.bytes).toEqual(bytes);
});
