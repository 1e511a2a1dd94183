import { LonghaulError, Rng } from '../../core/index.ts';
import {
  BRANCH_OPERATIONS,
  CONDITIONS,
  type Condition,
  fill,
  INTEGER_OPERATIONS,
  type Language,
  LEVEL,
  LIST_OPERATIONS,
  type Operation,
  STRING_OPERATIONS,
  type Value,
} from './operations.ts';

export const DOMAINS = ['integers', 'strings', 'lists', 'conditionals'] as const;
export type Domain = (typeof DOMAINS)[number];

/**
 * What a program must do: a chain of operations applied from left to right (`s:rev,bang=`), or a
 * choice between two operations on an integer (`c:neg?mul3:add1=`).
 */
export type Spec =
  | { domain: Exclude<Domain, 'conditionals'>; chain: readonly Operation[] }
  | { domain: 'conditionals'; condition: Condition; yes: Operation; no: Operation };

const PREFIX: Record<Domain, string> = {
  integers: 'i',
  strings: 's',
  lists: 'l',
  conditionals: 'c',
};
const OPERATIONS: Record<Domain, readonly Operation[]> = {
  integers: INTEGER_OPERATIONS,
  strings: STRING_OPERATIONS,
  lists: LIST_OPERATIONS,
  conditionals: BRANCH_OPERATIONS,
};

/** The spec as the agent reads it, without the closing `=`. */
export function formatSpec(spec: Spec): string {
  const prefix = PREFIX[spec.domain];
  return spec.domain === 'conditionals'
    ? `${prefix}:${spec.condition.name}?${spec.yes.name}:${spec.no.name}`
    : `${prefix}:${spec.chain.map((operation) => operation.name).join(',')}`;
}

/** Reads what `formatSpec` wrote. `TaskInvalid` names the part that is not known. */
export function parseSpec(text: string): Spec {
  const [, prefix, body] = /^(.):(.+)$/.exec(text) ?? [];
  const domain = DOMAINS.find((name) => PREFIX[name] === prefix);
  if (domain === undefined || body === undefined)
    throw new LonghaulError('TaskInvalid', `"${text}" is not a program spec such as s:rev,bang`);
  const operation = (name: string): Operation => {
    const found = OPERATIONS[domain].find((candidate) => candidate.name === name);
    if (found === undefined)
      throw new LonghaulError('TaskInvalid', `"${name}" in "${text}" is no operation on ${domain}`);
    return found;
  };
  if (domain !== 'conditionals') return { domain, chain: body.split(',').map(operation) };
  const [, name = '', yes = '', no = ''] = /^(.+)\?(.+):(.+)$/.exec(body) ?? [];
  const condition = CONDITIONS.find((candidate) => candidate.name === name);
  if (condition === undefined)
    throw new LonghaulError('TaskInvalid', `"${name}" in "${text}" is no condition`);
  return { domain, condition, yes: operation(yes), no: operation(no) };
}

/** The parts of a spec that can be got right or wrong one by one. */
export function parts(spec: Spec): readonly { family: string }[] {
  return spec.domain === 'conditionals'
    ? [spec.condition, spec.yes, spec.no]
    : (spec.chain as readonly { family: string }[]);
}

/** Writes the program of a spec; `wrong[i]` takes the wrong form of part i. */
export function writeProgram(spec: Spec, language: Language, wrong: readonly boolean[]): string {
  const form = (operation: Operation, i: number) =>
    (wrong[i] ? operation.wrong : operation.right)[language];
  const x = { text: 'x', level: LEVEL.atom as number };
  if (spec.domain !== 'conditionals')
    return spec.chain.reduce((inner, operation, i) => fill(form(operation, i), inner), x).text;
  const condition = (wrong[0] ? spec.condition.wrong : spec.condition.right).text;
  const yes = fill(form(spec.yes, 1), x).text;
  const no = fill(form(spec.no, 2), x).text;
  return language === 'python' ? `${yes} if ${condition} else ${no}` : `${condition}?${yes}:${no}`;
}

/** Reference meaning of a spec, or of one of its wrong variants. Null where it has no value. */
export function evaluate(spec: Spec, wrong: readonly boolean[], input: Value): Value | null {
  const form = (operation: Operation, i: number) => (wrong[i] ? operation.wrong : operation.right);
  if (spec.domain === 'conditionals') {
    const condition = wrong[0] ? spec.condition.wrong : spec.condition.right;
    return condition.test(input as number)
      ? form(spec.yes, 1).apply(input)
      : form(spec.no, 2).apply(input);
  }
  let value: Value | null = input;
  for (const [i, operation] of spec.chain.entries()) {
    if (value === null) return null;
    value = form(operation, i).apply(value);
  }
  return value;
}

/**
 * Where a spec belongs, by a hash of its text: 20 % are held out, a further 10 % are for validation
 * (never trained on, free to tune on), the rest are trained on. Single operations are always trained
 * on: held-out tasks are new combinations of known operations. The salt gives a split of its own, not
 * the one on which the settings were first tried.
 */
export function bucket(spec: Spec): 'train' | 'validation' | 'heldout' {
  if (parts(spec).length === 1) return 'train';
  const percent = Rng.of(SPLIT_SALT, 'split', formatSpec(spec)).int(0, 99);
  if (percent < 20) return 'heldout';
  return percent < 30 ? 'validation' : 'train';
}
const SPLIT_SALT = 20261;

/** Chance of each chain length, first for one operation. */
const LENGTHS = { train: [0.15, 0.55, 0.3], heldout: [0, 0.7, 0.3] } as const;

/** Longest right program in Python: with three tries and their observations it bounds an episode. */
const LONGEST = 40;

/** Draws a spec: the family first, then the number in it, so that large families are not favoured. */
export function drawSpec(rng: Rng, domain: Domain, bucketName: ReturnType<typeof bucket>): Spec {
  for (;;) {
    const spec = drawAny(rng, domain, LENGTHS[bucketName === 'train' ? 'train' : 'heldout']);
    if (spec === null || bucket(spec) !== bucketName) continue;
    if (writeProgram(spec, 'python', []).length <= LONGEST) return spec;
  }
}

function drawAny(rng: Rng, domain: Domain, lengths: readonly number[]): Spec | null {
  if (domain === 'conditionals') {
    const condition = drawFamily(rng, CONDITIONS);
    const yes = drawFamily(rng, BRANCH_OPERATIONS);
    const no = drawFamily(rng, BRANCH_OPERATIONS);
    return yes === no ? null : { domain, condition, yes, no };
  }
  let pick = rng.float();
  const length = 1 + lengths.findIndex((chance) => (pick -= chance) < 0);
  const chain: Operation[] = [];
  for (let i = 0; i < length; i++) {
    const last = chain.at(-1);
    const type = last?.to ?? OPERATIONS[domain][0]?.from;
    const fitting = OPERATIONS[domain].filter(
      (operation) =>
        operation.from === type &&
        operation.name !== last?.name &&
        // Only the last operation may leave the domain's own type.
        (i === length - 1 || operation.to === operation.from),
    );
    chain.push(drawFamily(rng, fitting));
  }
  return { domain, chain };
}

function drawFamily<T extends { family: string }>(rng: Rng, items: readonly T[]): T {
  const family = rng.pick([...new Set(items.map((item) => item.family))]);
  return rng.pick(items.filter((item) => item.family === family));
}
