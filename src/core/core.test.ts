import { describe, expect, it } from 'vitest';
import { type CompletionTokens, decodeTokens, encodeTokens } from './completion.ts';
import { attribute, LonghaulError } from './errors.ts';
import { Redactor } from './redaction.ts';
import { Reward } from './reward.ts';
import { Rng } from './rng.ts';
import { appendCall, type Segment } from './trajectory.ts';

describe('Rng', () => {
  it('gives equal streams for equal seeds and paths, and others for others', () => {
    const draw = (rng: Rng) => Array.from({ length: 5 }, () => rng.uint32());
    expect(draw(Rng.of(7, 'a', 1))).toEqual(draw(Rng.of(7, 'a', 1)));
    const streams = [
      Rng.of(7, 'a', 1),
      Rng.of(7, 'a', 2),
      Rng.of(8, 'a', 1),
      Rng.of(7, 'a#1'),
      Rng.of(7 + 2 ** 32, 'a', 1),
    ];
    expect(new Set(streams.map((rng) => draw(rng).join())).size).toBe(streams.length);
  });

  it('is uniform in float, unbiased in int, standard in normal', () => {
    const rng = Rng.of(1, 'moments');
    const n = 200_000;
    let sum = 0;
    let normal = 0;
    let square = 0;
    const counts = new Array<number>(7).fill(0);
    for (let i = 0; i < n; i++) {
      sum += rng.float();
      const z = rng.normal();
      normal += z;
      square += z * z;
      counts[rng.int(0, 6)]! += 1;
    }
    expect(sum / n).toBeCloseTo(0.5, 2);
    expect(normal / n).toBeCloseTo(0, 1);
    expect(square / n).toBeCloseTo(1, 1);
    for (const count of counts) expect(Math.abs(count / n - 1 / 7)).toBeLessThan(0.005);
  });

  it('continues a stored stream exactly, a spare normal included', () => {
    const rng = Rng.of(3, 'x');
    rng.normal();
    const copy = Rng.restore(JSON.parse(JSON.stringify(rng.state())));
    expect([copy.normal(), copy.uint32()]).toEqual([rng.normal(), rng.uint32()]);
  });

  it('shuffles into a permutation and refuses to pick from nothing', () => {
    const items = Array.from({ length: 50 }, (_, i) => i);
    const shuffled = Rng.of(1, 's').shuffle(items);
    expect(shuffled).not.toEqual(items);
    expect(shuffled.toSorted((a, b) => a - b)).toEqual(items);
    expect(() => Rng.of(1).pick([])).toThrow(RangeError);
  });
});

describe('Redactor', () => {
  it('removes known secrets and the shapes of credentials from every string of an event', () => {
    const redactor = new Redactor(['hunter2-hunter2', 'short']);
    const key = `sk-proj-${'a1B2'.repeat(8)}`;
    const event = redactor.event({
      type: 'message.added',
      data: { message: { role: 'user', content: `pass hunter2-hunter2, key ${key}, short stays` } },
    });
    expect(event.data).toEqual({
      message: {
        role: 'user',
        content: 'pass [redacted:secret], key [redacted:api-key], short stays',
      },
    });
  });

  it('leaves class names that only begin like a key', () => {
    const css = '.sk-folding-cube-container { }';
    expect(new Redactor().text(css)).toBe(css);
  });

  it('reaches keys and keeps a key that is called __proto__', () => {
    const input = JSON.parse('{"hunter2-hunter2": 1, "__proto__": {"a": "hunter2-hunter2"}}');
    expect(JSON.stringify(new Redactor(['hunter2-hunter2']).json(input))).toBe(
      '{"[redacted:secret]":1,"__proto__":{"a":"[redacted:secret]"}}',
    );
  });

  it('returns the very event when there is nothing to hide', () => {
    const event = {
      type: 'message.added',
      data: { message: { role: 'user', content: 'plain' } },
    } as const;
    expect(new Redactor().event(event)).toBe(event);
  });
});

describe('Reward', () => {
  it('an ungraded status has no value and a graded one must have a finite one', () => {
    expect(
      Reward.safeParse({ status: 'grader_error', value: 0, components: {}, reason: 'x' }).success,
    ).toBe(false);
    expect(Reward.safeParse({ status: 'ok', value: Number.NaN, components: {} }).success).toBe(
      false,
    );
    expect(Reward.safeParse({ status: 'ok', value: null, components: {} }).success).toBe(false);
    expect(Reward.safeParse({ status: 'ok', value: 0.5, components: { a: 1 } }).success).toBe(true);
  });
});

describe('tokens', () => {
  const tokens: CompletionTokens = {
    promptIds: [1, 2, 300_000],
    ids: [4, 5],
    logprobs: [-0.5, -2.25],
    logprobKind: 'raw',
    sampling: { temperature: 1, seed: 3 },
    versionSpans: [{ start: 0, version: 'v1' }],
    tokenizerHash: 't',
    rendererHash: 'r',
  };

  it('survive encoding, and foreign bytes are refused', () => {
    expect(decodeTokens(encodeTokens(tokens))).toEqual(tokens);
    expect(() => decodeTokens(new Uint8Array(8))).toThrow();
    expect(() => decodeTokens(encodeTokens(tokens).subarray(0, -4))).toThrow();
  });
});

describe('trajectory', () => {
  const call = (promptIds: number[], ids: number[], modelCallId: string) => ({
    promptIds,
    ids,
    logprobs: ids.map(() => -1),
    version: 'v',
    modelCallId,
  });

  it('makes the surplus of a prompt that extends the last an observation', () => {
    const segments: Segment[] = [];
    appendCall(segments, call([1, 2], [3], 'm1'));
    appendCall(segments, call([1, 2, 3, 9, 9], [4], 'm2'));
    expect(segments).toHaveLength(1);
    expect(segments[0]!.chunks.map((chunk) => [chunk.role, chunk.ids])).toEqual([
      ['prompt', [1, 2]],
      ['action', [3]],
      ['observation', [9, 9]],
      ['action', [4]],
    ]);
  });

  it('starts a new segment, and says why, when one token of the past differs', () => {
    const segments: Segment[] = [];
    appendCall(segments, call([1, 2], [3], 'm1'));
    appendCall(segments, call([1, 7, 3, 9], [4], 'm2'));
    expect(segments.map((segment) => segment.startedBecause)).toEqual([
      'start',
      'prompt_rewritten',
    ]);
    expect(segments[1]!.chunks[0]).toEqual({ role: 'prompt', ids: [1, 7, 3, 9] });
  });
});

describe('errors', () => {
  it('are attributed once', () => {
    const first = attribute(new Error('refused'), 'ModelUnreachable', 'model m');
    expect(first).toMatchObject({
      code: 'ModelUnreachable',
      class: 'retryable',
      message: 'model m: refused',
    });
    expect(attribute(first, 'Internal')).toBe(first);
    expect(new LonghaulError('NotFound', 'x').toJSON()).not.toHaveProperty('stack');
  });
});
