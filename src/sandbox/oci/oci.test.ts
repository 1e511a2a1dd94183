import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import {
  chmodSync,
  chownSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, test } from 'vitest';
import { findCgroups, ownerGroups } from '../bubblewrap/cgroup.ts';
import { BubblewrapDriver, probeBubblewrap } from '../index.ts';
import { OCI_RUNTIMES, OciDriver, probeOci } from './index.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-oci-'));
const room = fileURLToPath(new URL('./index.ts', import.meta.url));
const root = process.getuid?.() === 0;
const text = (bytes: Uint8Array) => Buffer.from(bytes).toString();

afterAll(() => rmSync(home, { recursive: true, force: true }));

async function until(condition: () => boolean, what: string): Promise<void> {
  for (let i = 0; i < 1000; i++) {
    if (condition()) return;
    await sleep(20);
  }
  throw new Error(`not within 20 s: ${what}`);
}

/** Processes of this machine, other than this one, that name a word. */
function naming(word: string): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name) && Number(name) !== process.pid)
    .map(Number)
    .filter((pid) => {
      try {
        return readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(word);
      } catch {
        return false;
      }
    });
}

/** Runs a script in a Node process of its own; its printed JSON lines come one by one. */
function startScript(source: string, prefix: string[] = []) {
  const [command, ...args] = [
    ...prefix,
    process.execPath,
    '--no-warnings',
    '--input-type=module',
    '--eval',
    `import { OciDriver } from ${JSON.stringify(room)};\n${source}`,
  ];
  const child: ChildProcess = spawn(command!, args, { stdio: ['ignore', 'pipe', 'pipe'] });
  let stderr = '';
  child.stderr!.on('data', (chunk) => {
    stderr += chunk;
  });
  const lines = createInterface({ input: child.stdout! })[Symbol.asyncIterator]();
  const next = async () => {
    const line = await lines.next();
    if (line.done) throw new Error(`the script ended: ${stderr}`);
    return JSON.parse(line.value);
  };
  return { child, next };
}

const runtimes: { runtime: (typeof OCI_RUNTIMES)[number] }[] = [];
for (const runtime of OCI_RUNTIMES) {
  const probe = await probeOci({ dir: join(home, 'probe', runtime), runtime });
  if (probe.ok) runtimes.push({ runtime });
  else test.skip(`${runtime}: ${probe.reason}`);
}

/** Names of an owner's control groups that are still there, the runtime's own included. */
function groupsOf(owner: string): string[] {
  const host = findCgroups();
  const folders = [
    '/sys/fs/cgroup',
    ...readdirSync('/sys/fs/cgroup').map((n) => `/sys/fs/cgroup/${n}`),
  ];
  return [
    ...(host ? ownerGroups(host, owner) : []),
    ...folders.map((folder) => join(folder, `longhaul-${owner}`)),
  ].filter(existsSync);
}

describe.each(runtimes)('$runtime', ({ runtime }) => {
  /** An owner with a paused and a running sandbox, each with a process that knows a word. */
  const owner = (dir: string, word: string) =>
    startScript(`
      const driver = await OciDriver.open({ dir: ${JSON.stringify(dir)}, runtime: '${runtime}', warm: 0 });
      const sandbox = await driver.create();
      await sandbox.writeFile('a', 'saved');
      const layer = await sandbox.snapshot({ durable: true });
      await sandbox.start({ argv: ['sh', '-c', 'trap "" TERM; while :; do sleep ${word}; done'] });
      const paused = await driver.create();
      await paused.start({ argv: ['sleep', '${word}'] });
      if (driver.capabilities.pause !== 'none') await paused.pause();
      console.log(JSON.stringify({ layer, ids: [sandbox.id, paused.id], supervisor: driver.supervisorPid }));
      await new Promise((resolve) => setTimeout(resolve, 60000));
    `);

  test('kill -9 of the owner ends its containers, paused ones too; durable layers are whole', async () => {
    const dir = join(home, `killed-${runtime}`);
    const word = `7171${process.pid}.1`;
    const { child, next } = owner(dir, word);
    const { layer, ids, supervisor } = await next();
    const living = () => [word, ...ids].flatMap(naming);
    expect(living().length).toBeGreaterThan(0);
    const [name] = readdirSync(join(dir, 'run')).filter((each) => each !== 'gate');
    child.kill('SIGKILL');
    await until(() => !existsSync(`/proc/${supervisor}`), 'the supervisor ended');
    expect(living()).toEqual([]);
    expect(groupsOf(name!)).toEqual([]);
    expect(readdirSync(join(dir, 'run'))).toEqual(['gate']);

    const driver = await OciDriver.open({ dir, runtime, warm: 0 });
    const resumed = await driver.create({}, layer);
    expect(text(await resumed.readFile('a'))).toBe('saved');
    await driver.close();
  });

  test('kill -9 of owner and supervisor at once: the next start removes what is left', async () => {
    const dir = join(home, `both-${runtime}`);
    const word = `7171${process.pid}.2`;
    const { child, next } = owner(dir, word);
    const { layer, ids, supervisor } = await next();
    const [name] = readdirSync(join(dir, 'run')).filter((each) => each !== 'gate');
    mkdirSync(join(dir, 'layers', `partial-${name}-d-0`)); // a layer that was being written
    process.kill(supervisor, 'SIGKILL');
    child.kill('SIGKILL');
    await until(() => !existsSync(`/proc/${supervisor}`), 'the supervisor ended');

    const driver = await OciDriver.open({ dir, runtime, warm: 0 });
    expect(driver.cleaned).toBe(1);
    await until(() => [word, ...ids].flatMap(naming).length === 0, 'containers ended');
    expect(groupsOf(name!)).toEqual([]);
    expect(readdirSync(join(dir, 'run'))).not.toContain(name);
    expect(readdirSync(join(dir, 'layers'))).toEqual([layer]);
    await driver.close();
    expect(readdirSync(join(dir, 'run'))).toEqual(['gate']);
  });

  test('kill -9 at any moment, while starting too, leaves nothing behind', async () => {
    const dir = join(home, `anytime-${runtime}`);
    const owners = new Set<string>();
    const rounds = runtime === 'runsc' ? 3 : 5;
    for (let round = 0; round < rounds; round++) {
      const { child, next } = startScript(`
        const driver = await OciDriver.open({ dir: ${JSON.stringify(dir)}, runtime: '${runtime}', warm: 2 });
        console.log('"open"');
        for (;;) {
          const sandbox = await driver.create();
          await sandbox.snapshot({ durable: true });
          await sandbox.fork(1);
          await sandbox.stop();
        }
      `);
      if (round > 0) await next();
      await sleep(200 + round * 130);
      for (const name of existsSync(join(dir, 'run')) ? readdirSync(join(dir, 'run')) : [])
        if (name !== 'gate') owners.add(name);
      child.kill('SIGKILL');
    }
    expect(owners.size).toBeGreaterThan(1);
    const ended = () => readdirSync(join(dir, 'run')).every((name) => name === 'gate');
    await until(ended, 'every supervisor has cleaned up');
    expect([...owners].flatMap(groupsOf)).toEqual([]);
    // A group cannot be removed while it holds a process, so none is left either.
    const driver = await OciDriver.open({ dir, runtime, warm: 0 });
    for (const layer of readdirSync(join(dir, 'layers'))) {
      expect(layer).toMatch(/^d-/);
      await (await driver.create({}, layer)).stop();
    }
    await driver.close();
  });

  test('a container or supervisor ended from outside is the host’s doing, and the driver goes on', async () => {
    const driver = await OciDriver.open({
      dir: join(home, `outside-${runtime}`),
      runtime,
      warm: 0,
    });
    const sandbox = await driver.create();
    await sandbox.writeFile('a', 'kept');
    const durable = await sandbox.snapshot({ durable: true });
    const volatile = await sandbox.snapshot();
    const word = `7171${process.pid}.3`;
    const running = sandbox.exec({ argv: ['sleep', word] });
    const first = () => (runtime === 'runsc' ? naming(`${sandbox.id}-1`) : naming(word));
    await until(() => first().length > 0, 'it runs');
    if (runtime === 'runsc') process.kill(first()[0]!, 'SIGKILL');
    else {
      const status = readFileSync(`/proc/${first()[0]}/status`, 'utf8');
      process.kill(Number(/^PPid:\t(\d+)$/m.exec(status)![1]), 'SIGKILL'); // process 1 inside
    }
    await expect(running).rejects.toMatchObject({ code: 'SandboxBroken' });
    await sandbox.stop();

    const lost = await driver.create({}, volatile);
    process.kill(driver.supervisorPid, 'SIGKILL');
    await expect(lost.exec({ argv: ['sleep', '60'] })).rejects.toMatchObject({
      code: 'SandboxBroken',
    });
    await until(() => naming(`${lost.id}-`).length === 0, 'its container ended');
    const again = await driver.create({}, durable);
    expect(text(await again.readFile('a'))).toBe('kept');
    await expect(driver.create({}, volatile)).rejects.toMatchObject({ code: 'NotFound' });
    await driver.close();
  });

  test('an image directory is the read-only root, and stays as it was', async () => {
    const image = join(home, `image-${runtime}`);
    for (const name of ['bin', 'etc', 'data', 'work'])
      mkdirSync(join(image, name), { recursive: true });
    const libraries = execFileSync('/usr/bin/ldd', ['/bin/dash'], { encoding: 'utf8' }).match(
      /\/\S+\.so\S*/g,
    )!;
    for (const path of ['/bin/dash', ...libraries]) {
      mkdirSync(join(image, dirname(path)), { recursive: true });
      copyFileSync(path, join(image, path));
      chmodSync(join(image, path), 0o755);
    }
    symlinkSync('dash', join(image, 'bin/sh'));
    writeFileSync(join(image, 'etc/release'), 'tiny\n');
    writeFileSync(join(image, 'top'), 'file at the top\n');
    const before = readdirSync(image).sort();
    const driver = await OciDriver.open({ dir: join(home, `images-${runtime}`), runtime, warm: 0 });
    const sandbox = await driver.create({ image: `dir:${image}` });
    const run = (line: string) => sandbox.exec({ argv: ['sh', '-c', line] });
    expect((await run('read a < /etc/release; read b < /top; echo "$a, $b"')).stdout).toBe(
      'tiny, file at the top\n',
    );
    expect((await run('echo x > /etc/new; echo x > /data/new; echo x > /new')).stderr).toMatch(
      /(.*cannot create.*\n){3}/,
    );
    expect((await run('python3 -c 1')).code).toBe(127);
    const [snippet] = await sandbox.runCode([
      {
        language: 'python',
        source: 'import json; open("/workspace/out", "w").write(json.dumps([1]))',
      },
    ]);
    expect(snippet).toMatchObject({ cause: 'exited', code: 0, stderr: '' });
    expect(text(await sandbox.readFile('out'))).toBe('[1]');
    await driver.close();
    expect(readdirSync(image).sort()).toEqual(before);
    for (const missing of [`dir:${image}-none`, 'dir:relative'])
      await expect(
        (async () => {
          const other = await OciDriver.open({
            dir: join(home, `none-${runtime}`),
            runtime,
            warm: 0,
          });
          await other.create({ image: missing }).finally(() => other.close());
        })(),
      ).rejects.toMatchObject({ code: 'ConfigInvalid' });
  });

  test.skipIf(!root)(
    'runs for a user who is not root, with what it then cannot do stated',
    async () => {
      const dir = mkdtempSync(join(tmpdir(), 'longhaul-rootless-'));
      chownSync(dir, 65534, 65534);
      const { next } = startScript(
        `
      const driver = await OciDriver.open({ dir: ${JSON.stringify(join(dir, 'd'))}, runtime: '${runtime}', warm: 0 });
      const sandbox = await driver.create({ memoryBytes: 128 << 20, pids: 20 });
      const python = async (source) => (await sandbox.runCode([{ language: 'python', source }]))[0];
      await sandbox.writeFile('a', 'one');
      const layer = await sandbox.snapshot({ durable: true });
      await sandbox.writeFile('a', 'two');
      await sandbox.rollback(layer);
      const [child] = await sandbox.fork(1);
      const bomb = await python('b = []\\nwhile True: b.append(bytearray(1 << 20))');
      const forks = await python('import os, time\\nn = 0\\ntry:\\n  while n < 500:\\n    if os.fork() == 0: time.sleep(60)\\n    n += 1\\nexcept OSError as e: print(n)');
      console.log(JSON.stringify({
        capabilities: driver.capabilities,
        back: Buffer.from(await child.readFile('a')).toString(),
        bomb: bomb.stderr, forks: forks.stdout,
        pause: await sandbox.pause().then(() => 'paused', ({ code }) => code),
      }));
      await driver.close();
      `,
        ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups'],
      );
      const said = await next();
      rmSync(dir, { recursive: true, force: true });
      const gvisor = runtime === 'runsc';
      expect(said).toMatchObject({
        capabilities: { memory: 'rlimit', pids: 'rlimit', cpu: 'none', ownUid: false },
        back: 'one',
        pause: gvisor ? 'paused' : 'CapabilityMissing',
      });
      expect(said.bomb).toMatch(/MemoryError/);
      expect(Number(said.forks)).toBeLessThan(25);
    },
  );
});

const [first] = runtimes;
const bubblewrap = await probeBubblewrap({ dir: join(home, 'probe', 'bubblewrap') });
const apart = !first ? 'no OCI runtime here' : bubblewrap.ok ? '' : bubblewrap.reason;

test.skipIf(apart !== '')(
  `a layer exported from bubblewrap imports here, and back${apart && ` (skipped: ${apart})`}`,
  async () => {
    const here = await OciDriver.open({ dir: join(home, 'a'), runtime: first!.runtime, warm: 0 });
    const there = await BubblewrapDriver.open({ dir: join(home, 'b'), warm: 0 });
    const made = await there.create();
    await made.writeFile('deep/file', Buffer.alloc(200_000, 'abc'));
    await made.exec({
      argv: ['sh', '-c', 'ln -s /etc/passwd link; chmod 700 deep; mkdir empty; mkfifo p'],
    });
    const state = async (sandbox: typeof made) =>
      (
        await sandbox.exec({
          argv: ['sh', '-c', "find . -printf '%P %y %m %l\\n' | sort; sha256sum deep/file"],
        })
      ).stdout;
    const original = await state(made);
    const imported = await here.importLayer(await there.exportLayer(await made.snapshot()));
    const copy = await here.create({}, imported);
    expect(await state(copy)).toBe(original);
    await copy.writeFile('more', 'x');
    const back = await there.importLayer(await here.exportLayer(await copy.snapshot()));
    const returned = await there.create({}, back);
    expect(await state(returned)).toBe(await state(copy));
    await Promise.all([here.close(), there.close()]);
  },
);

test.skipIf(!first || !root)('a full disk is said, and the sandbox goes on', async () => {
  const dir = join(home, 'full');
  mkdirSync(dir);
  const { next } = startScript(
    `
    const driver = await OciDriver.open({ dir: ${JSON.stringify(dir)}, runtime: '${first!.runtime}', warm: 0 });
    const sandbox = await driver.create();
    const run = async (line) => (await sandbox.exec({ argv: ['sh', '-c', line] })).stdout;
    await run('head -c 6M /dev/urandom > big');
    const codes = [];
    for (const durable of [false, true])
      codes.push(await sandbox.snapshot({ durable }).then(() => 'saved', ({ code }) => code));
    const after = await run('rm big; echo fits > small; cat small');
    const layer = await sandbox.snapshot({ durable: true });
    await sandbox.rollback(layer);
    console.log(JSON.stringify({ codes, after, back: await run('ls') }));
    await driver.close();
    `,
    ['unshare', '--mount', 'sh', '-ec', 'mount -t tmpfs -o size=4m t "$0"; exec "$@"', dir],
  );
  expect(await next()).toEqual({
    codes: ['DiskFull', 'DiskFull'],
    after: 'fits\n',
    back: 'small\n',
  });
});

test.skipIf(!first)('a damaged or missing archive is never a workspace', async () => {
  const dir = join(home, 'damaged');
  const driver = await OciDriver.open({ dir, runtime: first!.runtime, warm: 0 });
  const sandbox = await driver.create();
  await sandbox.writeFile('a', Buffer.alloc(100_000, 'abcdefg'));
  const layer = await sandbox.snapshot({ durable: true });
  const path = join(dir, 'layers', layer, 'workspace.tar.zst');
  const whole = readFileSync(path);
  for (const at of [8, whole.length >> 1, whole.length - 2]) {
    const broken = Buffer.from(whole);
    broken[at] = broken[at]! ^ 0x10;
    writeFileSync(path, broken);
    await expect(driver.create({}, layer)).rejects.toMatchObject({
      message: expect.stringMatching(/damaged/),
    });
  }
  writeFileSync(path, whole.subarray(0, whole.length - 20));
  await expect(driver.create({}, layer)).rejects.toMatchObject({ code: 'SandboxUnavailable' });
  writeFileSync(path, whole);
  expect((await (await driver.create({}, layer)).readFile('a')).length).toBe(100_000);
  await expect(
    driver.importLayer(Readable.from([whole.subarray(0, whole.length >> 1)])),
  ).rejects.toMatchObject({ code: 'FileRefused' });
  expect(readdirSync(join(dir, 'layers'))).toEqual([layer]);
  expect(basename(dirname(path))).toBe(layer);
  await driver.close();
});
