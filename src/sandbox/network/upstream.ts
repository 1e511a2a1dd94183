import { lookup as systemLookup } from 'node:dns/promises';
import { once } from 'node:events';
import { connect, isIP, type Socket } from 'node:net';
import { connect as connectTls, type SecureContext, type TLSSocket } from 'node:tls';
import { type Host, hostInUrl, permitted, type Rule } from './rules.ts';

/** The addresses of a name. Rejects when it has none; nobody waits any more once the signal is aborted. */
export type Lookup = (name: string, signal: AbortSignal) => Promise<readonly string[]>;

/** Addresses of one name that are tried in turn. */
const MAX_ADDRESSES = 4;
/**
 * The system's resolver blocks one of this process's four I/O threads for as long as a name server
 * keeps silent: guests must not take them all.
 */
const MAX_SYSTEM_LOOKUPS = 2;

/** Why a request ended without reaching its server, in words that the guest may read. */
export class Denied extends Error {
  readonly outcome: 'refused' | 'failed';
  readonly status: number;
  constructor(outcome: 'refused' | 'failed', status: number, message: string) {
    super(message);
    this.outcome = outcome;
    this.status = status;
  }
}

export const refused = (message: string, status = 403) => new Denied('refused', status, message);
export const failed = (message: string, status = 502) => new Denied('failed', status, message);

/** Look-ups that wait for their turn, and how many run. */
const waiting: (() => void)[] = [];
let running = 0;

/** As the system resolves names, hosts file included. */
export const lookupBySystem: Lookup = async (name, signal) => {
  if (running < MAX_SYSTEM_LOOKUPS) running++;
  else await new Promise<void>((resolve) => waiting.push(resolve));
  try {
    signal.throwIfAborted();
    return (await systemLookup(name, { all: true })).map(({ address }) => address);
  } finally {
    const next = waiting.shift();
    if (next) next();
    else running--;
  }
};

const codeOf = (error: unknown) => (error as { code?: string }).code ?? 'unknown error';

/** What the promise gives, unless the signal ends the wait first. */
async function within<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  signal.throwIfAborted();
  const { promise: ended, reject } = Promise.withResolvers<never>();
  const onAbort = () => reject(signal.reason);
  signal.addEventListener('abort', onAbort, { once: true });
  try {
    return await Promise.race([promise, ended]);
  } finally {
    signal.removeEventListener('abort', onAbort);
  }
}

async function addressesOf(host: Host, lookup: Lookup, signal: AbortSignal) {
  if (host.kind === 'address') return [host.text];
  const unresolved = (why: string) => failed(`the name ${host.text} cannot be resolved (${why})`);
  const addresses = await within(lookup(host.text, signal), signal).catch((error: unknown) => {
    signal.throwIfAborted();
    throw unresolved(codeOf(error));
  });
  if (addresses.length === 0) throw unresolved('no address');
  return addresses;
}

async function connectTo(address: string, port: number, signal: AbortSignal): Promise<Socket> {
  const socket = connect({ host: address, port, allowHalfOpen: true, noDelay: true });
  // Whoever uses the connection learns of its end by the streams' own means.
  socket.on('error', () => {});
  try {
    await once(socket, 'connect', { signal });
    return socket;
  } catch (error) {
    socket.destroy();
    throw error;
  }
}

/**
 * Connects to a host that a rule admits: one look-up, and a connection to one of the very addresses
 * that it gave. Throws `Denied`; the signal's reason when it ends the wait.
 */
export async function dial(
  target: { host: Host; port: number; rule: Rule },
  lookup: Lookup,
  signal: AbortSignal,
): Promise<{ socket: Socket; address: string }> {
  const { host, port, rule } = target;
  const found = permitted(rule, await addressesOf(host, lookup, signal));
  if ('refusal' in found) throw refused(`${hostInUrl(host)} is refused: ${found.refusal}`);
  const problems: string[] = [];
  for (const address of found.addresses.slice(0, MAX_ADDRESSES)) {
    try {
      return { socket: await connectTo(address, port, signal), address };
    } catch (error) {
      signal.throwIfAborted();
      problems.push(`${address} port ${port}: ${codeOf(error)}`);
    }
  }
  throw failed(`cannot connect to ${hostInUrl(host)} (${problems.join('; ')})`);
}

/**
 * TLS over a connection, with the server's certificate checked against the host that was asked for.
 * `context` holds the roots.
 */
export async function secure(
  socket: Socket,
  host: Host,
  context: SecureContext,
  signal: AbortSignal,
): Promise<TLSSocket> {
  const tls = connectTls({
    socket,
    host: host.text,
    servername: isIP(host.text) ? '' : host.text,
    secureContext: context,
    ALPNProtocols: ['http/1.1'],
    // NODE_TLS_REJECT_UNAUTHORIZED must not switch this off.
    rejectUnauthorized: true,
  });
  tls.on('error', () => {});
  try {
    await once(tls, 'secureConnect', { signal });
    return tls;
  } catch (error) {
    tls.destroy();
    signal.throwIfAborted();
    throw failed(`no trusted TLS connection to ${hostInUrl(host)} (${codeOf(error)})`);
  }
}
