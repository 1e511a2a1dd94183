import { type ChildProcess, spawn } from 'node:child_process';
import {
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';
import { buffer } from 'node:stream/consumers';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { zstdCompressSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { Sandbox } from '../contract.ts';
import { WasmDriver } from './driver.ts';
import { pythonFolder, withMemoryLimit } from './python.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-wasm-'));
afterAll(() => rmSync(home, { recursive: true, force: true }));
const text = (bytes: Uint8Array) => Buffer.from(bytes).toString();
const run = async (
  sandbox: Sandbox,
  language: 'javascript' | 'python',
  source: string,
  more = {},
) => (await sandbox.runCode([{ language, source, ...more }]))[0]!;
const print = (sandbox: Sandbox, source: string) => run(sandbox, 'javascript', source);

/** Processes of this one that run sandboxes. */
const hosts = () =>
  readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map(Number)
    .filter((pid) => {
      try {
        const parent = /^PPid:\t(\d+)$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1];
        const command = readFileSync(`/proc/${pid}/cmdline`, 'utf8');
        return Number(parent) === process.pid && command.includes('wasm/host.');
      } catch {
        return false;
      }
    });

describe('a driver', () => {
  let driver: WasmDriver;
  beforeAll(async () => {
    driver = await WasmDriver.open({ dir: join(home, 'driver') });
  });
  afterAll(() => driver?.close());

  test('says that its boundary is the weaker one, and what it cannot do throws with a next step', async () => {
    expect(driver.capabilities).toMatchObject({ isolation: 'wasm', exec: false, network: 'none' });
    expect(driver.capabilities.languages).toEqual(['javascript', 'python']);
    const sandbox = await driver.create();
    for (const call of [
      () => sandbox.exec({ argv: ['true'] }),
      () => sandbox.start({ argv: ['true'] }),
      () => sandbox.pause(),
      () => sandbox.resume(),
      () => driver.create({ image: 'dir:/' }),
      () => driver.create({ network: { allow: [] } }),
      () => driver.create({ cpus: 0.5 }),
      () => driver.create({ diskBytes: 2 ** 40 }),
    ])
      await expect(call()).rejects.toMatchObject({
        code: 'CapabilityMissing',
        next: expect.stringMatching(/./),
      });
    expect(sandbox.networkAttempts()).toEqual([]);
    await sandbox.stop();
  });

  test('both languages and the file calls share the files', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('in.txt', 'von außen');
    const seen = await sandbox.runCode([
      {
        language: 'python',
        source: 'import os\nos.makedirs("d/e")\nopen("d/e/py", "w").write(open("in.txt").read())',
      },
      { language: 'javascript', source: 'writeFile("d/js", readFile("d/e/py") + "!")' },
      {
        language: 'python',
        source:
          'print(open("/workspace/d/js").read()); os = __import__("os"); os.rename("d", "f"); os.remove("in.txt")',
      },
      { language: 'javascript', source: 'print(readFile("f/js"))' },
    ]);
    expect(seen.map(({ stderr }) => stderr)).toEqual(['', '', '', '']);
    expect(seen[2]!.stdout).toBe('von außen!\n');
    expect(seen[3]!.stdout).toBe('von außen!\n');
    expect((await sandbox.listFiles('.')).map(({ name }) => name)).toEqual(['f']);
    expect(text(await sandbox.readFile('f/e/py', { offset: 4, limit: 4 }))).toBe('auß');
    await sandbox.writeFile('f/e/py', 'again');
    expect((await run(sandbox, 'python', 'print(open("f/e/py").read())')).stdout).toBe('again\n');
    await sandbox.stop();
  });

  test('files: stat, links, offsets, bytes as names', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('f', '0123456789');
    await run(
      sandbox,
      'python',
      'import os\nos.symlink("/etc/passwd", "out"); os.symlink("f", "in"); os.mkdir("d")',
    );
    expect(await sandbox.stat('f')).toMatchObject({ kind: 'file', bytes: 10, mode: 0o644 });
    expect(Date.now() - (await sandbox.stat('f')).modifiedMs).toBeLessThan(60_000);
    expect(await sandbox.stat('d')).toMatchObject({ kind: 'directory' });
    expect(await sandbox.stat('out')).toMatchObject({ kind: 'symlink', target: '/etc/passwd' });
    await expect(sandbox.readFile('out')).rejects.toMatchObject({ code: 'NotFound' });
    expect(text(await sandbox.readFile('in', { offset: 8 }))).toBe('89');
    expect(text(await sandbox.readFile('in', { offset: 99 }))).toBe('');
    await expect(sandbox.writeFile('/etc/x', '')).rejects.toMatchObject({ code: 'FileRefused' });
    await expect(sandbox.writeFile('/dev/null', '')).rejects.toMatchObject({ code: 'FileRefused' });
    await expect(sandbox.stat('none')).rejects.toMatchObject({ code: 'NotFound' });
    const raw = Uint8Array.of(0x61, 0xff);
    await sandbox.writeFile(raw, 'raw');
    expect((await run(sandbox, 'python', 'import os\nprint(os.listdir(b".")[0])')).stdout).toMatch(
      /xff/,
    );
    expect(text(await sandbox.readFile(raw))).toBe('raw');
    await sandbox.stop();
  });

  test('texts of any characters pass between host and guest', async () => {
    const sandbox = await driver.create();
    const odd = '\0 \x01 \x02 \x01\x02 \0\x01 ü 🙂 \ud7ff';
    const [echo, length] = await sandbox.runCode([
      {
        language: 'javascript',
        stdin: odd,
        source: 'writeFile("f", readStdin()); print(readFile("f"))',
      },
      {
        language: 'python',
        stdin: odd,
        source: 'import sys\nsys.stdout.write(sys.stdin.read() + "\\n")',
      },
    ]);
    expect(echo!.stdout).toBe(`${odd}\n`);
    expect(length!.stdout).toBe(`${odd}\n`);
    await sandbox.stop();
  });

  test('a snippet that is ended leaves the files as they were before it', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('f', 'before');
    const [late, after] = await sandbox.runCode([
      {
        language: 'python',
        source: 'open("f", "w").write("after")\nprint("seen", flush=True)\nwhile True: pass',
        timeoutMs: 1000,
      },
      { language: 'javascript', source: 'print(readFile("f"))' },
    ]);
    expect(late).toMatchObject({
      cause: 'timeout',
      code: null,
      signal: 'SIGKILL',
      stdout: 'seen\n',
    });
    expect(after!.stdout).toBe('before\n');
    await run(sandbox, 'javascript', 'writeFile("f", "after"); while (true);', { timeoutMs: 200 });
    expect(text(await sandbox.readFile('f'))).toBe('before');
    await sandbox.stop();
  });

  test('secrets are files that no layer, rollback or fork has', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('f', '1');
    await sandbox.putSecrets({ TOKEN: 's3cret' });
    await sandbox.putSecrets({ OTHER: 'x' });
    expect((await print(sandbox, 'print(readFile("/run/secrets/TOKEN"))')).stdout).toBe('s3cret\n');
    const listed = await run(
      sandbox,
      'python',
      'import os\nprint(sorted(os.listdir("/run/secrets")))',
    );
    expect(listed.stdout).toBe("['OTHER', 'TOKEN']\n");
    expect(text(await sandbox.readFile('/run/secrets/TOKEN'))).toBe('s3cret');
    await expect(sandbox.putSecrets({ '../x': '' })).rejects.toMatchObject({
      code: 'ConfigInvalid',
    });
    const layer = await sandbox.snapshot({ durable: true });
    const archive = await buffer(await driver.exportLayer(layer));
    expect(archive.includes('s3cret')).toBe(false);
    const [child] = await sandbox.fork(1);
    for (const each of [child!, await driver.create({}, layer)])
      expect((await print(each, 'readFile("/run/secrets/TOKEN")')).code).toBe(1);
    await sandbox.rollback(layer);
    expect((await print(sandbox, 'readFile("/run/secrets/TOKEN")')).code).toBe(1);
  });

  test.skipIf(process.platform !== 'linux')(
    'a process killed from outside is a typed error; the sandbox and the next one go on',
    async () => {
      const before = hosts();
      const sandbox = await driver.create();
      await sandbox.writeFile('f', 'kept');
      await print(sandbox, 'writeFile("g", "kept too")');
      const running = print(
        sandbox,
        'writeFile("g", "lost"); const end = Date.now() + 20000; while (Date.now() < end);',
      );
      const failed = expect(running).rejects.toMatchObject({
        code: 'SandboxBroken',
        class: 'retryable',
      });
      await sleep(200);
      for (const pid of hosts()) if (!before.includes(pid)) process.kill(pid, 'SIGKILL');
      for (const pid of before) process.kill(pid, 'SIGKILL');
      await failed;
      expect((await print(sandbox, 'print(readFile("f"), readFile("g"))')).stdout).toBe(
        'kept kept too\n',
      );
      const next = await driver.create();
      expect((await print(next, 'print(1)')).stdout).toBe('1\n');
      await Promise.all([sandbox.stop(), next.stop()]);
    },
  );

  test.skipIf(process.platform !== 'linux')(
    'each sandbox has a process of its own, which ends with it',
    async () => {
      const alone = await WasmDriver.open({ dir: join(home, 'alone'), processes: 2 });
      const [one, two, three] = await Promise.all([alone.create(), alone.create(), alone.create()]);
      for (const each of [one, two, three, one, two, three]) {
        await print(each, 'writeFile("n", "1")');
        expect((await print(each, 'print(readFile("n"))')).stdout).toBe('1\n');
      }
      const results = await Promise.all(
        [one, two, three].map((each) =>
          print(each, 'const end = Date.now() + 100; while (Date.now() < end); print(1)'),
        ),
      );
      expect(results.map(({ stdout }) => stdout)).toEqual(['1\n', '1\n', '1\n']);
      await Promise.all([one.stop(), two.stop(), three.stop()]);
      const left = hosts();
      await alone.close();
      for (let i = 0; i < 500 && hosts().some((pid) => left.includes(pid)); i++) await sleep(20);
      const others = hosts();
      await driver.create().then(async (each) => {
        await print(each, '1');
        await each.stop();
      });
      expect(others.length).toBeLessThanOrEqual(5);
    },
  );

  test('after the driver is closed a snippet is refused instead of waiting', async () => {
    const closed = await WasmDriver.open({ dir: join(home, 'closed'), processes: 1 });
    const sandbox = await closed.create();
    await closed.close();
    await expect(print(sandbox, 'print(1)')).rejects.toMatchObject({ code: 'SandboxBroken' });
  });

  test('stop ends a snippet that runs', async () => {
    const sandbox = await driver.create();
    const running = run(sandbox, 'python', 'while True: pass', { timeoutMs: 60_000 });
    const failed = expect(running).rejects.toMatchObject({ code: 'SandboxBroken' });
    await sleep(300);
    await sandbox.stop();
    await failed;
  });
});

describe('layers', () => {
  let driver: WasmDriver;
  const dir = join(home, 'layers');
  const folder = join(dir, 'wasm-layers');
  const files = () => readdirSync(folder);
  beforeAll(async () => {
    driver = await WasmDriver.open({ dir });
  });
  afterAll(() => driver?.close());

  const rich = async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('dir/a', 'first');
    await sandbox.writeFile(Uint8Array.of(0xff), 'raw');
    await run(sandbox, 'python', 'import os\nos.mkdir("empty"); os.symlink("/etc/passwd", "link")');
    return sandbox;
  };
  const listing = async (sandbox: Sandbox) =>
    Promise.all(
      (await sandbox.listFiles('.')).map(async ({ name, rawName, kind, bytes }) => [
        name,
        kind,
        bytes,
        (await sandbox.stat(rawName ?? name)).modifiedMs,
      ]),
    );

  test('a durable one comes back whole in another driver', async () => {
    const sandbox = await rich();
    const layer = await sandbox.snapshot({ durable: true });
    const other = await WasmDriver.open({ dir });
    const resumed = await other.create({}, layer);
    const close = (rows: unknown[][]) =>
      rows.map((row) => [...row.slice(0, 3), Math.round(row[3] as number)]);
    expect(close(await listing(resumed))).toEqual(close(await listing(sandbox)));
    expect(text(await resumed.readFile('dir/a'))).toBe('first');
    await other.dropLayer(layer);
    expect(await driver.hasLayer(layer)).toBe(false);
    await other.close();
  });

  test('exported and imported it is the same workspace', async () => {
    const sandbox = await rich();
    for (const durable of [false, true]) {
      const layer = await sandbox.snapshot({ durable });
      const imported = await driver.importLayer(await driver.exportLayer(layer));
      expect(imported).not.toBe(layer);
      const again = await driver.create({}, imported);
      expect((await listing(again)).map((row) => row.slice(0, 3))).toEqual(
        (await listing(sandbox)).map((row) => row.slice(0, 3)),
      );
      expect(text(await again.readFile(Uint8Array.of(0xff)))).toBe('raw');
      await driver.dropLayer(layer);
      await driver.dropLayer(imported);
    }
    await expect(driver.exportLayer('w-000000000000000000000000')).rejects.toMatchObject({
      code: 'NotFound',
    });
  });

  test('archives that are none, are cut short, do not fit or burst are refused', async () => {
    const sandbox = await rich();
    const whole = await buffer(await driver.exportLayer(await sandbox.snapshot()));
    const import_ = (bytes: Uint8Array, spec = {}) =>
      driver.importLayer(Readable.from([bytes]), spec);
    const before = files();
    const cases: [string, Uint8Array, object?][] = [
      ['no archive', Buffer.from('hello')],
      ['nothing', Buffer.alloc(0)],
      ['cut short', whole.subarray(0, whole.length - 20)],
      ['changed', Buffer.concat([whole.subarray(0, 40), Buffer.from('xxxx'), whole.subarray(44)])],
      ['a tar that is cut short', zstdCompressSync(Buffer.alloc(511))],
      ['no tar', zstdCompressSync(Buffer.alloc(4096, 'x'))],
      ['a bomb', zstdCompressSync(Buffer.alloc(200e6)), { diskBytes: 2 ** 20 }],
      ['too much for the disk', whole, { diskBytes: 20 }],
      ['too many files', whole, { inodes: 4 }],
      ['longer than any that fits', Buffer.alloc(3e6, 'x'), { diskBytes: 2 ** 20 }],
    ];
    for (const [name, bytes, spec] of cases)
      await expect(import_(bytes, spec), name).rejects.toMatchObject({ code: 'FileRefused' });
    expect(files()).toEqual(before);
    expect(await driver.hasLayer(await import_(whole))).toBe(true);
  });

  test('a layer that was changed on disk is not used', async () => {
    const sandbox = await rich();
    const layer = await sandbox.snapshot({ durable: true });
    const path = join(folder, `${layer}.layer`);
    const bytes = readFileSync(path);
    for (const at of [0, 40, bytes.length - 1]) {
      const changed = Buffer.from(bytes);
      changed[at] = changed[at]! ^ 1;
      writeFileSync(path, changed);
      await expect(driver.create({}, layer), `${at}`).rejects.toMatchObject({
        code: 'SandboxUnavailable',
        message: expect.stringMatching(/damaged/),
      });
      await expect(driver.exportLayer(layer)).rejects.toThrow(/damaged/);
    }
    writeFileSync(path, bytes.subarray(0, bytes.length - 5));
    await expect(sandbox.rollback(layer)).rejects.toThrow(/damaged/);
    expect(text(await sandbox.readFile('dir/a'))).toBe('first');
    writeFileSync(path, bytes);
    await sandbox.rollback(layer);
    await driver.dropLayer(layer);
  });

  test('prune removes old layers that nobody names, asks after it chose, and clears what a crash left', async () => {
    const sandbox = await rich();
    const [old, named, fresh] = [
      await sandbox.snapshot({ durable: true }),
      await sandbox.snapshot({ durable: true }),
      await sandbox.snapshot({ durable: true }),
    ];
    const volatile = await sandbox.snapshot();
    const age = (name: string) => utimesSync(join(folder, name), 1, 1);
    writeFileSync(join(folder, 'partial-w-1'), 'half');
    writeFileSync(join(folder, 'partial-w-2'), 'half');
    writeFileSync(join(folder, 'not-ours'), 'kept');
    for (const name of [`${old}.layer`, `${named}.layer`, 'partial-w-1', 'not-ours']) age(name);
    const report = await driver.prune(async () => {
      // A layer that becomes old while names are looked up was no candidate.
      age(`${fresh}.layer`);
      return new Set([named]);
    });
    expect(report.removed).toContain(old);
    expect(report.removed).not.toContain(named);
    expect(report.removed).not.toContain(fresh);
    expect(report.bytesFreed).toBeGreaterThan(100);
    expect(report.kept).toBe(files().filter((name) => name.endsWith('.layer')).length);
    expect(files().filter((name) => !name.endsWith('.layer'))).toEqual(['not-ours', 'partial-w-2']);
    expect(await driver.hasLayer(volatile)).toBe(true);
  });

  test('a layer larger than the sandbox is refused', async () => {
    const sandbox = await rich();
    const layer = await sandbox.snapshot();
    await expect(driver.create({ diskBytes: 10 }, layer)).rejects.toMatchObject({
      code: 'FileRefused',
    });
  });

  test('kill -9 of the owner while it saves: every layer that can be seen is whole', async () => {
    const crashed = join(home, 'crashed');
    const room = fileURLToPath(new URL('../index.ts', import.meta.url));
    const script = `
      import { WasmDriver } from ${JSON.stringify(room)};
      const driver = await WasmDriver.open({ dir: ${JSON.stringify(crashed)}, processes: 1 });
      const sandbox = await driver.create();
      for (let i = 0; ; i++) {
        await sandbox.writeFile('n', String(i).repeat(20000));
        console.log(await sandbox.snapshot({ durable: true }), i);
      }`;
    const said = new Map<string, string>();
    for (let round = 0; round < 8; round++) {
      const child: ChildProcess = spawn(
        process.execPath,
        ['--no-warnings', '--input-type=module', '--eval', script],
        { stdio: ['ignore', 'pipe', 'inherit'] },
      );
      const lines = createInterface({ input: child.stdout! });
      let count = 0;
      for await (const line of lines) {
        const [layer, n] = line.split(' ') as [string, string];
        said.set(layer, n);
        if (++count > round) child.kill('SIGKILL');
      }
    }
    const driver = await WasmDriver.open({ dir: crashed });
    const layers = readdirSync(join(crashed, 'wasm-layers'))
      .filter((name) => name.endsWith('.layer'))
      .map((name) => name.slice(0, -'.layer'.length));
    expect(layers).toEqual(expect.arrayContaining([...said.keys()]));
    for (const layer of layers) {
      const sandbox = await driver.create({}, layer);
      const content = text(await sandbox.readFile('n', 10_000_000));
      const n = said.get(layer) ?? content.slice(0, content.length / 20_000);
      expect(content === n.repeat(20_000), layer).toBe(true);
    }
    await driver.close();
  });
});

test('a memory limit below what Python needs to begin is an error of its own', async () => {
  const module = readFileSync(join(pythonFolder()!, 'python-3.11.3.wasm'));
  expect(() => withMemoryLimit(module, 2 ** 20)).toThrow(/are needed to begin/);
  expect(() => withMemoryLimit(Buffer.from('\0asm\x01\0\0\0'), 2 ** 30)).toThrow(/no memory/);
  expect(withMemoryLimit(module, 2 ** 28).length - module.length).toBeLessThan(8);
});

test('the package with Python is found by Node alone', () => {
  expect(existsSync(join(pythonFolder()!, 'python-3.11.3.wasm'))).toBe(true);
});
