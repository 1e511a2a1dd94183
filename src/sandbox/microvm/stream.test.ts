import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeEach, expect, test } from 'vitest';
import { AgentStream } from './stream.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-stream-'));
afterAll(() => rmSync(home, { recursive: true, force: true }));

let near: Socket;
let far: Socket;
let count = 0;
beforeEach(async () => {
  const path = join(home, `${count++}`);
  const server = createServer().listen(path);
  await once(server, 'listening');
  near = connect(path);
  [far] = (await once(server, 'connection')) as [Socket];
  server.close();
});

function frame(bytes: number): Buffer {
  const head = Buffer.alloc(8);
  head.writeUInt32BE(bytes, 0);
  return Buffer.concat([head, Buffer.alloc(bytes, 7)]);
}

const send = async (data: Buffer) => {
  await new Promise((resolve) => far.write(data, resolve));
};

test('keeps what has come of a frame that has not ended, however it was cut', async () => {
  const stream = new AgentStream(near);
  stream.resume();
  const whole = Buffer.concat([frame(10), frame(0), frame(100_000), frame(5)]);
  for (const end of [0, 1, 3, 4, 9, 18, 25, 26, 27, 70_000, whole.length - 1, whole.length]) {
    const before = stream.partial;
    expect(before.length).toBeLessThan(100_008);
    await send(whole.subarray(stream.heard, end));
    await stream.settle();
    expect(stream.heard).toBe(end);
    const starts = [0, 18, 26, 100_034, whole.length];
    const start = starts.findLast((each) => each <= end)!;
    expect(stream.partial.equals(whole.subarray(start, end))).toBe(true);
  }
  stream.destroy();
});

test('a stream that goes on from half a frame hears that half first', async () => {
  const whole = frame(20);
  const stream = new AgentStream(near, whole.subarray(0, 11));
  const heard: Buffer[] = [];
  stream.on('data', (chunk) => heard.push(chunk));
  await send(whole.subarray(11));
  await stream.settle();
  expect(Buffer.concat(heard).equals(whole)).toBe(true);
  expect(stream.partial).toHaveLength(0);
  stream.destroy();
});

test('what is written while held comes after the release, in order', async () => {
  const stream = new AgentStream(near);
  const heard: Buffer[] = [];
  far.on('data', (chunk) => heard.push(chunk));
  stream.write('a');
  await once(far, 'data');
  stream.hold();
  stream.write('b');
  stream.write('c');
  await stream.settle();
  expect(Buffer.concat(heard).toString()).toBe('a');
  stream.release();
  while (Buffer.concat(heard).length < 3) await once(far, 'data');
  expect(Buffer.concat(heard).toString()).toBe('abc');
  stream.destroy();
});
