import { ALLOWED, CONDITIONAL, DENIED, type SyscallNumbers } from '../bubblewrap/syscalls.ts';

/**
 * The allow-list of bubblewrap/seccomp.ts as `linux.seccomp` of an OCI bundle, which the runtime
 * compiles. A test holds the two forms equal in what they let through. Rules for one argument's values
 * cost compilation at every start, and gVisor takes 4,096 instructions in all, so a call refused for its
 * arguments is ENOSYS here unless programs go by the number.
 */

const EPERM = 1;
const ENOSYS = 38;
const EAFNOSUPPORT = 97;
const ERRNO = 'SCMP_ACT_ERRNO';
const ALLOW = 'SCMP_ACT_ALLOW';
const TRACE = 'SCMP_ACT_TRACE';

type Action = typeof ERRNO | typeof ALLOW | typeof TRACE;

interface OciArgument {
  index: number;
  value: number;
  valueTwo: number;
  op: 'SCMP_CMP_MASKED_EQ';
}

export interface OciSyscall {
  names: string[];
  action: Action;
  errnoRet?: number;
  args?: OciArgument[];
}

/** `linux.seccomp` (OCI runtime specification, config-linux.md). */
export interface OciSeccomp {
  defaultAction: Action;
  defaultErrnoRet?: number;
  architectures: string[];
  syscalls: OciSyscall[];
}

/** Arguments by index and the values that are let through (`only`) or refused (`never`), or bits that are. */
type Condition = { errno?: number } & (
  | { only: Record<number, readonly number[]> }
  | { never: Record<number, readonly number[]> }
  | { without: Record<number, number> }
);

const SELF = { only: { 0: [0] } } as const;
const CLONE_NEW_NAMESPACES = 0x7e020000;

/** Why each is conditional: bubblewrap/seccomp.ts. */
const CONDITIONS: Record<keyof typeof CONDITIONAL, Condition> = {
  clone: { without: { 0: CLONE_NEW_NAMESPACES }, errno: EPERM },
  get_robust_list: SELF,
  ioctl: { never: { 1: [0x5412, 0x541c] }, errno: EPERM },
  ioprio_set: { only: { 0: [1], 1: [0] } },
  personality: { only: { 0: [0, 0xffffffff] } },
  prctl: { never: { 0: [62] }, errno: EPERM },
  prlimit64: SELF,
  sched_setaffinity: SELF,
  sched_setattr: SELF,
  sched_setparam: SELF,
  sched_setscheduler: SELF,
  setpriority: { only: { 0: [0], 1: [0] } },
  socket: { only: { 0: [1, 2, 10] }, errno: EAFNOSUPPORT },
};

/**
 * A comparison of the lower 32 bits only: the kernel reads no more of these arguments, so a comparison
 * of all 64 could be passed by with bits above them.
 */
const bits = (index: number, mask: number, value: number): OciArgument => ({
  index,
  value: mask >>> 0,
  valueTwo: value >>> 0,
  op: 'SCMP_CMP_MASKED_EQ',
});

const equal = (index: number, value: number) => bits(index, 0xffffffff, value);

/**
 * Comparisons one of which holds for every 32-bit value that is none of `values`: a rule cannot compare
 * one argument twice, so "neither this nor that" is said by prefixes.
 */
function otherThan(index: number, values: readonly number[]): OciArgument[] {
  const result: OciArgument[] = [];
  const visit = (prefix: number, length: number) => {
    const mask = length === 0 ? 0 : (0xffffffff << (32 - length)) >>> 0;
    const inside = values.filter((value) => (value & mask) >>> 0 === prefix);
    if (inside.length === 0) result.push(bits(index, mask, prefix));
    else if (length < 32) {
      visit(prefix, length + 1);
      visit((prefix | (1 << (31 - length))) >>> 0, length + 1);
    }
  };
  visit(0, 0);
  return result;
}

function conditional(name: keyof typeof CONDITIONAL): OciSyscall[] {
  const condition = CONDITIONS[name];
  const allow = (...args: OciArgument[]): OciSyscall => ({ names: [name], action: ALLOW, args });
  const refuse = (...args: OciArgument[]): OciSyscall[] =>
    condition.errno === undefined
      ? []
      : [{ names: [name], action: ERRNO, errnoRet: condition.errno, args }];
  if ('without' in condition)
    return Object.entries(condition.without).flatMap(([index, mask]) => [
      allow(bits(Number(index), mask, 0)),
      ...Array.from({ length: 32 }, (_, bit) => (1 << bit) >>> 0)
        .filter((bit) => (mask & bit) !== 0)
        .flatMap((bit) => refuse(bits(Number(index), bit, bit))),
    ]);
  if ('never' in condition)
    return Object.entries(condition.never).flatMap(([index, values]) => [
      ...values.flatMap((value) => refuse(equal(Number(index), value))),
      ...otherThan(Number(index), values).map((each) => allow(each)),
    ]);
  const entries = Object.entries(condition.only).map(([i, values]) => [Number(i), values] as const);
  const combinations = entries.reduce<OciArgument[][]>(
    (all, [index, values]) =>
      all.flatMap((each) => values.map((value) => [...each, equal(index, value)])),
    [[]],
  );
  return [
    ...combinations.map((args) => allow(...args)),
    ...entries.flatMap(([index, values]) =>
      otherThan(index, values).flatMap((each) => refuse(each)),
    ),
  ];
}

const ARCHITECTURES = {
  x64: { column: 0, name: 'SCMP_ARCH_X86_64' },
  arm64: { column: 1, name: 'SCMP_ARCH_AARCH64' },
} as const;

/**
 * `gvisor`: releases up to 2023 give every refused call EPERM, whatever `errnoRet` says, and programs need
 * ENOSYS of calls that are not there. That is what a call to be traced gives where nothing traces
 * (seccomp(2)).
 */
export function ociSeccomp(
  architecture: keyof typeof ARCHITECTURES,
  kernel: 'linux' | 'gvisor',
): OciSeccomp {
  const { column, name } = ARCHITECTURES[architecture];
  const present = (table: Readonly<Record<string, SyscallNumbers>>) =>
    Object.keys(table).filter((call) => table[call]![column] !== null);
  return {
    ...(kernel === 'gvisor'
      ? { defaultAction: TRACE }
      : { defaultAction: ERRNO, defaultErrnoRet: ENOSYS }),
    architectures: [name],
    syscalls: [
      { names: present(ALLOWED), action: ALLOW },
      { names: present(DENIED), action: ERRNO, errnoRet: EPERM },
      ...present(CONDITIONAL).flatMap((call) => conditional(call as keyof typeof CONDITIONAL)),
    ],
  };
}
