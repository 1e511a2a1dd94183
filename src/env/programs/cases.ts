import { Rng } from '../../core/index.ts';
import type { Value } from './operations.ts';
import { type Domain, evaluate, formatSpec, parts, type Spec } from './spec.ts';

export interface Case {
  input: Value;
  expected: Value;
}

/** Hidden cases a try. */
export const CASES = 6;
/** Candidate inputs from which the cases are chosen. */
const CANDIDATES = 48;

/**
 * The hidden cases of a task: `CASES` inputs and their expected values, a function of (spec, seed).
 * They are chosen so that the wrong form of every single part shows on at least one of them; null
 * where no choice does (`up,low`: what `up` did is gone), and such a spec is no task.
 */
export function drawCases(spec: Spec, seed: number): Case[] | null {
  const rng = Rng.of(seed, 'cases', formatSpec(spec));
  const count = parts(spec).length;
  const right = new Array<boolean>(count).fill(false);
  const candidates: (Case & { shows: boolean[] })[] = [];
  for (let i = 0; i < CANDIDATES; i++) {
    const input = drawInput(rng, spec.domain);
    const expected = evaluate(spec, right, input);
    if (expected === null || candidates.some((other) => same(other.input, input))) continue;
    const shows = right.map(
      (_, part) =>
        !same(
          expected,
          evaluate(
            spec,
            right.map((_, j) => j === part),
            input,
          ),
        ),
    );
    candidates.push({ input, expected, shows });
  }
  const chosen = new Set<(typeof candidates)[number]>();
  for (let part = 0; part < count; part++) {
    if ([...chosen].some((item) => item.shows[part])) continue;
    const witness = candidates.find((item) => item.shows[part]);
    if (witness === undefined) return null;
    chosen.add(witness);
  }
  for (const item of candidates) if (chosen.size < CASES) chosen.add(item);
  if (chosen.size < CASES) return null;
  return rng.shuffle([...chosen]).map(({ input, expected }) => ({ input, expected }));
}

function drawInput(rng: Rng, domain: Domain): Value {
  if (domain === 'strings') {
    const letters = rng.float() < 0.5 ? 'abAB' : 'abcdABC';
    return Array.from({ length: rng.int(3, 5) }, () => rng.pick([...letters])).join('');
  }
  if (domain === 'lists') return Array.from({ length: rng.int(3, 5) }, () => rng.int(-6, 9));
  return rng.int(-12, 20);
}

/** Strict equality of values; an integer is never equal to its text. */
export function same(a: Value | null, b: Value | null): boolean {
  if (Array.isArray(a) && Array.isArray(b))
    return a.length === b.length && a.every((item, i) => item === b[i]);
  return a === b;
}
