/** Bytes kept of an output stream when the caller names no number. */
export const DEFAULT_KEEP_BYTES = 256 * 1024;

/** A UTF-8 sequence has at most this many continuation bytes. */
const MAX_CONTINUATION = 3;
const isContinuation = (byte: number) => (byte & 0xc0) === 0x80;

/** Drops a sequence that was cut at the end, so that a cut does not show as a wrong character. */
function withoutBrokenEnd(bytes: Uint8Array): Uint8Array {
  for (let back = 1; back <= Math.min(MAX_CONTINUATION + 1, bytes.length); back++) {
    const byte = bytes[bytes.length - back]!;
    if (isContinuation(byte)) continue;
    const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back ? bytes.subarray(0, bytes.length - back) : bytes;
  }
  return bytes;
}

function withoutBrokenStart(bytes: Uint8Array): Uint8Array {
  let start = 0;
  while (start < MAX_CONTINUATION && start < bytes.length && isContinuation(bytes[start]!)) start++;
  return bytes.subarray(start);
}

/**
 * Text of a stream of which head and tail were kept. Invalid UTF-8 becomes U+FFFD; where bytes were
 * left out, a line says how many.
 */
export function outputText(head: Uint8Array, tail: Uint8Array, total: number): string {
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  if (head.length + tail.length >= total) return decoder.decode(Buffer.concat([head, tail]));
  const first = withoutBrokenEnd(head);
  const last = withoutBrokenStart(tail);
  const left = total - first.length - last.length;
  return `${decoder.decode(first)}\n[${left} bytes left out]\n${decoder.decode(last)}`;
}

/** The head and the tail of a stream, within `keepBytes`. */
export class KeptOutput {
  readonly #headLimit: number;
  readonly #tailLimit: number;
  #head: Buffer[] = [];
  #headBytes = 0;
  #tail: Buffer[] = [];
  #tailBytes = 0;
  #total = 0;

  constructor(keepBytes: number) {
    this.#tailLimit = Math.floor(keepBytes / 2);
    this.#headLimit = keepBytes - this.#tailLimit;
  }

  add(chunk: Buffer): void {
    this.#total += chunk.length;
    const room = this.#headLimit - this.#headBytes;
    const first = chunk.subarray(0, room);
    if (first.length > 0) {
      this.#head.push(first);
      this.#headBytes += first.length;
    }
    const rest = chunk.subarray(first.length);
    if (rest.length === 0) return;
    this.#tail.push(rest);
    this.#tailBytes += rest.length;
    // Not at each chunk: many small ones would copy the whole tail each time.
    if (this.#tailBytes > 2 * this.#tailLimit) this.#cutTail();
  }

  #cutTail(): Buffer {
    const joined = Buffer.concat(this.#tail);
    const kept = Buffer.from(joined.subarray(Math.max(0, joined.length - this.#tailLimit)));
    this.#tail = [kept];
    this.#tailBytes = kept.length;
    return kept;
  }

  /** What was kept, and the number of bytes that passed. */
  data(): { head: Buffer; tail: Buffer; total: number } {
    return { head: Buffer.concat(this.#head), tail: this.#cutTail(), total: this.#total };
  }
}
