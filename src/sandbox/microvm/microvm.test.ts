import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  existsSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { MicroVmDriver } from './driver.ts';
import { probeMicroVm } from './probe.ts';
import type { MicroVmSandbox } from './sandbox.ts';

const kernel = join(process.env.LONGHAUL_TEST_MICROVM ?? '.cache/microvm', 'vmlinuz');
const hasQemu = spawnSync('qemu-system-x86_64', ['--version']).status === 0;
const missing = !hasQemu
  ? 'no qemu-system-x86_64'
  : !existsSync(kernel)
    ? 'no kernel: node test/setup-microvm.ts'
    : null;
/** Tests that wait for deadlines of ten seconds and more. */
const long = process.env.LONGHAUL_TEST_LONG === '1';
const text = (bytes: Uint8Array) => Buffer.from(bytes).toString();
const python = (source: string) => [{ language: 'python' as const, source, timeoutMs: 60_000 }];
const RANDOM =
  'import os, random, uuid\nprint(os.urandom(16).hex(), random.random(), uuid.uuid4(), open("/proc/sys/kernel/random/uuid").read().strip())';
const SMALL = { memoryBytes: 64 * 2 ** 20, diskBytes: 64 * 2 ** 20, pids: 16 };

describe.skipIf(missing !== null)(`microvm${missing ? ` (${missing})` : ''}`, () => {
  const home = mkdtempSync(join(tmpdir(), 'longhaul-microvm-'));
  const options = { dir: home, kernel };
  let driver: MicroVmDriver;
  beforeAll(async () => {
    driver = await MicroVmDriver.open(options);
  });
  afterAll(async () => {
    await driver?.close();
    rmSync(home, { recursive: true, force: true });
  });
  const create = async (from?: string) => (await driver.create(SMALL, from)) as MicroVmSandbox;
  const sh = (script: string, more = {}) => ({ argv: ['sh', '-c', script], ...more });

  test('machines of one image share no random numbers and have the right time', async () => {
    const [one, two] = await Promise.all([create(), create()]);
    await one.writeFile('a', '');
    const children = await one.fork(2);
    const layer = await one.snapshot();
    const again = await create(layer);
    const machines = [one, two, ...children, again];
    const outputs: string[] = [];
    for (const machine of machines) {
      const [result] = await machine.runCode(python(RANDOM));
      expect(result!.code).toBe(0);
      outputs.push(...result!.stdout.trim().split(' '));
      const now = Number((await machine.exec(sh('date +%s'))).stdout);
      expect(Math.abs(now - Date.now() / 1000)).toBeLessThan(30);
    }
    expect(outputs).toHaveLength(4 * machines.length);
    expect(new Set(outputs).size).toBe(outputs.length);
    await Promise.all(machines.map((machine) => machine.stop()));
  });

  test('processes go on after a snapshot, in the sandbox and in its forks, cut in the middle of what they say', async () => {
    const sandbox = await create();
    let printed = 0;
    const flood = await sandbox.start(
      sh('while :; do head -c 30000 /dev/zero; echo x >> lines; done', {
        onOutput: (_: string, chunk: Uint8Array) => (printed += chunk.length),
      }),
    );
    while (printed < 100_000) await new Promise((resolve) => setTimeout(resolve, 20));
    const layer = await sandbox.snapshot({ durable: true });
    const before = printed;
    while (printed === before) await new Promise((resolve) => setTimeout(resolve, 20));
    const child = await create(layer);
    const lines = async () => (await child.readFile('lines')).length;
    const first = await lines();
    while ((await lines()) === first);
    // A number that the parent's process had must not be taken for the child's.
    const own = await child.start(sh('echo mine'));
    expect((await own.exited).stdout).toBe('mine\n');
    expect((await child.usage()).pids).toBeGreaterThan(0);
    await flood.kill();
    expect(await flood.exited).toMatchObject({ cause: 'killed' });
    await sandbox.rollback(layer);
    expect((await sandbox.usage()).pids).toBeGreaterThan(0);
    await Promise.all([sandbox.stop(), child.stop()]);
    await driver.dropLayer(layer);
  });

  test('a memory bomb and a fork bomb are the guest’s doing, with the kernel’s count as evidence', async () => {
    const sandbox = await create();
    await sandbox.writeFile('kept', 'yes');
    const [bomb] = await sandbox.runCode(
      python('x = []\nwhile True: x.append(bytearray(1 << 22))'),
    );
    expect(bomb).toMatchObject({ cause: 'out_of_memory', limitsHit: ['memory'] });
    const forks = 'import os, time\nfor _ in range(40):\n  if os.fork() == 0: time.sleep(60)';
    const [many] = await sandbox.runCode(python(forks));
    expect(many!.code).not.toBe(0);
    expect(many!.stderr).toContain('BlockingIOError');
    expect(many!.limitsHit).toEqual(['pids']);
    const disk = await sandbox.exec(sh('head -c 100M /dev/zero > big; rm big; cat kept'));
    expect(disk.stdout).toBe('yes');
    expect(disk.stderr).toContain('No space left');
    expect(await sandbox.usage()).toMatchObject({ oomKills: 1, pids: 0 });
    await sandbox.stop();
  });

  test('a guest that brings its kernel down gets a machine from its last snapshot', async () => {
    const sandbox = await create();
    await sandbox.writeFile('a', 'saved');
    await sandbox.snapshot();
    await sandbox.writeFile('a', 'lost');
    const sleeping = sandbox.exec(sh('sleep 60'));
    while (sandbox.idle) await new Promise((resolve) => setTimeout(resolve, 10));
    sandbox.machine.interrupt().catch(() => {}); // an NMI: its kernel panics
    expect((await sleeping).cause).not.toBe('exited');
    expect(text(await sandbox.readFile('a'))).toBe('saved');
    await sandbox.stop();
  });

  test('QEMU’s end is the host’s fault: SandboxBroken', async () => {
    const sandbox = await create();
    const sleeping = sandbox.exec(sh('sleep 60'));
    sleeping.catch(() => {});
    process.kill(sandbox.machine.pid, 'SIGKILL');
    await expect(sleeping).rejects.toMatchObject({ code: 'SandboxBroken' });
    await expect(sandbox.readFile('a')).rejects.toMatchObject({ code: 'SandboxBroken' });
    await sandbox.stop();
  });

  test.skipIf(!long)(
    'an agent that says nothing is replaced (with LONGHAUL_TEST_LONG=1)',
    async () => {
      const sandbox = await create();
      await sandbox.writeFile('a', 'kept');
      const held = sandbox.exec(sh('sleep 60', { timeoutMs: 500 }));
      await sandbox.machine.warden.call('freeze');
      expect(await held).toMatchObject({ cause: 'timeout' });
      expect(text(await sandbox.readFile('a'))).toBe('kept');
      expect((await sandbox.exec(sh('echo on'))).stdout).toBe('on\n');
      await sandbox.stop();
    },
  );

  test('paused it does nothing; resumed it goes on, with the right time', async () => {
    const sandbox = await create();
    await sandbox.start(sh('while :; do date +%s%N > tick; sleep 0.05; done'));
    await sandbox.pause();
    await expect(sandbox.exec(sh('true'))).rejects.toMatchObject({ code: 'SandboxBusy' });
    await new Promise((resolve) => setTimeout(resolve, 1500));
    await sandbox.resume();
    const now = Number((await sandbox.exec(sh('date +%s%N'))).stdout) / 1e6;
    expect(Math.abs(now - Date.now())).toBeLessThan(1400);
    await sandbox.pause();
    await sandbox.stop();
  });

  test('secrets are readable inside and keep the machine from being saved', async () => {
    const sandbox = await create();
    const layer = await sandbox.snapshot();
    await sandbox.putSecrets({ TOKEN: 'hidden' });
    expect((await sandbox.exec(sh('cat /run/secrets/TOKEN'))).stdout).toBe('hidden');
    await expect(sandbox.snapshot()).rejects.toMatchObject({ code: 'CapabilityMissing' });
    await expect(sandbox.fork(1)).rejects.toMatchObject({ code: 'CapabilityMissing' });
    await sandbox.rollback(layer);
    await expect(sandbox.readFile('/run/secrets/TOKEN')).rejects.toMatchObject({
      code: 'NotFound',
    });
    await driver.dropLayer(await sandbox.snapshot());
    await sandbox.stop();
  });

  test('a layer that was changed on disk is refused', async () => {
    const sandbox = await create();
    const layer = await sandbox.snapshot({ durable: true });
    const path = join(home, 'layers', layer, 'machine');
    const bytes = readFileSync(path);
    writeFileSync(path, bytes.subarray(0, bytes.length >> 1));
    await expect(create(layer)).rejects.toMatchObject({ code: 'SandboxUnavailable' });
    const middle = bytes.length >> 1;
    bytes[middle] = bytes[middle]! ^ 1;
    writeFileSync(path, bytes);
    await expect(sandbox.rollback(layer)).rejects.toMatchObject({ message: /damaged/ });
    expect((await sandbox.exec(sh('echo on'))).stdout).toBe('on\n');
    await sandbox.stop();
    await driver.dropLayer(layer);
    expect(readdirSync(join(home, 'layers')).filter((name) => !name.startsWith('t-'))).toEqual([]);
  });

  test('workspaces leave and come as archives', async () => {
    const sandbox = await create();
    await sandbox.exec(sh('mkdir d; echo content > d/file; ln -s file d/link'));
    const layer = await sandbox.snapshot();
    await sandbox.stop();
    const imported = await driver.importLayer(await driver.exportLayer(layer), SMALL);
    const other = await create(imported);
    expect(text(await other.readFile('d/link'))).toBe('content\n');
    await other.stop();
    await driver.dropLayer(imported);
  });

  test('QEMU has no privileges, no environment and no file; the guest no network and no way to the warden', async () => {
    const sandbox = await create();
    const { pid } = sandbox.machine;
    const status = readFileSync(`/proc/${pid}/status`, 'utf8');
    const field = (name: string) => new RegExp(`^${name}:\\s+(\\S+)`, 'm').exec(status)?.[1];
    if (process.getuid?.() === 0) expect(Number(field('Uid'))).toBeGreaterThan(2_000_000);
    expect(Number.parseInt(field('CapEff')!, 16)).toBe(0);
    expect(field('NoNewPrivs')).toBe('1');
    expect(field('Seccomp')).toBe('2');
    expect(readFileSync(`/proc/${pid}/environ`, 'utf8').replaceAll('\0', '')).toBe('');
    // The image that others start from cannot be changed through what QEMU has open.
    const memory = openSync(`/proc/${pid}/fd/3`, 'r+');
    expect(() => writeSync(memory, 'x', 0)).toThrow(/EPERM/);
    const inside = await sandbox.exec(
      sh(
        'cut -d: -f1 /proc/net/dev | tail -n +3; id -u; ls /longhaul/dev /longhaul/cgroup /longhaul/state; ' +
          'grep Cap /proc/self/status | cut -f2 | sort -u; kill -9 1; kill -9 -1; echo alive',
      ),
    );
    expect(inside.stdout.trim().split(/\s+/)).toEqual([
      ...['lo', '1000', '/longhaul/cgroup:', '/longhaul/dev:', '/longhaul/state:'],
      ...['0000000000000000', 'alive'],
    ]);
    const [tries] = await sandbox.runCode(
      python(
        'import ctypes, os\nlibc = ctypes.CDLL(None)\n' +
          'print([libc.unshare(0x10000000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.ptrace(16, 1, 0, 0)])\n' +
          'print([name for name in os.listdir("/dev") if name.startswith(("vport", "mem", "kmsg", "port"))])\n' +
          'print(len([pid for pid in os.listdir("/proc") if pid.isdigit()]) < 6)',
      ),
    );
    expect(tries!.stdout).toBe('[-1, -1, -1]\n[]\nTrue\n');
    await sandbox.stop();
  });

  test('kill -9 of the owner ends its machines; the next one cleans up', async () => {
    const module = JSON.stringify(join(import.meta.dirname, 'driver.ts'));
    const script = `
      const { MicroVmDriver } = await import(${module});
      const driver = await MicroVmDriver.open(${JSON.stringify(options)});
      const sandbox = await driver.create(${JSON.stringify(SMALL)});
      console.log(sandbox.machine.pid);
      await sandbox.exec({ argv: ['sleep', '600'], timeoutMs: 600000 });`;
    const owner = spawn(process.execPath, ['--input-type=module', '-e', script], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    const [said] = (await once(owner.stdout, 'data')) as [Buffer];
    const pid = Number(said);
    expect(existsSync(`/proc/${pid}`)).toBe(true);
    expect(readdirSync(join(home, 'run'))).toHaveLength(2);
    owner.kill('SIGKILL');
    await once(owner, 'close');
    while (existsSync(`/proc/${pid}`)) await new Promise((resolve) => setTimeout(resolve, 10));
    const next = await MicroVmDriver.open(options);
    expect(readdirSync(join(home, 'run'))).toHaveLength(2); // this test's and the next one's
    await next.close();
    expect(readdirSync(join(home, 'run'))).toHaveLength(1);
  });

  test('limits out of range, other images and networks are refused', async () => {
    await expect(driver.create({ image: 'dir:/srv' })).rejects.toMatchObject({
      code: 'CapabilityMissing',
    });
    await expect(driver.create({ network: { allow: [] } })).rejects.toMatchObject({
      code: 'CapabilityMissing',
    });
    await expect(driver.create({ pids: 0 })).rejects.toMatchObject({ code: 'ConfigInvalid' });
    const sandbox = await create();
    const layer = await sandbox.snapshot();
    await expect(driver.create({ memoryBytes: 2 ** 32 }, layer)).rejects.toMatchObject({
      code: 'ConfigInvalid',
    });
    await sandbox.stop();
  });
});

describe('probe', () => {
  test('says what is missing and what to do', async () => {
    const dir = mkdtempSync(join(tmpdir(), 'longhaul-microvm-'));
    const noQemu = await probeMicroVm({ dir, kernel, qemu: 'qemu-that-is-not-there' });
    expect(noQemu).toMatchObject({ ok: false, next: /apt-get install qemu-system-x86/ });
    if (hasQemu) {
      const noKernel = await probeMicroVm({ dir, kernel: join(dir, 'none') });
      expect(noKernel).toMatchObject({ ok: false, next: /setup-microvm/ });
    }
    rmSync(dir, { recursive: true });
  });
});
