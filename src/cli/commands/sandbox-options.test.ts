import { InvalidArgumentError } from 'commander';
import { describe, expect, test } from 'vitest';
import { cores, count, duration, image, networkRule, several, size } from './sandbox-options.ts';

const cases = <T>(parse: (text: string) => T, good: [string, T][], bad: string[]) => {
  test.each(good)('%j is %j', (text, expected) => expect(parse(text)).toEqual(expected));
  test.each(bad)('%j is refused', (text) =>
    expect(() => parse(text)).toThrow(InvalidArgumentError),
  );
};

describe('size', () =>
  cases(
    size,
    [
      ['512m', 512 * 2 ** 20],
      ['512M', 512 * 2 ** 20],
      ['64MiB', 64 * 2 ** 20],
      ['64mb', 64 * 2 ** 20],
      ['1.5g', 1.5 * 2 ** 30],
      ['2k', 2048],
      ['1t', 2 ** 40],
      ['1048576', 1048576],
      ['4096b', 4096],
    ],
    [
      '-512m',
      '0',
      '0m',
      '',
      'm',
      '512q',
      '1e9',
      '0x10',
      'Infinity',
      'NaN',
      '99999999t',
      '5 5m',
      '5mm',
    ],
  ));

describe('duration', () =>
  cases(
    duration,
    [
      ['30', 30_000],
      ['1.5', 1500],
      ['500ms', 500],
      ['30s', 30_000],
      ['5m', 300_000],
      ['1h', 3_600_000],
    ],
    // Beyond 24.8 days a timer of Node would fire at once.
    ['0', '-1', '', 's', '1d', '30 s s', '9999h', 'Infinity', '1e3'],
  ));

describe('cores', () =>
  cases(
    cores,
    [
      ['0.5', 0.5],
      ['.5', 0.5],
      ['2', 2],
    ],
    ['0', '-1', '', 'x', '1e9', '99999', '1/2'],
  ));

describe('count', () =>
  cases(
    count,
    [
      ['1', 1],
      ['128', 128],
    ],
    ['0', '-1', '1.5', '', '1e3', 'x'],
  ));

describe('image', () =>
  cases(
    image,
    [
      ['host', 'host'],
      ['dir:/srv/root', 'dir:/srv/root'],
      ['image:sha256-1', 'image:sha256-1'],
      ['rootfs:sha256-1', 'rootfs:sha256-1'],
      // Paths and names: what they stand for is looked up later.
      ['./root', './root'],
      ['docker.io/ubuntu:24.04', 'docker.io/ubuntu:24.04'],
    ],
    ['', ' ', 'dir:', 'image:', 'rootfs:'],
  ));

describe('networkRule', () =>
  cases(
    networkRule,
    [
      ['example.org', { host: 'example.org' }],
      ['example.org:443', { host: 'example.org', ports: [443] }],
      ['*.example.org:8080', { host: '*.example.org', ports: [8080] }],
      ['10.1.2.3:80', { host: '10.1.2.3', ports: [80], private: true }],
      ['10.0.0.0/8', { host: '10.0.0.0/8', private: true }],
      ['[::1]:443', { host: '::1', ports: [443], private: true }],
      ['[fd00::/8]', { host: 'fd00::/8', private: true }],
      ['localhost:3000', { host: 'localhost', ports: [3000], private: true }],
    ],
    [
      '',
      ':80',
      'http://example.org',
      'example.org/path',
      'user@example.org',
      'example.org:0',
      'example.org:65536',
      'example.org:-1',
      'example.org:http',
      'a b',
      '*',
      '*.*.example.org',
      '-x.example.org',
      '10.0.0.0/33',
      '300.1.1.1',
      '::1',
      '[example.org]:80',
      'ex\u001b]0;x\u0007ample.org',
    ],
  ));

test('an option that may be repeated keeps the order', () => {
  const collect = several(size);
  expect(collect('1m', collect('2k'))).toEqual([2048, 2 ** 20]);
});
