import { LonghaulError } from '../../core/index.ts';
import { AgentSandbox } from '../agent/sandbox.ts';
import type { LayerId, Sandbox, SandboxDriver, SandboxSpec } from '../contract.ts';
import { refused } from './refused.ts';
import { directoryEntry, TAR_END } from './tar-writer.ts';

const WORKSPACE = '/workspace';

export type BuildSandbox = Sandbox & AgentSandbox;

/** A sandbox that archives can be unpacked in. `CapabilityMissing` for drivers that have no agent inside. */
export async function agentSandbox(
  driver: SandboxDriver,
  spec: Partial<SandboxSpec>,
  from?: LayerId,
): Promise<BuildSandbox> {
  const sandbox = await driver.create(spec, from);
  if (sandbox instanceof AgentSandbox) return sandbox as BuildSandbox;
  await sandbox.stop();
  throw new LonghaulError('CapabilityMissing', `${driver.name} sandboxes cannot hold images`, {
    next: 'Use the bubblewrap driver for the image store.',
  });
}

/**
 * A durable layer of tars, unpacked one over the other inside a sandbox of its own. `FileRefused` where
 * an archive is at fault or does not fit; then no layer is left.
 */
export async function unpackLayers(
  driver: SandboxDriver,
  tars: Iterable<AsyncIterable<Uint8Array>>,
  options: { spec: Partial<SandboxSpec>; workdir: string | null; signal?: AbortSignal | undefined },
): Promise<LayerId> {
  const sandbox = await agentSandbox(driver, { ...options.spec, image: 'host' });
  try {
    for (const tar of tars) {
      let complete = false;
      const watched = async function* () {
        for await (const chunk of tar) {
          options.signal?.throwIfAborted();
          yield chunk;
        }
        complete = true;
      };
      await sandbox.unpack(watched(), WORKSPACE, true);
      // Only what came to its end has been checked.
      if (!complete) throw refused('layer', 'it was not read to its end');
    }
    const workdir = options.workdir?.split('/').filter((part) => part !== '' && part !== '.');
    if (workdir?.length && !workdir.includes('..'))
      await sandbox.unpack(once([directoryEntry(workdir.join('/')), TAR_END]), WORKSPACE, true);
    return await sandbox.snapshot({ durable: true });
  } finally {
    await sandbox.stop();
  }
}

export async function* once(parts: Iterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  yield* parts;
}
