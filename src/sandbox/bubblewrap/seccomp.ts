import { ALLOWED, CONDITIONAL, DENIED, type SyscallNumbers } from './syscalls.ts';

/**
 * Assembles the seccomp filter as classic BPF (linux/filter.h, linux/seccomp.h), so that neither
 * libseccomp nor its per-start compilation is needed. The kernel runs it on every system call inside.
 */

// struct seccomp_data { int nr; u32 arch; u64 instruction_pointer; u64 args[6]; }, little endian.
const OFFSET_NR = 0;
const OFFSET_ARCH = 4;
const argLow = (index: number) => 16 + 8 * index;

const LOAD_WORD = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP_EQUAL = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_GREATER_EQUAL = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const JUMP_ANY_BIT = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const RETURN = 0x06; // BPF_RET | BPF_K

const KILL_PROCESS = 0x80000000;
const ALLOW = 0x7fff0000;
const errno = (code: number) => 0x00050000 | code;
const EPERM = 1;
const ENOSYS = 38;
const EAFNOSUPPORT = 97;

const ARCHITECTURES = {
  x64: { audit: 0xc000003e, column: 0 },
  arm64: { audit: 0xc00000b7, column: 1 },
} as const;

export type SeccompArchitecture = keyof typeof ARCHITECTURES;

interface Instruction {
  code: number;
  jumpTrue: number;
  jumpFalse: number;
  k: number;
}

const statement = (code: number, k: number): Instruction => ({
  code,
  jumpTrue: 0,
  jumpFalse: 0,
  k,
});
const jump = (code: number, k: number, jumpTrue: number, jumpFalse: number): Instruction => ({
  code,
  jumpTrue,
  jumpFalse,
  k,
});

/** CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and, in the low byte, nothing: that is the signal. */
const CLONE_NEW_NAMESPACES = 0x7e020000;
const AF_UNIX = 1;
const AF_INET = 2;
const AF_INET6 = 10;
/** Pushes characters into a terminal's input; TIOCLINUX pastes a selection. */
const TIOCSTI = 0x5412;
const TIOCLINUX = 0x541c;
/** PER_LINUX, and the query value. Others switch off ASLR or change the system call ABI. */
const PERSONALITIES = [0, 0xffffffff];

/** Decides by one 32-bit argument: equal to one of `values` gives `match`, else `otherwise`. */
function byValue(index: number, values: number[], match: number, otherwise: number): Instruction[] {
  const tests = values.map((value, i) => jump(JUMP_EQUAL, value, values.length - i, 0));
  return [
    statement(LOAD_WORD, argLow(index)),
    ...tests,
    statement(RETURN, otherwise),
    statement(RETURN, match),
  ];
}

/** Allowed where every argument has its value, else EPERM. Pids are `int`: the kernel reads no more. */
function onlyWith(values: Record<number, number>): Instruction[] {
  const tests = Object.entries(values).flatMap(([index, value], i, all) => [
    statement(LOAD_WORD, argLow(Number(index))),
    jump(JUMP_EQUAL, value, 0, 2 * (all.length - 1 - i) + 1),
  ]);
  return [...tests, statement(RETURN, ALLOW), statement(RETURN, errno(EPERM))];
}

/** The caller itself. By number a guest could name the agent, or the process that waits for the next snippet. */
const SELF = 0;
const PRIO_PROCESS = 0;
const IOPRIO_WHO_PROCESS = 1;
/** Shares a core-scheduling cookie with another process. */
const PR_SCHED_CORE = 62;

const CONDITIONS: Record<keyof typeof CONDITIONAL, Instruction[]> = {
  clone: [
    statement(LOAD_WORD, argLow(0)),
    jump(JUMP_ANY_BIT, CLONE_NEW_NAMESPACES, 0, 1),
    statement(RETURN, errno(EPERM)),
    statement(RETURN, ALLOW),
  ],
  get_robust_list: onlyWith({ 0: SELF }),
  ioprio_set: onlyWith({ 0: IOPRIO_WHO_PROCESS, 1: SELF }),
  ioctl: byValue(1, [TIOCSTI, TIOCLINUX], errno(EPERM), ALLOW),
  personality: byValue(0, PERSONALITIES, ALLOW, errno(EPERM)),
  prctl: byValue(0, [PR_SCHED_CORE], errno(EPERM), ALLOW),
  prlimit64: onlyWith({ 0: SELF }),
  // Threads are named by number too, so a program cannot pin or rank its threads from outside them.
  sched_setaffinity: onlyWith({ 0: SELF }),
  sched_setattr: onlyWith({ 0: SELF }),
  sched_setparam: onlyWith({ 0: SELF }),
  sched_setscheduler: onlyWith({ 0: SELF }),
  setpriority: onlyWith({ 0: PRIO_PROCESS, 1: SELF }),
  // No AF_VSOCK (it reaches the hypervisor's host past the network namespace), netlink or packet sockets.
  socket: byValue(0, [AF_UNIX, AF_INET, AF_INET6], ALLOW, errno(EAFNOSUPPORT)),
};

/** From `first` on, up to the next segment's first, system calls are decided by `program`. */
interface Segment {
  first: number;
  program: Instruction[];
}

function segments(column: 0 | 1): Segment[] {
  const decisions = new Map<number, Instruction[]>();
  const put = (table: Record<string, SyscallNumbers>, program: (name: string) => Instruction[]) => {
    for (const [name, numbers] of Object.entries(table)) {
      const number = numbers[column];
      if (number !== null) decisions.set(number, program(name));
    }
  };
  const allow = [statement(RETURN, ALLOW)];
  const refuse = [statement(RETURN, errno(EPERM))];
  const unknown = [statement(RETURN, errno(ENOSYS))];
  put(ALLOWED, () => allow);
  put(DENIED, () => refuse);
  put(CONDITIONAL, (name) => CONDITIONS[name as keyof typeof CONDITIONAL]);

  const result: Segment[] = [];
  const last = Math.max(...decisions.keys());
  for (let number = 0; number <= last + 1; number++) {
    const program = decisions.get(number) ?? unknown;
    if (result.at(-1)?.program !== program) result.push({ first: number, program });
  }
  return result;
}

/** Binary search over the segments. Jumps reach 255 instructions, so far targets go through BPF_JA. */
function search(list: Segment[]): Instruction[] {
  if (list.length === 1) return list[0]!.program;
  const middle = list.length >> 1;
  const low = search(list.slice(0, middle));
  const high = search(list.slice(middle));
  const first = list[middle]!.first;
  if (low.length <= 255) return [jump(JUMP_GREATER_EQUAL, first, low.length, 0), ...low, ...high];
  const BPF_JUMP_ALWAYS = 0x05;
  return [
    jump(JUMP_GREATER_EQUAL, first, 0, 1),
    statement(BPF_JUMP_ALWAYS, low.length),
    ...low,
    ...high,
  ];
}

/**
 * The filter for one architecture as `struct sock_filter[]`, ready for `bwrap --seccomp`. A call in
 * another architecture's numbering (32-bit x86 by int 0x80) kills the process; x32 numbers are ENOSYS.
 */
export function seccompFilter(architecture: SeccompArchitecture): Buffer {
  const { audit, column } = ARCHITECTURES[architecture];
  const program = [
    statement(LOAD_WORD, OFFSET_ARCH),
    jump(JUMP_EQUAL, audit, 1, 0),
    statement(RETURN, KILL_PROCESS),
    statement(LOAD_WORD, OFFSET_NR),
    ...search(segments(column)),
  ];
  const bytes = Buffer.alloc(program.length * 8);
  program.forEach((instruction, index) => {
    bytes.writeUInt16LE(instruction.code, index * 8);
    bytes.writeUInt8(instruction.jumpTrue, index * 8 + 2);
    bytes.writeUInt8(instruction.jumpFalse, index * 8 + 3);
    bytes.writeUInt32LE(instruction.k, index * 8 + 4);
  });
  return bytes;
}

/** The machine's architecture, or null where the filter knows none (the driver then refuses to start). */
export function hostArchitecture(): SeccompArchitecture | null {
  return process.arch === 'x64' || process.arch === 'arm64' ? process.arch : null;
}
