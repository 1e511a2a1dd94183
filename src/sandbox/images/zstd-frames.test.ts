import { pipeline, Readable } from 'node:stream';
import { constants, createZstdDecompress, zstdCompressSync } from 'node:zlib';
import { expect, test } from 'vitest';
import { cutAtFrames } from './zstd-frames.ts';

const noise = Buffer.from(Array.from({ length: 300_000 }, (_, i) => (i * i * 2654435761) >>> 24));
const checked = { params: { [constants.ZSTD_c_checksumFlag]: 1 } };
const unsized = { params: { [constants.ZSTD_c_contentSizeFlag]: 0 } };
const skippable = Buffer.concat([
  Buffer.from([0x5a, 0x2a, 0x4d, 0x18, 5, 0, 0, 0]),
  Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0]),
]);

async function unpacked(stored: Buffer, chunkBytes: number): Promise<Buffer> {
  const chunks: Buffer[] = [];
  for (let at = 0; at < stored.length; at += chunkBytes)
    chunks.push(stored.subarray(at, at + chunkBytes));
  const cut = cutAtFrames(Readable.from(chunks));
  const codec = createZstdDecompress();
  const out: Buffer[] = [];
  for await (const chunk of pipeline(Readable.from(cut, { objectMode: false }), codec, () => {}))
    out.push(chunk as Buffer);
  return Buffer.concat(out);
}

test.each([1, 2, 7, 1000, 1 << 20])(
  'frames of every kind, in chunks of %i bytes',
  async (chunkBytes) => {
    const parts = [
      noise,
      Buffer.alloc(200_000),
      Buffer.from('x'),
      Buffer.alloc(0),
      noise.subarray(0, 70_000),
    ];
    const stored = parts.flatMap((part, index) => [
      zstdCompressSync(part, index % 2 ? checked : unsized),
      skippable,
    ]);
    expect((await unpacked(Buffer.concat(stored), chunkBytes)).equals(Buffer.concat(parts))).toBe(
      true,
    );
  },
);

test('what is no frame is an error of the decoder', async () => {
  const stored = Buffer.concat([zstdCompressSync('a'), Buffer.from('no frame at all')]);
  await expect(unpacked(stored, 1000)).rejects.toThrow();
  await expect(unpacked(zstdCompressSync(noise).subarray(0, 1000), 100)).rejects.toThrow();
});
