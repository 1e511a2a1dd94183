import { isIP } from 'node:net';
import { z } from 'zod';
import { LonghaulError } from '../../core/index.ts';
import type { NetworkPolicy, NetworkRule } from '../contract.ts';
import { addressBlock, canonicalAddress, specialRange } from './addresses.ts';

export const HTTP_PORT = 80;
export const HTTPS_PORT = 443;
const DEFAULT_PORTS: readonly number[] = [HTTP_PORT, HTTPS_PORT];
const MAX_PORT = 65_535;
/** Rules that a refusal quotes: enough to choose another host, short enough to read. */
const QUOTED_RULES = 20;

/** A host in its one spelling: `address` is an IP address without brackets, `name` an ASCII name in lower case. */
export interface Host {
  kind: 'name' | 'address';
  text: string;
}

export interface Rule extends NetworkRule {
  matches(host: Host): boolean;
  /** Whether the policy names this port itself, rather than by default. */
  names(port: number): boolean;
  allows(port: number): boolean;
}

const LABEL = /^(?!-)[a-z0-9_-]{1,63}(?<!-)$/;
const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
const HEADER_TEXT = /^[\t\x20-\x7e\x80-\xff]*$/;
/** Headers that frame a message, name its target or belong to one connection: nobody injects these. */
const FRAMING =
  /^(host|connection|content-length|transfer-encoding|te|trailer|upgrade|expect|keep-alive|accept-encoding|range|proxy-.*)$/i;

const POLICY = z.strictObject({
  allow: z.array(
    z.strictObject({
      host: z.string(),
      ports: z.array(z.int().min(1).max(MAX_PORT)).min(1).optional(),
      private: z.boolean().optional(),
      inject: z
        .record(
          z
            .string()
            .regex(TOKEN, 'is no header name')
            .refine((name) => !FRAMING.test(name), {
              error: 'belongs to the connection and cannot be injected',
            }),
          z.strictObject({
            env: z.string().regex(/^[A-Za-z_][A-Za-z0-9_]*$/, 'is no name of a variable'),
            prefix: z
              .string()
              .regex(HEADER_TEXT, 'has a character that no header may hold')
              .optional(),
          }),
        )
        .optional(),
      upgrade: z.boolean().optional(),
    }),
  ),
});

/**
 * The one spelling of a host as a URL would read it (WHATWG URL: case, IDNA, `0x7f.1`, `2130706433`),
 * without brackets and without the root's trailing dot. Null for what is no host, and for percent signs,
 * which hide characters or name a zone.
 */
export function normaliseHost(raw: string): Host | null {
  if (raw === '' || /[\s\x00-\x20\x7f%/?#@\\]/.test(raw)) return null;
  const inner = /^\[(.*)\]$/.exec(raw)?.[1] ?? (isIP(raw) === 6 ? raw : undefined);
  if (inner !== undefined) {
    const address = isIP(inner) === 6 ? canonicalAddress(inner) : null;
    return address === null ? null : { kind: 'address', text: address };
  }
  if (raw.includes(':')) return null;
  const url = URL.parse(`http://${raw}/`);
  if (!url) return null;
  const name = url.hostname.replace(/\.$/, '');
  if (isIP(name) === 4) return { kind: 'address', text: name };
  if (name.length > 253 || !name.split('.').every((label) => LABEL.test(label))) return null;
  return { kind: 'name', text: name };
}

/** A host as it stands in a URL or a Host header. */
export function hostInUrl(host: Host): string {
  return isIP(host.text) === 6 ? `[${host.text}]` : host.text;
}

function invalid(index: number, text: string): LonghaulError {
  return new LonghaulError('ConfigInvalid', `network.allow[${index}]: ${text}`);
}

function compileHost(pattern: string, index: number): (host: Host) => boolean {
  const quoted = JSON.stringify(pattern);
  if (pattern.includes('/')) {
    const block = addressBlock(pattern);
    if (!block)
      throw invalid(index, `host ${quoted} is no CIDR block such as 10.0.0.0/8 or 2001:db8::/32`);
    return (host) => host.kind === 'address' && block.has(host.text);
  }
  const wildcard = pattern.startsWith('*.');
  const host = normaliseHost(wildcard ? pattern.slice(2) : pattern);
  if (!host || (wildcard && host.kind !== 'name'))
    throw invalid(
      index,
      `host ${quoted} is none of: a name (example.org), names below one (*.example.org), an address, a CIDR block`,
    );
  if (wildcard) return ({ kind, text }) => kind === 'name' && text.endsWith(`.${host.text}`);
  return ({ kind, text }) => kind === host.kind && text === host.text;
}

function compileRule(rule: NetworkRule, index: number): Rule {
  const seen = new Set<string>();
  for (const name of Object.keys(rule.inject ?? {})) {
    if (seen.has(name.toLowerCase())) throw invalid(index, `inject names ${name} twice`);
    seen.add(name.toLowerCase());
  }
  const ports = rule.ports ?? DEFAULT_PORTS;
  return {
    ...rule,
    matches: compileHost(rule.host, index),
    names: (port) => rule.ports?.includes(port) ?? false,
    allows: (port) => ports.includes(port),
  };
}

/**
 * Checks a policy and prepares it for `decide`.
 *
 * @throws `ConfigInvalid`, with the rule's index and what is wrong with it.
 */
export function compilePolicy(policy: NetworkPolicy): readonly Rule[] {
  const parsed = POLICY.safeParse(policy);
  if (!parsed.success) {
    const issue = parsed.error.issues[0]!;
    const path = issue.path.map((key) =>
      typeof key === 'number' ? `[${key}]` : `.${String(key)}`,
    );
    const nested = issue.code === 'invalid_key' ? issue.issues[0]?.message : undefined;
    throw new LonghaulError('ConfigInvalid', `network${path.join('')}: ${nested ?? issue.message}`);
  }
  return (parsed.data as NetworkPolicy).allow.map(compileRule);
}

function describe(rule: Rule): string {
  return `${rule.host} (${(rule.ports ?? DEFAULT_PORTS).join(', ')})`;
}

/** The ports by which a rule may admit a request: a plain one to port 80 that will leave as HTTPS counts as 443 too. */
function admits(rule: Rule, port: number, plain: boolean): boolean {
  return (
    rule.allows(port) ||
    (plain && rule.upgrade === true && port === HTTP_PORT && rule.allows(HTTPS_PORT))
  );
}

/**
 * The first rule for a host and port, or why there is none, in words for whoever asked. `plain` is a
 * request to the proxy itself, as against a tunnel. A rule with addresses speaks of addresses as they
 * are asked for: a name is never looked up unless a rule names it.
 */
export function decide(
  rules: readonly Rule[],
  host: Host,
  port: number,
  plain: boolean,
): { rule: Rule } | { refusal: string } {
  const rule = rules.find((each) => each.matches(host) && admits(each, port, plain));
  if (rule) return { rule };
  const where = hostInUrl(host);
  const sameHost = rules.filter((each) => each.matches(host));
  if (sameHost.length > 0)
    return {
      refusal: `no rule allows port ${port} of ${where}; allowed there: ${sameHost.map(describe).join(', ')}`,
    };
  const known = rules.slice(0, QUOTED_RULES).map(describe);
  if (rules.length > QUOTED_RULES) known.push(`${rules.length - QUOTED_RULES} more`);
  return {
    refusal: `no rule allows ${where} (port ${port}); allowed are: ${known.join(', ') || 'no hosts at all'}`,
  };
}

/** Of the addresses that a host stands for those that its rule lets through, or why none is. */
export function permitted(
  rule: Rule,
  addresses: readonly string[],
): { addresses: string[] } | { refusal: string } {
  const allowed: string[] = [];
  let refusal = 'no address';
  for (const address of addresses) {
    const canonical = canonicalAddress(address);
    const range = canonical === null ? 'bound to an interface' : specialRange(canonical);
    if (canonical !== null && (range === null || rule.private === true)) allowed.push(canonical);
    else
      refusal = `${address} is not public (${range}) and rule ${rule.host} does not say private: true`;
  }
  return allowed.length > 0 ? { addresses: allowed } : { refusal };
}
