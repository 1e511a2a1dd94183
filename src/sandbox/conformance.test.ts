import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { CodeRequest } from '../core/index.ts';
import type { NetworkPolicy } from './contract.ts';
import { BubblewrapDriver, probeBubblewrap, type SandboxDriver, WasmDriver } from './index.ts';
import { MicroVmDriver } from './microvm/driver.ts';
import { OCI_RUNTIMES, OciDriver, probeOci } from './oci/index.ts';

/** Every driver passes this suite; what one cannot do is skipped by its stated capabilities. */

const text = (bytes: Uint8Array) => Buffer.from(bytes).toString();
const home = mkdtempSync(join(tmpdir(), 'longhaul-sandbox-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const bubblewrapOptions = { dir: join(home, 'bubblewrap'), warm: 1 };
/** `only`: the language of the suite's snippets, where a driver has several. */
const drivers: {
  name: string;
  open: () => Promise<SandboxDriver>;
  only?: 'python' | 'javascript';
}[] = [
  { name: 'wasm, JavaScript', open: () => WasmDriver.open({ dir: join(home, 'wasm') }) },
  {
    name: 'wasm, Python',
    open: () => WasmDriver.open({ dir: join(home, 'wasm') }),
    only: 'python',
  },
];
if (probe.ok) {
  drivers.push({ name: 'bubblewrap', open: () => BubblewrapDriver.open(bubblewrapOptions) });
  drivers.push({
    name: 'bubblewrap without cgroups',
    open: () => BubblewrapDriver.open({ ...bubblewrapOptions, cgroups: false }),
  });
} else test.skip(`bubblewrap: ${probe.reason}`);
for (const runtime of OCI_RUNTIMES) {
  const options = { dir: join(home, runtime), runtime, warm: 0 };
  const runs = await probeOci(options);
  if (runs.ok) drivers.push({ name: runtime, open: () => OciDriver.open(options) });
  else test.skip(`${runtime}: ${runs.reason}`);
}

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

describe.each(drivers)('$name', ({ open, only }) => {
  let driver: SandboxDriver;
  beforeAll(async () => {
    driver = await open();
  });
  afterAll(() => driver?.close());

  const snippet = (kind: keyof (typeof SNIPPETS)['python'], more: Partial<CodeRequest> = {}) => {
    const language = only ?? driver.capabilities.languages[0]!;
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
    const missing = (['python', 'javascript'] as const).find(
      (language) => !driver.capabilities.languages.includes(language),
    );
    if (missing === undefined) return sandbox.stop();
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

  const commands = () => driver.capabilities.exec;
  const lacks = (what: Promise<unknown>) =>
    expect(what).rejects.toMatchObject({ code: 'CapabilityMissing' });

  test('output comes as it is printed, both streams apart', async () => {
    const sandbox = await driver.create();
    if (commands()) {
      const seen: string[] = [];
      const first = Promise.withResolvers<void>();
      const running = sandbox.exec({
        argv: ['sh', '-c', 'mkfifo go.fifo; echo one; read x < go.fifo; echo two >&2; echo three'],
        onOutput: (stream, chunk) => {
          seen.push(`${stream} ${text(chunk)}`);
          first.resolve();
        },
        timeoutMs: 20_000,
      });
      const refused = expect(running).rejects.toMatchObject({ code: 'SandboxBroken' });
      await first.promise;
      expect(seen).toEqual(['stdout one\n']);
      await sandbox.stop();
      await refused;
    }
    await sandbox.stop();
  });

  test('a listener that throws ends the command, and its caller hears of its own error', async () => {
    const sandbox = await driver.create();
    if (commands()) {
      const onOutput = () => {
        throw new RangeError('mine');
      };
      await expect(
        sandbox.exec({ argv: ['sh', '-c', 'echo x; sleep 100'], onOutput }),
      ).rejects.toThrow('mine');
      expect((await sandbox.exec({ argv: ['echo', 'well'] })).stdout).toBe('well\n');
      for (const wrong of [{ timeoutMs: Number.NaN }, { timeoutMs: 1e12 }, { keepBytes: 1.5 }])
        await expect(sandbox.exec({ argv: ['true'], ...wrong })).rejects.toMatchObject({
          code: 'ConfigInvalid',
        });
    }
    await sandbox.stop();
  });

  test('an aborted command is killed with all it started, and the sandbox goes on', async () => {
    const sandbox = await driver.create();
    if (commands()) {
      const abort = new AbortController();
      const running = sandbox.exec({
        argv: ['sh', '-c', 'trap "" TERM; sleep 100 & setsid sleep 101 & echo up; wait; sleep 102'],
        onOutput: () => abort.abort(),
        signal: abort.signal,
      });
      expect(await running).toMatchObject({ cause: 'killed', signal: 'SIGKILL', stdout: 'up\n' });
      expect(await sandbox.snapshot()).toMatch(/./); // would be SandboxBusy
      const never = await sandbox.exec({ argv: ['touch', 'made'], signal: abort.signal });
      expect(never.cause).toBe('killed');
      await expect(sandbox.stat('made')).rejects.toMatchObject({ code: 'NotFound' });
    }
    await sandbox.stop();
  });

  test('a started process goes on beside other calls, reads, is signalled and tells its end', async () => {
    const sandbox = await driver.create();
    const script =
      'trap "echo bye; exit 7" TERM; while read -r x; do echo "got $x"; done; echo eof; sleep 0.05; while :; do sleep 0.01; done';
    const request = { argv: ['sh', '-c', script] };
    if (!driver.capabilities.processes) await lacks(sandbox.start(request));
    else {
      let heard = '';
      const said = async (what: string) => {
        while (!heard.includes(what)) await sleep(5);
      };
      const process = await sandbox.start({
        ...request,
        onOutput: (_, chunk) => {
          heard += text(chunk);
        },
      });
      await process.write('a\nb\n');
      await said('got b');
      await sandbox.writeFile('beside', '1');
      expect((await sandbox.exec({ argv: ['cat', 'beside'] })).stdout).toBe('1');
      // A machine is frozen with its processes.
      if (driver.capabilities.layers !== 'machine')
        await expect(sandbox.snapshot()).rejects.toMatchObject({ code: 'SandboxBusy' });
      await process.end();
      await said('eof');
      await expect(process.write('late')).rejects.toMatchObject({ code: 'FileRefused' });
      await process.kill('SIGTERM');
      expect(await process.exited).toMatchObject({
        cause: 'exited',
        code: 7,
        stdout: 'got a\ngot b\neof\nbye\n',
      });
      await process.kill(); // gone: no error
      const endless = await sandbox.start({ argv: ['sleep', '100'] });
      const [fork] = await sandbox.fork(1, { stopProcesses: true });
      expect(await endless.exited).toMatchObject({ cause: 'killed', signal: 'SIGKILL' });
      expect(text(await fork!.readFile('beside'))).toBe('1'); // as it is now, in no layer before
      await fork!.stop();
      if (driver.capabilities.layers !== 'machine') await sandbox.snapshot({ onBusy: 'stop' });
      const timed = await sandbox.start({ argv: ['sleep', '100'], timeoutMs: 50 });
      expect(await timed.exited).toMatchObject({ cause: 'timeout' });
      const refused = await sandbox.start({ argv: ['no-such-program'] });
      expect(await refused.exited).toMatchObject({ code: 127 });
    }
    await sandbox.stop();
  });

  test('parts of files, their state, and names that are not text', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('digits', '0123456789');
    expect(text(await sandbox.readFile('digits', { offset: 3, limit: 4 }))).toBe('3456');
    expect(text(await sandbox.readFile('digits', { offset: 20 }))).toBe('');
    const stat = await sandbox.stat('digits');
    expect(stat).toMatchObject({ kind: 'file', bytes: 10 });
    expect(Math.abs(stat.modifiedMs - Date.now())).toBeLessThan(3_600_000);
    expect(await sandbox.stat('.')).toMatchObject({ kind: 'directory' });
    await expect(sandbox.stat('none')).rejects.toMatchObject({ code: 'NotFound' });
    const raw = Uint8Array.of(0x61, 0xff, 0xfe, 0x62);
    await sandbox.writeFile(raw, 'odd');
    const entry = (await sandbox.listFiles('.')).find((each) => each.rawName !== undefined);
    expect(entry).toMatchObject({ kind: 'file', bytes: 3, rawName: raw });
    expect(entry!.name).toContain('\uFFFD');
    expect(text(await sandbox.readFile(entry!.rawName!))).toBe('odd');
    if (commands()) {
      await sandbox.exec({ argv: ['sh', '-c', 'ln -s /etc/passwd link; chmod 751 digits'] });
      expect(await sandbox.stat('link')).toMatchObject({ kind: 'symlink', target: '/etc/passwd' });
      expect((await sandbox.stat('digits')).mode).toBe(0o751);
    }
    await sandbox.stop();
  });

  test('a symlink that points outward leads to the sandbox’s own files, for every call', async () => {
    const sandbox = await driver.create();
    const outside = join(home, 'outside');
    writeFileSync(outside, 'host');
    if (commands()) {
      await sandbox.exec({ argv: ['sh', '-c', `ln -s ${outside} out; ln -s ${home} folder`] });
      await expect(sandbox.readFile('out')).rejects.toMatchObject({ code: 'NotFound' });
      await expect(sandbox.listFiles('folder')).rejects.toMatchObject({ code: 'NotFound' });
      await sandbox.writeFile('out', 'guest').catch(() => {});
      await sandbox.writeFile('folder/outside', 'guest').catch(() => {});
    }
    await sandbox.writeFile(`../../../..${outside}`, 'guest').catch(() => {});
    await sandbox.writeFile(outside, 'guest').catch(() => {});
    expect(readFileSync(outside, 'utf8')).toBe('host');
    await sandbox.stop();
  });

  test('paused, it does nothing and refuses calls; resumed, it goes on where it was', async () => {
    const sandbox = await driver.create();
    if (driver.capabilities.pause === 'none') await lacks(sandbox.pause());
    else {
      const counter = await sandbox.start({
        argv: ['sh', '-c', 'while :; do echo x >> ticks; sleep 0.01; done'],
      });
      while ((await sandbox.listFiles('.')).length === 0) await sleep(5);
      await sandbox.pause();
      await expect(sandbox.readFile('ticks')).rejects.toMatchObject({ code: 'SandboxBusy' });
      await sandbox.resume();
      await sandbox.resume();
      const { bytes } = await sandbox.stat('ticks');
      while ((await sandbox.stat('ticks')).bytes === bytes) await sleep(5);
      await counter.kill();
      await sandbox.pause();
    }
    await sandbox.stop(); // also while it is paused
  });

  test('secrets are readable inside, and in no layer', async () => {
    const sandbox = await driver.create();
    const read = () => sandbox.readFile('/run/secrets/token').then(text);
    await sandbox.putSecrets({ token: 's3cret' });
    expect(await read()).toBe('s3cret');
    await expect(sandbox.putSecrets({ '../x': 'y' })).rejects.toMatchObject({
      code: 'ConfigInvalid',
    });
    if (driver.capabilities.layers === 'machine') {
      await lacks(sandbox.snapshot()); // it would hold the memory that holds them
      return sandbox.stop();
    }
    const layer = await sandbox.snapshot();
    await sandbox.rollback(layer);
    await expect(read()).rejects.toMatchObject({ code: 'NotFound' });
    await sandbox.putSecrets({ token: 's3cret' });
    const [fork] = await sandbox.fork(1);
    await expect(fork!.readFile('/run/secrets/token')).rejects.toMatchObject({ code: 'NotFound' });
    await Promise.all([sandbox.stop(), fork!.stop()]);
  });

  test('a network policy lets its hosts through, records every attempt, and keeps secrets outside', async () => {
    const server = createServer((request, response) => {
      response.end(
        `${request.url} ${request.headers.authorization === 'Bearer k3y-0123456789' ? 'known' : 'unknown'}`,
      );
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const { port } = server.address() as AddressInfo;
    process.env.CONFORMANCE_KEY = 'k3y-0123456789';
    const network: NetworkPolicy = {
      allow: [
        {
          host: '127.0.0.1',
          ports: [port],
          private: true,
          inject: { authorization: { env: 'CONFORMANCE_KEY', prefix: 'Bearer ' } },
        },
      ],
    };
    try {
      if (driver.capabilities.network === 'none') return await lacks(driver.create({ network }));
      await expect(driver.create({ network: { allow: [{ host: 'a b' }] } })).rejects.toMatchObject({
        code: 'ConfigInvalid',
      });
      const sandbox = await driver.create({ network });
      const fetch = (url: string) => `
import os, urllib.request
for name in ("no_proxy", "NO_PROXY"): del os.environ[name]  # the server here is on the loopback
opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": os.environ["HTTP_PROXY"]}))
try: print(opener.open("${url}", timeout=10).read().decode())
except Exception as error: print(error, getattr(error, "read", lambda: "")())
print("k3y-0123456789" in str(os.environ))
`;
      const python = (source: string) =>
        sandbox.exec({ argv: ['python3', '-c', source], timeoutMs: 20_000 });
      const url = `http://127.0.0.1:${port}/path`;
      expect((await python(fetch(url))).stdout).toBe('/path known\nFalse\n');
      expect((await python(fetch('http://example.com/'))).stdout).toMatch(/403/);
      const direct = `import socket; socket.create_connection(("127.0.0.1", ${port}), 5)`;
      expect((await python(direct)).stderr).toMatch(/refused|unreachable/i);
      const seen = sandbox.networkAttempts().map(({ host, outcome }) => `${host} ${outcome}`);
      expect(seen).toEqual(['127.0.0.1 allowed', 'example.com refused']);
      const [fork] = await sandbox.fork(1);
      expect((await fork!.exec({ argv: ['python3', '-c', fetch(url)] })).stdout).toContain('known');
      expect(fork!.networkAttempts()).toHaveLength(1);
      await Promise.all([sandbox.stop(), fork!.stop()]);
    } finally {
      delete process.env.CONFORMANCE_KEY;
      server.close();
    }
  });

  test('what the guest runs into is told with what the kernel counted', async () => {
    const sandbox = await driver.create({ memoryBytes: 96 * 1024 * 1024, pids: 24 });
    if (commands()) {
      const bomb = await sandbox.exec({
        argv: ['sh', '-c', 'i=0; while [ $i -lt 80 ]; do sleep 5 & i=$((i+1)); done; echo done'],
      });
      if (driver.capabilities.pids === 'cgroup') expect(bomb.limitsHit).toContain('pids');
      else expect(bomb.stdout + bomb.stderr).toMatch(/fork|retry|unavailable/i);
      await sandbox.snapshot({ onBusy: 'stop' });
      expect(await sandbox.exec({ argv: ['echo', 'well'] })).toMatchObject({ stdout: 'well\n' });
    }
    await sandbox.stop();
  });

  test('a layer travels as an archive, and a broken archive is refused', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('deep/er/file', Buffer.alloc(300_000, 'abc'));
    await sandbox.writeFile('new\nline', 'odd');
    if (commands())
      await sandbox.exec({
        argv: ['sh', '-c', 'ln -s /etc/passwd link; ln new* hard; mkdir empty; chmod 700 deep'],
      });
    const layer = await sandbox.snapshot({ durable: true });
    await sandbox.stop();
    const chunks: Buffer[] = [];
    for await (const chunk of await driver.exportLayer(layer)) chunks.push(chunk as Buffer);
    const archive = Buffer.concat(chunks);
    expect(archive.readUInt32LE(0)).toBe(0xfd2fb528); // zstd
    const imported = await driver.importLayer(Readable.from([archive]));
    const copy = await driver.create({}, imported);
    expect((await copy.readFile('deep/er/file')).length).toBe(300_000);
    expect(text(await copy.readFile('new\nline'))).toBe('odd');
    if (commands()) {
      const { stdout } = await copy.exec({
        argv: [
          'sh',
          '-c',
          "readlink link; find hard -printf '%n\\n'; find deep -maxdepth 0 -printf '%m\\n'; find empty",
        ],
      });
      expect(stdout).toBe('/etc/passwd\n2\n700\nempty\n');
    }
    await copy.stop();
    for (const bad of [
      archive.subarray(0, archive.length - 20),
      Buffer.from('no archive'),
      Buffer.alloc(0),
    ])
      await expect(driver.importLayer(Readable.from([bad]))).rejects.toMatchObject({
        code: 'FileRefused',
      });
    await expect(driver.exportLayer('d-000000000000000000000000')).rejects.toMatchObject({
      code: 'NotFound',
    });
    await driver.dropLayer(layer);
    await driver.dropLayer(imported);
  });

  test('pruning leaves what is named, in use or young', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('a', '1');
    const layer = await sandbox.snapshot({ durable: true });
    await sandbox.stop();
    const report = await driver.prune(async () => new Set([layer]));
    expect(report.removed).not.toContain(layer);
    expect((await driver.prune(async () => new Set())).removed).not.toContain(layer); // young
    expect(await driver.hasLayer(layer)).toBe(true);
    await driver.dropLayer(layer);
  });

  test('usage counts', async () => {
    const sandbox = await driver.create();
    await sandbox.writeFile('a', Buffer.alloc(100_000));
    await sandbox.runCode([snippet('endless', { timeoutMs: 200 })]);
    const usage = await sandbox.usage();
    expect(usage.cpuSeconds).toBeGreaterThan(0.02);
    expect(usage.diskBytes).toBeGreaterThanOrEqual(100_000);
    expect(usage.wallSeconds).toBeGreaterThan(0);
    if (driver.capabilities.pids === 'cgroup') expect(usage.pids).toBe(0);
    await sandbox.stop();
  });
});
