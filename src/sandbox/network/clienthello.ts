/**
 * Reads the server name of a TLS ClientHello (RFC 8446, 4.1.2; RFC 6066, 3) from the first bytes of a
 * connection, without TLS itself: the proxy holds no key. With encrypted ClientHello the outer name is
 * the one that is read.
 */
export type HelloReading =
  | { state: 'incomplete' }
  /** The bytes cannot be the beginning of a TLS connection, or break its format. */
  | { state: 'invalid'; reason: string }
  /** `serverName` is null where the client sent none. */
  | { state: 'complete'; serverName: string | null };

const RECORD_HEADER = 5;
const HANDSHAKE_RECORD = 22;
const HANDSHAKE_HEADER = 4;
const CLIENT_HELLO = 1;
const MAX_RECORD = 16_384;
/** Post-quantum key shares make about 2 KiB; no known client comes near. */
const MAX_HELLO_BYTES = 16_384;
const SERVER_NAME_EXTENSION = 0;
const HOST_NAME = 0;

const INCOMPLETE: HelloReading = { state: 'incomplete' };
const invalid = (reason: string): HelloReading => ({ state: 'invalid', reason });

/** Whether a connection that begins with this byte may be TLS: a handshake record. */
export function mayBeTls(first: number): boolean {
  return first === HANDSHAKE_RECORD;
}

class Cut extends Error {}

/** Reads lengths and fields in order; throws `Cut` past the end. */
class Reader {
  #at = 0;
  readonly #bytes: Buffer;
  constructor(bytes: Buffer) {
    this.#bytes = bytes;
  }
  get done(): boolean {
    return this.#at === this.#bytes.length;
  }
  take(count: number): Buffer {
    if (this.#at + count > this.#bytes.length) throw new Cut();
    this.#at += count;
    return this.#bytes.subarray(this.#at - count, this.#at);
  }
  uint(bytes: number): number {
    return this.take(bytes).readUIntBE(0, bytes);
  }
  /** A field that its length, of so many bytes, stands before. */
  field(lengthBytes: number): Buffer {
    return this.take(this.uint(lengthBytes));
  }
}

function serverName(extension: Buffer): string {
  const list = new Reader(new Reader(extension).field(2));
  const type = list.uint(1);
  const name = list.field(2).toString('latin1');
  if (type !== HOST_NAME || !list.done) throw new Cut();
  return name;
}

function readHello(body: Buffer): HelloReading {
  try {
    const hello = new Reader(body);
    hello.take(2 + 32);
    hello.field(1);
    hello.field(2);
    hello.field(1);
    if (hello.done) return { state: 'complete', serverName: null };
    const extensions = new Reader(hello.field(2));
    let name: string | null = null;
    while (!extensions.done) {
      const type = extensions.uint(2);
      const data = extensions.field(2);
      if (type !== SERVER_NAME_EXTENSION) continue;
      // A second name could be the one that the server believes.
      if (name !== null) return invalid('the ClientHello names two servers');
      name = serverName(data);
    }
    return hello.done
      ? { state: 'complete', serverName: name }
      : invalid('a malformed ClientHello');
  } catch (error) {
    if (error instanceof Cut) return invalid('a malformed ClientHello');
    throw error;
  }
}

/** Reads what has arrived so far; call again with more while it is `incomplete`. */
export function readClientHello(bytes: Buffer): HelloReading {
  const parts: Buffer[] = [];
  let at = 0;
  // Records of another type may follow a whole ClientHello (early data), but not cut one in two.
  let cut = false;
  while (at < bytes.length && !cut) {
    const length = at + RECORD_HEADER <= bytes.length ? bytes.readUInt16BE(at + 3) : 1;
    cut = bytes[at] !== HANDSHAKE_RECORD || (bytes[at + 1] ?? 3) !== 3;
    cut ||= length === 0 || length > MAX_RECORD;
    if (!cut) parts.push(bytes.subarray(at + RECORD_HEADER, at + RECORD_HEADER + length));
    at += RECORD_HEADER + length;
  }
  const handshake = Buffer.concat(parts);
  const unfinished = cut ? invalid('not the beginning of TLS') : INCOMPLETE;
  if (handshake.length === 0) return unfinished;
  if (handshake[0] !== CLIENT_HELLO) return invalid('TLS without a ClientHello');
  if (handshake.length < HANDSHAKE_HEADER) return unfinished;
  const helloBytes = handshake.readUIntBE(1, 3);
  if (helloBytes > MAX_HELLO_BYTES) return invalid('a ClientHello of more than 16 KiB');
  if (handshake.length < HANDSHAKE_HEADER + helloBytes) return unfinished;
  return readHello(handshake.subarray(HANDSHAKE_HEADER, HANDSHAKE_HEADER + helloBytes));
}
