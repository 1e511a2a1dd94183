import { setImmediate as turn } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { NetworkAttempt, NetworkRule } from '../contract.ts';
import { NetworkProxy } from './proxy.ts';
import {
  clientHello,
  craftedHello,
  head,
  inRecords,
  Origin,
  relayed,
  untilEnd,
} from './test-origin.ts';

// The servers listen on the ports that rules speak of.
const root = process.getuid?.() === 0;

const NAMES = ['web.test', 'api.test', 'private.test', 'mixed.test', 'rebind.test'];
const SECRET = 'sk-test-1234567890';
let origin: Origin;
let proxy: NetworkProxy;
let socketPath: string;
let looked: string[] = [];
let sids = 0;

const environment: NodeJS.ProcessEnv = {
  KEY: SECRET,
  SHORT: 'abc',
  BROKEN: 'abcdefgh\r\nHost: evil',
};

async function lookup(name: string): Promise<readonly string[]> {
  looked.push(name);
  if (name === 'meta.test') return ['169.254.169.254'];
  if (name === 'mapped.test') return ['::ffff:169.254.169.254', 'fe80::1%eth0', '::1'];
  if (name === 'empty.test') return [];
  if (name === 'slow.test') return new Promise(() => {});
  if (name === 'closed.test') return ['127.0.0.254'];
  // Another address each time: whoever asks twice is led astray.
  if (name === 'rebind.test')
    return looked.filter((each) => each === name).length === 1 ? [origin.address] : ['127.0.0.254'];
  if (name === 'mixed.test') return ['169.254.169.254', origin.address];
  if (NAMES.includes(name) || name === 'untrusted.test') return [origin.address];
  throw Object.assign(new Error('no such name'), { code: 'ENOTFOUND' });
}

beforeAll(async () => {
  if (!root) return;
  origin = await new Origin(NAMES).open();
  socketPath = `${origin.folder}/proxy`;
  proxy = await NetworkProxy.open({
    socketPath,
    lookup,
    ca: [origin.certificates.ca],
    environment,
    limits: { headerMs: 600, helloMs: 600, connectMs: 1500, idleMs: 3000, connections: 4 },
  });
});

afterAll(async () => {
  await proxy?.close();
  await origin?.close();
});

function guest(...allow: unknown[]) {
  const sid = `box-${sids++}`;
  const handle = proxy.register(sid, { allow: allow as NetworkRule[] });
  const dial = () => relayed(socketPath, sid);
  /** Sends pieces, each a packet of its own, and reads to the end. */
  const send = async (...pieces: (string | Buffer)[]) => {
    const socket = dial();
    const answer = untilEnd(socket);
    for (const piece of pieces) {
      socket.write(typeof piece === 'string' ? Buffer.from(piece, 'latin1') : piece);
      if (pieces.length > 1) await turn();
    }
    return answer;
  };
  return { sid, handle, dial, send };
}

const get = (url: string, host: string, ...more: string[]) =>
  [`GET ${url} HTTP/1.1`, `Host: ${host}`, 'Connection: close', ...more, '', ''].join('\r\n');
const connectTo = (target: string, ...more: string[]) =>
  [`CONNECT ${target} HTTP/1.1`, `Host: ${target}`, ...more, '', ''].join('\r\n');

const WEB = { host: 'web.test', private: true };
const ANY = [{ host: '0.0.0.0/0' }, { host: '::/0' }];

type Expected = Pick<NetworkAttempt, 'host' | 'port' | 'method' | 'outcome'> & { detail: string };

function expectAttempts(
  attempts: readonly NetworkAttempt[],
  ...expected: (Expected & { bytes?: boolean })[]
) {
  expect(attempts).toEqual(
    expected.map(({ detail, bytes = false, ...rest }) => ({
      ...rest,
      at: expect.any(Number),
      detail: expect.stringContaining(detail),
      bytesUp: bytes ? expect.any(Number) : 0,
      bytesDown: bytes ? expect.any(Number) : 0,
    })),
  );
}

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
        { host: expect.any(String), port: 80, method: 'GET', outcome: 'refused', detail },
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
      looked = [];
      const answer = await send(request);
      expect(answer).toMatch(/^HTTP\/1.1 403 /);
      expect(answer).toContain('web.test (80, 443)');
      expect(looked).toEqual([]);
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

    test('a second request in the first one’s packet', async () => {
      const { send, handle } = guest(WEB);
      const one = 'GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n';
      expect(await send(one + one)).toBe('');
      const [, second] = handle.attempts();
      expect(second).toMatchObject({
        outcome: 'refused',
        detail: expect.stringContaining('pipelining'),
      });
    });

    test('a tunnel behind a request that is not answered', async () => {
      const { send, handle } = guest(WEB);
      const one = 'GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n';
      expect(await send(one + connectTo('web.test:443'))).toBe('');
      expect(handle.attempts()[1]?.detail).toContain('pipelining');
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

  describe('names', () => {
    test('a name is looked up once, and that address is the one connected to', async () => {
      const { dial, handle } = guest({ host: 'rebind.test', private: true });
      looked = [];
      const socket = dial();
      socket.write(get('http://rebind.test/', 'rebind.test'));
      expect(await untilEnd(socket)).toMatch(/^HTTP\/1.1 200 /);
      expect(looked).toEqual(['rebind.test']);
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

  describe('tunnels', () => {
    const tunnelled = async (rule: unknown, target: string, ...pieces: (string | Buffer)[]) => {
      const { dial, handle } = guest(rule);
      const socket = dial();
      const up = origin.connections;
      socket.write(connectTo(target));
      expect(await head(socket)).toMatch(/^HTTP\/1.1 200 /);
      const rest = untilEnd(socket);
      for (const piece of pieces) {
        socket.write(piece);
        await turn();
      }
      return {
        rest: await rest,
        attempt: handle.attempts()[0]!,
        connected: origin.connections - up,
      };
    };
    const single = (bytes: Buffer) => Array.from(bytes, (byte) => Buffer.from([byte]));

    test.each<[string, () => Promise<(string | Buffer)[]> | (string | Buffer)[], string]>([
      ['another server name', async () => [await clientHello('evil.test')], '"evil.test" (SNI)'],
      ['a name below', async () => [await clientHello('x.web.test')], '"x.web.test" (SNI)'],
      ['no server name', async () => [await clientHello(undefined)], 'names no server'],
      ['two server names', () => [craftedHello(['web.test', 'evil.test'])], 'names two servers'],
      ['an empty server name', () => [craftedHello([''])], '"" (SNI)'],
      ['a server name with NUL', () => [craftedHello(['web.test\0.evil.test'])], '(SNI)'],
      ['another name in tiny records', () => [craftedHello(['evil.test'], 7)], '"evil.test" (SNI)'],
      ['another name byte by byte', () => single(craftedHello(['evil.test'])), '"evil.test" (SNI)'],
      ['plain HTTP', () => ['GET / HTTP/1.1\r\nHost: web.test\r\n\r\n'], 'must carry TLS'],
      ['SSH', () => ['SSH-2.0-guest\r\n'], 'must carry TLS'],
      ['a TLS alert', () => [Buffer.from([21, 3, 1, 0, 2, 1, 0])], 'must carry TLS'],
      [
        'TLS without a ClientHello',
        () => [Buffer.from([22, 3, 1, 0, 4, 2, 0, 0, 0])],
        'without a ClientHello',
      ],
      ['an empty record', () => [Buffer.from([22, 3, 1, 0, 0])], 'must carry TLS'],
      [
        'a malformed ClientHello',
        () => [Buffer.from([22, 3, 1, 0, 6, 1, 0, 0, 2, 3, 3])],
        'malformed',
      ],
      [
        'a ClientHello of 16 MiB',
        () => [Buffer.from([22, 3, 1, 0, 4, 1, 255, 255, 255])],
        'more than 16 KiB',
      ],
      [
        'records of one byte',
        () => [craftedHello(['web.test'], 1, 8_000).subarray(0, 30_000)],
        'too large',
      ],
      [
        'half a ClientHello',
        async () => [(await clientHello('web.test')).subarray(0, 90)],
        'in time',
      ],
      ['nothing', () => [], 'in time'],
    ])('to 443 with %s', async (_name, pieces, detail) => {
      const { rest, attempt, connected } = await tunnelled(
        WEB,
        'web.test:443',
        ...(await pieces()),
      );
      expect(rest).toBe('');
      // The connection was there, but nothing of the guest's passed.
      expect(connected).toBe(1);
      expectAttempts([attempt], {
        host: 'web.test',
        port: 443,
        method: 'CONNECT',
        outcome: 'refused',
        detail,
      });
    });

    test.each<[string, () => Promise<Buffer[]>]>([
      ['as it comes', async () => [await clientHello('web.test')]],
      ['in capitals', async () => [craftedHello(['WEB.TEST'])]],
      ['byte by byte', async () => single(await clientHello('web.test'))],
      [
        'in records of 11 bytes',
        async () => [inRecords((await clientHello('web.test')).subarray(5), 11)],
      ],
    ])('to 443 with the right name %s', async (_name, pieces) => {
      const { attempt } = await tunnelled(
        WEB,
        'web.test:443',
        ...(await pieces()),
        Buffer.from('garbage'),
      );
      expect(attempt).toMatchObject({ outcome: 'allowed', detail: origin.address });
      // The server answered the ClientHello.
      expect(attempt.bytesUp).toBeGreaterThan(50);
      expect(attempt.bytesDown).toBeGreaterThan(0);
    });

    test('to an address: no server name is right, another is not', async () => {
      const rule = { host: `${origin.address}/32`, private: true };
      const target = `${origin.address}:443`;
      const right = await tunnelled(
        rule,
        target,
        await clientHello(undefined),
        Buffer.from('garbage'),
      );
      expect(right.attempt.outcome).toBe('allowed');
      const wrong = await tunnelled(rule, target, await clientHello('evil.test'));
      expect(wrong.attempt).toMatchObject({
        outcome: 'refused',
        detail: expect.stringContaining('(SNI)'),
      });
    });

    test('to another port that the rule names the server may speak first', async () => {
      const ssh = await tunnelled({ ...WEB, ports: [22] }, 'web.test:22');
      expect(ssh.rest).toBe('SSH-2.0-test\r\n');
      expect(ssh.attempt).toMatchObject({ outcome: 'allowed', bytesDown: 14 });
    });

    describe('to a port that no rule names, 80', () => {
      const inside = (path: string, ...more: string[]) =>
        [`GET ${path} HTTP/1.1`, 'Host: web.test', ...more, '', ''].join('\r\n');
      const last = 'Connection: close';

      test('plain HTTP is read, and each request judged', async () => {
        const { send, handle } = guest(WEB);
        origin.received.length = 0;
        const answer = await send(connectTo('web.test:80') + inside('/in', last));
        expect(answer).toMatch(/^HTTP\/1.1 200 Connection established\r\n\r\nHTTP\/1.1 200 /);
        expect(origin.received).toMatchObject([{ url: '/in', secure: false }]);
        expectAttempts(
          handle.attempts(),
          {
            host: 'web.test',
            port: 80,
            method: 'CONNECT',
            outcome: 'allowed',
            detail: 'each request judged',
          },
          {
            host: 'web.test',
            port: 80,
            method: 'GET',
            outcome: 'allowed',
            detail: origin.address,
            bytes: true,
          },
        );
      });

      test.each([
        ['another host', inside('/').replace('web.test', 'evil.test'), 400, 'Host header'],
        ['a whole address', inside('http://evil.test/'), 400, 'only its path'],
        ['the same whole address', inside('http://web.test/'), 400, 'only its path'],
        ['a tunnel', connectTo('web.test:80'), 400, 'tunnel within a tunnel'],
        ['a WebSocket', inside('/', 'Upgrade: websocket', 'Connection: Upgrade'), 501, 'WebSocket'],
        ['TLS', craftedHello(['web.test']).toString('latin1'), 400, 'no valid HTTP/1.1'],
        ['SSH', 'SSH-2.0-guest\r\n', 400, 'no valid HTTP/1.1'],
        ['a contradiction', inside('/', 'Content-Length: 1, 2'), 400, 'no valid HTTP/1.1'],
      ])('%s is refused', async (_name, request, status, detail) => {
        const { send, handle } = guest(WEB);
        const before = origin.connections;
        const answer = await send(connectTo('web.test:80'), request);
        expect(answer).toMatch(
          new RegExp(`established\r\n\r\nHTTP/1.1 ${status} .*${detail}`, 's'),
        );
        expect(origin.connections).toBe(before);
        expect(handle.attempts()).toMatchObject([
          { outcome: 'allowed' },
          { outcome: 'refused', detail: expect.stringContaining(detail) },
        ]);
      });
    });

    test('to another port TLS must still name the host', async () => {
      const rule = { ...WEB, ports: [7] };
      const wrong = await tunnelled(rule, 'web.test:7', await clientHello('evil.test'));
      expect(wrong.attempt).toMatchObject({ outcome: 'refused', bytesUp: 0 });
    });

    test('one side may end before the other', async () => {
      const { dial, handle } = guest({ ...WEB, ports: [7] });
      const socket = dial();
      socket.write(`${connectTo('web.test:7')}with the request, `);
      await head(socket);
      socket.end('and after');
      expect(await untilEnd(socket)).toBe('with the request, and after');
      expect(handle.attempts()).toMatchObject([{ outcome: 'allowed', bytesUp: 27, bytesDown: 27 }]);
    });
  });

  describe('secrets', () => {
    const inject = { Authorization: { env: 'KEY', prefix: 'Bearer ' } };
    const API = { host: 'api.test', private: true, upgrade: true, inject };

    test('are added outside, over TLS that is verified, and masked where they come back', async () => {
      const { send, handle } = guest(API);
      origin.received.length = 0;
      const answer = await send(
        get(
          'http://api.test/v1',
          'api.test',
          'authorization: Bearer mine',
          'Range: bytes=0-5',
          'Accept-Encoding: gzip',
        ),
      );
      expect(answer).toMatch(/^HTTP\/1.1 200 /);
      expect(origin.received).toMatchObject([
        {
          secure: true,
          url: '/v1',
          headers: [
            'Host',
            'api.test',
            'Authorization',
            `Bearer ${SECRET}`,
            'Accept-Encoding',
            'identity',
            'Connection',
            'close',
          ],
        },
      ]);
      const stars = `Bearer ${'*'.repeat(SECRET.length)}`;
      expect(answer).toContain(`X-Echo: ${stars}\r\n`);
      expect(answer).toContain(`"Authorization","${stars}"`);
      expect(answer + JSON.stringify(handle.attempts())).not.toContain(SECRET);
      expect(handle.attempts()).toMatchObject([{ host: 'api.test', port: 80, outcome: 'allowed' }]);
    });

    test('a compressed answer is not let through', async () => {
      const { send, handle } = guest(API);
      expect(await send(get('http://api.test/gzip', 'api.test'))).toMatch(
        /^HTTP\/1.1 502 .*compressed/s,
      );
      expect(handle.attempts()).toMatchObject([{ outcome: 'failed' }]);
    });

    test('a certificate for another name is refused before anything is sent', async () => {
      const { send, handle } = guest({ ...API, host: 'untrusted.test' });
      origin.received.length = 0;
      const answer = await send(get('http://untrusted.test/', 'untrusted.test'));
      expect(answer).toMatch(/^HTTP\/1.1 502 .*ERR_TLS_CERT_ALTNAME_INVALID/s);
      expect(origin.received).toEqual([]);
      expect(handle.attempts()).toMatchObject([{ outcome: 'failed' }]);
    });

    test('an address is checked by the certificate’s addresses', async () => {
      const { send } = guest({ ...API, host: origin.address });
      const answer = await send(get(`http://${origin.address}/`, origin.address));
      expect(answer).toMatch(/^HTTP\/1.1 200 /);
    });

    test.each([
      ['that is not set', 'MISSING', 'is not set'],
      ['too short to be one', 'SHORT', 'shorter than 8'],
      ['with a line break', 'BROKEN', 'no header may hold'],
    ])('a variable %s', async (_name, env, text) => {
      const { send, handle } = guest({ ...API, inject: { 'X-Key': { env } } });
      const answer = await send(get('http://api.test/', 'api.test'));
      expect(answer).toMatch(/^HTTP\/1.1 502 /);
      expect(answer).toContain(`variable ${env}`);
      expect(answer).toContain(text);
      expect(answer).not.toContain('abc');
      expect(handle.attempts()).toMatchObject([
        { outcome: 'failed', detail: expect.stringContaining(env) },
      ]);
    });

    test('a variable is read when the request passes', async () => {
      const { send } = guest({ ...API, inject: { 'X-Key': { env: 'LATER' } } });
      expect(await send(get('http://api.test/', 'api.test'))).toMatch(/^HTTP\/1.1 502 /);
      environment.LATER = 'later-than-that';
      expect(await send(get('http://api.test/', 'api.test'))).toMatch(/^HTTP\/1.1 200 /);
    });
  });

  describe('other protocols', () => {
    test('a WebSocket is told how it would pass', async () => {
      const { send, handle } = guest(WEB);
      const answer = await send(
        'GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n',
      );
      expect(answer).toMatch(/^HTTP\/1.1 501 .*CONNECT/s);
      expect(handle.attempts()).toMatchObject([{ outcome: 'refused', method: 'GET' }]);
    });
  });
});
