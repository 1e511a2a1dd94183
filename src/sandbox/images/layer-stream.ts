import { createHash } from 'node:crypto';
import { type Duplex, pipeline, Readable } from 'node:stream';
import { createGunzip, createZstdDecompress } from 'node:zlib';
import type { ArchiveFiles } from './archive-files.ts';
import type { LayerBlob } from './oci.ts';
import { refused } from './refused.ts';
import { cutAtFrames } from './zstd-frames.ts';

const GZIP = Buffer.from([0x1f, 0x8b]);
const ZSTD = Buffer.from([0x28, 0xb5, 0x2f, 0xfd]);

/**
 * A layer's tar, uncompressed, for the archiver inside a sandbox: the host decompresses and hashes, and
 * reads no member. After the last byte, size and checksums are compared: a layer that is not what its
 * image names ends with `FileRefused`, and what was unpacked of it goes with the sandbox.
 */
export async function* layerTar(
  files: ArchiveFiles,
  layer: LayerBlob,
  maxBytes: number,
): AsyncGenerator<Uint8Array> {
  const raw = createHash('sha256');
  const tar = createHash('sha256');
  let [bytes, total] = [0, 0];
  async function* stored(): AsyncGenerator<Uint8Array> {
    for await (const chunk of files.read(layer.path)) {
      raw.update(chunk);
      bytes += chunk.length;
      yield chunk;
    }
  }
  const source = stored();
  const first = await source.next();
  const head = Buffer.from(first.value ?? []);
  async function* whole(): AsyncGenerator<Uint8Array> {
    yield head;
    yield* source;
  }
  let plain: AsyncIterable<Uint8Array> = whole();
  let codec: Duplex | null = null;
  if (head.subarray(0, 2).equals(GZIP)) codec = createGunzip();
  else if (head.subarray(0, 4).equals(ZSTD)) {
    codec = createZstdDecompress();
    plain = cutAtFrames(plain);
  }
  // Errors come out where the codec is read.
  if (codec) plain = pipeline(Readable.from(plain, { objectMode: false }), codec, () => {});
  try {
    for await (const chunk of plain) {
      total += chunk.length;
      if (total > maxBytes)
        throw refused(layer.path, `more than ${maxBytes} bytes when unpacked`, MORE_DISK);
      tar.update(chunk);
      yield chunk;
    }
  } catch (error) {
    const code = (error as NodeJS.ErrnoException).code ?? '';
    if (/^(Z_|ZSTD_|ERR_ZLIB|ERR_STREAM_PREMATURE)/.test(code))
      throw refused(layer.path, `it cannot be decompressed: ${(error as Error).message}`);
    throw error;
  }
  const wrong =
    (layer.sha256 !== null && raw.digest('hex') !== layer.sha256) ||
    (layer.bytes !== null && bytes !== layer.bytes) ||
    tar.digest('hex') !== layer.diffId;
  if (wrong) throw refused(layer.path, 'its content has another size or checksum');
}

export const MORE_DISK = 'Give the store more room with `spec: { diskBytes, inodes }`.';
