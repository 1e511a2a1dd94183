import { open as openFile } from 'node:fs/promises';
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { basename, dirname } from 'node:path';
import { createSecureContext, getCACertificates, type SecureContext } from 'node:tls';
import { attribute, LonghaulError } from '../../core/index.ts';
import type { NetworkAttempt, NetworkPolicy } from '../contract.ts';
import { forward } from './forward.ts';
import { compilePolicy } from './rules.ts';
import {
  answerAndEnd,
  DEFAULT_LIMITS,
  type Guest,
  type ProxyContext,
  type ProxyLimits,
  Session,
} from './session.ts';
import { tunnel } from './tunnel.ts';
import { type Lookup, lookupBySystem } from './upstream.ts';

export interface NetworkProxyOptions {
  /** Where the relays connect to. Its folder must be closed to everyone else. */
  socketPath: string;
  /** Default: as the system resolves names. */
  lookup?: Lookup;
  /** Roots that `upgrade` trusts besides the system's, in PEM. */
  ca?: readonly string[];
  /** Where secrets are read, when a request passes. Default: this process's variables. */
  environment?: NodeJS.ProcessEnv;
  limits?: Partial<ProxyLimits>;
}

/** One sandbox's registration. */
export interface NetworkHandle {
  /** What it tried, oldest first, at most the last 1,000; those still going on included. */
  attempts(): readonly NetworkAttempt[];
  /** Ends its connections and takes no more; its attempts stay readable. Idempotent. */
  close(): void;
}

const SID = /^[A-Za-z0-9_-]{1,64}$/;
const MAX_SID_LINE = 65;
/** The relay writes its line at once; a connection without one is not from a relay. */
const SID_MS = 10_000;
/** Requests of one connection that may wait for the answer to an earlier one; apt sends ten. */
const MAX_WAITING = 16;

/**
 * The filtering HTTP proxy of all sandboxes of a driver, on a unix socket. Each connection begins with
 * the line `SID\n` of a trusted relay; what follows is the guest's and hostile. HTTP is parsed by Node's
 * strict parser and written anew.
 */
export class NetworkProxy {
  readonly #http: Server;
  readonly #serve: (socket: Socket) => void;
  readonly #context: ProxyContext;
  readonly #sessions = new Map<string, Session>();
  readonly #guests = new WeakMap<Socket, Guest>();
  readonly #sockets = new Set<Socket>();

  private constructor(options: NetworkProxyOptions) {
    const limits = { ...DEFAULT_LIMITS, ...options.limits };
    let secureContext: SecureContext | undefined;
    this.#context = {
      lookup: options.lookup ?? lookupBySystem,
      limits,
      environment: options.environment ?? process.env,
      // Parsing the roots takes milliseconds: once.
      secureContext: () =>
        (secureContext ??= createSecureContext({
          ca: [...getCACertificates('default'), ...(options.ca ?? [])],
        })),
    };
    this.#http = createServer({
      maxHeaderSize: limits.headerBytes,
      headersTimeout: limits.headerMs,
      requestTimeout: 0,
      keepAliveTimeout: limits.keepAliveMs,
      connectionsCheckingInterval: Math.min(1000, limits.headerMs),
      // Checked with the target, where it can be recorded.
      requireHostHeader: false,
      insecureHTTPParser: false,
    });
    // The default would drop headers beyond 2,000 without a word; their bytes are limited.
    this.#http.maxHeadersCount = 0;
    // Later than the server's, so that the guest is told which side was silent.
    this.#http.timeout = limits.idleMs + limits.headerMs;
    this.#serve = this.#http.listeners('connection')[0] as (socket: Socket) => void;
    this.#http.removeAllListeners('connection');
    this.#listen();
  }

  /** Throws `SandboxUnavailable` when the socket cannot be made. */
  static async open(options: NetworkProxyOptions): Promise<NetworkProxy> {
    const proxy = new NetworkProxy(options);
    const { socketPath } = options;
    try {
      // Through a descriptor of the folder: the address of a unix socket holds 108 bytes.
      const folder = await openFile(dirname(socketPath));
      proxy.#http.once('close', () => void folder.close());
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      proxy.#http.once('listening', resolve).once('error', reject);
      proxy.#http.listen(`/proc/self/fd/${folder.fd}/${basename(socketPath)}`);
      await promise.catch(async (error: unknown) => {
        await folder.close();
        throw error;
      });
      return proxy;
    } catch (error) {
      throw attribute(error, 'SandboxUnavailable', 'The network proxy cannot listen');
    }
  }

  /** Throws `ConfigInvalid` for a policy that is wrong, `Internal` for a name that is taken or malformed. */
  register(sid: string, policy: NetworkPolicy): NetworkHandle {
    if (!SID.test(sid) || this.#sessions.has(sid))
      throw new LonghaulError(
        'Internal',
        `The network proxy cannot register ${JSON.stringify(sid)}`,
      );
    const session = new Session(this.#context, compilePolicy(policy));
    this.#sessions.set(sid, session);
    return {
      attempts: () => session.attempts.view(),
      close: () => {
        if (this.#sessions.get(sid) === session) this.#sessions.delete(sid);
        session.close();
      },
    };
  }

  /** Ends every connection and removes the socket. Idempotent. */
  async close(): Promise<void> {
    this.#sessions.clear();
    for (const socket of this.#sockets) socket.destroy();
    if (!this.#http.listening) return;
    const { promise, resolve } = Promise.withResolvers<void>();
    this.#http.close(() => resolve());
    await promise;
  }

  #listen(): void {
    this.#http.on('connection', (socket) => this.#accept(socket));
    this.#http.on('request', (request, response) => this.#request(request, response, false));
    this.#http.on('checkContinue', (request, response) => this.#request(request, response, true));
    this.#http.on('checkExpectation', (request, response) =>
      this.#request(request, response, false),
    );
    this.#http.on('connect', (request, stream, head) => {
      const socket = stream as Socket;
      socket.on('error', () => {});
      socket.setTimeout(0);
      void this.#connect(request, socket, head);
    });
    this.#http.on('clientError', (error: NodeJS.ErrnoException, stream) =>
      this.#malformed(error, stream as Socket),
    );
  }

  /** One request at a time on a connection: all at once would multiply connections to servers. */
  #request(request: IncomingMessage, response: ServerResponse, expectsContinue: boolean): void {
    const { socket } = request;
    const guest = this.#guests.get(socket)!;
    // The parser goes on with what it had already read.
    if (socket.destroyed) return;
    const serve = () => {
      guest.busy = true;
      response.once('close', () => {
        guest.busy = false;
        if (!socket.destroyed) guest.waiting.shift()?.();
      });
      void forward(guest, request, response, expectsContinue);
    };
    if (!guest.busy) serve();
    else if (guest.waiting.length < MAX_WAITING) guest.waiting.push(serve);
    else this.#drop(socket, guest, `more than ${MAX_WAITING} requests ahead of an answer`);
  }

  /** Reads the relay's line, then lets HTTP begin. */
  #accept(socket: Socket): void {
    let line: Buffer = Buffer.alloc(0);
    this.#sockets.add(socket);
    socket.once('close', () => this.#sockets.delete(socket));
    const onError = () => {};
    const timer = setTimeout(() => socket.destroy(), SID_MS);
    const onEnd = () => {
      clearTimeout(timer);
      socket.destroy();
    };
    const onData = (bytes: Buffer) => {
      line = Buffer.concat([line, bytes]);
      const end = line.subarray(0, MAX_SID_LINE).indexOf('\n');
      if (end < 0 && line.length < MAX_SID_LINE) return;
      clearTimeout(timer);
      socket.pause();
      socket.off('data', onData).off('end', onEnd).off('error', onError).off('close', onEnd);
      const session = this.#sessions.get(line.toString('latin1', 0, Math.max(end, 0)));
      if (!session) socket.destroy();
      else this.#welcome(socket, session, line.subarray(end + 1));
    };
    socket.on('data', onData).on('end', onEnd).on('close', onEnd).on('error', onError);
  }

  #welcome(socket: Socket, session: Session, first: Buffer): void {
    if (!session.add(socket)) {
      const reason = `no more than ${this.#context.limits.connections} connections at a time`;
      session.attempts.begin({ host: '', port: 0, method: '' }).end('refused', reason);
      socket.on('error', () => {});
      answerAndEnd(socket, 503, reason);
      return;
    }
    if (first.length > 0) socket.unshift(first);
    this.#speak(socket, session, null);
  }

  #speak(socket: Socket, session: Session, inside: Guest['inside']): void {
    this.#guests.set(socket, { session, inside, busy: false, waiting: [] });
    this.#serve.call(this.#http, socket);
    socket.resume();
  }

  async #connect(request: IncomingMessage, socket: Socket, head: Buffer): Promise<void> {
    const guest = this.#guests.get(socket)!;
    if (guest.busy) {
      this.#drop(socket, guest, 'a tunnel ahead of an answer');
      return;
    }
    const inside = await tunnel(guest, request, socket, head);
    if (inside && !socket.destroyed) this.#speak(socket, guest.session, inside);
  }

  #drop(socket: Socket, guest: Guest, reason: string): void {
    guest.session.attempts.begin({ host: '', port: 0, method: '' }).end('refused', reason);
    socket.destroy();
  }

  #malformed(error: NodeJS.ErrnoException, socket: Socket): void {
    const guest = this.#guests.get(socket);
    socket.on('error', () => {});
    if (!guest || socket.destroyed || error.code === 'ECONNRESET' || error.code === 'EPIPE') {
      socket.destroy();
      return;
    }
    const [status, reason] =
      error.code === 'HPE_HEADER_OVERFLOW'
        ? [431, `the header is larger than ${this.#context.limits.headerBytes} bytes`]
        : error.code === 'ERR_HTTP_REQUEST_TIMEOUT'
          ? [408, 'no whole request header arrived in time']
          : [400, `no valid HTTP/1.1 request (${error.code ?? 'unknown'})`];
    if (guest.busy) {
      this.#drop(socket, guest, reason);
      return;
    }
    guest.session.attempts.begin({ host: '', port: 0, method: '' }).end('refused', reason);
    answerAndEnd(socket, status, reason);
  }
}
