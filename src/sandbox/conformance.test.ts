import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { CodeRequest } from '../core/index.ts';
import { BubblewrapDriver, probeBubblewrap, QuickJsDriver, type SandboxDriver } from './index.ts';
import { MicroVmDriver } from './microvm/driver.ts';

/** Every driver passes this suite; what one cannot do is skipped by its stated capabilities. */

const text = (bytes: Uint8Array) => Buffer.from(bytes).toString();
const home = mkdtempSync(join(tmpdir(), 'longhaul-sandbox-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const bubblewrapOptions = { dir: join(home, 'bubblewrap'), warm: 1 };
const drivers: { name: string; open: () => Promise<SandboxDriver> }[] = [
  { name: 'quickjs', open: () => QuickJsDriver.open({ dir: join(home, 'quickjs') }) },
];
if (probe.ok) {
  drivers.push({ name: 'bubblewrap', open: () => BubblewrapDriver.open(bubblewrapOptions) });
  drivers.push({
    name: 'bubblewrap without cgroups',
    open: () => BubblewrapDriver.open({ ...bubblewrapOptions, cgroups: false }),
  });
} else test.skip(`bubblewrap: ${probe.reason}`);

const kernel = join(process.env.LONGHAUL_TEST_MICROVM ?? '.cache/microvm', 'vmlinuz');
const hasQemu = spawnSync('qemu-system-x86_64', ['--version']).status === 0;
if (hasQemu && existsSync(kernel)) {
  const options = { dir: join(home, 'microvm'), kernel };
  drivers.push({ name: 'microvm', open: () => MicroVmDriver.open(options) });
} else
  test.skip(
    `microvm: ${hasQemu ? 'no kernel: node test/setup-microvm.ts' : 'no qemu-system-x86_64'}`,
  );

afterAll(() => rmSync(home, { recursive: true, force: true }));

const SNIPPETS = {
  python: {
    echo: 'import sys\nprint(sys.stdin.read().upper())',
    fail: 'raise ValueError("no good")',
    endless: 'while True: pass',
    remember: 'import builtins\nbuiltins.secret = 1\nimport sys\nsys.modules["json"] = None',
    recall: 'import builtins, json\nprint(hasattr(builtins, "secret"))',
    flood: 'print("é" * 300_000)',
    save: 'open("made.txt", "w").write("by guest")',
  },
  javascript: {
    echo: 'print(readStdin().toUpperCase())',
    fail: 'throw new TypeError("no good")',
    endless: 'while (true);',
    remember: 'globalThis.secret = 1; JSON.parse = null',
    recall: 'print(typeof JSON.parse === "function" ? "secret" in globalThis : "broken")',
    flood: 'print("é".repeat(300000))',
    save: 'writeFile("made.txt", "by guest")',
  },
} as const;

describe.each(drivers)('$name', ({ open }) => {
  let driver: SandboxDriver;
  beforeAll(async () => {
    driver = await open();
  });
  afterAll(() => driver?.close());

  const snippet = (kind: keyof (typeof SNIPPETS)['python'], more: Partial<CodeRequest> = {}) => {
    const language = driver.capabilities.languages[0]!;
    return { language, source: SNIPPETS[language][kind], ...more };
  };

  test('runs a batch of snippets in order, each with its own input and outcome', async () => {
    const sandbox = await driver.create();
    const [echo, fail, again] = await sandbox.runCode([
      snippet('echo', { stdin: 'grüße' }),
      snippet('fail'),
      snippet('echo', { stdin: 'b' }),
    ]);
    expect(echo).toMatchObject({ cause: 'exited', code: 0, stdout: 'GRÜSSE\n', stderr: '' });
    expect(fail).toMatchObject({ cause: 'exited', code: 1, stdout: '' });
    expect(fail!.stderr).toMatch(/(ValueError|TypeError): no good/);
    expect(again!.stdout).toBe('B\n');
    await sandbox.stop();
  });

  test('a snippet past its deadline is a timeout, and the next one runs', async () => {
    const sandbox = await driver.create();
    const [endless, echo] = await sandbox.runCode([
      snippet('endless', { timeoutMs: 200 }),
      snippet('echo', { stdin: 'a' }),
    ]);
    expect(endless).toMatchObject({ cause: 'timeout', code: null, signal: 'SIGKILL' });
    expect(echo).toMatchObject({ cause: 'exited', stdout: 'A\n' });
    await sandbox.stop();
  });

  test('snippets leave nothing in the interpreter', async () => {
    const sandbox = await driver.create();
    const results = await sandbox.runCode([snippet('remember'), snippet('recall')]);
    expect(results[1]!.stdout.toLowerCase()).toBe('false\n');
    await sandbox.stop();
  });

  test('output beyond the limit keeps head and tail, counts bytes and stays valid text', async () => {
    const sandbox = await driver.create();
    const [result] = await sandbox.runCode([snippet('flood')]);
    expect(result!.stdoutBytes).toBe(600_001);
    expect(result!.stdout).toMatch(/^é+\n\[\d+ bytes left out\]\né+\n$/);
    expect(Buffer.byteLength(result!.stdout)).toBeLessThan(300_000);
    await sandbox.stop();
  });

  test('refuses languages it does not have', async () => {
    const sandbox = await driver.create();
    const missing = driver.capabilities.languages.includes('python') ? 'javascript' : 'python';
    await expect(sandbox.runCode([{ language: missing, source: '' }])).rejects.toMatchObject({
      code: 'CapabilityMissing',
    });
    await sandbox.stop();
  });

  test('exec runs commands or says that it cannot', async () => {
    const sandbox = await driver.create();
    const request = { argv: ['sh', '-c', 'cat; echo $A >&2; exit 3'], stdin: 'x', env: { A: 'b' } };
    if (driver.capabilities.exec)
      expect(await sandbox.exec(request)).toMatchObject({
        cause: 'exited',
        code: 3,
        stdout: 'x',
        stderr: 'b\n',
      });
    else await expect(sandbox.exec(request)).rejects.toMatchObject({ code: 'CapabilityMissing' });
    await sandbox.stop();
  });

  test('files: text, binary, odd names, large ones, limits', async () => {
    const sandbox = await driver.create();
    const binary = Uint8Array.from({ length: 256 }, (_, i) => i);
    await sandbox.writeFile('deep/er/b.bin', binary);
    expect(await sandbox.readFile('/workspace/deep/er/b.bin')).toEqual(binary);
    const odd = 'new\nline "quoted" \\ ünï 🙂';
    await sandbox.writeFile(odd, 'odd');
    expect(text(await sandbox.readFile(odd))).toBe('odd');
    const large = Buffer.alloc(5_000_000, 'x');
    await sandbox.writeFile('large', large);
    expect((await sandbox.readFile('large')).length).toBe(1024 * 1024);
    expect((await sandbox.readFile('large', 10_000_000)).length).toBe(5_000_000);
    await sandbox.writeFile('large', 'small');
    expect(text(await sandbox.readFile('large'))).toBe('small');
    const listed = await sandbox.listFiles('.');
    expect(listed).toContainEqual(expect.objectContaining({ name: 'deep', kind: 'directory' }));
    expect(listed).toContainEqual({ name: 'large', kind: 'file', bytes: 5 });
    expect(listed).toContainEqual({ name: odd, kind: 'file', bytes: 3 });
    await sandbox.stop();
  });

  test('file errors are the caller’s: missing, directory, impossible names', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('dir/file', '');
    await expect(sandbox.readFile('none')).rejects.toMatchObject({ code: 'NotFound' });
    await expect(sandbox.listFiles('none')).rejects.toMatchObject({ code: 'NotFound' });
    await expect(sandbox.readFile('dir')).rejects.toMatchObject({ code: 'FileRefused' });
    await expect(sandbox.writeFile('dir', '')).rejects.toMatchObject({ code: 'FileRefused' });
    for (const name of ['a\0b', 'x'.repeat(256)])
      await expect(sandbox.writeFile(name, '')).rejects.toMatchObject({ code: 'FileRefused' });
    expect(text(await sandbox.readFile('dir/file'))).toBe('');
    await sandbox.stop();
  });

  test('a full workspace refuses the file and stays usable', async () => {
    const sandbox = await driver.create({ diskBytes: 1024 * 1024 });
    await expect(sandbox.writeFile('big', Buffer.alloc(2_000_000))).rejects.toMatchObject({
      code: 'FileRefused',
    });
    if (driver.capabilities.exec) await sandbox.exec({ argv: ['rm', '-f', 'big'] });
    await sandbox.writeFile('small', 'fits');
    expect(text(await sandbox.readFile('small'))).toBe('fits');
    await sandbox.stop();
  });

  test('snippets and file calls see the same files', async () => {
    const sandbox = await driver.create();
    await sandbox.runCode([snippet('save')]);
    expect(text(await sandbox.readFile('made.txt'))).toBe('by guest');
    await sandbox.stop();
  });

  test('snapshot, change, rollback: deletions come back, additions go', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('kept/a', 'one');
    await sandbox.writeFile('b', 'two');
    const first = await sandbox.snapshot();
    await sandbox.writeFile('kept/a', 'changed');
    await sandbox.writeFile('c', 'new');
    const second = await sandbox.snapshot();
    await sandbox.rollback(first);
    expect(text(await sandbox.readFile('kept/a'))).toBe('one');
    await expect(sandbox.readFile('c')).rejects.toMatchObject({ code: 'NotFound' });
    await sandbox.rollback(second);
    expect(text(await sandbox.readFile('kept/a'))).toBe('changed');
    expect(text(await sandbox.readFile('c'))).toBe('new');
    await sandbox.stop();
  });

  test('a layer outlives its sandbox and starts others, which share nothing they write', async () => {
    const parent = await driver.create();
    await parent.writeFile('a', 'base');
    const layer = await parent.snapshot();
    await parent.stop();
    const [one, two] = await Promise.all([driver.create({}, layer), driver.create({}, layer)]);
    await one.writeFile('a', 'one');
    expect(text(await two.readFile('a'))).toBe('base');
    expect(await driver.hasLayer(layer)).toBe(true);
    await driver.dropLayer(layer);
    expect(await driver.hasLayer(layer)).toBe(false);
    expect(text(await two.readFile('a'))).toBe('base');
    await Promise.all([one.stop(), two.stop()]);
    await expect(driver.create({}, layer)).rejects.toMatchObject({ code: 'NotFound' });
  });

  test('forks start equal and go their own ways', async () => {
    const parent = await driver.create();
    await parent.writeFile('a', 'base');
    const children = await parent.fork(3);
    expect(children).toHaveLength(3);
    await Promise.all(children.map((child, i) => child.writeFile('a', `child ${i}`)));
    const grandchild = (await children[1]!.fork(1))[0]!;
    await grandchild.writeFile('b', 'deeper');
    expect(text(await parent.readFile('a'))).toBe('base');
    expect(text(await children[2]!.readFile('a'))).toBe('child 2');
    expect(text(await grandchild.readFile('a'))).toBe('child 1');
    await parent.stop();
    expect(text(await children[0]!.readFile('a'))).toBe('child 0');
    await Promise.all([...children, grandchild].map((each) => each.stop()));
  });

  test('durable layers are found by another driver on the same folder', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('dir/a', 'first');
    await sandbox.writeFile('gone', 'x');
    const first = await sandbox.snapshot({ durable: true });
    await sandbox.writeFile('dir/a', 'second');
    if (driver.capabilities.exec)
      await sandbox.exec({
        argv: ['sh', '-c', 'rm gone; ln -s /etc/passwd link; mkdir empty; chmod 700 dir; mkfifo p'],
      });
    const second = await sandbox.snapshot({ durable: true });
    await sandbox.stop();
    const other = await open();
    expect(await other.hasLayer(second)).toBe(true);
    const resumed = await other.create({}, second);
    expect(text(await resumed.readFile('dir/a'))).toBe('second');
    if (driver.capabilities.exec) {
      const kinds = (await resumed.listFiles('.')).map(({ name, kind }) => `${name} ${kind}`);
      expect(kinds).toEqual(['dir directory', 'empty directory', 'link symlink', 'p other']);
    }
    await resumed.writeFile('dir/a', 'third');
    await resumed.rollback(first);
    expect(text(await resumed.readFile('dir/a'))).toBe('first');
    expect(text(await resumed.readFile('gone'))).toBe('x');
    await other.dropLayer(first);
    expect(await driver.hasLayer(first)).toBe(false);
    expect(await driver.hasLayer(second)).toBe(true);
    await resumed.rollback(second);
    expect(text(await resumed.readFile('dir/a'))).toBe('second');
    await other.close();
    await driver.dropLayer(second);
  });

  test('a limit that cannot be enforced is refused', async () => {
    const asked = driver.create({ cpus: 0.5 });
    if (driver.capabilities.cpu === 'none')
      await expect(asked).rejects.toMatchObject({ code: 'CapabilityMissing' });
    else await (await asked).stop();
  });

  test('unknown layers are the caller’s error', async () => {
    for (const layer of ['d-000000000000000000000000', 'v-0', '../../etc', ''])
      await expect(driver.create({}, layer)).rejects.toMatchObject({ code: 'NotFound' });
  });

  test('calls queue; after stop they throw SandboxBroken; stop is idempotent', async () => {
    const sandbox = await driver.create();
    const writes = Array.from({ length: 20 }, (_, i) => sandbox.writeFile('n', `${i}`));
    expect(text(await sandbox.readFile('n'))).toBe('19');
    await Promise.all(writes);
    await Promise.all([sandbox.stop(), sandbox.stop()]);
    await expect(sandbox.readFile('n')).rejects.toMatchObject({ code: 'SandboxBroken' });
    await expect(sandbox.runCode([snippet('echo')])).rejects.toMatchObject({
      code: 'SandboxBroken',
    });
  });

  test('usage counts', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('a', Buffer.alloc(100_000));
    await sandbox.runCode([snippet('endless', { timeoutMs: 200 })]);
    const usage = await sandbox.usage();
    expect(usage.cpuSeconds).toBeGreaterThan(0.02);
    expect(usage.diskBytes).toBeGreaterThanOrEqual(100_000);
    expect(usage.wallSeconds).toBeGreaterThan(0);
    await sandbox.stop();
  });
});
