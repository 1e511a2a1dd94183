import { expect, test } from 'vitest';
import { seccompFilter } from '../bubblewrap/seccomp.ts';
import { ALLOWED, CONDITIONAL, DENIED } from '../bubblewrap/syscalls.ts';
import { ociSeccomp } from './seccomp.ts';

const AUDIT = { x64: 0xc000003e, arm64: 0xc00000b7 };
const TABLES = { ...ALLOWED, ...DENIED, ...CONDITIONAL };

/** Whether bubblewrap's filter lets a call through: classic BPF as the kernel interprets it. */
function passes(filter: Buffer, arch: number, nr: number, args: readonly bigint[]): boolean {
  const memory = Buffer.alloc(64);
  memory.writeUInt32LE(nr, 0);
  memory.writeUInt32LE(arch, 4);
  for (const [i, arg] of args.entries()) memory.writeBigUInt64LE(arg, 16 + 8 * i);
  let accumulator = 0;
  for (let at = 0; ; at++) {
    const code = filter.readUInt16LE(at * 8);
    const [yes, no] = [filter.readUInt8(at * 8 + 2), filter.readUInt8(at * 8 + 3)];
    const k = filter.readUInt32LE(at * 8 + 4);
    if (code === 0x20) accumulator = memory.readUInt32LE(k);
    else if (code === 0x15) at += accumulator === k ? yes : no;
    else if (code === 0x35) at += accumulator >= k ? yes : no;
    else if (code === 0x45) at += (accumulator & k) !== 0 ? yes : no;
    else if (code === 0x05) at += k;
    else return k === 0x7fff0000;
  }
}

const FORMS = { x64: ociSeccomp('x64', 'linux'), arm64: ociSeccomp('arm64', 'linux') };

/** What the OCI form decides, as libseccomp does: the rule whose comparisons all hold, or the default. */
function decide(architecture: 'x64' | 'arm64', name: string, args: readonly bigint[]) {
  const { syscalls, defaultAction, defaultErrnoRet } = FORMS[architecture];
  const matching = syscalls.filter(
    (rule) =>
      rule.names.includes(name) &&
      (rule.args ?? []).every(
        ({ index, value, valueTwo }) => (args[index]! & BigInt(value)) === BigInt(valueTwo),
      ),
  );
  // More than one kind of answer would leave it to the order of rules.
  expect(new Set(matching.map(({ action }) => action)).size, name).toBeLessThanOrEqual(1);
  return matching[0] ?? { action: defaultAction, errnoRet: defaultErrnoRet };
}

const VALUES = [
  ...[0, 1, 2, 3, 10, 16, 17, 38, 40, 61, 62, 63, 0x5411, 0x5412, 0x5413, 0x541b, 0x541c, 0x541d],
  ...[0x0040000, 0x3d0f00, 0x10000011, 0x7e020000, 0x80000000, 0xfffffffe, 0xffffffff],
].flatMap((low) => [BigInt(low), BigInt(low) + (1n << 32n)]);

test.each(['x64', 'arm64'] as const)('%s: lets through what bubblewrap’s filter does', (name) => {
  const filter = seccompFilter(name);
  const column = name === 'x64' ? 0 : 1;
  let compared = 0;
  for (const [call, numbers] of Object.entries(TABLES)) {
    const nr = numbers[column];
    if (nr === null) continue;
    const samples =
      call in CONDITIONAL ? VALUES.flatMap((a) => VALUES.map((b) => [a, b])) : [[0n, 0n]];
    for (const args of samples) {
      const { action } = decide(name, call, args);
      const same = (action === 'SCMP_ACT_ALLOW') === passes(filter, AUDIT[name], nr, args);
      if (!same) expect.fail(`${call}(${args.join(', ')}) differs`);
      compared++;
    }
  }
  expect(compared).toBeGreaterThan(20_000);
});

test('refusals that programs go by keep their numbers', () => {
  expect(decide('x64', 'clone', [0x10000011n, 0n]).errnoRet).toBe(1);
  expect(decide('x64', 'socket', [40n, 0n]).errnoRet).toBe(97);
  expect(decide('x64', 'mount', [0n, 0n]).errnoRet).toBe(1);
  expect(decide('x64', 'clone3', [0n, 0n]).errnoRet).toBe(38);
});
