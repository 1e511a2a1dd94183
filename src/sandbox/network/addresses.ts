import { BlockList, isIP } from 'node:net';

const GROUPS = 8;

/**
 * Ranges that are no public unicast destination: the IANA special-purpose registries for IPv4 and IPv6
 * (RFC 6890 and its updates) without those marked globally reachable, and metadata services of clouds.
 * The first match names an address, so narrow ranges stand before the wide ones that hold them.
 */
const SPECIAL: readonly (readonly [name: string, ...subnets: string[]])[] = [
  [
    'cloud metadata',
    '169.254.169.254/32',
    '169.254.170.0/24',
    '168.63.129.16/32',
    '100.100.100.200/32',
    '192.0.0.192/32',
    'fd00:ec2::254/128',
    'fd20:ce::254/128',
  ],
  ['unspecified', '0.0.0.0/8', '::/128'],
  ['loopback', '127.0.0.0/8', '::1/128'],
  ['link-local', '169.254.0.0/16', 'fe80::/10'],
  ['private', '10.0.0.0/8', '172.16.0.0/12', '192.168.0.0/16', 'fc00::/7', 'fec0::/10'],
  ['carrier-grade NAT', '100.64.0.0/10'],
  ['benchmarking', '198.18.0.0/15', '2001:2::/48'],
  [
    'documentation',
    '192.0.2.0/24',
    '198.51.100.0/24',
    '203.0.113.0/24',
    '2001:db8::/32',
    '3fff::/20',
  ],
  ['multicast', '224.0.0.0/4', 'ff00::/8'],
  ['reserved', '192.0.0.0/24', '192.88.99.0/24', '240.0.0.0/4', '2001::/23'],
];

const family = (address: string) => (isIP(address) === 4 ? 'ipv4' : 'ipv6');

function blockList(subnets: readonly string[]): BlockList {
  const list = new BlockList();
  for (const subnet of subnets) {
    const [network = '', prefix] = subnet.split('/');
    list.addSubnet(network, Number(prefix), family(network));
  }
  return list;
}

const SPECIAL_LISTS = SPECIAL.map(([name, ...subnets]) => ({ name, list: blockList(subnets) }));
/** The only part of IPv6 that is assigned to global unicast. */
const GLOBAL_IPV6 = blockList(['2000::/3']);

function groups(address: string): number[] {
  const [head = '', tail] = address.split('::');
  const parse = (part: string) =>
    part === '' ? [] : part.split(':').map((group) => Number.parseInt(group, 16));
  const first = parse(head);
  if (tail === undefined) return first;
  const last = parse(tail);
  return [...first, ...new Array(GROUPS - first.length - last.length).fill(0), ...last];
}

function ipv4At(parts: readonly number[], index: number): string {
  return parts
    .slice(index, index + 2)
    .flatMap((group) => [group >> 8, group & 0xff])
    .join('.');
}

/**
 * The one spelling of an IPv4 or IPv6 address: lower case, compressed, and IPv4-mapped addresses
 * (::ffff:0:0/96) as the IPv4 address that a socket connects to. Null for anything else, and for an
 * address with a zone, which names an interface of this machine.
 */
export function canonicalAddress(text: string): string | null {
  const version = isIP(text);
  if (version === 0 || text.includes('%')) return null;
  if (version === 4) return text;
  const address = new URL(`http://[${text}]/`).hostname.slice(1, -1);
  const parts = groups(address);
  const mapped = parts.slice(0, 5).every((group) => group === 0) && parts[5] === 0xffff;
  return mapped ? ipv4At(parts, 6) : address;
}

/** The IPv4 address that a translator or a tunnel would deliver to: NAT64 (RFC 6052) and 6to4 (RFC 3056). */
function embeddedIpv4(address: string): string | null {
  if (isIP(address) !== 6) return null;
  const parts = groups(address);
  if (parts[0] === 0x2002) return ipv4At(parts, 1);
  const nat64 = [0x64, 0xff9b, 0, 0, 0, 0].every((group, index) => parts[index] === group);
  return nat64 ? ipv4At(parts, 6) : null;
}

/**
 * Why a canonical address is no public destination (`loopback`, `private`, `cloud metadata`, ...), or
 * null when it is one. An address that stands for an IPv4 address is judged as that one.
 */
export function specialRange(address: string): string | null {
  const final = embeddedIpv4(address) ?? address;
  const kind = family(final);
  const special = SPECIAL_LISTS.find(({ list }) => list.check(final, kind));
  if (special) return special.name;
  return kind === 'ipv6' && !GLOBAL_IPV6.check(final, kind) ? 'reserved' : null;
}

/** A block of addresses in CIDR notation, or null. The base must be canonical in family (no mapped IPv4). */
export function addressBlock(text: string): { has(address: string): boolean } | null {
  const match = /^([0-9A-Fa-f:.]+)\/(\d{1,3})$/.exec(text);
  if (!match) return null;
  const base = canonicalAddress(match[1]!);
  const prefix = Number(match[2]);
  if (base === null || isIP(base) !== isIP(match[1]!)) return null;
  if (prefix > (isIP(base) === 4 ? 32 : 128)) return null;
  const list = blockList([`${base}/${prefix}`]);
  // A BlockList lets ::ffff:0:0/96 match IPv4: a block of one family must not hold the other's.
  return { has: (address) => isIP(address) === isIP(base) && list.check(address, family(address)) };
}
