import { type Case, same } from './cases.ts';
import type { Value } from './operations.ts';

/** What a program gave for one case: a value, or the kind of error it ended with. */
export type CaseResult = { value: Value } | { error: string };

/** A judged try: `wrong` gave values, but not the expected ones; `invalid` gave none. */
export type Verdict =
  | { kind: 'solved' }
  | { kind: 'wrong'; case: Case; got: Value }
  | { kind: 'invalid'; error: string };

/** Judges results against the cases, here and never in the sandbox. The first bad case decides. */
export function verdict(cases: readonly Case[], results: readonly CaseResult[]): Verdict {
  for (const [i, item] of cases.entries()) {
    const result = results[i] ?? { error: 'Output' };
    if ('error' in result) return { kind: 'invalid', error: result.error };
    if (!same(result.value, item.expected)) return { kind: 'wrong', case: item, got: result.value };
  }
  return { kind: 'solved' };
}

const SOLVED = '+';
/** Longest value an observation shows: context is short, and the value may be a megabyte. */
const SHOWN = 12;

/** The verdict as the agent reads it: `+`, `!IN>EXPECTED:GOT=` or `!EKIND=`. Printable ASCII only. */
export function observation(judged: Verdict): string {
  switch (judged.kind) {
    case 'solved':
      return SOLVED;
    case 'wrong':
      return `!${show(judged.case.input)}>${show(judged.case.expected)}:${show(judged.got)}=`;
    case 'invalid':
      return `!E${clip(judged.error)}=`;
  }
}

/**
 * The kind of verdict behind an observation: the run's messages are all that grading has. Text that is no
 * verdict's says that the call did not reach the tool, such as arguments of the wrong shape: no program ran.
 */
export function readObservation(text: string): Verdict['kind'] {
  if (text === SOLVED) return 'solved';
  return text.startsWith('!') && !text.startsWith('!E') ? 'wrong' : 'invalid';
}

function show(value: Value): string {
  return clip(typeof value === 'object' ? value.join(',') : String(value));
}

function clip(text: string): string {
  const plain = text.slice(0, SHOWN + 1).replace(/[^ -~]/g, '?');
  return plain.length > SHOWN ? `${plain.slice(0, SHOWN - 1)}~` : plain;
}
