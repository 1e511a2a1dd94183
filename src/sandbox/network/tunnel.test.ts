import { setImmediate as turn } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { connectTo, expectAttempts, get, SECRET, TestProxy } from './test-guest.ts';
import {
  clientHello,
  craftedHello,
  head,
  inRecords,
  type Origin,
  untilEnd,
} from './test-origin.ts';

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

const guest = (...allow: unknown[]) => world.guest(...allow);

const WEB = { host: 'web.test', private: true };

describe.skipIf(!root)('ports below 1024 need root: what passes unseen, and what is added', () => {
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
      world.environment.LATER = 'later-than-that';
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
