import { execFileSync } from 'node:child_process';
import { randomInt } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer as createHttp, type RequestListener } from 'node:http';
import { createServer as createHttps } from 'node:https';
import { connect, createServer as createTcp, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Duplex, Readable } from 'node:stream';
import { buffer, text } from 'node:stream/consumers';
import { pipeline } from 'node:stream/promises';
import { connect as connectTls } from 'node:tls';
import { gzipSync } from 'node:zlib';

/** An address of the loopback that no other test uses. */
export const loopback = () => `127.${randomInt(1, 255)}.${randomInt(1, 255)}.${randomInt(1, 255)}`;

export interface Certificates {
  ca: string;
  cert: string;
  key: string;
}

/** A certificate for some names, and its own authority. */
export function certify(folder: string, names: readonly string[]): Certificates {
  const at = (name: string) => join(folder, name);
  const key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes'];
  const openssl = (...args: string[]) => execFileSync('openssl', args, { stdio: 'pipe' });
  openssl('req', '-x509', ...key, '-keyout', at('ca.key'), '-out', at('ca'), '-subj', '/CN=ca');
  openssl('req', ...key, '-keyout', at('key'), '-out', at('csr'), '-subj', '/CN=origin');
  writeFileSync(at('san'), `subjectAltName=${names.join(',')}`);
  const signed = [
    '-CA',
    at('ca'),
    '-CAkey',
    at('ca.key'),
    '-CAcreateserial',
    '-extfile',
    at('san'),
  ];
  openssl('x509', '-req', '-in', at('csr'), ...signed, '-out', at('cert'));
  const read = (name: string) => readFileSync(at(name), 'utf8');
  return { ca: read('ca'), cert: read('cert'), key: read('key') };
}

export interface Received {
  secure: boolean;
  method: string;
  url: string;
  headers: string[];
  body: string;
}

/** Real servers on one address of the loopback: 80 and 443 HTTP, 22 that speaks first, 7 that echoes. */
export class Origin {
  readonly address = loopback();
  readonly folder = mkdtempSync(join(tmpdir(), 'longhaul-network-'));
  readonly certificates: Certificates;
  readonly received: Received[] = [];
  /** Bytes that /endless has handed over, and connections to any port. */
  sent = 0;
  connections = 0;
  readonly #servers: Server[] = [];
  readonly #sockets = new Set<Socket>();

  constructor(names: readonly string[]) {
    this.certificates = certify(this.folder, [
      ...names.map((name) => `DNS:${name}`),
      `IP:${this.address}`,
    ]);
  }

  async open(): Promise<this> {
    await this.serve(80, createHttp(this.#answer(false)));
    await this.serve(443, createHttps(this.certificates, this.#answer(true)));
    await this.serve(
      22,
      createTcp((socket) => socket.end('SSH-2.0-test\r\n')),
    );
    await this.serve(
      7,
      createTcp({ allowHalfOpen: true }, (socket) => socket.pipe(socket)),
    );
    return this;
  }

  async serve(port: number, server: Server): Promise<void> {
    this.#servers.push(server);
    server.on('connection', (socket: Socket) => {
      this.connections++;
      this.#sockets.add(socket);
      socket.on('error', () => {}).once('close', () => this.#sockets.delete(socket));
    });
    await once(server.listen(port, this.address), 'listening');
  }

  *#chunks(bytes: number): Generator<Buffer> {
    const chunk = Buffer.alloc(64 * 1024, 'x');
    for (let left = bytes; left > 0; left -= chunk.length) {
      this.sent += chunk.length;
      yield chunk;
    }
  }

  #answer(secure: boolean): RequestListener {
    return async (request, response) => {
      const { method = '', url = '', rawHeaders: headers } = request;
      if (url === '/early') {
        response.writeHead(413, { Connection: 'close' }).end('too large');
        return;
      }
      if (url === '/count') {
        let bytes = 0;
        request.on('data', (chunk: Buffer) => {
          bytes += chunk.length;
        });
        request.on('error', () => {}).on('end', () => response.end(String(bytes)));
        return;
      }
      if (url.startsWith('/endless')) {
        await pipeline(Readable.from(this.#chunks(Number(url.split('?')[1]))), response).catch(
          () => {},
        );
        return;
      }
      const body = await text(request).catch(() => 'broken off');
      this.received.push({ secure, method, url, headers, body });
      const echoed = JSON.stringify({ secure, method, url, headers, body });
      if (url === '/gzip') {
        response.writeHead(200, { 'Content-Encoding': 'gzip' }).end(gzipSync(echoed));
      } else if (url === '/redirect') {
        response.writeHead(302, { Location: 'http://169.254.169.254/latest/' }).end();
      } else if (url === '/cut') {
        response.writeHead(200, { 'Content-Length': '100' }).write('half');
        setImmediate(() => response.destroy());
      } else {
        response.setHeader('X-Echo', request.headers.authorization ?? 'none');
        response.setHeader('Keep-Alive', 'timeout=9');
        response.setHeader('Proxy-Authenticate', 'Basic');
        response.end(echoed);
      }
    };
  }

  async close(): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    await Promise.all(this.#servers.map((server) => new Promise((done) => server.close(done))));
    rmSync(this.folder, { recursive: true });
  }
}

/** A connection as a relay makes it. */
export function relayed(socketPath: string, sid: string): Socket {
  const socket = connect({ path: socketPath, allowHalfOpen: true });
  socket.on('error', () => {});
  socket.write(`${sid}\n`);
  return socket;
}

/** Everything that a connection gives until it ends, as text. */
export async function untilEnd(socket: Socket): Promise<string> {
  try {
    return (await buffer(socket)).toString('latin1');
  } catch {
    return '';
  }
}

function moved(socket: Socket): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      socket.off('readable', done).off('end', done).off('close', done);
      resolve();
    };
    socket.on('readable', done).on('end', done).on('close', done);
  });
}

/** Reads exactly the header of an answer. */
export async function head(socket: Socket): Promise<string> {
  let got = '';
  while (!got.endsWith('\r\n\r\n')) {
    const byte = socket.read(1) as Buffer | null;
    if (byte) got += byte.toString('latin1');
    else if (socket.readableEnded || socket.destroyed) return got;
    else await moved(socket);
  }
  return got;
}

/** The first flight of Node's own TLS client. */
export function clientHello(servername: string | undefined): Promise<Buffer> {
  const { promise, resolve } = Promise.withResolvers<Buffer>();
  const wire = new Duplex({
    read() {},
    write(chunk: Buffer, _encoding, done) {
      resolve(chunk);
      done();
    },
  });
  connectTls({ socket: wire, ...(servername === undefined ? {} : { servername }) }).on(
    'error',
    () => {},
  );
  return promise;
}

const sized = (lengthBytes: number, ...parts: Buffer[]) => {
  const body = Buffer.concat(parts);
  const length = Buffer.alloc(lengthBytes);
  length.writeUIntBE(body.length, 0, lengthBytes);
  return Buffer.concat([length, body]);
};

/** A ClientHello with just these server names, in records of at most `recordBytes`. */
export function craftedHello(names: readonly string[], recordBytes = 16_384, padding = 0): Buffer {
  const extensions = names.map((name) =>
    Buffer.concat([
      Buffer.from([0, 0]),
      sized(2, sized(2, Buffer.from([0]), sized(2, Buffer.from(name)))),
    ]),
  );
  if (padding > 0)
    extensions.push(Buffer.concat([Buffer.from([0, 21]), sized(2, Buffer.alloc(padding))]));
  const hello = Buffer.concat([
    Buffer.from([1]),
    sized(
      3,
      Buffer.from([3, 3]),
      Buffer.alloc(32),
      sized(1),
      sized(2, Buffer.from([0x13, 1])),
      sized(1, Buffer.from([0])),
      sized(2, ...extensions),
    ),
  ]);
  return inRecords(hello, recordBytes);
}

/** Cuts a handshake message into records. */
export function inRecords(handshake: Buffer, recordBytes: number): Buffer {
  const records: Buffer[] = [];
  for (let at = 0; at < handshake.length; at += recordBytes)
    records.push(Buffer.from([22, 3, 1]), sized(2, handshake.subarray(at, at + recordBytes)));
  return Buffer.concat(records);
}
