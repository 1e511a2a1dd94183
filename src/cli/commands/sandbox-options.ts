import { isIP } from 'node:net';
import { InvalidArgumentError } from 'commander';
import type { NetworkRule } from '../../sandbox/contract.ts';

const UNITS: Record<string, number> = { '': 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30, t: 2 ** 40 };
const MILLISECONDS: Record<string, number> = { ms: 1, '': 1000, s: 1000, m: 60_000, h: 3_600_000 };
/** Longest delay that a timer of Node takes. */
const MOST_MS = 2 ** 31 - 1;

/** Bytes of `512m`, `1.5g`, `64MiB`, `1048576`: units are powers of 1024. */
export function size(text: string): number {
  const match = /^(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?$/i.exec(text.trim());
  const bytes = match ? Math.round(Number(match[1]) * UNITS[(match[2] ?? '').toLowerCase()]!) : 0;
  if (!(bytes > 0 && Number.isSafeInteger(bytes)))
    throw new InvalidArgumentError('a size above 0 is expected, for example 512m or 2g');
  return bytes;
}

/** Milliseconds of `30`, `30s`, `500ms`, `5m`, `1h`: a plain number is seconds. */
export function duration(text: string): number {
  const match = /^(\d+(?:\.\d+)?)\s*(ms|s|m|h)?$/.exec(text.trim());
  const ms = match ? Math.round(Number(match[1]) * MILLISECONDS[match[2] ?? '']!) : 0;
  if (!(ms > 0 && ms <= MOST_MS))
    throw new InvalidArgumentError('a time above 0 is expected, for example 30s, 500ms or 5m');
  return ms;
}

/** What a sandbox is told as it is; anything else is a path or a name, which `specImage` looks up. */
export const SPEC_IMAGE = /^(?:host$|(?:dir|image|rootfs):.)/;

/** `host`, `dir:PATH`, `image:DIGEST`, `rootfs:DIGEST`, a path or a name; whether it exists is found out later. */
export function image(text: string): string {
  if (text.trim() !== '' && !/^(dir|image|rootfs):$/.test(text)) return text;
  throw new InvalidArgumentError(
    'host, a path, the name of an image, dir:PATH, image:DIGEST or rootfs:DIGEST is expected',
  );
}

/** Cores: a share of one, or several. */
export function cores(text: string): number {
  const value = /^\d*\.?\d+$/.test(text.trim()) ? Number(text) : 0;
  if (!(value > 0 && value <= 4096))
    throw new InvalidArgumentError('a number of cores above 0 is expected, for example 0.5 or 2');
  return value;
}

export function count(text: string): number {
  const value = /^\d+$/.test(text.trim()) ? Number(text) : 0;
  if (!(value > 0 && value <= 4_194_304))
    throw new InvalidArgumentError('a whole number above 0 is expected');
  return value;
}

const NAME = /^(?:\*\.)?[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*\.?$/i;

/** Whether it is one address, or a block of them: a person who writes that down means those machines. */
function isAddress(host: string): boolean {
  const [address = '', prefix, ...more] = host.split('/');
  const version = isIP(address);
  if (version === 0 || more.length > 0) return false;
  if (prefix === undefined) return true;
  return /^\d{1,3}$/.test(prefix) && Number(prefix) <= (version === 4 ? 32 : 128);
}

/**
 * A rule of `HOST[:PORT]`: a name, `*.name`, an address (IPv6 in brackets) or a CIDR block. Private
 * addresses are let through only where the address itself, or `localhost`, is written down: a name
 * that resolves to one is not.
 */
export function networkRule(text: string): NetworkRule {
  const match = /^(?:\[([^\]]+)\]|([^:\s]+))(?::(\d+))?$/.exec(text.trim());
  const host = match?.[1] ?? match?.[2] ?? '';
  const port = match?.[3] === undefined ? undefined : Number(match[3]);
  const address = isAddress(host);
  // Digits and dots alone that are no address are a mistyped one, not a name.
  const named = NAME.test(host) && !/^[\d.]+$/.test(host) && match?.[1] === undefined;
  if (!(address || named) || (port !== undefined && !(port >= 1 && port <= 65_535)))
    throw new InvalidArgumentError(
      'HOST[:PORT] is expected: a name, *.name, an address ([::1] for IPv6) or a CIDR block',
    );
  return {
    host,
    ...(port !== undefined && { ports: [port] }),
    ...((address || host === 'localhost') && { private: true }),
  };
}

/** Collects the values of an option that may be given several times. */
export const several =
  <T>(parse: (text: string) => T) =>
  (text: string, before: T[] = []): T[] => [...before, parse(text)];
