import { PassThrough, type Readable } from 'node:stream';
import { LonghaulError } from '../../core/index.ts';
import { type AgentChannel, type Frame, frameParts } from './channel.ts';
import type { RawResult } from './requests.ts';

const MESSAGE_BYTES = 4096;
const CHUNK_BYTES = 1 << 20;

/** Starts the archiver inside and waits for its end; `onOutput` gets what it prints. */
function archiver(
  channel: AgentChannel,
  fields: Record<string, unknown>,
  onOutput: (chunk: Buffer) => void,
): { id: number; ended: Promise<void> } {
  const id = channel.reserve();
  const ended = new Promise<void>((resolve, reject) => {
    channel.listen(id, (frame: Frame) => {
      const exit = frame.header.exit as RawResult | undefined;
      if (!exit) {
        if (frame.header.stream === 0) onOutput(frame.body);
        return;
      }
      if (exit.code === 0) return resolve();
      const [, , head, tail] = frameParts(frame);
      const said = Buffer.concat([head!, tail!]).toString().trim() || `it ended by ${exit.cause}`;
      reject(new LonghaulError('FileRefused', `archive: ${said}`));
    });
    channel
      .call({ op: 'start', ...fields, keep: MESSAGE_BYTES, tag: id }, [], id)
      .catch((error) => reject(new LonghaulError('SandboxBroken', `archive: ${error.message}`)));
  });
  ended.catch(() => {});
  return { id, ended };
}

/** A tar stream of a folder. A slow reader holds the agent back. */
export function packWorkspace(
  exclusively: (use: (channel: AgentChannel) => Promise<void>) => Promise<void>,
  path: string,
): Readable {
  const out = new PassThrough({ highWaterMark: 4 * CHUNK_BYTES });
  exclusively(async (channel) => {
    const resume = () => channel.resume();
    out.on('drain', resume);
    out.on('close', resume); // an abandoned export must not leave the sandbox deaf
    const { ended } = archiver(channel, { kind: 'pack', path }, (chunk) => {
      if (!out.destroyed && !out.write(chunk)) channel.pause();
    });
    await ended;
    out.end();
  }).catch((error) => out.destroy(error));
  return out;
}

/** Removes everything below a folder, as the guest. */
export async function clearFolder(channel: AgentChannel, path: string): Promise<void> {
  await archiver(channel, { kind: 'clear', path }, () => {}).ended;
}

export async function unpackInto(
  channel: AgentChannel,
  source: AsyncIterable<Uint8Array>,
  path: string,
  whiteouts: boolean,
): Promise<void> {
  const { id, ended } = archiver(channel, { kind: 'unpack', path, whiteouts }, () => {});
  const feed = async () => {
    for await (const whole of source) {
      for (let at = 0; at < whole.length; at += CHUNK_BYTES) {
        const frame = await channel.call({ op: 'input', process: id, end: false }, [
          whole.subarray(at, at + CHUNK_BYTES),
        ]);
        if (frame.header.errno !== undefined) return; // it has ended: `ended` says why
      }
    }
    await channel.call({ op: 'input', process: id, end: true });
  };
  try {
    await feed();
  } catch (error) {
    await channel.call({ op: 'kill', process: id, signal: 9 }).catch(() => {});
    await ended.catch(() => {});
    throw error;
  }
  await ended;
}
