import { expect, test } from 'vitest';
import { KeptOutput, outputText } from './output.ts';

const bytes = (text: string) => Buffer.from(text);

test('complete output is decoded as it is, across the seam of head and tail', () => {
  const all = bytes('grüße 🙂');
  for (let cut = 0; cut <= all.length; cut++)
    expect(outputText(all.subarray(0, cut), all.subarray(cut), all.length)).toBe('grüße 🙂');
});

test('a cut never shows half a character, and the marker counts what is missing', () => {
  const all = bytes('🙂'.repeat(100));
  for (let size = 1; size < 9; size++) {
    const text = outputText(all.subarray(0, size), all.subarray(all.length - size), all.length);
    expect(text).not.toContain('\ufffd');
    const left = Number(/\[(\d+) bytes left out\]/.exec(text)![1]);
    expect(left + Buffer.byteLength(text.replace(/\n\[.*\]\n/, ''))).toBe(all.length);
  }
});

test('invalid bytes become replacement characters', () => {
  expect(outputText(Buffer.from([0x61, 0xff, 0xc3]), Buffer.alloc(0), 3)).toBe('a\ufffd\ufffd');
});

test('head and tail are kept however the chunks fall', () => {
  const all = Buffer.from(Array.from({ length: 1000 }, (_, i) => i % 251));
  for (const step of [1, 7, 64, 999, 1000]) {
    const kept = new KeptOutput(101);
    for (let i = 0; i < all.length; i += step) kept.add(all.subarray(i, i + step));
    const { head, tail, total } = kept.data();
    expect(total).toBe(1000);
    expect(head).toEqual(all.subarray(0, 51));
    expect(tail).toEqual(all.subarray(950));
  }
});
