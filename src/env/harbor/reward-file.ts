/** What a verifier reported: the score and whatever else it measured. */
export interface Score {
  value: number;
  components: Record<string, number>;
}

/** Either a score, or why the file holds none. Never throws: the text is hostile. */
export type ScoreOrProblem = Score | { problem: string };

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;

/** `reward.txt`: one number in decimal notation. */
export function parseRewardText(text: string, range: readonly [number, number]): ScoreOrProblem {
  const trimmed = text.trim();
  if (!NUMBER.test(trimmed))
    return { problem: `reward.txt: expected one number, got ${quote(trimmed)}` };
  return bounded(Number(trimmed), {}, range, 'reward.txt');
}

/**
 * `reward.json`: a number, or an object of numbers. The key `reward` is the score and the others are
 * components; without it every key is a reward of its own, and the score is their mean (all are
 * components too).
 */
export function parseRewardJson(text: string, range: readonly [number, number]): ScoreOrProblem {
  let data: unknown;
  try {
    data = JSON.parse(text);
  } catch {
    return { problem: `reward.json: not valid JSON: ${quote(text.trim())}` };
  }
  if (typeof data === 'number') return bounded(data, {}, range, 'reward.json');
  if (typeof data !== 'object' || data === null || Array.isArray(data))
    return {
      problem: `reward.json: expected a number or an object of numbers, got ${quote(text)}`,
    };
  const components: Record<string, number> = {};
  for (const [key, value] of Object.entries(data)) {
    if (typeof value !== 'number' || !Number.isFinite(value))
      return {
        problem: `reward.json: ${quote(key)}: expected a finite number, got ${quote(JSON.stringify(value))}`,
      };
    Object.defineProperty(components, key, {
      value,
      enumerable: true,
      writable: true,
      configurable: true,
    });
  }
  const values = Object.values(components);
  if (values.length === 0) return { problem: 'reward.json: expected at least one number, got {}' };
  const { reward, ...rest } = components;
  if (reward !== undefined) return bounded(reward, rest, range, 'reward.json');
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return bounded(mean, components, range, 'reward.json');
}

function bounded(
  value: number,
  components: Record<string, number>,
  [low, high]: readonly [number, number],
  file: string,
): ScoreOrProblem {
  if (!Number.isFinite(value))
    return { problem: `${file}: expected a finite number, got ${value}` };
  if (value < low || value > high)
    return {
      problem: `${file}: the score ${value} lies outside of [${low}, ${high}]; a task with another range says so with metadata.reward_range`,
    };
  return { value, components };
}

function quote(text: string): string {
  return JSON.stringify(text.length > 80 ? `${text.slice(0, 80)}…` : text);
}
