import { createServer as createTcp } from 'node:net';
import { setTimeout as sleep, setImmediate as turn } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import { Rng } from '../../core/index.ts';
import { connectTo, type Expected, expectAttempts, get, TestProxy } from './test-guest.ts';
import { craftedHello, head, type Origin, untilEnd } from './test-origin.ts';

// The servers listen on the ports that rules speak of.
const root = process.getuid?.() === 0;

let world: TestProxy;
let origin: Origin;

beforeAll(async () => {
  if (!root) return;
  world = await new TestProxy().open();
  origin = world.origin;
});

afterAll(() => world?.close());

let ports = 0;
const guest = (...allow: unknown[]) => world.guest(...allow);

const WEB = { host: 'web.test', private: true };
const ANY = [{ host: '0.0.0.0/0' }, { host: '::/0' }];

describe.skipIf(!root)('ports below 1024 need root: what a guest tries', () => {
  describe('the metadata service, however it is spelled', () => {
    test.each([
      '169.254.169.254',
      '169.254.169.254.',
      '0xa9fea9fe',
      '0xa9.0xfe.0xa9.0xfe',
      '2852039166',
      '0251.0376.0251.0376',
      '169.254.43518',
      '169.16689662',
      '[::ffff:169.254.169.254]',
      '[::ffff:a9fe:a9fe]',
      '[0:0:0:0:0:FFFF:A9FE:A9FE]',
      '[64:ff9b::169.254.169.254]',
      '[2002:a9fe:a9fe::1]',
      '[fd00:ec2::254]',
      '100.100.100.200',
      'meta.test',
      'mapped.test',
    ])('%s', async (host) => {
      const { send, handle } = guest(...ANY, { host: 'meta.test' }, { host: 'mapped.test' });
      expect(await send(get(`http://${host}/latest/meta-data/`, host))).toMatch(/^HTTP\/1.1 403 /);
      expect(await send(connectTo(`${host}:443`))).toMatch(/^HTTP\/1.1 403 /);
      const inside = get('/latest/', host);
      expect(await send(connectTo(`${host}:80`) + inside)).toMatch(/ 403 Forbidden\r\n/);
      const detail = 'is not public';
      expectAttempts(
        handle.attempts(),
        { host, port: 80, method: 'GET', outcome: 'refused', detail },
        { host, port: 443, method: 'CONNECT', outcome: 'refused', detail },
        { host, port: 80, method: 'CONNECT', outcome: 'allowed', detail: 'each request judged' },
        { host: null, port: 80, method: 'GET', outcome: 'refused', detail },
      );
    });
  });

  describe('destinations that no rule allows', () => {
    test.each([
      ['another name', get('http://evil.test/', 'evil.test'), 'evil.test', 80, 'GET'],
      [
        'the name below an allowed one',
        get('http://x.web.test/', 'x.web.test'),
        'x.web.test',
        80,
        'GET',
      ],
      ['another port', get('http://web.test:8080/', 'web.test:8080'), 'web.test', 8080, 'GET'],
      ['ssh', connectTo('web.test:22'), 'web.test', 22, 'CONNECT'],
      ['a tunnel to another name', connectTo('evil.test:443'), 'evil.test', 443, 'CONNECT'],
      ['the loopback', get('http://localhost/', 'localhost'), 'localhost', 80, 'GET'],
      ['its address', get('http://127.1/', '127.1'), '127.1', 80, 'GET'],
      ['IPv6 loopback', connectTo('[::1]:443'), '[::1]', 443, 'CONNECT'],
      ['every interface', get('http://0/', '0'), '0', 80, 'GET'],
    ])('%s', async (_name, request, host, port, method) => {
      const { send, handle } = guest(WEB);
      world.looked.length = 0;
      const answer = await send(request);
      expect(answer).toMatch(/^HTTP\/1.1 403 /);
      expect(answer).toContain('web.test (80, 443)');
      expect(world.looked).toEqual([]);
      const detail = 'no rule allows';
      expectAttempts(handle.attempts(), { host, port, method, outcome: 'refused', detail });
    });
  });

  describe('requests that proxy and server could read differently', () => {
    const post = (...headers: string[]) =>
      `POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\n${headers.join('\r\n')}\r\n\r\n`;
    const cases: [string, string, number, Partial<Expected>][] = [
      [
        'length and chunks',
        `${post('Content-Length: 4', 'Transfer-Encoding: chunked')}0\r\n\r\n`,
        400,
        {},
      ],
      [
        'chunks and length',
        `${post('Transfer-Encoding: chunked', 'Content-Length: 4')}0\r\n\r\n`,
        400,
        {},
      ],
      ['two lengths', `${post('Content-Length: 4', 'Content-Length: 5')}abcde`, 400, {}],
      ['a list of lengths', `${post('Content-Length: 4, 4')}abcd`, 400, {}],
      ['a signed length', `${post('Content-Length: +4')}abcd`, 400, {}],
      ['a length beyond 64 bits', post('Content-Length: 99999999999999999999'), 400, {}],
      ['a space before the colon', `${post('Transfer-Encoding : chunked')}0\r\n\r\n`, 400, {}],
      ['chunks that are not last', `${post('Transfer-Encoding: chunked, gzip')}0\r\n\r\n`, 400, {}],
      ['a folded header', `${post('X-A: b\r\n Transfer-Encoding: chunked')}`, 400, {}],
      ['a bare line feed', 'GET http://web.test/ HTTP/1.1\nHost: web.test\n\n', 400, {}],
      ['a bare carriage return', post('X-A: b\rTransfer-Encoding: chunked'), 400, {}],
      ['a backslash in the host', get('http://evil.test\\.web.test/', 'web.test'), 400, {}],
      ['a NUL', post('X-A: b\0c'), 400, {}],
      ['HTTP/2 with prior knowledge', 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', 400, {}],
      ['TLS to the proxy', '\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03', 400, {}],
      [
        'HTTP/0.9',
        'GET http://web.test/\r\n\r\n',
        400,
        { host: 'web.test', port: 80, method: 'GET', detail: 'exactly one Host' },
      ],
      [
        'a coding within chunks',
        `${post('Transfer-Encoding: gzip, chunked')}0\r\n\r\n`,
        400,
        { host: 'web.test', port: 80, method: 'POST', detail: 'only chunked' },
      ],
    ];
    test.each(cases)('%s', async (_name, request, status, expected) => {
      const { send, handle } = guest(WEB);
      const before = origin.connections;
      expect(await send(request)).toMatch(new RegExp(`^HTTP/1.1 ${status} `));
      expect(origin.connections).toBe(before);
      expectAttempts(handle.attempts(), {
        host: '',
        port: 0,
        method: '',
        outcome: 'refused',
        detail: 'no valid HTTP/1.1 request',
        ...expected,
      });
    });

    test.each<[string, string, string, string, number, string]>([
      ['another Host', get('http://web.test/', 'evil.test'), 'Host header', 'web.test', 80, 'GET'],
      [
        'a Host with another port',
        get('http://web.test/', 'web.test:81'),
        'Host header',
        'web.test',
        80,
        'GET',
      ],
      [
        'two Hosts',
        get('http://web.test/', 'web.test', 'Host: web.test'),
        'exactly one Host',
        'web.test',
        80,
        'GET',
      ],
      [
        'no Host',
        'GET http://web.test/ HTTP/1.1\r\nX: y\r\n\r\n',
        'exactly one Host',
        'web.test',
        80,
        'GET',
      ],
      ['an empty Host', get('http://web.test/', ''), 'Host header', 'web.test', 80, 'GET'],
      [
        'CONNECT with another Host',
        'CONNECT web.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n',
        'Host header',
        'web.test',
        443,
        'CONNECT',
      ],
      [
        'CONNECT with a body',
        connectTo('web.test:443', 'Content-Length: 4'),
        'no body',
        'web.test',
        443,
        'CONNECT',
      ],
      ['CONNECT without a port', connectTo('web.test'), 'host:port', 'web.test', 0, 'CONNECT'],
      ['CONNECT to port 0', connectTo('web.test:0'), 'host:port', 'web.test', 0, 'CONNECT'],
      [
        'CONNECT to port 65979',
        connectTo('web.test:65979'),
        'host:port',
        'web.test',
        65979,
        'CONNECT',
      ],
      [
        'user and password',
        get('http://web.test@evil.test/', 'evil.test'),
        'user and password',
        'evil.test',
        80,
        'GET',
      ],
      [
        'user and password first',
        get('http://u:p@web.test/', 'web.test'),
        'user and password',
        'web.test',
        80,
        'GET',
      ],
      [
        'https without a tunnel',
        get('https://web.test/', 'web.test'),
        'use CONNECT',
        'web.test',
        80,
        'GET',
      ],
      [
        'another scheme',
        get('ftp://web.test/', 'web.test'),
        'this is a proxy',
        'web.test',
        80,
        'GET',
      ],
      ['a path alone', get('/etc', 'web.test'), 'this is a proxy', '', 0, 'GET'],
      [
        'an escaped dot',
        get('http://web%2etest/', 'web.test'),
        'no valid host',
        'web%2etest',
        80,
        'GET',
      ],
      [
        'an IPv6 zone',
        get('http://[fe80::1%25eth0]/', '[fe80::1%25eth0]'),
        'no valid host',
        '[fe80::1%25eth0]',
        80,
        'GET',
      ],
    ])('%s', async (_name, request, detail, host, port, method) => {
      const { send, handle } = guest(WEB);
      const before = origin.connections;
      const answer = await send(request);
      expect(answer).toMatch(/^HTTP\/1.1 400 /);
      expect(origin.connections).toBe(before);
      expectAttempts(handle.attempts(), { host, port, method, outcome: 'refused', detail });
    });

    test('an unknown coding', async () => {
      const { send, handle } = guest(WEB);
      const before = origin.connections;
      expect(await send(`${post('Transfer-Encoding: xchunked')}0\r\n\r\n`)).not.toMatch(/ 200 /);
      expect(origin.connections).toBe(before);
      expect(handle.attempts().map(({ outcome }) => outcome)).toEqual(['refused', 'refused']);
    });

    test('requests ahead of an answer wait their turn, so many of them', async () => {
      const { send, handle } = guest(WEB);
      const request = (path: string) =>
        `GET http://web.test/${path} HTTP/1.1\r\nHost: web.test\r\n`;
      const before = origin.connections;
      const answer = await send(
        `${request('1')}\r\n${request('2')}\r\n${request('3')}Connection: close\r\n\r\n`,
      );
      expect(answer.match(/"url":"\/\d"/g)).toEqual(['"url":"/1"', '"url":"/2"', '"url":"/3"']);
      expect(origin.connections).toBe(before + 3);
      expect(await send(`${request('x')}\r\n`.repeat(40))).toBe('');
      expect(origin.connections).toBeLessThanOrEqual(before + 4);
      expect(handle.attempts().at(-1)).toMatchObject({
        outcome: 'refused',
        detail: expect.stringContaining('more than 16 requests'),
      });
    });

    test('a tunnel behind a request that is not answered', async () => {
      const { send, handle } = guest(WEB);
      const one = 'GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n';
      expect(await send(one + connectTo('web.test:443'))).toBe('');
      expect(handle.attempts()[1]?.detail).toContain('ahead of an answer');
    });
  });

  describe('headers', () => {
    test('those of one connection stay behind, those named by Connection too, framing does not', async () => {
      const { send, handle } = guest(WEB);
      origin.received.length = 0;
      const answer = await send(
        [
          'POST http://web.test/a?b HTTP/1.1',
          'Host: WEB.test',
          'Connection: close, X-Mine, Content-Length, Host',
          'X-Mine: 1',
          'X-Other: kept',
          'Proxy-Authorization: Basic Zm9vOmJhcg==',
          'Proxy-Connection: keep-alive',
          'Keep-Alive: 300',
          'TE: trailers',
          'Upgrade: h2c',
          'HTTP2-Settings: AAMAAABkAAQAAP',
          'Content-Length: 004',
          '',
          'body',
        ].join('\r\n'),
      );
      expect(answer).toMatch(/^HTTP\/1.1 200 /);
      expect(answer).not.toMatch(/^(keep-alive: timeout=9|proxy-authenticate)/im);
      expect(origin.received).toEqual([
        {
          secure: false,
          method: 'POST',
          url: '/a?b',
          headers: [
            'Host',
            'web.test',
            'X-Other',
            'kept',
            'Content-Length',
            '4',
            'Connection',
            'close',
          ],
          body: 'body',
        },
      ]);
      expectAttempts(handle.attempts(), {
        host: 'web.test',
        port: 80,
        method: 'POST',
        outcome: 'allowed',
        detail: origin.address,
        bytes: true,
      });
      expect(handle.attempts()[0]!.bytesUp).toBeGreaterThan(50);
      expect(handle.attempts()[0]!.bytesDown).toBeGreaterThan(200);
    });

    test.each([
      ['one that is huge', `X: ${'a'.repeat(20_000)}`, '16384 bytes'],
      ['thousands', new Array(4_000).fill('a: b').join('\r\n'), 'fields'],
    ])('a flood: %s', async (_name, headers, detail) => {
      const { send, handle } = guest(WEB);
      expect(await send(get('http://web.test/', 'web.test', headers))).toMatch(/^HTTP\/1.1 431 /);
      expect(handle.attempts()).toMatchObject([
        { outcome: 'refused', detail: expect.stringContaining(detail) },
      ]);
    });

    test('a header that never ends is ended', async () => {
      const { send, handle } = guest(WEB);
      const drip = [...'GET http://web.test/ HTTP/1.1\r\nHost: web'];
      expect(await send(...drip)).toMatch(/^HTTP\/1.1 408 /);
      expect(handle.attempts()).toMatchObject([
        { outcome: 'refused', detail: expect.stringContaining('in time') },
      ]);
    });

    test('a connection that says nothing is ended', async () => {
      const { send, handle } = guest(WEB);
      expect(await send()).toMatch(/^HTTP\/1.1 408 /);
      expect(handle.attempts()).toHaveLength(1);
    });
  });

  describe('bodies', () => {
    const chunked = (rest: string, path = '/') =>
      `POST http://web.test${path} HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n${rest}`;

    test('chunks are written anew, their extensions and trailers dropped', async () => {
      const { send } = guest(WEB);
      origin.received.length = 0;
      const answer = await send(chunked('4;evil=1\r\nbody\r\n0\r\nX-Trailer: 1\r\n\r\n'));
      expect(answer).toMatch(/^HTTP\/1.1 200 /);
      expect(origin.received).toMatchObject([{ body: 'body' }]);
      expect(origin.received[0]!.headers.join()).not.toContain('Trailer');
    });

    test.each([
      ['a size beyond 64 bits', 'fffffffffffffffff\r\n'],
      ['a size that is none', '-1\r\n'],
      ['a chunk longer than it says', '2\r\nabcdef\r\n0\r\n\r\n'],
      ['an endless extension', `1;${'a'.repeat(40_000)}`],
    ])('a chunk bomb: %s', async (_name, rest) => {
      const { send, handle } = guest(WEB);
      await send(chunked(rest));
      const last = handle.attempts().at(-1);
      expect(last).toMatchObject({
        outcome: 'refused',
        detail: expect.stringContaining('no valid HTTP/1.1'),
      });
    });

    test('a server that answers early and closes is heard', async () => {
      const { send, handle } = guest(WEB);
      const answer = await send(
        chunked(`10000\r\n${'x'.repeat(65_536)}\r\n`, '/early'),
        '1\r\nx\r\n',
      );
      expect(answer).toMatch(/^HTTP\/1.1 413 .*too large/s);
      expect(handle.attempts()[0]).toMatchObject({ outcome: 'allowed', host: 'web.test' });
    });

    test('Expect: 100-continue', async () => {
      const { dial } = guest(WEB);
      const socket = dial();
      socket.write(
        'POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n',
      );
      expect(await head(socket)).toMatch(/^HTTP\/1.1 100 /);
      socket.write('body');
      expect(await untilEnd(socket)).toMatch(/^HTTP\/1.1 200 .*"body":"body"/s);
    });

    test('an answer that is cut short is cut short for the guest', async () => {
      const { send, handle } = guest(WEB);
      const answer = await send(get('http://web.test/cut', 'web.test'));
      expect(answer).toContain('Content-Length: 100');
      expect(answer).toMatch(/half$/);
      await vi.waitFor(() =>
        expect(handle.attempts()).toMatchObject([
          { outcome: 'failed', detail: expect.stringContaining('broke off') },
        ]),
      );
    });
  });

  describe('servers that are hostile too', () => {
    const OK = 'HTTP/1.1 200 OK\r\n';
    test.each([
      [
        'switches the protocol',
        'HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n',
        502,
        'changed the protocol',
      ],
      [
        'contradicts itself',
        `${OK}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n`,
        502,
        'broke off',
      ],
      ['floods headers', `${OK}${'a: bcdefgh\r\n'.repeat(4_000)}\r\n`, 502, 'HPE_HEADER_OVERFLOW'],
      ['speaks something else', 'SSH-2.0-x\r\n', 502, 'broke off'],
      ['says nothing and closes', '', 502, 'broke off'],
    ])('one that %s', async (_name, bytes, status, detail) => {
      const port = 20_000 + ports++;
      await origin.serve(
        port,
        createTcp((socket) => socket.end(bytes)),
      );
      const { send, handle } = guest({ ...WEB, ports: [port] });
      const answer = await send(get(`http://web.test:${port}/`, `web.test:${port}`));
      expect(answer).toMatch(new RegExp(`^HTTP/1.1 ${status} .*${detail}`, 's'));
      expect(handle.attempts()).toMatchObject([
        { outcome: 'failed', detail: expect.stringContaining(detail) },
      ]);
    });

    test('one that never answers', async () => {
      const port = 20_000 + ports++;
      await origin.serve(
        port,
        createTcp((socket) => socket.resume()),
      );
      const { send, handle } = guest({ ...WEB, ports: [port] });
      const answer = await send(get(`http://web.test:${port}/`, `web.test:${port}`));
      expect(answer).toMatch(/^HTTP\/1.1 504 .*nothing for too long/s);
      expect(handle.attempts()).toMatchObject([{ outcome: 'failed' }]);
    });
  });

  test('2,000 requests with random faults: only what was understood leaves, and the proxy stays', async () => {
    const { dial, send } = guest(WEB, { host: 'web.test', ports: [7], private: true });
    const rng = Rng.of(7);
    const any = (count: number) => rng.uint32() % count;
    const seeds = [
      get('http://web.test/a?b', 'web.test', 'X-A: 1', 'Cookie: a=b'),
      'POST http://web.test/p HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n',
      'PUT http://web.test/q HTTP/1.1\r\nHost: web.test\r\nContent-Length: 4\r\n\r\nbody',
      `${connectTo('web.test:443')}${craftedHello(['web.test']).toString('latin1')}`,
      `${connectTo('web.test:7')}raw`,
      `${connectTo('web.test:80')}GET /in HTTP/1.1\r\nHost: web.test\r\n\r\n`,
    ];
    const parts = [
      '\r\n',
      '\n',
      '\r',
      '\0',
      ' ',
      ':',
      'Host: evil.test',
      'Content-Length: 3',
      '\t',
      '\xff',
      '@',
      '#',
    ];
    const faulty = () => {
      let text = seeds[any(seeds.length)]!;
      for (let count = any(4); count > 0; count--) {
        const at = any(text.length);
        const part = any(3) === 0 ? String.fromCharCode(any(256)) : parts[any(parts.length)]!;
        text = text.slice(0, at) + (any(4) === 0 ? '' : part) + text.slice(at + any(3));
      }
      return Buffer.from(text, 'latin1');
    };
    origin.received.length = 0;
    for (let round = 0; round < 500; round++) {
      await Promise.all(
        Array.from({ length: 4 }, async () => {
          const socket = dial();
          const bytes = faulty();
          const cut = any(bytes.length);
          socket.write(bytes.subarray(0, cut));
          await turn();
          socket.write(bytes.subarray(cut));
          await Promise.race([untilEnd(socket), sleep(15)]);
          socket.destroy();
        }),
      );
    }
    expect(origin.received.length).toBeGreaterThan(100);
    for (const { headers, url } of origin.received) {
      const hosts = headers.filter((_, index) => headers[index - 1]?.toLowerCase() === 'host');
      expect([url, ...hosts]).toEqual([expect.stringMatching(/^\//), 'web.test']);
    }
    await vi.waitFor(async () =>
      expect(await send(get('http://web.test/', 'web.test'))).toMatch(/^HTTP\/1.1 200 /),
    );
  });

  describe('names', () => {
    test('a name is looked up once, and that address is the one connected to', async () => {
      const { dial, handle } = guest({ host: 'rebind.test', private: true });
      world.looked.length = 0;
      const socket = dial();
      socket.write(get('http://rebind.test/', 'rebind.test'));
      expect(await untilEnd(socket)).toMatch(/^HTTP\/1.1 200 /);
      expect(world.looked).toEqual(['rebind.test']);
      expect(handle.attempts()).toMatchObject([{ outcome: 'allowed', detail: origin.address }]);
    });

    test('a public name with a private address', async () => {
      const { send, handle } = guest({ host: 'private.test' });
      const before = origin.connections;
      expect(await send(get('http://private.test/', 'private.test'))).toMatch(
        /^HTTP\/1.1 403 .*private: true/s,
      );
      expect(await send(connectTo('private.test:443'))).toMatch(/^HTTP\/1.1 403 /);
      expect(origin.connections).toBe(before);
      expect(handle.attempts()).toMatchObject([
        { outcome: 'refused', detail: expect.stringContaining('loopback') },
        { outcome: 'refused', detail: expect.stringContaining('loopback') },
      ]);
    });

    test('private: true speaks for its own host only', async () => {
      const { send } = guest(WEB, { host: 'private.test' });
      expect(await send(get('http://private.test/', 'private.test'))).toMatch(/^HTTP\/1.1 403 /);
      expect(await send(get('http://web.test/', 'web.test'))).toMatch(/^HTTP\/1.1 200 /);
    });

    test.each([
      ['unknown', 'gone.test', 502, 'ENOTFOUND'],
      ['without an address', 'empty.test', 502, 'no address'],
      ['whose server is down', 'closed.test', 502, 'ECONNREFUSED'],
      ['that takes for ever', 'slow.test', 504, 'in time'],
    ])('a name %s', async (_name, host, status, detail) => {
      const { send, handle } = guest({ host, private: true });
      const failure = new RegExp(`^HTTP/1.1 ${status} .*${detail}`, 's');
      expect(await send(get(`http://${host}/`, host))).toMatch(failure);
      expect(await send(connectTo(`${host}:443`))).toMatch(failure);
      expectAttempts(
        handle.attempts(),
        { host, port: 80, method: 'GET', outcome: 'failed', detail },
        { host, port: 443, method: 'CONNECT', outcome: 'failed', detail },
      );
    });

    test('a redirect is the client’s business, and judged again', async () => {
      const { send, handle } = guest(WEB);
      const answer = await send(get('http://web.test/redirect', 'web.test'));
      const location = /Location: (.*)\r\n/.exec(answer)![1]!;
      expect(await send(get(location, '169.254.169.254'))).toMatch(/^HTTP\/1.1 403 /);
      expect(handle.attempts().map(({ outcome }) => outcome)).toEqual(['allowed', 'refused']);
    });
  });

  describe('each request of a kept connection is judged', () => {
    test('a refusal after an answer', async () => {
      const { dial, handle } = guest(WEB);
      const socket = dial();
      socket.write('GET http://web.test/1 HTTP/1.1\r\nHost: web.test\r\n\r\n');
      const first = await head(socket);
      expect(first).toMatch(/^HTTP\/1.1 200 .*keep-alive/is);
      socket.read();
      socket.write('GET http://evil.test/2 HTTP/1.1\r\nHost: evil.test\r\n\r\n');
      expect(await untilEnd(socket)).toContain('HTTP/1.1 403 ');
      expect(handle.attempts().map(({ host, outcome }) => [host, outcome])).toEqual([
        ['web.test', 'allowed'],
        ['evil.test', 'refused'],
      ]);
    });
  });
});
