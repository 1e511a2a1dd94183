import { expect, test } from 'vitest';
import { type SeccompArchitecture, seccompFilter } from './seccomp.ts';
import { ALLOWED, CONDITIONAL, DENIED } from './syscalls.ts';

const AUDIT = { x64: 0xc000003e, arm64: 0xc00000b7 };
const ALLOW = 0x7fff0000;
const EPERM = 0x00050001;
const ENOSYS = 0x00050026;
const EAFNOSUPPORT = 0x00050061;
const KILL = 0x80000000;

/** Interprets classic BPF as the kernel does for a seccomp_data. */
function decide(filter: Buffer, data: { nr: number; arch: number; args?: bigint[] }): number {
  const memory = Buffer.alloc(64);
  memory.writeUInt32LE(data.nr, 0);
  memory.writeUInt32LE(data.arch, 4);
  for (const [i, arg] of (data.args ?? []).entries()) memory.writeBigUInt64LE(arg, 16 + 8 * i);
  let accumulator = 0;
  for (let at = 0; ; at++) {
    const code = filter.readUInt16LE(at * 8);
    const yes = filter.readUInt8(at * 8 + 2);
    const no = filter.readUInt8(at * 8 + 3);
    const k = filter.readUInt32LE(at * 8 + 4);
    if (code === 0x20) accumulator = memory.readUInt32LE(k);
    else if (code === 0x15) at += accumulator === k ? yes : no;
    else if (code === 0x35) at += accumulator >= k ? yes : no;
    else if (code === 0x45) at += (accumulator & k) !== 0 ? yes : no;
    else if (code === 0x05) at += k;
    else if (code === 0x06) return k;
    else throw new Error(`unknown instruction ${code} at ${at}`);
  }
}

test.each(['x64', 'arm64'] as const)('%s: every listed call is decided as listed', (name) => {
  const filter = seccompFilter(name);
  const column = name === 'x64' ? 0 : 1;
  const arch = AUDIT[name];
  const listed = new Set<number>();
  const check = (table: typeof ALLOWED, expected: number) => {
    for (const [call, numbers] of Object.entries(table)) {
      const nr = numbers[column];
      if (nr === null) continue;
      expect(listed.has(nr), `${call} has a number of its own`).toBe(false);
      listed.add(nr);
      expect(decide(filter, { nr, arch }), call).toBe(expected);
    }
  };
  check(ALLOWED, ALLOW);
  check(DENIED, EPERM);
  for (const numbers of Object.values(CONDITIONAL)) listed.add(numbers[column]);
  for (let nr = 0; nr < 700; nr++)
    if (!listed.has(nr)) expect(decide(filter, { nr, arch }), `call ${nr}`).toBe(ENOSYS);
  expect(filter.length / 8).toBeLessThan(4096);
});

test.each(['x64', 'arm64'] as const)('%s: arguments decide the conditional calls', (name) => {
  const filter = seccompFilter(name);
  const column = name === 'x64' ? 0 : 1;
  const call = (which: keyof typeof CONDITIONAL, ...args: number[]) =>
    decide(filter, { nr: CONDITIONAL[which][column], arch: AUDIT[name], args: args.map(BigInt) });
  for (const family of [1, 2, 10]) expect(call('socket', family)).toBe(ALLOW);
  for (const family of [0, 3, 16, 17, 38, 40]) expect(call('socket', family)).toBe(EAFNOSUPPORT);
  const THREAD = 0x003d0f00;
  expect(call('clone', THREAD)).toBe(ALLOW);
  expect(call('clone', 17)).toBe(ALLOW);
  for (const bit of [17, 25, 26, 27, 28, 29, 30])
    expect(call('clone', 2 ** bit + 17), `bit ${bit}`).toBe(EPERM);
  expect(call('ioctl', 0, 0x5412)).toBe(EPERM);
  expect(call('ioctl', 0, 0x541c)).toBe(EPERM);
  expect(call('ioctl', 0, 0x5413)).toBe(ALLOW);
  expect(call('personality', 0xffffffff)).toBe(ALLOW);
  expect(call('personality', 0x0040000)).toBe(EPERM);
  for (const which of [
    'prlimit64',
    'get_robust_list',
    'sched_setaffinity',
    'sched_setattr',
    'sched_setparam',
    'sched_setscheduler',
  ] as const) {
    expect(call(which, 0, 7), which).toBe(ALLOW);
    for (const pid of [1, 2, 0xffffffff]) expect(call(which, pid, 0), which).toBe(EPERM);
  }
  expect(call('setpriority', 0, 0)).toBe(ALLOW);
  for (const [which, who] of [
    [0, 1],
    [1, 0],
    [2, 0],
  ] as const)
    expect(call('setpriority', which, who)).toBe(EPERM);
  expect(call('ioprio_set', 1, 0)).toBe(ALLOW);
  for (const [which, who] of [
    [1, 1],
    [2, 0],
    [3, 0],
  ] as const)
    expect(call('ioprio_set', which, who)).toBe(EPERM);
  expect(call('prctl', 4)).toBe(ALLOW);
  expect(call('prctl', 62)).toBe(EPERM);
});

test('a foreign architecture is killed, x32 numbers do not exist', () => {
  const filters: [SeccompArchitecture, number][] = [
    ['x64', AUDIT.arm64],
    ['x64', 0x40000003],
    ['arm64', 0x40000028],
  ];
  for (const [name, arch] of filters)
    expect(decide(seccompFilter(name), { nr: 0, arch })).toBe(KILL);
  const x32 = { nr: 0x40000000 + 1, arch: AUDIT.x64 };
  expect(decide(seccompFilter('x64'), x32)).toBe(ENOSYS);
});
