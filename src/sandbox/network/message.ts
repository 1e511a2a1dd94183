import type { IncomingMessage } from 'node:http';
import { type Host, HTTP_PORT, hostInUrl, normaliseHost } from './rules.ts';
import { refused } from './upstream.ts';

/** What a request names as its destination. */
export interface Target {
  host: Host;
  port: number;
}

type Field = readonly [name: string, value: string];

/** Headers of one connection, not of the message (RFC 9110, 7.6.1), or between client and proxy. */
const HOP_BY_HOP =
  /^(connection|keep-alive|te|trailer|transfer-encoding|upgrade|expect|http2-settings|proxy-.*)$/i;
const MAX_PORT = 65_535;
/** Their bytes are limited by the parser, which counts neither separators nor fields. */
const MAX_FIELDS = 256;
/** Methods whose requests have no body unless their headers say so; others state a length of 0. */
const BODILESS = new Set(['GET', 'HEAD', 'DELETE', 'OPTIONS', 'TRACE']);

const malformed = (text: string) => refused(text, 400);

function splitAuthority(text: string): { host: string; port: string | undefined } | null {
  const match = /^(\[[^[\]]*\]|[^:]*)(?::([0-9]{1,5}))?$/.exec(text);
  return match ? { host: match[1]!, port: match[2] } : null;
}

function authority(text: string, defaultPort: number | null): Target | null {
  const parts = splitAuthority(text);
  // Names beyond ASCII are written as punycode in a request.
  if (!parts || !/^[\x21-\x7e]*$/.test(text)) return null;
  const host = normaliseHost(parts.host);
  const port = parts.port === undefined ? defaultPort : Number(parts.port);
  return host && port !== null && port >= 1 && port <= MAX_PORT ? { host, port } : null;
}

function fields(request: IncomingMessage): Field[] {
  const { rawHeaders } = request;
  return Array.from({ length: rawHeaders.length / 2 }, (_, index) => [
    rawHeaders[2 * index]!,
    rawHeaders[2 * index + 1]!,
  ]);
}

function valuesOf(request: IncomingMessage, name: string): string[] {
  return fields(request).flatMap(([key, value]) => (key.toLowerCase() === name ? [value] : []));
}

/** What the guest asked for, for the record: as it wrote it, but without user and password. */
export function askedFor(
  request: IncomingMessage,
  inside: Target | null,
): { host: string; port: number; method: string } {
  const { method = '', url = '' } = request;
  if (inside) return { host: hostInUrl(inside.host), port: inside.port, method };
  const plain = method !== 'CONNECT';
  const text = (plain ? (/^[a-z]+:\/\/([^/?#]*)/i.exec(url)?.[1] ?? '') : url).replace(/^.*@/, '');
  const parts = splitAuthority(text);
  return {
    host: parts?.host ?? text,
    port: Number(parts?.port ?? (plain && text !== '' ? HTTP_PORT : 0)),
    method,
  };
}

/** A Host header that differs from the target could make proxy and server see two destinations. */
function checkHost(request: IncomingMessage, target: Target, defaultPort: number, needed: boolean) {
  if (request.rawHeaders.length > 2 * MAX_FIELDS)
    throw refused(`the header has more than ${MAX_FIELDS} fields`, 431);
  const values = valuesOf(request, 'host');
  if (values.length === 0 && !needed) return;
  if (values.length !== 1) throw malformed('exactly one Host header is needed');
  const named = authority(values[0]!, defaultPort);
  if (named?.host.text !== target.host.text || named.port !== target.port)
    throw malformed('the Host header names another destination than the request');
}

/** The destination of `CONNECT host:port`. Throws `Denied`. */
export function connectTarget(request: IncomingMessage): Target {
  const target = authority(request.url ?? '', null);
  if (!target) throw malformed('CONNECT needs a destination of the form host:port');
  checkHost(request, target, target.port, false);
  const framed = ['content-length', 'transfer-encoding'];
  if (framed.some((name) => valuesOf(request, name).length > 0))
    throw malformed('CONNECT has no body');
  return target;
}

/**
 * The destination of a plain request: `GET http://host:port/path`, or `GET /path` inside a tunnel.
 * Throws `Denied`.
 */
export function plainTarget(
  request: IncomingMessage,
  inside: Target | null,
): Target & { path: string } {
  const { url = '' } = request;
  if (inside) {
    if (!/^\/[^#]*$/.test(url)) throw malformed('inside a tunnel a request names only its path');
    checkHost(request, inside, HTTP_PORT, request.httpVersion !== '1.0');
    return { ...inside, path: url };
  }
  if (/^(https|wss):/i.test(url))
    throw malformed('use CONNECT for https: the proxy does not see inside TLS');
  const match = /^http:\/\/([^/?#]*)(\/[^#]*|\?[^#]*)?$/i.exec(url);
  if (!match)
    throw malformed('this is a proxy: ask for http://host/path, or CONNECT host:port for TLS');
  if (match[1]!.includes('@')) throw malformed('user and password do not belong into the address');
  const target = authority(match[1]!, HTTP_PORT);
  if (!target) throw malformed('the address has no valid host and port');
  checkHost(request, target, HTTP_PORT, request.httpVersion !== '1.0');
  const path = match[2] ?? '/';
  return { ...target, path: path.startsWith('/') ? path : `/${path}` };
}

/** The header fields that go on to the other side; hop-by-hop ones and those that Connection names stay. */
export function endToEnd(message: IncomingMessage): Field[] {
  const named = new Set(
    valuesOf(message, 'connection').flatMap((value) =>
      value.split(',').map((name) => name.trim().toLowerCase()),
    ),
  );
  return fields(message).filter(
    ([name]) =>
      !HOP_BY_HOP.test(name) &&
      (name.toLowerCase() === 'content-length' || !named.has(name.toLowerCase())),
  );
}

/** How the body is delimited. The parser has refused contradictions already. Throws `Denied`. */
function framing(request: IncomingMessage): Field[] {
  const encodings = valuesOf(request, 'transfer-encoding');
  const lengths = valuesOf(request, 'content-length');
  if (encodings.length > 0) {
    if (lengths.length > 0 || encodings.length > 1 || encodings[0]!.toLowerCase() !== 'chunked')
      throw malformed('of transfer encodings only chunked, alone, is accepted');
    return [['Transfer-Encoding', 'chunked']];
  }
  if (lengths.length > 1) throw malformed('more than one Content-Length');
  if (lengths.length === 1) return [['Content-Length', BigInt(lengths[0]!).toString()]];
  return BODILESS.has(request.method ?? '') ? [] : [['Content-Length', '0']];
}

/**
 * The header of the request that goes out, name and value in turn: written anew, so that only what was
 * understood passes. `injected` replaces the guest's own headers of these names.
 */
export function outgoingHeaders(
  request: IncomingMessage,
  target: Target,
  defaultPort: number,
  injected: readonly Field[],
): string[] {
  const replaced = new Set(['host', 'content-length']);
  for (const [name] of injected) replaced.add(name.toLowerCase());
  // A compressed answer, or a piece of one, could carry a secret past the mask.
  if (injected.length > 0)
    for (const name of ['accept-encoding', 'range', 'if-range']) replaced.add(name);
  const port = target.port === defaultPort ? '' : `:${target.port}`;
  return [
    ['Host', `${hostInUrl(target.host)}${port}`],
    ...endToEnd(request).filter(([name]) => !replaced.has(name.toLowerCase())),
    ...injected,
    ...(injected.length > 0 ? [['Accept-Encoding', 'identity']] : []),
    ...framing(request),
    ['Connection', 'close'],
  ].flat();
}
