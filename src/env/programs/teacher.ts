import type { Rng } from '../../core/index.ts';
import { type Case, same } from './cases.ts';
import type { Language, Value } from './operations.ts';
import { evaluate, parts, type Spec, writeProgram } from './spec.ts';
import { type CaseResult, type Verdict, verdict } from './verdict.ts';

/**
 * The faulty teacher of the warm-up. For about half of the operation families it prefers the wrong
 * form, so a model that imitates it is wrong at temperature 0 too: what is learned afterwards from
 * execution rewards is to correct a habit, not only to be more decided.
 *
 * These families have the bad habit, in every domain in which they appear.
 */
const BAD_HABITS: ReadonlySet<string> = new Set([
  // strings and lists
  'rev',
  'pre',
  'tail',
  'last',
  'drop',
  'no',
  'rep',
  'find',
  'inc',
  'max',
  'end',
  // integers and branches
  'sub',
  'mod',
  'neg',
  // conditions
  'odd',
]);
/** Chance of the right form, for families with a good and with a bad habit. */
const RIGHT = { good: 0.85, bad: 0.4 } as const;

/** Which parts the teacher gets wrong this time. */
function teacherMistakes(rng: Rng, spec: Spec): boolean[] {
  return parts(spec).map(
    (part) => rng.float() >= RIGHT[BAD_HABITS.has(part.family) ? 'bad' : 'good'],
  );
}

/** What the teacher writes when it follows its habits without chance: what greedy decoding learns. */
export function teacherHabit(spec: Spec): boolean[] {
  return parts(spec).map((part) => BAD_HABITS.has(part.family));
}

export interface Turn {
  program: string;
  verdict: Verdict;
}

/**
 * A demonstration: the teacher's tries at a task until one passes, `tries` at most. A try differs from
 * those before it, which shows that a failed program should be changed. The observations are
 * what the sandbox would have answered, from the reference meaning of right and wrong forms.
 */
export function demonstrate(
  rng: Rng,
  spec: Spec,
  cases: readonly Case[],
  language: Language,
  tries: number,
): Turn[] {
  const turns: Turn[] = [];
  for (let i = 0; i < tries; i++) {
    let mistakes = teacherMistakes(rng, spec);
    let program = writeProgram(spec, language, mistakes);
    for (let again = 0; again < 64 && turns.some((turn) => turn.program === program); again++) {
      mistakes = teacherMistakes(rng, spec);
      program = writeProgram(spec, language, mistakes);
    }
    const results = cases.map((item) => asResult(evaluate(spec, mistakes, item.input)));
    const judged = verdict(cases, results);
    turns.push({ program, verdict: judged });
    if (judged.kind === 'solved') break;
  }
  return turns;
}

/** An operation without a value raises an error in Python: an index or an empty sequence. */
function asResult(value: Value | null): CaseResult {
  return value === null ? { error: 'Value' } : { value };
}

/** Whether the mistakes change any of the cases: some wrong forms cancel each other. */
export function failsCases(spec: Spec, mistakes: readonly boolean[], cases: readonly Case[]) {
  return cases.some((item) => !same(item.expected, evaluate(spec, mistakes, item.input)));
}
