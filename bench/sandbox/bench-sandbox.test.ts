import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { BubblewrapDriver, probeBubblewrap } from '../../src/sandbox/index.ts';
import { coldPython, RuncBundle } from './baseline.ts';
import { QUANTITIES, takeCensus, trend } from './census.ts';
import { Rates, seconds } from './measure.ts';
import { idleMemoryRow } from './memory.ts';
import { descendants, membersOf, privateBytes } from './processes.ts';
import { haunt, LITTERING, residueAfterRollback } from './residue.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-bench-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const without = probe.ok ? '' : ` (skipped: ${probe.reason})`;
const runc = spawnSync('runc', ['--version'], { stdio: 'ignore' });
const withoutRunc = runc.error ? ' (skipped: runc is not installed)' : '';

afterAll(() => rmSync(home, { recursive: true, force: true }));

describe('trend', () => {
  const series = (value: (i: number) => number) =>
    Array.from({ length: 20 }, (_, i) => ({ at: 1000 + i * 500, value: value(i) }));

  test('a leak of one in 500 is found over the whole span', () => {
    expect(trend(series((i) => 40 + i))).toBeCloseTo(19);
  });

  test('a level with outliers has none', () => {
    expect(trend(series((i) => (i % 7 === 3 ? 90 : 40)))).toBe(0);
  });

  test('what falls is no growth', () => {
    expect(trend(series((i) => 40 - i))).toBeLessThan(0);
  });

  test('a leak between noise is found', () => {
    expect(trend(series((i) => 40 + i + (i % 3)))).toBeGreaterThan(15);
  });
});

test('rates speak of all that was done, not of the mean of slices', () => {
  const rates = new Rates();
  rates.add(100, 1);
  rates.add(100, 4);
  expect(rates.rate).toBe(40);
  expect(rates.p50).toBe(25);
});

test('workers do exactly the jobs that were asked for', async () => {
  let done = 0;
  await seconds(2, 7, async () => {
    done++;
  });
  expect(done).toBe(7);
});

describe.skipIf(without !== '')(`on real sandboxes${without}`, () => {
  test('what an execution leaves is seen by the next one, unless a rollback takes it away', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'residue'), warm: 0 });
    try {
      const sandbox = await driver.create();
      const clean = await sandbox.snapshot();
      const snippet = async (source: string) =>
        (await sandbox.runCode([{ language: 'python', source }]))[0]!.stdout.trim();
      expect(await snippet(LITTERING)).toBe('clean');
      await haunt(sandbox);
      expect(await snippet(LITTERING)).toMatch(/\/workspace\/.*\/tmp\/.*process/);
      await sandbox.rollback(clean);
      expect(await snippet(LITTERING)).toBe('clean');
      // A layer that holds a leftover is no clean base: the test must say so.
      const dirty = await sandbox.snapshot({ onBusy: 'stop' });
      expect(await residueAfterRollback(sandbox, dirty)).toMatch(/first execution saw .*workspace/);
    } finally {
      await driver.close();
    }
  });

  test('a cold bubblewrap that prints something else is no baseline', async () => {
    await coldPython('print(1)', '1\n');
    await expect(coldPython('print(2)', '1\n')).rejects.toThrow(/printed "2/);
    await expect(coldPython('raise SystemExit(3)', '')).rejects.toThrow(/ended with 3/);
  });

  test('the census counts what is there', async () => {
    const dir = join(home, 'census');
    const driver = await BubblewrapDriver.open({ dir, warm: 0 });
    try {
      const before = await takeCensus(driver, dir);
      expect(Object.keys(before)).toEqual(Object.keys(QUANTITIES));
      const sandbox = await driver.create();
      await sandbox.writeFile('file', 'x'.repeat(100_000));
      const layer = await sandbox.snapshot({ durable: true });
      const during = await takeCensus(driver, dir);
      for (const quantity of [
        'mounts of the supervisor',
        'processes',
        'inodes on disk',
        'MiB on disk',
        'entries in volatile layers',
      ] as const)
        expect(during[quantity], quantity).toBeGreaterThan(before[quantity]);
      if (driver.cgroups) expect(during['control groups']).toBeGreaterThan(0);
      await sandbox.stop();
      await driver.dropLayer(layer);
      const after = await takeCensus(driver, dir);
      expect(after.processes).toBe(before.processes);
      expect(after['mounts of the supervisor']).toBe(before['mounts of the supervisor']);
      expect(after['inodes on disk']).toBe(before['inodes on disk']);
    } finally {
      await driver.close();
    }
  });

  test('processes of one sandbox are found, and their private memory', async () => {
    const driver = await BubblewrapDriver.open({ dir: join(home, 'members'), warm: 0 });
    try {
      const before = descendants(driver.supervisorPid);
      const sandbox = await driver.create();
      const fresh = [...descendants(driver.supervisorPid)].filter((pid) => !before.has(pid));
      const members = [...membersOf(driver, sandbox.id)];
      const all = new Set([...fresh, ...members]);
      expect(all.size).toBeGreaterThan(0);
      if (driver.cgroups) expect(members.length).toBeGreaterThan(0);
      for (const pid of all) expect(privateBytes(pid)).toBeGreaterThan(0);
      await sandbox.stop();
      expect([...membersOf(driver, sandbox.id)]).toEqual([]);
    } finally {
      await driver.close();
    }
    const row = await idleMemoryRow(home, { quick: true, progress: () => {} });
    expect(row.value).toBeGreaterThan(0.1);
    expect(row.baseline).toBeGreaterThan(0.1);
  });
});

test.skipIf(withoutRunc !== '')(
  `runc runs the bundle and leaves nothing${withoutRunc}`,
  async () => {
    const bundles = () => readdirSync(tmpdir()).filter((name) => name.startsWith('longhaul-runc-'));
    const before = bundles();
    const bundle = new RuncBundle(
      'import os\nprint(os.getuid() in (0, 1000), os.path.exists("/etc/passwd"), os.access("/usr", os.W_OK), len(os.listdir("/sys")) if os.path.exists("/sys") else 0)',
    );
    await bundle.run('True False False 0\n');
    await expect(bundle.run('something else\n')).rejects.toThrow(/runc printed/);
    bundle.remove();
    expect(bundles()).toEqual(before);
    const groups = existsSync('/sys/fs/cgroup/pids') ? readdirSync('/sys/fs/cgroup/pids') : [];
    expect(groups.filter((name) => name.startsWith(`longhaul-bench-${process.pid}`))).toEqual([]);
    expect(readFileSync('/proc/self/mounts', 'utf8')).not.toContain('longhaul-runc-');
  },
);
