import { once } from 'node:events';
import { existsSync, readdirSync } from 'node:fs';
import { connect, createServer as createTcp, type Socket } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { NetworkRule } from '../contract.ts';
import { NetworkProxy } from './proxy.ts';
import { head, Origin, relayed, untilEnd } from './test-origin.ts';

const root = process.getuid?.() === 0;
const MIB = 1024 * 1024;
/** What kernel and streams may hold of one transfer, all hops together. */
const MAX_IN_FLIGHT = 32 * MIB;
/** With what the collector has not yet swept; the same for 800 MB. */
const MAX_LIVE = 96 * MIB;

let origin: Origin;
let proxy: NetworkProxy;
let socketPath: string;
let sids = 0;

beforeAll(async () => {
  if (!root) return;
  origin = await new Origin(['web.test']).open();
  await origin.serve(
    9,
    createTcp((socket) => socket.pause()),
  );
  socketPath = `${origin.folder}/proxy`;
  proxy = await NetworkProxy.open({
    socketPath,
    lookup: async () => [origin.address],
    ca: [origin.certificates.ca],
    environment: { KEY: 'sk-test-1234567890' },
    limits: { connections: 3, idleMs: 5000 },
  });
});

afterAll(async () => {
  await proxy?.close();
  await origin?.close();
});

function guest(rule: Partial<NetworkRule> = {}) {
  const sid = `box-${sids++}`;
  const handle = proxy.register(sid, { allow: [{ host: 'web.test', private: true, ...rule }] });
  return { handle, sid, dial: () => relayed(socketPath, sid) };
}

const get = (path: string) =>
  `GET http://web.test${path} HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n`;

/** The value once it has stayed the same for a while. */
async function settled(read: () => number): Promise<number> {
  let last = -1;
  for (let same = 0; same < 10; same++) {
    if (read() !== last) same = 0;
    last = read();
    await sleep(20);
  }
  return last;
}

setFlagsFromString('--expose-gc');
const collect = runInNewContext('gc') as () => void;
const live = () => {
  collect();
  return process.memoryUsage().arrayBuffers;
};

/** Reads to the end, and the most memory that guest, proxy and server, all in this process, had meanwhile. */
async function drain(socket: Socket): Promise<{ bytes: number; peak: number }> {
  let bytes = 0;
  let peak = 0;
  for await (const chunk of socket) {
    const before = bytes;
    bytes += (chunk as Buffer).length;
    if (Math.floor(before / (16 * MIB)) < Math.floor(bytes / (16 * MIB)))
      peak = Math.max(peak, live());
  }
  return { bytes, peak };
}

describe.skipIf(!root)('ports below 1024 need root: the proxy', () => {
  const total = 200 * MIB;

  test.each([
    ['a plain answer', {}, get(`/endless?${total}`)],
    [
      'a masked answer',
      { upgrade: true, inject: { 'X-Key': { env: 'KEY' } } },
      get(`/endless?${total}`),
    ],
    [
      'a tunnel',
      { ports: [80] },
      `CONNECT web.test:80 HTTP/1.1\r\nHost: web.test:80\r\n\r\nGET /endless?${total} HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n`,
    ],
  ])(
    'waits for a guest that does not read %s, then passes 200 MB in little memory',
    async (_name, rule, request) => {
      const { dial, handle } = guest(rule);
      const socket = dial();
      const sent = origin.sent;
      const before = live();
      socket.write(request);
      await vi.waitFor(() => expect(origin.sent).toBeGreaterThan(sent), { timeout: 10_000 });
      expect((await settled(() => origin.sent)) - sent).toBeLessThan(MAX_IN_FLIGHT);
      const { bytes, peak } = await drain(socket);
      expect(bytes).toBeGreaterThan(total);
      expect(peak - before).toBeLessThan(MAX_LIVE);
      expect(handle.attempts()[0]!.bytesDown).toBeGreaterThan(total);
    },
  );

  test.each([
    ['a tunnel', 'CONNECT web.test:9 HTTP/1.1\r\nHost: web.test:9\r\n\r\n'],
    [
      'a request',
      'PUT http://web.test:9/ HTTP/1.1\r\nHost: web.test:9\r\nContent-Length: 999999999\r\n\r\n',
    ],
  ])('stops reading from a guest whose server does not read %s', async (_name, request) => {
    const { dial } = guest({ ports: [9] });
    const socket = dial();
    socket.write(request);
    const chunk = Buffer.alloc(64 * 1024);
    let given = 0;
    const give = () => {
      while (socket.write(chunk)) given += chunk.length;
    };
    socket.on('drain', give);
    give();
    expect(await settled(() => given)).toBeLessThan(MAX_IN_FLIGHT);
    // What stalls for ever is ended.
    await new Promise((resolve) => socket.once('close', resolve));
  });

  test('passes a large body up', async () => {
    const { dial } = guest();
    const socket = dial();
    const answer = untilEnd(socket);
    socket.write(
      `PUT http://web.test/count HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nContent-Length: ${total}\r\n\r\n`,
    );
    const chunk = Buffer.alloc(MIB);
    for (let left = total; left > 0; left -= MIB)
      if (!socket.write(chunk)) await once(socket, 'drain');
    expect(await answer).toMatch(new RegExp(`200 OK.*${total}$`, 's'));
  });

  test('ends a tunnel in which nothing happens', async () => {
    const { dial, handle } = guest({ ports: [7] });
    const socket = dial();
    socket.write('CONNECT web.test:7 HTTP/1.1\r\nHost: web.test:7\r\n\r\n');
    await head(socket);
    expect(await untilEnd(socket)).toBe('');
    expect(handle.attempts()).toMatchObject([{ outcome: 'allowed', bytesUp: 0 }]);
  });

  test('gives a sandbox so many connections, and others theirs', async () => {
    const { dial, handle } = guest();
    const other = guest();
    const held = [dial(), dial(), dial()];
    // A whole request shows that the connection has been taken in.
    for (const socket of held) {
      socket.write('GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n');
      expect(await head(socket)).toMatch(/ 200 /);
    }
    expect(await untilEnd(dial())).toMatch(/^HTTP\/1.1 503 .*no more than 3 connections/s);
    expect(handle.attempts().at(-1)).toMatchObject({ outcome: 'refused', host: '' });
    const free = other.dial();
    free.write(get('/'));
    expect(await untilEnd(free)).toMatch(/ 200 /);
    held[0]!.destroy();
    await vi.waitFor(async () => {
      const again = dial();
      again.write(get('/'));
      expect(await untilEnd(again)).toMatch(/ 200 /);
    });
    for (const socket of held) socket.destroy();
  });

  test('leaves nothing of guests that break off', async () => {
    const { dial, handle } = guest();
    const beginnings = [
      '',
      'GET http://web.test/ HT',
      'GET http://web.test/endless?99999999 HTTP/1.1\r\nHost: web.test\r\n\r\n',
      'PUT http://web.test/count HTTP/1.1\r\nHost: web.test\r\nContent-Length: 9999\r\n\r\nxx',
      'CONNECT web.test:443 HTTP/1.1\r\nHost: web.test:443\r\n\r\n',
      'CONNECT web.test:80 HTTP/1.1\r\nHost: web.test:80\r\n\r\nGET / HT',
    ];
    const descriptors = () => readdirSync('/proc/self/fd').length;
    const before = descriptors();
    for (let round = 0; round < 50; round++)
      for (const text of beginnings) {
        const socket = dial();
        socket.write(text);
        if (round % 2 === 0 && text !== '') await Promise.race([once(socket, 'data'), sleep(5)]);
        socket.destroy();
        await new Promise((resolve) => socket.once('close', resolve));
      }
    await vi.waitFor(() => expect(descriptors()).toBeLessThanOrEqual(before + 1), {
      timeout: 10_000,
    });
    expect(handle.attempts().length).toBeGreaterThan(50);
  });

  test('keeps the last 1,000 attempts', async () => {
    const { dial, handle } = guest();
    for (let index = 0; index < 1_010; index++) {
      const socket = dial();
      const host = `h${index}.test`;
      socket.write(`GET http://${host}/ HTTP/1.1\r\nHost: ${host}\r\n\r\n`);
      expect(await untilEnd(socket)).toMatch(/ 403 /);
    }
    const attempts = handle.attempts();
    expect(attempts).toHaveLength(1_000);
    expect(attempts[0]!.host).toBe('h10.test');
    expect(attempts.at(-1)!.host).toBe('h1009.test');
  });

  test.each([
    ['an unknown sandbox', 'box-unknown\n'],
    ['no line', 'x'.repeat(100)],
    ['an empty line', '\n'],
    ['a line that looks like a request', 'GET http://web.test/ HTTP/1.1\n'],
  ])('drops a connection with %s', async (_name, text) => {
    const socket = relayed(socketPath, '').on('error', () => {});
    socket.write(text);
    expect(await untilEnd(socket)).toBe('');
  });

  test('reads the line however it arrives', async () => {
    const { sid } = guest();
    const line = `${sid}\n${get('/')}`;
    for (const at of [1, sid.length, sid.length + 1, sid.length + 5]) {
      const cut = connect(socketPath);
      cut.write(line.slice(0, at));
      await sleep(5);
      cut.write(line.slice(at));
      expect(await untilEnd(cut)).toMatch(/^HTTP\/1.1 200 /);
    }
  });

  test('a closed registration ends its connections and keeps its record', async () => {
    const { dial, handle, sid } = guest({ ports: [7, 80] });
    const tunnel = dial();
    tunnel.write('CONNECT web.test:7 HTTP/1.1\r\nHost: web.test:7\r\n\r\n');
    expect(await head(tunnel)).toMatch(/ 200 /);
    const ended = untilEnd(tunnel);
    handle.close();
    handle.close();
    await ended;
    expect(await untilEnd(dial())).toBe('');
    expect(handle.attempts()).toMatchObject([{ outcome: 'allowed', port: 7 }]);
    proxy.register(sid, { allow: [] }).close();
  });

  test('refuses a wrong registration', () => {
    const { sid } = guest();
    const internal = expect.objectContaining({ code: 'Internal' });
    expect(() => proxy.register(sid, { allow: [] })).toThrow(internal);
    expect(() => proxy.register('a b', { allow: [] })).toThrow(internal);
    expect(() => proxy.register('fresh', { allow: [{ host: '*' }] })).toThrow(
      expect.objectContaining({ code: 'ConfigInvalid' }),
    );
    // What was refused is not taken.
    proxy.register('fresh', { allow: [] }).close();
  });

  test('closes with its connections and removes its socket', async () => {
    const path = `${origin.folder}/second`;
    const second = await NetworkProxy.open({ socketPath: path });
    second.register('box', { allow: [] });
    const idle = relayed(path, 'box');
    const ended = untilEnd(idle);
    await once(idle, 'connect');
    await second.close();
    await second.close();
    await ended;
    expect(existsSync(path)).toBe(false);
  });

  test('says why it cannot listen', async () => {
    await expect(NetworkProxy.open({ socketPath: '/nowhere/at/all' })).rejects.toMatchObject({
      code: 'SandboxUnavailable',
    });
    await expect(NetworkProxy.open({ socketPath })).rejects.toMatchObject({
      code: 'SandboxUnavailable',
      message: expect.stringContaining('EADDRINUSE'),
    });
  });
});
