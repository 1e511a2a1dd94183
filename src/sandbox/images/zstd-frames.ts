const FRAME = 0xfd2fb528;
const SKIPPABLE = 0x184d2a50;
/** Sizes of the fields that a frame's descriptor names (RFC 8878, 3.1.1.1). */
const DICTIONARY_BYTES = [0, 1, 2, 4];
const CONTENT_BYTES = [0, 2, 4, 8];
const RLE = 1;

interface Wanted {
  bytes: number;
  /** Whether the bytes are needed, or only counted. */
  read: boolean;
  /** A frame begins here. */
  begins?: boolean;
}

/** Where frames begin, by their headers and block sizes alone. */
function* boundaries(): Generator<Wanted, never, Buffer> {
  for (;;) {
    const magic = (yield { bytes: 4, read: true, begins: true }).readUInt32LE(0);
    if ((magic & 0xfffffff0) >>> 0 === SKIPPABLE) {
      const size = (yield { bytes: 4, read: true }).readUInt32LE(0);
      yield { bytes: size, read: false };
      continue;
    }
    // The decoder says what is wrong with anything else.
    if (magic !== FRAME) yield { bytes: Number.POSITIVE_INFINITY, read: false };
    const descriptor = (yield { bytes: 1, read: true })[0]!;
    const single = (descriptor & 0x20) !== 0;
    const content = CONTENT_BYTES[descriptor >> 6]! || (single ? 1 : 0);
    yield { bytes: (single ? 0 : 1) + DICTIONARY_BYTES[descriptor & 3]! + content, read: false };
    for (let last = false; !last; ) {
      const header = (yield { bytes: 3, read: true }).readUIntLE(0, 3);
      last = (header & 1) === 1;
      yield { bytes: ((header >> 1) & 3) === RLE ? 1 : header >> 3, read: false };
    }
    yield { bytes: (descriptor & 4) === 0 ? 0 : 4, read: false };
  }
}

/**
 * The same bytes, cut where a Zstandard frame begins. Node's decoder (24.x) silently drops what follows a
 * frame in the same chunk, and goes on with a chunk that begins with the next; layers of several frames are
 * usual (`zstd:chunked`, pzstd).
 */
export async function* cutAtFrames(source: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  const parser = boundaries();
  let wanted = parser.next().value;
  let { bytes: missing } = wanted;
  let seen: Uint8Array[] = [];
  for await (const chunk of source) {
    let start = 0;
    for (let at = 0; at < chunk.length; ) {
      const taken = Math.min(missing, chunk.length - at);
      if (wanted.read) seen.push(chunk.subarray(at, at + taken));
      at += taken;
      missing -= taken;
      while (missing === 0) {
        wanted = parser.next(Buffer.concat(seen)).value;
        missing = wanted.bytes;
        seen = [];
        if (!wanted.begins) continue;
        yield chunk.subarray(start, at);
        start = at;
      }
    }
    if (start < chunk.length) yield chunk.subarray(start);
  }
}
