import { describe, expect, test } from 'vitest';
import type { NetworkRule } from '../contract.ts';
import { canonicalAddress, specialRange } from './addresses.ts';
import { compilePolicy, decide, normaliseHost, permitted } from './rules.ts';

const compile = (...allow: unknown[]) => compilePolicy({ allow: allow as NetworkRule[] });

describe('a host has one spelling', () => {
  test.each([
    ['EXAMPLE.org', 'example.org'],
    ['example.org.', 'example.org'],
    ['bücher.example', 'xn--bcher-kva.example'],
    ['ｅｘａｍｐｌｅ.org', 'example.org'],
    ['under_score.example', 'under_score.example'],
    ['127.0.0.1', '127.0.0.1'],
    ['0x7f.1', '127.0.0.1'],
    ['0x7f000001', '127.0.0.1'],
    ['2130706433', '127.0.0.1'],
    ['017700000001', '127.0.0.1'],
    ['127.1', '127.0.0.1'],
    ['127.0.0.1.', '127.0.0.1'],
    ['①②⑦.0.0.1', '127.0.0.1'],
    ['0', '0.0.0.0'],
    ['::1', '::1'],
    ['[::1]', '::1'],
    ['[0:0:0:0:0:0:0:1]', '::1'],
    ['[::ffff:127.0.0.1]', '127.0.0.1'],
    ['::FFFF:7f00:1', '127.0.0.1'],
    ['[2001:DB8::1]', '2001:db8::1'],
  ])('%s is %s', (raw, text) => expect(normaliseHost(raw)?.text).toBe(text));

  test.each([
    '',
    ' ',
    '.',
    'a..b',
    '..',
    'a b',
    'a\nb',
    'a\0b',
    'a%2eb',
    'user@host',
    'host/path',
    'host#x',
    'host\\x',
    '[::1',
    '::1]',
    '[fe80::1%eth0]',
    'fe80::1%eth0',
    '[fe80::1%25eth0]',
    '[127.0.0.1]',
    '256.0.0.1',
    '1.2.3.4.5',
    '-a.example',
    'a-.example',
    `${'a'.repeat(64)}.example`,
    `${'a.'.repeat(127)}example`,
    '*',
    '*.example.org',
    'host:80',
  ])('%j is none', (raw) => expect(normaliseHost(raw)).toBeNull());
});

describe('an address is judged by where it leads', () => {
  test.each([
    ['0.0.0.0', 'unspecified'],
    ['127.255.0.9', 'loopback'],
    ['10.1.2.3', 'private'],
    ['172.16.0.1', 'private'],
    ['172.31.255.255', 'private'],
    ['192.168.1.1', 'private'],
    ['100.64.0.1', 'carrier-grade NAT'],
    ['100.100.100.200', 'cloud metadata'],
    ['169.254.169.254', 'cloud metadata'],
    ['169.254.170.2', 'cloud metadata'],
    ['168.63.129.16', 'cloud metadata'],
    ['fd00:ec2::254', 'cloud metadata'],
    ['169.254.1.1', 'link-local'],
    ['192.0.2.1', 'documentation'],
    ['198.18.0.1', 'benchmarking'],
    ['192.88.99.1', 'reserved'],
    ['224.0.0.1', 'multicast'],
    ['255.255.255.255', 'reserved'],
    ['::', 'unspecified'],
    ['::1', 'loopback'],
    ['::127.0.0.1', 'reserved'],
    ['fe80::1', 'link-local'],
    ['fc00::1', 'private'],
    ['fec0::1', 'private'],
    ['ff02::1', 'multicast'],
    ['2001:db8::1', 'documentation'],
    ['2001::1', 'reserved'],
    ['4000::1', 'reserved'],
    ['64:ff9b:1::a00:1', 'reserved'],
    ['64:ff9b::a9fe:a9fe', 'cloud metadata'],
    ['64:ff9b::10.0.0.1', 'private'],
    ['2002:7f00:1::', 'loopback'],
    ['::ffff:169.254.169.254', 'cloud metadata'],
    ['::ffff:0:127.0.0.1', 'reserved'],
  ])('%s is %s', (text, range) => expect(specialRange(canonicalAddress(text)!)).toBe(range));

  test.each([
    '93.184.216.34',
    '172.32.0.1',
    '100.128.0.1',
    '2606:4700::1111',
    '64:ff9b::5db8:d822',
    '2002:5db8:d822::1',
    '::ffff:93.184.216.34',
  ])('%s is public', (text) => expect(specialRange(canonicalAddress(text)!)).toBeNull());
});

describe('a wrong policy is told before anything runs', () => {
  test.each([
    ['no host', { host: '' }, 'network.allow[0]: host ""'],
    ['everything', { host: '*' }, 'network.allow[0]: host "*"'],
    ['a star inside', { host: 'a.*.example' }, 'host "a.*.example"'],
    ['a star before an address', { host: '*.0.0.1' }, 'host "*.0.0.1"'],
    ['a URL', { host: 'https://example.org' }, 'is no CIDR block'],
    ['a port in the host', { host: 'example.org:80' }, 'host "example.org:80"'],
    ['a line break in the host', { host: 'a\r\nb' }, 'host "a\\r\\nb"'],
    ['a zone', { host: 'fe80::1%eth0' }, 'host "fe80::1%eth0"'],
    ['a prefix too long', { host: '10.0.0.0/33' }, 'is no CIDR block'],
    ['a mapped block', { host: '::ffff:10.0.0.0/104' }, 'is no CIDR block'],
    ['no ports', { host: 'a.example', ports: [] }, 'network.allow[0].ports'],
    ['port 0', { host: 'a.example', ports: [0] }, 'network.allow[0].ports[0]'],
    ['port 65536', { host: 'a.example', ports: [65536] }, 'network.allow[0].ports[0]'],
    ['a broken port', { host: 'a.example', ports: [80.5] }, 'network.allow[0].ports[0]'],
    ['a key that is unknown', { host: 'a.example', prot: 1 }, 'prot'],
    [
      'a header that is none',
      { host: 'a.example', inject: { 'X Y': { env: 'KEY' } } },
      'is no header name',
    ],
    [
      'a header with a line break',
      { host: 'a.example', inject: { 'X\r\nY': { env: 'KEY' } } },
      'is no header name',
    ],
    [
      'a header of the connection',
      { host: 'a.example', inject: { 'Transfer-Encoding': { env: 'KEY' } } },
      'cannot be injected',
    ],
    [
      'a header twice',
      { host: 'a.example', inject: { 'X-Key': { env: 'KEY' }, 'x-key': { env: 'KEY' } } },
      'twice',
    ],
    [
      'a variable that is none',
      { host: 'a.example', inject: { 'X-Key': { env: 'A B' } } },
      'is no name of a variable',
    ],
    [
      'a prefix with a line break',
      { host: 'a.example', inject: { 'X-Key': { env: 'KEY', prefix: 'a\r\nHost: b' } } },
      'no header may hold',
    ],
  ])('%s', (_name, rule, text) => {
    expect(() => compile(rule)).toThrow(
      expect.objectContaining({ code: 'ConfigInvalid', message: expect.stringContaining(text) }),
    );
  });

  test('the index names the rule', () =>
    expect(() => compile({ host: 'a.example' }, { host: '?' })).toThrow('network.allow[1]'));
});

describe('the first rule that matches decides', () => {
  const asked = (allow: unknown[], raw: string, port: number, plain = false) =>
    decide(compile(...allow), normaliseHost(raw)!, port, plain);
  const allowed = (...args: Parameters<typeof asked>) => 'rule' in asked(...args);

  test.each<[string, unknown, string, number, boolean]>([
    ['the name itself', { host: 'a.example' }, 'A.EXAMPLE.', 443, true],
    ['a name in another script', { host: 'bücher.example' }, 'xn--bcher-kva.example', 443, true],
    ['another name', { host: 'a.example' }, 'b.example', 443, false],
    ['a name that ends alike', { host: 'a.example' }, 'xa.example', 443, false],
    ['a name below', { host: 'a.example' }, 'x.a.example', 443, false],
    ['below a star', { host: '*.a.example' }, 'x.y.a.example', 443, true],
    ['the star name itself', { host: '*.a.example' }, 'a.example', 443, false],
    ['ends like a star', { host: '*.a.example' }, 'xa.example', 443, false],
    ['another port', { host: 'a.example' }, 'a.example', 22, false],
    ['a named port', { host: 'a.example', ports: [22] }, 'a.example', 22, true],
    [
      'a default port that is not named',
      { host: 'a.example', ports: [22] },
      'a.example',
      443,
      false,
    ],
    ['an address', { host: '0x7f.1' }, '127.0.0.1', 80, true],
    ['an address in IPv6 clothes', { host: '127.0.0.1' }, '[::ffff:7f00:1]', 80, true],
    ['inside a block', { host: '10.0.0.0/8' }, '10.9.8.7', 80, true],
    ['outside a block', { host: '10.0.0.0/8' }, '11.0.0.1', 80, false],
    ['an IPv6 block', { host: '2606:4700::/32' }, '[2606:4700:1::1]', 80, true],
    ['all of IPv6 holds no IPv4', { host: '::/0' }, '10.0.0.1', 80, false],
    ['a name for an address rule', { host: '10.0.0.0/8' }, 'ten.example', 80, false],
  ])('%s', (_name, rule, raw, port, expected) => expect(allowed([rule], raw, port)).toBe(expected));

  test('a plain request that leaves as HTTPS is admitted by 443', () => {
    const rule = { host: 'a.example', ports: [443], upgrade: true };
    expect(allowed([rule], 'a.example', 80, true)).toBe(true);
    expect(allowed([rule], 'a.example', 80, false)).toBe(false);
    expect(allowed([{ ...rule, upgrade: false }], 'a.example', 80, true)).toBe(false);
  });

  test('a refusal says what is missing', () => {
    const rules = [{ host: 'a.example' }, { host: '*.b.example', ports: [8443] }];
    expect(asked(rules, 'c.example', 443)).toEqual({
      refusal:
        'no rule allows c.example (port 443); allowed are: a.example (80, 443), *.b.example (8443)',
    });
    expect(asked(rules, 'a.example', 22)).toEqual({
      refusal: 'no rule allows port 22 of a.example; allowed there: a.example (80, 443)',
    });
    expect(asked([], 'a.example', 22)).toEqual({
      refusal: 'no rule allows a.example (port 22); allowed are: no hosts at all',
    });
  });

  test('of the addresses of a name only those pass that the rule lets through', () => {
    const [open, closed] = compile({ host: 'a.example', private: true }, { host: 'a.example' });
    const mixed = ['10.0.0.1', '93.184.216.34', '::ffff:127.0.0.1'];
    expect(permitted(closed!, mixed)).toEqual({ addresses: ['93.184.216.34'] });
    expect(permitted(open!, mixed)).toEqual({
      addresses: ['10.0.0.1', '93.184.216.34', '127.0.0.1'],
    });
    expect(permitted(closed!, ['10.0.0.1'])).toEqual({
      refusal: '10.0.0.1 is not public (private) and rule a.example does not say private: true',
    });
    expect(permitted(open!, ['fe80::1%eth0'])).toHaveProperty('refusal');
  });
});
