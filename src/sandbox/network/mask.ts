import { Transform, type TransformCallback } from 'node:stream';

const MASK = '*'.charCodeAt(0);

/**
 * The spellings in which a server that echoes a request gives a secret back: as it is, in a JSON string
 * and in a URL. Others (base64, one character at a time) cannot be told from data.
 */
function spellings(secret: string): Buffer[] {
  const texts = new Set([secret, JSON.stringify(secret).slice(1, -1), encodeURIComponent(secret)]);
  return [...texts].map((text) => Buffer.from(text, 'latin1'));
}

/** Replaces every occurrence of secrets by asterisks of the same length, so that lengths stay true. */
export class SecretMask {
  readonly #needles: readonly Buffer[];
  /** The longest piece that may be the beginning of a secret. */
  readonly #longest: number;

  constructor(secrets: readonly string[]) {
    this.#needles = secrets.flatMap(spellings);
    this.#longest = Math.max(0, ...this.#needles.map((needle) => needle.length - 1));
  }

  /** Masks in `shown` what stands in `raw`; both have the same length. */
  #mask(raw: Buffer, shown: Buffer): void {
    for (const needle of this.#needles)
      for (let at = raw.indexOf(needle); at >= 0; at = raw.indexOf(needle, at + 1))
        shown.fill(MASK, at, at + needle.length);
  }

  /** How many of the last bytes could be the beginning of a secret that goes on in the next chunk. */
  #openEnd(raw: Buffer): number {
    for (let length = Math.min(this.#longest, raw.length); length > 0; length--) {
      const end = raw.subarray(raw.length - length);
      const open = this.#needles.some(
        (needle) => needle.length > length && needle.subarray(0, length).equals(end),
      );
      if (open) return length;
    }
    return 0;
  }

  /** A header value or status text, as Node reads them (latin1). */
  text(value: string): string {
    const raw = Buffer.from(value, 'latin1');
    const shown = Buffer.from(raw);
    this.#mask(raw, shown);
    return shown.toString('latin1');
  }

  /** Masks a body as it streams. Holds back only what may be the beginning of a secret, so events are not delayed. */
  stream(): Transform {
    let raw: Buffer = Buffer.alloc(0);
    let shown: Buffer = raw;
    return new Transform({
      transform: (chunk: Buffer, _encoding, done: TransformCallback) => {
        raw = Buffer.concat([raw, chunk]);
        shown = Buffer.concat([shown, chunk]);
        this.#mask(raw, shown);
        const ready = raw.length - this.#openEnd(raw);
        const out = shown.subarray(0, ready);
        raw = raw.subarray(ready);
        shown = shown.subarray(ready);
        done(null, out);
      },
      flush: (done) => done(null, shown),
    });
  }
}
