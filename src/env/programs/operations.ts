/**
 * The operations of the `programs` environment. Each has a right form and one wrong form; each form is
 * a Python template, a JavaScript template and a TypeScript function with the same meaning. The
 * TypeScript functions are the reference: expected values come from them and never enter a sandbox.
 */

export type Value = number | string | readonly number[];
type ValueType = 'int' | 'str' | 'list';
export type Language = 'python' | 'javascript';

/**
 * An expression with one hole, `@`. `level` is how tightly the whole binds, `slot` how tightly an
 * operand must bind to stand in the hole without parentheses.
 */
export interface Template {
  text: string;
  level: number;
  slot: number;
}

/** Binding levels of the expressions we write, loosest first. */
export const LEVEL = { any: 0, sum: 1, product: 2, unary: 3, atom: 4 } as const;

interface Form {
  python: Template;
  javascript: Template;
  /** Null where the operation has no value (the first element of an empty list). */
  apply: (x: Value) => Value | null;
}

export interface Operation {
  name: string;
  /** Operations that differ only in a number share a family, and the teacher's habit. */
  family: string;
  from: ValueType;
  to: ValueType;
  right: Form;
  wrong: Form;
}

/** A question about an integer, for the conditional domain. */
export interface Condition {
  name: string;
  family: string;
  right: ConditionForm;
  wrong: ConditionForm;
}
interface ConditionForm {
  /** Same text in both languages. */
  text: string;
  test: (x: number) => boolean;
}

/** Puts an expression into a template's hole, in parentheses where precedence asks for them. */
export function fill(template: Template, inner: { text: string; level: number }) {
  const operand = inner.level < template.slot ? `(${inner.text})` : inner.text;
  return { text: template.text.replace('@', () => operand), level: template.level };
}

const call = (text: string): Template => ({ text, level: LEVEL.atom, slot: LEVEL.any });
const post = (text: string): Template => ({ text, level: LEVEL.atom, slot: LEVEL.atom });
const sum = (text: string, slot: number = LEVEL.sum): Template => ({
  text,
  level: LEVEL.sum,
  slot,
});
const product = (text: string, slot: number = LEVEL.product): Template => ({
  text,
  level: LEVEL.product,
  slot,
});
const unary = (text: string): Template => ({ text, level: LEVEL.unary, slot: LEVEL.atom });

function form<T extends Value>(
  python: Template,
  javascript: Template,
  apply: (x: T) => Value | null,
): Form {
  return { python, javascript, apply: apply as (x: Value) => Value | null };
}
const both = <T extends Value>(template: Template, apply: (x: T) => Value | null) =>
  form(template, template, apply);

function op(
  name: string,
  types: [ValueType, ValueType],
  right: Form,
  wrong: Form,
  family = name,
): Operation {
  return { name, family, from: types[0], to: types[1], right, wrong };
}

/** One operation a number, which its name ends in. */
function numbered(family: string, numbers: number[], make: (n: number) => Operation): Operation[] {
  return numbers.map((n) => ({ ...make(n), name: `${family}${n}`, family }));
}

/** One operation a character, which its name ends in. */
function lettered(family: string, chars: string[], make: (c: string) => Operation): Operation[] {
  return chars.map((c) => ({ ...make(c), name: `${family}${c}`, family }));
}

const mod = (x: number, n: number) => ((x % n) + n) % n;
const reversed = (x: string) => [...x].reverse().join('');

type S = string;
type N = number;
type L = readonly number[];

const SS: [ValueType, ValueType] = ['str', 'str'];
const SI: [ValueType, ValueType] = ['str', 'int'];
const II: [ValueType, ValueType] = ['int', 'int'];
const LL: [ValueType, ValueType] = ['list', 'list'];
const LI: [ValueType, ValueType] = ['list', 'int'];

// Slices mean the same on strings and lists in both languages.
const slice = {
  from: (n: number) =>
    form(post(`@[${n}:]`), post(`@.slice(${n})`), (x: S | L) => x.slice(n) as Value),
  upTo: (n: number) =>
    form(post(`@[:${n}]`), post(`@.slice(0,${n})`), (x: S | L) => x.slice(0, n) as Value),
};

const repeated = (n: number) =>
  form(product(`@*${n}`), post(`@.repeat(${n})`), (x: S) => x.repeat(n));
const replaced = (from: string, to: string) =>
  form(post(`@.replace('${from}','${to}')`), post(`@.replaceAll('${from}','${to}')`), (x: S) =>
    x.replaceAll(from, to),
  );
const counted = (c: string) =>
  form(
    post(`@.count('${c}')`),
    sum(`@.split('${c}').length-1`, LEVEL.atom),
    (x: S) => x.split(c).length - 1,
  );

export const STRING_OPERATIONS: readonly Operation[] = [
  op(
    'rev',
    SS,
    form(post('@[::-1]'), call("[...@].reverse().join('')"), (x: S) => reversed(x)),
    form(post('@[-2::-1]'), post("[...@.slice(0,-1)].reverse().join('')"), (x: S) =>
      reversed(x.slice(0, -1)),
    ),
  ),
  op(
    'up',
    SS,
    form(post('@.upper()'), post('@.toUpperCase()'), (x: S) => x.toUpperCase()),
    form(post('@.lower()'), post('@.toLowerCase()'), (x: S) => x.toLowerCase()),
  ),
  op(
    'low',
    SS,
    form(post('@.lower()'), post('@.toLowerCase()'), (x: S) => x.toLowerCase()),
    form(post('@.upper()'), post('@.toUpperCase()'), (x: S) => x.toUpperCase()),
  ),
  op(
    'bang',
    SS,
    both(sum("@+'!'"), (x: S) => `${x}!`),
    both(sum("'!'+@"), (x: S) => `!${x}`),
  ),
  ...lettered('suf', ['.', '?', '&'], (c) =>
    op(
      '',
      SS,
      both(sum(`@+'${c}'`), (x: S) => `${x}${c}`),
      both(sum(`'${c}'+@`), (x: S) => `${c}${x}`),
    ),
  ),
  ...lettered('pre', ['*', '-', '#', '_'], (c) =>
    op(
      '',
      SS,
      both(sum(`'${c}'+@`), (x: S) => `${c}${x}`),
      both(sum(`@+'${c}'`), (x: S) => `${x}${c}`),
    ),
  ),
  ...numbered('rep', [2, 3, 4], (n) => op('', SS, repeated(n), repeated(n + 1))),
  op('tail', SS, slice.from(1), slice.from(2)),
  op('init', SS, slice.upTo(-1), slice.upTo(-2)),
  ...numbered('take', [2, 3, 4], (n) => op('', SS, slice.upTo(n), slice.from(-n))),
  ...numbered('last', [2, 3, 4], (n) => op('', SS, slice.from(-n), slice.upTo(n))),
  ...numbered('drop', [2, 3], (n) => op('', SS, slice.from(n), slice.upTo(-n))),
  ...lettered('no', ['a', 'b', 'c'], (c) =>
    op('', SS, replaced(c, ''), replaced(c.toUpperCase(), '')),
  ),
  op('a2b', SS, replaced('a', 'b'), replaced('b', 'a')),
  op(
    'len',
    SI,
    form(call('len(@)'), post('@.length'), (x: S) => x.length),
    form(sum('len(@)-1', LEVEL.any), sum('@.length-1', LEVEL.atom), (x: S) => x.length - 1),
  ),
  ...lettered('cnt', ['a', 'b'], (c) => op('', SI, counted(c), counted(c === 'a' ? 'b' : 'a'))),
  ...lettered('find', ['a', 'b'], (c) =>
    op(
      '',
      SI,
      form(post(`@.find('${c}')`), post(`@.indexOf('${c}')`), (x: S) => x.indexOf(c)),
      form(post(`@.rfind('${c}')`), post(`@.lastIndexOf('${c}')`), (x: S) => x.lastIndexOf(c)),
    ),
  ),
];

const digits = (low: number, high: number) =>
  Array.from({ length: high - low + 1 }, (_, i) => low + i);

/** Python's `%` and `//` round down; JavaScript needs to be told. */
const floorMod = (n: number) =>
  form(product(`@%${n}`), product(`(@%${n}+${n})%${n}`), (x: N) => mod(x, n));
const floorDiv = (n: number) =>
  form(product(`@//${n}`), { ...call(`Math.floor(@/${n})`), slot: LEVEL.product }, (x: N) =>
    Math.floor(x / n),
  );

const ADD = numbered('add', digits(1, 9), (n) =>
  op(
    '',
    II,
    both(sum(`@+${n}`), (x: N) => x + n),
    both(sum(`@-${n}`), (x: N) => x - n),
  ),
);
const SUB = numbered('sub', digits(1, 9), (n) =>
  op(
    '',
    II,
    both(sum(`@-${n}`), (x: N) => x - n),
    both(sum(`${n}-@`, LEVEL.atom), (x: N) => n - x),
  ),
);
const MUL = numbered('mul', digits(2, 6), (n) =>
  op(
    '',
    II,
    both(product(`@*${n}`), (x: N) => x * n),
    both(sum(`@+${n}`), (x: N) => x + n),
  ),
);
const NEG = op(
  'neg',
  II,
  both(unary('-@'), (x: N) => -x),
  both(unary('~@'), (x: N) => -x - 1),
);
const SQ = op(
  'sq',
  II,
  both({ ...unary('@**2') }, (x: N) => x * x),
  both(product('@*2'), (x: N) => x * 2),
);

export const INTEGER_OPERATIONS: readonly Operation[] = [
  ...ADD,
  ...SUB,
  ...MUL,
  ...numbered('mod', digits(3, 7), (n) => op('', II, floorMod(n), floorDiv(n))),
  ...numbered('div', digits(2, 4), (n) =>
    op(
      '',
      II,
      floorDiv(n),
      form(
        sum(`@//${n}+1`, LEVEL.product),
        { ...sum(`Math.floor(@/${n})+1`), slot: LEVEL.product },
        (x: N) => Math.floor(x / n) + 1,
      ),
    ),
  ),
  NEG,
  SQ,
  op(
    'abs',
    II,
    form(call('abs(@)'), call('Math.abs(@)'), (x: N) => Math.abs(x)),
    form(
      { ...unary('-abs(@)'), slot: LEVEL.any },
      { ...unary('-Math.abs(@)'), slot: LEVEL.any },
      (x: N) => -Math.abs(x),
    ),
  ),
  ...numbered('min', digits(4, 7), (n) =>
    op(
      '',
      II,
      form(call(`min(@,${n})`), call(`Math.min(@,${n})`), (x: N) => Math.min(x, n)),
      form(call(`max(@,${n})`), call(`Math.max(@,${n})`), (x: N) => Math.max(x, n)),
    ),
  ),
  ...numbered('max', digits(4, 7), (n) =>
    op(
      '',
      II,
      form(call(`max(@,${n})`), call(`Math.max(@,${n})`), (x: N) => Math.max(x, n)),
      form(call(`min(@,${n})`), call(`Math.min(@,${n})`), (x: N) => Math.min(x, n)),
    ),
  ),
];

/** Maps and filters: the body is the same text in both languages. */
const map = (body: string, apply: (v: number) => number) =>
  form(call(`[${body} for v in @]`), post(`@.map(v=>${body})`), (x: L) => x.map(apply));
const filter = (test: string, apply: (v: number) => boolean) =>
  form(call(`[v for v in @ if ${test}]`), post(`@.filter(v=>${test})`), (x: L) => x.filter(apply));
const shifted = (sign: '+' | '-', n: number) =>
  map(`v${sign}${n}`, (v) => (sign === '+' ? v + n : v - n));
const ascending = (x: L) => [...x].sort((a, b) => a - b);
const at = (i: number) =>
  form(post(`@[${i}]`), i < 0 ? post(`@.at(${i})`) : post(`@[${i}]`), (x: L) => x.at(i) ?? null);
const least = form(call('min(@)'), call('Math.min(...@)'), (x: L) =>
  x.length > 0 ? Math.min(...x) : null,
);
const greatest = form(call('max(@)'), call('Math.max(...@)'), (x: L) =>
  x.length > 0 ? Math.max(...x) : null,
);
const count = form(call('len(@)'), post('@.length'), (x: L) => x.length);

export const LIST_OPERATIONS: readonly Operation[] = [
  op(
    'sort',
    LL,
    form(call('sorted(@)'), call('[...@].sort((a,b)=>a-b)'), ascending),
    form(post('sorted(@)[::-1]'), call('[...@].sort((a,b)=>b-a)'), (x: L) =>
      ascending(x).reverse(),
    ),
  ),
  op(
    'rev',
    LL,
    form(post('@[::-1]'), call('[...@].reverse()'), (x: L) => [...x].reverse()),
    form(post('@[-2::-1]'), post('[...@.slice(0,-1)].reverse()'), (x: L) =>
      x.slice(0, -1).reverse(),
    ),
  ),
  op('tail', LL, slice.from(1), slice.from(2)),
  op('init', LL, slice.upTo(-1), slice.upTo(-2)),
  ...numbered('take', [2, 3], (n) => op('', LL, slice.upTo(n), slice.from(-n))),
  ...numbered('last', [2, 3], (n) => op('', LL, slice.from(-n), slice.upTo(n))),
  ...numbered('inc', digits(1, 9), (n) => op('', LL, shifted('+', n), shifted('-', n))),
  ...numbered('dec', digits(1, 9), (n) => op('', LL, shifted('-', n), shifted('+', n))),
  ...numbered('mul', digits(2, 5), (n) =>
    op(
      '',
      LL,
      map(`v*${n}`, (v) => v * n),
      shifted('+', n),
    ),
  ),
  ...numbered('gt', digits(0, 4), (n) =>
    op(
      '',
      LL,
      filter(`v>${n}`, (v) => v > n),
      filter(`v<${n}`, (v) => v < n),
    ),
  ),
  op(
    'even',
    LL,
    filter('v%2==0', (v) => v % 2 === 0),
    filter('v%2!=0', (v) => v % 2 !== 0),
  ),
  op(
    'neg',
    LL,
    map('-v', (v) => -v),
    map('~v', (v) => -v - 1),
  ),
  op(
    'sq',
    LL,
    map('v*v', (v) => v * v),
    map('v+v', (v) => v + v),
  ),
  op(
    'sum',
    LI,
    form(call('sum(@)'), call('@.reduce((a,b)=>a+b,0)'), (x: L) => x.reduce((a, b) => a + b, 0)),
    count,
  ),
  op('max', LI, greatest, least),
  op('min', LI, least, greatest),
  op(
    'len',
    LI,
    count,
    form(sum('len(@)-1', LEVEL.any), sum('@.length-1', LEVEL.atom), (x: L) => x.length - 1),
  ),
  op('head', LI, at(0), at(-1)),
  op('end', LI, at(-1), at(-2)),
];

/** Branches of the conditional domain: the integer operations with short forms. */
export const BRANCH_OPERATIONS: readonly Operation[] = [...ADD, ...SUB, ...MUL, NEG, SQ];

function condition(
  name: string,
  right: ConditionForm,
  wrong: ConditionForm,
  family = name,
): Condition {
  return { name, family, right, wrong };
}
const than = (sign: '>' | '<', n: number): ConditionForm => ({
  text: `x${sign}${n}`,
  test: (x) => (sign === '>' ? x > n : x < n),
});
const divisible = (n: number, yes: boolean): ConditionForm => ({
  text: `x%${n}${yes ? '==' : '!='}0`,
  test: (x) => (x % n === 0) === yes,
});

export const CONDITIONS: readonly Condition[] = [
  condition('pos', than('>', 0), than('<', 0)),
  condition('neg', than('<', 0), than('>', 0)),
  condition('even', divisible(2, true), divisible(2, false)),
  condition('odd', divisible(2, false), divisible(2, true)),
  condition('by3', divisible(3, true), divisible(3, false)),
  ...digits(3, 7).map((n) => condition(`gt${n}`, than('>', n), than('<', n), 'gt')),
  ...digits(3, 7).map((n) => condition(`lt${n}`, than('<', n), than('>', n), 'lt')),
];
