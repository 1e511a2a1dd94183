import { Readable } from 'node:stream';
import { buffer } from 'node:stream/consumers';
import { describe, expect, test } from 'vitest';
import { SecretMask } from './mask.ts';

const SECRET = 'sk-"abab%abab';
const streamed = async (pieces: string[]) =>
  (
    await buffer(
      Readable.from(pieces.map((piece) => Buffer.from(piece))).pipe(
        new SecretMask([SECRET]).stream(),
      ),
    )
  ).toString();

describe('a secret in an answer is masked', () => {
  const text = `a ${SECRET} b ${JSON.stringify({ key: SECRET })} c ${encodeURIComponent(SECRET)} d`;
  const expected = text
    .replaceAll(SECRET, '*'.repeat(SECRET.length))
    .replaceAll('sk-\\"abab%abab', '*'.repeat(SECRET.length + 1))
    .replaceAll(encodeURIComponent(SECRET), '*'.repeat(encodeURIComponent(SECRET).length));

  test('cut anywhere', async () => {
    expect(expected).not.toContain('abab');
    for (let at = 0; at <= text.length; at++)
      expect(await streamed([text.slice(0, at), text.slice(at)])).toBe(expected);
  });

  test('byte by byte', async () => expect(await streamed([...text])).toBe(expected));

  test('where occurrences overlap', async () => {
    const mask = new SecretMask(['abcabcab']);
    expect(mask.text('xabcabcabcabx')).toBe(`x${'*'.repeat(11)}x`);
    const pieces = ['xabcabca', 'bcab', 'x'].map((piece) => Buffer.from(piece));
    const out = await buffer(Readable.from(pieces).pipe(mask.stream()));
    expect(out.toString()).toBe(`x${'*'.repeat(11)}x`);
  });

  test('what begins like a secret and goes on otherwise is kept', async () => {
    expect(await streamed(['say sk-', '"ab', 'ac'])).toBe('say sk-"abac');
    expect(await streamed(['ends with sk-"aba'])).toBe('ends with sk-"aba');
  });

  test('an event passes before the next one is sent', () => {
    const stream = new SecretMask([SECRET]).stream();
    stream.write('data: 1\n\n');
    expect(stream.read()?.toString()).toBe('data: 1\n\n');
  });
});
