import { PassThrough, pipeline, type Readable } from 'node:stream';
import { constants, createZstdCompress, createZstdDecompress } from 'node:zlib';
import { LonghaulError } from '../../core/index.ts';
import type { LayerId, Sandbox, SandboxDriver, SandboxSpec } from '../contract.ts';
import { AgentSandbox } from './sandbox.ts';

const WORKSPACE = '/workspace';

function withAgent(sandbox: Sandbox): Sandbox & AgentSandbox {
  if (sandbox instanceof AgentSandbox) return sandbox;
  throw new LonghaulError('Internal', 'archives need a sandbox with an agent inside');
}

/** A layer's whole workspace as tar and zstd, read in a sandbox of its own, which ends with the stream. */
export async function exportArchive(driver: SandboxDriver, layer: LayerId): Promise<Readable> {
  const sandbox = withAgent(await driver.create({}, layer));
  const out = new PassThrough();
  const zstd = createZstdCompress({ params: { [constants.ZSTD_c_checksumFlag]: 1 } });
  pipeline(sandbox.pack(WORKSPACE), zstd, out, () => void sandbox.stop());
  return out;
}

/** A durable layer of an archive. It is decompressed here and unpacked nowhere but inside. */
export async function importArchive(
  driver: SandboxDriver,
  archive: Readable,
  spec: Partial<SandboxSpec>,
): Promise<LayerId> {
  const sandbox = withAgent(await driver.create(spec));
  try {
    const tar = createZstdDecompress();
    pipeline(archive, tar, () => {}); // its failures are met where the tar is read
    try {
      await sandbox.unpack(tar, WORKSPACE);
    } catch (error) {
      if (error instanceof LonghaulError || !tar.errored) throw error;
      throw new LonghaulError(
        'FileRefused',
        `archive: not readable zstd: ${(error as Error).message}`,
      );
    }
    return await sandbox.snapshot({ durable: true });
  } finally {
    archive.destroy();
    await sandbox.stop();
  }
}
