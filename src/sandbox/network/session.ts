import type { Socket } from 'node:net';
import type { SecureContext } from 'node:tls';
import { type Attempt, AttemptLog } from './attempts.ts';
import type { Target } from './message.ts';
import { decide, type Rule } from './rules.ts';
import { Denied, dial, type Lookup, refused } from './upstream.ts';

export interface ProxyLimits {
  /** Open connections of one sandbox. */
  connections: number;
  /** Bytes of a request's header, and of an answer's. */
  headerBytes: number;
  /** For a whole request header to arrive. */
  headerMs: number;
  /** For the name, the connection and its TLS together. */
  connectMs: number;
  /** For the guest's whole ClientHello to arrive in a tunnel. */
  helloMs: number;
  /** Without a byte in either direction. */
  idleMs: number;
  /** Of a connection between two requests. */
  keepAliveMs: number;
}

export const DEFAULT_LIMITS: ProxyLimits = {
  connections: 64,
  headerBytes: 16 * 1024,
  headerMs: 10_000,
  connectMs: 15_000,
  helloMs: 10_000,
  // A model that thinks sends nothing for minutes.
  idleMs: 600_000,
  // Kept connections count: idle ones must not keep the sandbox's new ones waiting for long.
  keepAliveMs: 10_000,
};

/** What all sandboxes of a proxy share. */
export interface ProxyContext {
  lookup: Lookup;
  limits: ProxyLimits;
  /** The host's variables, of which secrets are read. */
  environment: NodeJS.ProcessEnv;
  secureContext(): SecureContext;
}

/** One sandbox: its rules, its connections and what it tried. */
export class Session {
  readonly context: ProxyContext;
  readonly attempts = new AttemptLog();
  readonly #rules: readonly Rule[];
  readonly #sockets = new Set<Socket>();

  constructor(context: ProxyContext, rules: readonly Rule[]) {
    this.context = context;
    this.#rules = rules;
  }

  /** False when the sandbox has all the connections that it may have. */
  add(socket: Socket): boolean {
    if (this.#sockets.size >= this.context.limits.connections) return false;
    this.#sockets.add(socket);
    socket.once('close', () => this.#sockets.delete(socket));
    return true;
  }

  close(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  /** The rule that admits a request. Throws `Denied`. */
  admit(target: Target, plain: boolean): Rule {
    const decision = decide(this.#rules, target.host, target.port, plain);
    if ('refusal' in decision) throw refused(decision.refusal);
    return decision.rule;
  }

  /** Connects to an admitted target, which the attempt then names as allowed. Throws `Denied`. */
  async connect(
    attempt: Attempt,
    target: Target & { rule: Rule },
    signal: AbortSignal,
  ): Promise<Socket> {
    const { socket, address } = await dial(target, this.context.lookup, signal);
    attempt.connected(socket, address);
    return socket;
  }
}

/** A connection from a sandbox. */
export interface Guest {
  session: Session;
  /** The destination of the tunnel in which this plain HTTP is spoken. */
  inside: Target | null;
  /** Whether a request is being served. */
  busy: boolean;
  /** Requests that came before the last one was answered, oldest first. */
  waiting: (() => void)[];
}

/** What the guest is told of an error: only what the proxy itself says. */
export function denial(error: unknown): Denied {
  if (error instanceof Denied) return error;
  if (error instanceof DOMException && error.name === 'TimeoutError')
    return new Denied('failed', 504, 'the server did not answer in time');
  const code = (error as { code?: unknown } | null)?.code;
  return new Denied(
    'failed',
    502,
    `the exchange broke off (${typeof code === 'string' ? code : 'no reason known'})`,
  );
}

/** The body of an answer that the proxy itself gives. */
export const denialText = (reason: string) => `longhaul proxy: ${reason}\n`;

/** An answer of the proxy itself on a bare connection, which it ends. */
export function answerAndEnd(socket: Socket, status: number, reason: string): void {
  const body = denialText(reason);
  const head = [
    `HTTP/1.1 ${status} ${status === 403 ? 'Forbidden' : 'Refused'}`,
    'Content-Type: text/plain; charset=utf-8',
    `Content-Length: ${Buffer.byteLength(body)}`,
    'Connection: close',
  ];
  socket.end(`${head.join('\r\n')}\r\n\r\n${body}`, () => socket.destroy());
}
