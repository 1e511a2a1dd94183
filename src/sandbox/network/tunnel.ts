import type { IncomingMessage } from 'node:http';
import type { Socket } from 'node:net';
import { mayBeTls, readClientHello } from './clienthello.ts';
import { askedFor, connectTarget, type Target } from './message.ts';
import { HTTPS_PORT, hostInUrl, normaliseHost, type Rule } from './rules.ts';
import { answerAndEnd, denial, type Guest } from './session.ts';
import { refused } from './upstream.ts';

/** A ClientHello in records of sensible size; records of single bytes are an attempt to hide a name. */
const MAX_FLIGHT_BYTES = 24 * 1024;

/** The next bytes of a connection, or null at its end. Leaves it paused. */
function nextBytes(socket: Socket, signal: AbortSignal | null): Promise<Buffer | null> {
  return new Promise((resolve, reject) => {
    const settle = (act: () => void) => {
      socket.pause();
      socket.off('data', onData).off('end', onEnd).off('close', onEnd);
      signal?.removeEventListener('abort', onAbort);
      act();
    };
    const onData = (bytes: Buffer) => settle(() => resolve(bytes));
    const onEnd = () => settle(() => resolve(null));
    const onAbort = () => settle(() => reject(signal?.reason));
    if (signal?.aborted) return onAbort();
    if (socket.readableEnded || socket.destroyed) return onEnd();
    socket.on('data', onData).on('end', onEnd).on('close', onEnd);
    signal?.addEventListener('abort', onAbort);
    socket.resume();
  });
}

/**
 * The first bytes of a tunnel once they may pass. TLS must name the host that was asked for; port 443
 * takes nothing but TLS. Throws `Denied`.
 */
async function firstFlight(client: Socket, target: Target, helloMs: number): Promise<Buffer> {
  const onlyTls = target.port === HTTPS_PORT;
  // Elsewhere the server may be the one that speaks first: no deadline until the guest has begun.
  let deadline = onlyTls ? AbortSignal.timeout(helloMs) : null;
  let flight: Buffer = Buffer.alloc(0);
  for (;;) {
    const bytes = await nextBytes(client, deadline).catch(() => {
      throw refused('the tunnel sent no whole TLS ClientHello in time');
    });
    if (!bytes) {
      if (onlyTls || flight.length > 0) throw refused('the tunnel ended before its TLS began');
      return flight;
    }
    flight = Buffer.concat([flight, bytes]);
    if (!onlyTls && !mayBeTls(flight[0]!)) return flight;
    deadline ??= AbortSignal.timeout(helloMs);
    const hello = readClientHello(flight);
    if (hello.state === 'complete') {
      checkServerName(hello.serverName, target);
      return flight;
    }
    if (hello.state === 'invalid')
      throw refused(`a tunnel to port ${target.port} must carry TLS: ${hello.reason}`);
    if (flight.length > MAX_FLIGHT_BYTES) throw refused('the TLS ClientHello is too large');
  }
}

function checkServerName(serverName: string | null, { host }: Target): void {
  // An address has no server name (RFC 6066, 3).
  if (serverName === null && host.kind === 'address') return;
  if (serverName === null) throw refused(`TLS names no server (SNI); it must name ${host.text}`);
  const named = /^[\x21-\x7e]+$/.test(serverName) ? normaliseHost(serverName) : null;
  if (named?.text !== host.text)
    throw refused(`TLS names ${JSON.stringify(serverName)} (SNI), the tunnel ${hostInUrl(host)}`);
}

/** Whichever side closes, the other follows: once it has what was sent to it, or at once after a break. */
function join(client: Socket, server: Socket): Promise<unknown> {
  const follow = (first: Socket, second: Socket) =>
    new Promise<void>((resolve) => {
      const onClose = () => {
        if (first.readableEnded) second.destroySoon();
        else second.destroy();
        resolve();
      };
      if (first.destroyed) onClose();
      else first.once('close', onClose);
    });
  return Promise.all([follow(client, server), follow(server, client)]);
}

const ESTABLISHED = 'HTTP/1.1 200 Connection established\r\n\r\n';

/** Whether what comes through is read as plain HTTP, each request judged, rather than copied unseen. */
function readsInside(rule: Rule, port: number): boolean {
  if (port === HTTPS_PORT) return false;
  return !rule.names(port) || rule.upgrade === true || rule.inject !== undefined;
}

/**
 * Serves `CONNECT`: judges, connects, checks the first bytes, then copies until both sides end. Gives
 * the destination where plain HTTP is to be read inside instead: some clients tunnel even that.
 */
export async function tunnel(
  { session, inside }: Guest,
  request: IncomingMessage,
  client: Socket,
  head: Buffer,
): Promise<Target | null> {
  const { limits } = session.context;
  const attempt = session.attempts.begin(askedFor(request, null));
  let upstream: Socket | null = null;
  try {
    const target = connectTarget(request);
    if (inside) throw refused('a tunnel within a tunnel', 400);
    const rule = session.admit(target, target.port !== HTTPS_PORT);
    if (head.length > 0) client.unshift(head);
    if (readsInside(rule, target.port)) {
      attempt.end('allowed', 'plain HTTP is read inside, each request judged');
      client.write(ESTABLISHED);
      return target;
    }
    const signal = AbortSignal.timeout(limits.connectMs);
    const server = await session.connect(attempt, { ...target, rule }, signal);
    upstream = server;
    const closed = join(client, server);
    server.setTimeout(limits.idleMs, () => server.destroy());
    client.write(ESTABLISHED);
    if (target.port !== HTTPS_PORT) server.pipe(client);
    server.write(await firstFlight(client, target, limits.helloMs));
    client.pipe(server);
    if (target.port === HTTPS_PORT) server.pipe(client);
    await closed;
  } catch (error) {
    const reason = denial(error);
    attempt.end(reason.outcome, reason.message);
    if (!upstream) {
      answerAndEnd(client, reason.status, reason.message);
      return null;
    }
  }
  upstream.destroy();
  client.destroy();
  return null;
}
