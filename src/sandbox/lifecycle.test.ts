import { type ChildProcess, spawn } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, test } from 'vitest';
import { findCgroups, ownerGroups } from './bubblewrap/cgroup.ts';
import { BubblewrapDriver, openSandboxes, probeBubblewrap } from './index.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-lifecycle-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const reason = probe.ok ? '' : ` (skipped: ${probe.reason})`;
const room = fileURLToPath(new URL('./index.ts', import.meta.url));

afterAll(() => rmSync(home, { recursive: true, force: true }));

/** Processes whose command line names one of these. */
function processesNaming(parts: string[]): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map(Number)
    .filter((pid) => {
      try {
        const command = readFileSync(`/proc/${pid}/cmdline`, 'utf8');
        return parts.some((part) => command.includes(part));
      } catch {
        return false;
      }
    });
}

/** Processes whose parent this is and whose command line names something. */
const childrenOf = (parent: number, name: string) =>
  processesNaming([name]).filter((pid) => parentOf(pid) === parent);

async function until(condition: () => boolean, what: string): Promise<void> {
  for (let i = 0; i < 1000; i++) {
    if (condition()) return;
    await sleep(20);
  }
  throw new Error(`not within 20 s: ${what}`);
}

/** Runs a script in a Node process (`detached`: and process group) of its own; its printed JSON lines come one by one. */
function startScript(source: string, prefix: string[] = [], detached = false) {
  const [command, ...args] = [
    ...prefix,
    process.execPath,
    '--no-warnings',
    '--input-type=module',
    '--eval',
    source,
  ];
  const stdio = ['ignore' as const, 'pipe' as const, 'pipe' as const];
  const child: ChildProcess = spawn(command!, args, { stdio, detached });
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

describe.skipIf(!probe.ok)(`bubblewrap life cycle${reason}`, () => {
  test('kill -9 of the owner leaves no process; durable layers are whole; leftovers are cleaned', async () => {
    const dir = join(home, 'killed');
    const { child, next } = startScript(`
      import { BubblewrapDriver } from ${JSON.stringify(room)};
      const driver = await BubblewrapDriver.open({ dir: ${JSON.stringify(dir)}, warm: 1 });
      const sandbox = await driver.create();
      await sandbox.writeFile('a', 'saved');
      const layer = await sandbox.snapshot({ durable: true });
      await sandbox.writeFile('a', 'lost');
      void sandbox.exec({ argv: ['sh', '-c', 'setsid sleep 300 & trap "" TERM; while :; do sleep 1; done'] });
      console.log(JSON.stringify({ layer, id: sandbox.id, supervisor: driver.supervisorPid }));
      await new Promise((resolve) => setTimeout(resolve, 60000));
    `);
    const { layer, id, supervisor } = await next();
    const mine = () => processesNaming([`/tmp/s${id}/ws`]);
    expect(mine().length).toBeGreaterThan(0);
    child.kill('SIGKILL');
    await until(() => mine().length === 0, 'bubblewrap ended');
    await until(() => !existsSync(`/proc/${supervisor}`), 'the supervisor ended');
    const [owner] = readdirSync(join(dir, 'run')).filter((name) => name !== 'gate');
    const cgroups = findCgroups();
    const groups = cgroups ? ownerGroups(cgroups, owner!) : [];
    for (const group of groups) expect(existsSync(group)).toBe(true);

    const driver = await BubblewrapDriver.open({ dir, warm: 0 });
    expect(driver.cleaned).toBe(1);
    expect(existsSync(join(dir, 'run', owner!))).toBe(false);
    for (const group of groups) expect(existsSync(group)).toBe(false);
    expect(await driver.hasLayer(layer)).toBe(true);
    const resumed = await driver.create({}, layer);
    expect(Buffer.from(await resumed.readFile('a')).toString()).toBe('saved');
    await driver.close();
  });

  test('kill -9 at any moment, while starting too, leaves no process behind', async () => {
    const dir = join(home, 'anytime');
    const holders = () =>
      readdirSync('/proc')
        .filter((name) => /^\d+$/.test(name) && Number(name) !== process.pid)
        .filter((pid) => {
          try {
            return readdirSync(`/proc/${pid}/fd`).some((fd) =>
              readlinkSync(`/proc/${pid}/fd/${fd}`).startsWith(join(dir, 'run')),
            );
          } catch {
            return false;
          }
        });
    for (let round = 0; round < 8; round++) {
      const { child } = startScript(`
        import { BubblewrapDriver } from ${JSON.stringify(room)};
        const driver = await BubblewrapDriver.open({ dir: ${JSON.stringify(dir)}, warm: 2 });
        for (;;) {
          const sandbox = await driver.create();
          await sandbox.snapshot({ durable: true });
          await sandbox.fork(1);
          await sandbox.stop();
        }
      `);
      await sleep(150 + round * 100);
      child.kill('SIGKILL');
    }
    await until(() => holders().length === 0, 'all ended');
    const driver = await BubblewrapDriver.open({ dir, warm: 0 });
    const layers = readdirSync(join(dir, 'layers'));
    for (const layer of layers.slice(0, 5)) {
      expect(await driver.hasLayer(layer)).toBe(true);
      await (await driver.create({}, layer)).stop();
    }
    await driver.close();
  });

  test('another live owner on the same folder is left alone', async () => {
    const dir = join(home, 'shared');
    const first = await BubblewrapDriver.open({ dir, warm: 0 });
    const sandbox = await first.create();
    await sandbox.writeFile('a', 'mine');
    const second = await BubblewrapDriver.open({ dir, warm: 0 });
    expect(second.cleaned).toBe(0);
    const other = await second.create();
    await other.writeFile('a', 'theirs');
    await second.close();
    expect(Buffer.from(await sandbox.readFile('a')).toString()).toBe('mine');
    await first.close();
    expect(readdirSync(join(dir, 'run'))).toEqual(['gate']);
  });

  test('copies that were not finished are never layers and are removed', async () => {
    const dir = join(home, 'partial');
    const first = await BubblewrapDriver.open({ dir, warm: 0 });
    const partial = join(dir, 'layers', 'partial-0123456789ab-d-000000000000000000000000');
    mkdirSync(join(partial, 'fs'), { recursive: true });
    writeFileSync(join(partial, 'layer.json'), '{}');
    await first.close();
    const second = await BubblewrapDriver.open({ dir, warm: 0 });
    expect(existsSync(partial)).toBe(false);
    await second.close();
  });

  test('a killed supervisor breaks its sandboxes and the next create works again', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'supervisor'), warm: 0 });
    const sandbox = await driver.create();
    const saved = await sandbox.snapshot({ durable: true });
    const running = sandbox.exec({ argv: ['sleep', '100'] });
    process.kill(driver.supervisorPid, 'SIGKILL');
    await expect(running).rejects.toMatchObject({ code: 'SandboxBroken' });
    await expect(sandbox.readFile('a')).rejects.toMatchObject({ code: 'SandboxBroken' });
    const next = await driver.create({}, saved);
    expect((await next.exec({ argv: ['echo', 'hi'] })).stdout).toBe('hi\n');
    await sandbox.stop();
    await driver.close();
  });

  test('what a guest swaps while its files are removed leads nowhere else', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'swap'), warm: 0 });
    const victim = join(home, 'victim');
    mkdirSync(victim);
    for (let i = 0; i < 50; i++) writeFileSync(join(victim, `${i}`), 'host');
    const swapper = `
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs("/tmp/a/b/c", exist_ok=True)
for i in range(300): open(f"/tmp/a/b/c/{i}", "w").close()
os.symlink(${JSON.stringify(victim)}, "/tmp/link")
for _ in range(5): os.fork()
while True: libc.renameat2(-100, b"/tmp/a/b", -100, b"/tmp/link", 2)
`;
    for (let round = 0; round < 6; round++) {
      const sandbox = await driver.create({ pids: 100 });
      await sandbox.writeFile('kept', 'x');
      await sandbox.snapshot(); // its file system outlives it
      await sandbox.start({ argv: ['python3', '-c', swapper] });
      await sleep(150);
      await sandbox.stop();
    }
    await driver.close();
    expect(readdirSync(victim)).toHaveLength(50);
  });

  test('a process that does not read its input holds up no call', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'unread'), warm: 0 });
    const sandbox = await driver.create();
    const deaf = await sandbox.start({ argv: ['sleep', '1000'], stdin: 'x'.repeat(1_000_000) });
    expect((await sandbox.exec({ argv: ['echo', 'on'] })).stdout).toBe('on\n');
    await deaf.kill();
    await driver.close();
  });

  test('stopped while it is being paused, nothing of it stays', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'pausing'), warm: 0 });
    if (driver.capabilities.pause === 'freezer') {
      const sandbox = await driver.create();
      await sandbox.start({
        argv: ['sh', '-c', 'for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait'],
      });
      const mine = () => processesNaming([`/tmp/s${sandbox.id}/ws`]).length;
      expect(mine()).toBeGreaterThan(0);
      const pausing = sandbox.pause().catch(() => {});
      await sandbox.stop();
      await pausing;
      expect(mine()).toBe(0);
    }
    await driver.close();
    expect(readdirSync(join(home, 'pausing', 'run')).filter((name) => name !== 'gate')).toEqual([]);
  });

  test('an idle sandbox lets its interpreter go, keeps its files, and wakes', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'idle'), warm: 0, idleMs: 100 });
    const sandbox = await driver.create();
    await sandbox.writeFile('a', 'kept');
    await sandbox.exec({ argv: ['sh', '-c', 'echo > /tmp/b'] });
    const [zygote] = childrenOf(driver.supervisorPid, 'zygote.py');
    const agents = () => childrenOf(zygote!, 'zygote.py').length;
    await until(() => agents() === 0, 'the interpreter goes');
    const [result] = await sandbox.runCode([
      { language: 'python', source: 'print(open("a").read(), open("/tmp/b").read())' },
    ]);
    expect(result!.stdout).toBe('kept \n\n');
    // A process of the guest keeps it awake.
    const sleeper = await sandbox.start({ argv: ['sleep', '1000'] });
    await sleep(400);
    expect(agents()).toBeGreaterThan(0);
    await sleeper.kill();
    await driver.close();
  });

  test('a killed zygote breaks its sandboxes, blames no guest, and the next create works', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'zygote'), warm: 0 });
    const sandbox = await driver.create();
    const running = expect(sandbox.exec({ argv: ['sleep', '30'] })).rejects.toMatchObject({
      code: 'SandboxBroken',
    });
    await sleep(100);
    for (const pid of childrenOf(driver.supervisorPid, 'zygote.py')) process.kill(pid, 'SIGKILL');
    await running;
    await sandbox.stop();
    const next = await driver.create();
    expect((await next.exec({ argv: ['echo', 'up'] })).stdout).toBe('up\n');
    await driver.close();
  });

  test('a sandbox killed from outside is broken, and that is not the guest’s doing', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'outside'), warm: 0 });
    const sandbox = await driver.create();
    const running = sandbox.exec({ argv: ['sleep', '100'] });
    await sleep(100);
    for (const pid of processesNaming([`/tmp/s${sandbox.id}/ws`])) process.kill(pid, 'SIGKILL');
    await expect(running).rejects.toMatchObject({ code: 'SandboxBroken' });
    await sandbox.stop();
    await driver.close();
  });

  test('an agent lost to a memory bomb is replaced over the same files', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'oom'), warm: 0 });
    if (driver.capabilities.memory !== 'cgroup') return driver.close();
    const sandbox = await driver.create({ memoryBytes: 32 << 20, diskBytes: 1 << 20 });
    await sandbox.writeFile('a', 'kept');
    // What pipes hold is nobody's own: the kernel takes the largest process, which the agent is.
    const bomb = await sandbox.exec({
      argv: [
        'perl',
        '-e',
        `select undef, undef, undef, 0.2;
        open F, ">/proc/self/oom_score_adj"; print F 0; close F;
        for (1..60) { pipe(my $r, my $w); fcntl($w, 1031, 1 << 20); push @kept, $r, $w;
          syswrite($w, "x" x 65536) for 1..16 }`,
      ],
    });
    expect(bomb.cause).toBe('out_of_memory');
    expect((await sandbox.usage()).oomKills).toBeGreaterThan(0);
    expect(Buffer.from(await sandbox.readFile('a')).toString()).toBe('kept');
    const layer = await sandbox.snapshot({ onBusy: 'stop' });
    await sandbox.writeFile('a', 'changed');
    await sandbox.rollback(layer);
    expect(Buffer.from(await sandbox.readFile('a')).toString()).toBe('kept');
    await driver.close();
  });

  test('a full workspace: ENOSPC and no kill; later durable layers hold what changed', async () => {
    const dir = join(home, 'full');
    const driver = await BubblewrapDriver.open({ dir, warm: 0 });
    const MiB = 1 << 20;
    const spec = { memoryBytes: 48 * MiB, diskBytes: 192 * MiB };
    const sandbox = await driver.create(spec);
    const sh = (line: string, each = sandbox) => each.exec({ argv: ['sh', '-c', line] });
    const layerBytes = (id: string): number =>
      JSON.parse(readFileSync(join(dir, 'layers', id, 'layer.json'), 'utf8')).bytes;
    const filled = await sh('dd if=/dev/zero of=big bs=1M count=1000');
    expect(filled).toMatchObject({ cause: 'exited', code: 1 });
    expect(filled.stderr).toMatch(/No space left on device/);
    const layers: string[] = [];
    for (let i = 0; i < 4; i++) {
      layers.push(await sandbox.snapshot({ durable: true, onBusy: 'stop' }));
      expect((await sh(`echo ${i} > g${i}; cat g${i}`)).stdout).toBe(`${i}\n`);
    }
    const [first, ...later] = layers.map(layerBytes);
    expect(first).toBeGreaterThan(180 * MiB);
    for (const bytes of later) expect(bytes).toBeLessThan(MiB);
    // The limit still holds beside the layers on disk, here and for who resumes from one.
    const more = 'dd if=/dev/zero of=more bs=64k count=100; rm more';
    expect((await sh(more)).stderr).toMatch(/No space left on device/);
    const resumed = await driver.create(spec, layers[3]!);
    expect((await sh('cat g2; ls', resumed)).stdout).toBe('2\nbig\ng0\ng1\ng2\n');
    expect((await sh(more, resumed)).stderr).toMatch(/No space left on device/);
    // What was removed is room again after the next durable layer, which leaves the old ones behind.
    await sh('rm big');
    expect(layerBytes(await sandbox.snapshot({ durable: true }))).toBeLessThan(MiB);
    const again = await sh('dd if=/dev/zero of=big bs=1M count=180');
    expect(again).toMatchObject({ cause: 'exited', code: 0 });
    await driver.close();
  });

  test('without a byte or an inode left, volatile and durable snapshots work', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'exhausted'), warm: 0 });
    const sandbox = await driver.create({ diskBytes: 4 << 20, inodes: 200 });
    const sh = async (line: string) => (await sandbox.exec({ argv: ['sh', '-c', line] })).stdout;
    const fill =
      'i=0; while true > $$.$i; do i=$((i+1)); done 2> /dev/null; cat /dev/zero > $$.0 2> /dev/null; ls | wc -l';
    expect(Number(await sh(fill))).toBeGreaterThan(100);
    const layers: string[] = [];
    for (let i = 0; i < 6; i++) {
      const durable = i >= 3;
      layers.push(await sandbox.snapshot({ durable }));
      await sh(fill);
    }
    await sandbox.rollback(layers[0]!);
    expect(Number(await sh('ls | wc -l'))).toBeGreaterThan(100);
    await driver.close();
  });

  test('deep histories are squashed and stay whole', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'deep'), warm: 0 });
    const sandbox = await driver.create();
    const layers: string[] = [];
    for (let i = 0; i < 40; i++) {
      await sandbox.writeFile(`f${i}`, `${i}`);
      await sandbox.writeFile('same', `${i}`);
      layers.push(await sandbox.snapshot());
    }
    expect(await sandbox.listFiles('.')).toHaveLength(41);
    await sandbox.rollback(layers[5]!);
    expect(await sandbox.listFiles('.')).toHaveLength(7);
    await sandbox.rollback(layers[39]!);
    expect(Buffer.from(await sandbox.readFile('same')).toString()).toBe('39');
    for (const layer of layers) await driver.dropLayer(layer);
    expect(await sandbox.listFiles('.')).toHaveLength(41);
    await driver.close();
  });

  test('more requests than places wait their turn; none fails', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'pool'), warm: 1, maxLive: 3 });
    const outputs = await Promise.all(
      Array.from({ length: 10 }, async (_, i) => {
        const sandbox = await driver.create();
        const { stdout } = await sandbox.exec({ argv: ['echo', `${i}`] });
        await sandbox.stop();
        return stdout.trim();
      }),
    );
    expect(outputs).toEqual(Array.from({ length: 10 }, (_, i) => `${i}`));
    await driver.close();
  });

  test('a full driver refuses after the wait, and a warm sandbox that died is not handed out', async () => {
    const driver = await BubblewrapDriver.open({
      dir: join(home, 'full'),
      warm: 1,
      maxLive: 2,
      waitMs: 3000,
    });
    const one = await driver.create();
    const outers = () =>
      processesNaming(['--as-pid-1']).filter((pid) => parentOf(pid) === driver.supervisorPid);
    await until(() => outers().length === 2, 'a warm one');
    await sleep(1000); // until it is on the shelf
    const [taken] = processesNaming([`/tmp/s${one.id}/ws`]).filter((pid) => outers().includes(pid));
    for (const pid of outers()) if (pid !== taken) process.kill(pid, 'SIGKILL');
    await until(() => outers().length === 1, 'it ended');
    await sleep(200); // its pid 1 is killed by its end
    const two = await driver.create();
    expect((await two.exec({ argv: ['echo', 'fine'] })).stdout).toBe('fine\n');
    await expect(driver.create()).rejects.toMatchObject({ code: 'SandboxUnavailable' });
    await one.stop();
    await (await driver.create()).stop();
    await driver.close();
  });

  test('close leaves nothing: no process, folder or control group', async () => {
    const dir = join(home, 'closed');
    const driver = await BubblewrapDriver.open({ dir, warm: 1 });
    const sandbox = await driver.create();
    await sandbox.snapshot();
    await sandbox.fork(2);
    const [owner] = readdirSync(join(dir, 'run')).filter((name) => name !== 'gate');
    const pid = driver.supervisorPid;
    await driver.close();
    expect(existsSync(`/proc/${pid}`)).toBe(false);
    expect(readdirSync(join(dir, 'run'))).toEqual(['gate']);
    for (const group of driver.cgroups ? ownerGroups(driver.cgroups, owner!) : [])
      expect(existsSync(group)).toBe(false);
    await expect(driver.create()).rejects.toMatchObject({ code: 'SandboxUnavailable' });
  });

  test('limits a sandbox cannot start with, and specs it cannot give, are usage errors', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'spec'), warm: 0 });
    for (const spec of [{ memoryBytes: 1000 }, { pids: 0 }, { cpus: 0 }, { diskBytes: 1 }])
      await expect(driver.create(spec)).rejects.toMatchObject({ code: 'ConfigInvalid' });
    await expect(driver.create({ network: 'all' as 'none' })).rejects.toMatchObject({
      code: 'ConfigInvalid',
    });
    await driver.close();
  });
});

function parentOf(pid: number): number {
  try {
    return Number(/^PPid:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1]);
  } catch {
    return 0;
  }
}

/** Whether another user could load this checkout: not from below a private home. */
function readableByAll(): boolean {
  for (let path = room; path !== '/'; path = dirname(path))
    if (!(statSync(path).mode & 0o004)) return false;
  return true;
}

const normal =
  process.getuid?.() !== 0
    ? 'the tests already run as a normal user'
    : !probe.ok
      ? probe.reason
      : !readableByAll()
        ? 'this folder is private to root'
        : '';

test.skipIf(normal !== '')(
  `works as a normal user${normal && ` (skipped: ${normal})`}`,
  async () => {
    const dir = mkdtempSync(join(tmpdir(), 'longhaul-normal-'));
    chmodSync(dir, 0o777);
    const script = `
    import { BubblewrapDriver } from ${JSON.stringify(room)};
    const driver = await BubblewrapDriver.open({ dir: ${JSON.stringify(join(dir, 'home'))}, warm: 0 });
    const sandbox = await driver.create();
    const run = async (line) => (await sandbox.exec({ argv: ['sh', '-c', line] })).stdout;
    await sandbox.writeFile('d/a', 'one');
    const volatile = await sandbox.snapshot();
    await run('rm -r d; mkdir d; echo two > d/b; mkdir locked; echo x > locked/x; chmod 500 locked');
    const durable = await sandbox.snapshot({ durable: true });
    await sandbox.rollback(volatile);
    const back = await run('cat d/a; ls d');
    const [child] = await sandbox.fork(1);
    const forked = Buffer.from(await child.readFile('d/a')).toString();
    await driver.close();
    const again = await BubblewrapDriver.open({ dir: ${JSON.stringify(join(dir, 'home'))}, warm: 0 });
    const resumed = await again.create({}, durable);
    const listed = (await resumed.listFiles('d')).map(({ name }) => name);
    const snippet = await resumed.runCode([{ language: 'python', source: 'print(6 * 7)' }]);
    const host = await resumed.exec({ argv: ['sh', '-c', 'cat /etc/shadow; echo $?; id -u'] });
    const bomb = await resumed.runCode([{ language: 'python', source: 'x = bytearray(1 << 30)' }]);
    const forks = await resumed.runCode([{ language: 'python', timeoutMs: 5000, source:
      'import os, time\\ntry:\\n  for i in range(1000):\\n    if os.fork() == 0: time.sleep(9)\\nexcept OSError as e: print(i)' }]);
    await resumed.stop();
    await again.dropLayer(durable);
    const dropped = await again.hasLayer(durable);
    await again.close();
    const { readdirSync } = await import('node:fs');
    const left = readdirSync(${JSON.stringify(join(dir, 'home', 'layers'))}).filter((n) => n === durable);
    console.log(JSON.stringify({ capabilities: again.capabilities, back, forked, listed,
      snippet: snippet[0].stdout, host: host.stdout, bomb: bomb[0].stderr, forks: forks[0].stdout, dropped, left }));
  `;
    const user = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups'];
    const { next } = startScript(script, user);
    const said = await next();
    rmSync(dir, { recursive: true, force: true });
    expect(said).toMatchObject({
      capabilities: { isolation: 'namespaces', layers: 'overlay', ownUid: false },
      back: 'onea\n',
      forked: 'one',
      listed: ['b'],
      snippet: '42\n',
      host: '1\n1000\n',
      dropped: false,
      left: [],
    });
    expect(said.bomb).toMatch(/MemoryError/);
    expect(Number(said.forks)).toBeLessThan(130);
  },
);

const overlaid = process.getuid?.() !== 0 ? 'needs root to mount' : probe.ok ? '' : probe.reason;
test.skipIf(overlaid !== '')(
  `durable layers in a folder on overlayfs, as in a container${overlaid && ` (skipped: ${overlaid})`}`,
  async () => {
    const dir = mkdtempSync(join(tmpdir(), 'longhaul-overlaid-'));
    const mount = [
      ...['unshare', '--mount', 'sh', '-ec'],
      `cd ${dir}; mkdir m; mount -t tmpfs t m; mkdir m/l m/u m/w m/o; mount -t overlay o -o lowerdir=m/l,upperdir=m/u,workdir=m/w m/o; exec "$@"`,
      'sh',
    ];
    const home = JSON.stringify(join(dir, 'm', 'o', 'home'));
    const script = `
      import { BubblewrapDriver } from ${JSON.stringify(room)};
      const driver = await BubblewrapDriver.open({ dir: ${home}, warm: 0 });
      const sandbox = await driver.create();
      const run = async (each, line) => (await each.exec({ argv: ['sh', '-c', line] })).stdout;
      await run(sandbox, 'mkdir d; echo 1 > d/a; echo 2 > b');
      const first = await sandbox.snapshot({ durable: true });
      await run(sandbox, 'rm -r d; mkdir d; echo 3 > d/c');
      const second = await sandbox.snapshot({ durable: true });
      await sandbox.rollback(first);
      const before = await run(sandbox, 'cat d/a; ls d; id -u; touch d/new && echo writable');
      await driver.close();
      const again = await BubblewrapDriver.open({ dir: ${home}, warm: 0 });
      const resumed = await again.create({}, second);
      const after = await run(resumed, 'ls . d');
      const [child] = await resumed.fork(1);
      const forked = await run(child, 'echo 4 >> d/c; cat d/c');
      await again.close();
      console.log(JSON.stringify({ before, after, forked, ownUid: again.capabilities.ownUid }));
    `;
    const said = await startScript(script, mount).next();
    rmSync(dir, { recursive: true, force: true });
    expect(said).toMatchObject({
      before: '1\na\n1000\nwritable\n',
      after: '.:\nb\nd\n\nd:\nc\n',
      forked: '3\n4\n',
    });
  },
);

test('the choice is made by running and said in one line', async () => {
  const dir = join(home, 'choice');
  const chosen = await openSandboxes({ dir, warm: 0 });
  if (probe.ok) {
    expect(chosen.saidAloud).toMatch(/^sandbox: bubblewrap \(.+overlay layers\)$/);
    expect(chosen).toMatchObject({ reason: null, next: null });
  } else {
    expect(chosen.saidAloud).toMatch(/^sandbox: wasm .+bubblewrap/);
    expect(chosen).toMatchObject({ reason: probe.reason, next: probe.next });
  }
  await chosen.driver.close();
  const weaker = await openSandboxes({ dir, prefer: 'wasm' });
  expect(weaker.driver.name).toBe('wasm');
  expect(weaker.saidAloud).toMatch(/weaker boundary, no commands/);
  expect(weaker).toMatchObject({ reason: 'wasm was asked for', next: expect.any(String) });
  await weaker.driver.close();
});

test.skipIf(process.getuid?.() !== 0)(
  'why bubblewrap is not used, and what to do, come with the weaker driver',
  async () => {
    const script = `
      import { openSandboxes } from ${JSON.stringify(room)};
      const { driver, saidAloud, reason, next } = await openSandboxes({ dir: ${JSON.stringify(join(home, 'why'))} });
      await driver.close();
      console.log(JSON.stringify({ name: driver.name, saidAloud, reason, next }));
    `;
    // No capability at all: namespaces cannot be had, whatever the machine allows.
    const bare = ['setpriv', '--bounding-set=-all', '--inh-caps=-all', '--no-new-privs'];
    const said = await startScript(script, bare).next();
    expect(said.name).toBe('wasm');
    expect(said.reason).toMatch(/^bubblewrap: /);
    expect(said.next.length).toBeGreaterThan(0);
    expect(said.saidAloud).toContain(`${said.reason} (${said.next})`);
  },
);

for (const name of ['bubblewrap', 'wasm'] as const) {
  const missing = name === 'bubblewrap' && !probe.ok ? probe.reason : '';
  test.skipIf(missing !== '')(
    `Ctrl-C signals the owner's process group and no process of ${name}${missing && ` (skipped: ${missing})`}`,
    async () => {
      const wasm = name === 'wasm';
      const script = `
        import { openSandboxes } from ${JSON.stringify(room)};
        const { driver } = await openSandboxes({
          dir: ${JSON.stringify(join(home, `interrupted-${name}`))}, prefer: '${name}', warm: 0, processes: 1 });
        const sandbox = await driver.create();
        const run = async (source) =>
          (await sandbox.runCode([{ language: '${wasm ? 'javascript' : 'python'}', source }]))[0];
        const first = await run('print(1)');
        const during = run(${JSON.stringify(
          wasm
            ? 'const end = Date.now() + 1000; while (Date.now() < end); print(2)'
            : 'import time; time.sleep(1); print(2)',
        )});
        process.on('SIGINT', async () => {
          const results = [first, await during, await run('print(3)')];
          await driver.close();
          console.log(JSON.stringify(results.map(({ stdout }) => stdout)));
          process.exit();
        });
        console.log(JSON.stringify('running'));
        setInterval(() => {}, 1000);
      `;
      const { child, next } = startScript(script, [], true);
      expect(await next()).toBe('running');
      process.kill(-child.pid!, 'SIGINT');
      expect(await next()).toEqual(['1\n', '2\n', '3\n']);
    },
  );
}
