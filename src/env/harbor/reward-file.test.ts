import { describe, expect, it } from 'vitest';
import { parseRewardJson, parseRewardText } from './reward-file.ts';

const unit = [0, 1] as const;

describe('parseRewardText', () => {
  it.each([
    ['1', 1],
    [' 0.25\n', 0.25],
    ['1e-1', 0.1],
    ['.5', 0.5],
    ['+1.', 1],
    ['-0', -0],
  ])('reads %j', (text, value) => {
    expect(parseRewardText(text, unit)).toEqual({ value, components: {} });
  });

  it.each([
    '',
    ' ',
    'NaN',
    'nan',
    'inf',
    'Infinity',
    '1 1',
    '0x1',
    '1,0',
    'passed',
    '1e999',
    '2',
    '-0.1',
  ])('finds no score in %j', (text) => {
    expect(parseRewardText(text, unit)).toHaveProperty('problem');
  });

  it('takes the range of the task', () => {
    expect(parseRewardText('-1', [-1, 1])).toEqual({ value: -1, components: {} });
    expect(parseRewardText('1.5', unit)).toEqual({
      problem: expect.stringContaining('metadata.reward_range'),
    });
  });
});

describe('parseRewardJson', () => {
  it.each([
    ['0.5', 0.5, {}],
    ['{"reward": 1}', 1, {}],
    ['{"reward": 0.5, "tests": 3, "speed": -2}', 0.5, { tests: 3, speed: -2 }],
    ['{"accuracy": 0.5}', 0.5, { accuracy: 0.5 }],
    ['{"a": 0, "b": 1}', 0.5, { a: 0, b: 1 }],
  ])('reads %s', (text, value, components) => {
    expect(parseRewardJson(text, unit)).toEqual({ value, components });
  });

  it.each([
    '',
    'NaN',
    '{"reward": NaN}',
    '{"reward": 1e999}',
    '{"reward": "1"}',
    '{"reward": true}',
    '{"reward": null}',
    '{"reward": 1, "extra": "x"}',
    '{"reward": {"value": 1}}',
    '{}',
    '[1]',
    '"1"',
    'true',
    'null',
    '{"reward": 2}',
    '{"a": 5, "b": 5}',
  ])('finds no score in %s', (text) => {
    expect(parseRewardJson(text, unit)).toHaveProperty('problem');
  });

  it('keeps a component named like a property of every object', () => {
    const score = parseRewardJson('{"reward": 1, "__proto__": 1, "constructor": 0}', unit);
    expect(score).toMatchObject({ value: 1 });
    expect(Object.keys((score as { components: object }).components).sort()).toEqual([
      '__proto__',
      'constructor',
    ]);
  });
});
