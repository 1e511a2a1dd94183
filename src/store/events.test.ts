import { describe, expect, test } from 'vitest';
import { EVENT_VERSIONS, type Event, type NewEvent, Redactor } from '../core/index.ts';
import { decode, encode, MAX_EVENT_BYTES, storable } from './events.ts';
import { userMessage } from './test-home.ts';

const redactor = new Redactor(['hunter2-hunter2']);

function toolRequested(input: unknown): NewEvent {
  return {
    type: 'tool.requested',
    data: {
      callId: 'c1',
      tool: 'shell',
      input,
      effect: 'workspace',
      idempotencyKey: 'k',
      timeoutMs: 1,
    },
  };
}

describe('storable', () => {
  test('replaces NUL characters and lone surrogates in values and keys, and keeps the rest', () => {
    expect(storable({ 'a\0': ['x\0y', '\ud83d', '😀'], n: 1, z: null })).toEqual({
      'a\uFFFD': ['x\uFFFDy', '\uFFFD', '😀'],
      n: 1,
      z: null,
    });
  });

  test('returns the same object when there is nothing to replace', () => {
    const value = { a: ['x', { b: 'y' }], c: 'literal \\u0000 text' };
    expect(storable(value)).toBe(value);
  });

  test('cuts what is nested deeper than Postgres can parse', () => {
    const deep = JSON.parse(`${'['.repeat(50_000)}${']'.repeat(50_000)}`);
    expect(JSON.stringify(storable(deep))).toMatch(/^\[{200}"\[nested too deeply\]"\]{200}$/);
  });

  test('keeps a key named __proto__ as data', () => {
    const out = storable(JSON.parse('{"__proto__": {"x": "a\\u0000"}}')) as object;
    expect(JSON.stringify(out)).toBe('{"__proto__":{"x":"a\uFFFD"}}');
    expect(Object.getPrototypeOf(out)).toBe(Object.prototype);
  });
});

describe('encode', () => {
  test('redacts every payload', () => {
    const { json } = encode(
      toolRequested({ argv: ['curl', '-u', 'me:hunter2-hunter2'] }),
      redactor,
    );
    expect(json).not.toContain('hunter2-hunter2');
    expect(json).toContain('[redacted:secret]');
  });

  test('refuses a payload of the wrong shape and says what is wrong', () => {
    const wrong = { type: 'tool.failed', data: { callId: 7 } } as unknown as NewEvent;
    expect(() => encode(wrong, redactor)).toThrow(/tool\.failed is malformed[\s\S]*callId/);
    const unknown = { type: 'tool.exploded', data: {} } as unknown as NewEvent;
    expect(() => encode(unknown, redactor)).toThrow(/no event type "tool.exploded"/);
    expect(() => encode(toolRequested(10n), redactor)).toThrow(/not JSON/);
  });

  test('refuses an event that is too large, by its bytes, and names the artifact store', () => {
    // Two bytes a character: the limit is not of characters.
    const large = userMessage('ü'.repeat(MAX_EVENT_BYTES / 2));
    try {
      encode(large, redactor);
      expect.unreachable();
    } catch (error) {
      expect(error).toMatchObject({ code: 'Internal', next: expect.stringMatching(/artifact/) });
    }
    expect(encode(userMessage('u'.repeat(MAX_EVENT_BYTES / 2)), redactor).v).toBe(1);
  });
});

describe('decode', () => {
  const data = JSON.stringify(userMessage('hi').data);

  test('gives an event of a known version', () => {
    expect(decode(['R', '3', 'message.added', '1', data, '7'])).toEqual({
      ...userMessage('hi'),
      runId: 'R',
      seq: 3,
      at: '1970-01-01T00:00:00.007Z',
      v: EVENT_VERSIONS['message.added'],
    } as Event);
  });

  test('refuses versions and types of a newer Longhaul', () => {
    for (const [type, v] of [
      ['message.added', '2'],
      ['dream.dreamt', '1'],
    ] as const)
      expect(() => decode(['R', '3', type, v, data, '0'])).toThrow(
        expect.objectContaining({
          code: 'StoreTooNew',
          message: expect.stringContaining('event 3'),
        }),
      );
  });
});
