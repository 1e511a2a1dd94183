import { spawnSync } from 'node:child_process';
import { chmodSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { DRIVER_PROBES, probeBubblewrap } from '../../sandbox/index.ts';
import { type SandboxReport, verdictOf } from './sandbox-doctor.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-sandbox-doctor-'));
const program = join(import.meta.dirname, '..', '..', '..', 'bin', 'longhaul.js');
const probe = await probeBubblewrap({ dir: join(home, 'sandbox') });
const without = probe.ok ? '' : ` (skipped: ${probe.reason})`;
const root = process.getuid?.() === 0;
const needsRoot = root ? without : ' (skipped: needs root)';

afterAll(() => rmSync(home, { recursive: true, force: true }));

function doctor(args: string[], prefix: string[] = [], folder = home) {
  const [command = '', ...rest] = [
    ...prefix,
    ...[process.execPath, program, 'sandbox', 'doctor', '--home', folder, ...args],
  ];
  const { status, stdout, stderr } = spawnSync(command, rest, { encoding: 'utf8' });
  return { status, stdout, stderr };
}

const held = { part: 'memory', ok: true, how: 'cgroup v2', found: '' };
test('the verdict is that of the default driver’s limits', () => {
  expect(verdictOf({ default: 'bubblewrap', limits: [held] })).toBe(0);
  expect(verdictOf({ default: 'bubblewrap', limits: [held, { ...held, ok: false }] })).toBe(1);
  expect(verdictOf({ default: null, limits: [] })).toBe(3);
});

test.skipIf(without !== '')(
  `every limit is tried, and the document says what the table says${without}`,
  () => {
    const json = doctor(['--json']);
    const report = JSON.parse(json.stdout) as SandboxReport & { verdict: number };
    expect(report.default).toBe('bubblewrap');
    expect(report.drivers.map(({ name }) => name)).toEqual(DRIVER_PROBES.map(({ name }) => name));
    expect(report.limits.map(({ part }) => part)).toEqual([
      ...['memory', 'cpu', 'processes', 'disk', 'inodes', 'time', 'network'],
      ...['seccomp', 'privileges', 'own uid'],
    ]);
    // These hold on every machine where bubblewrap runs at all.
    for (const part of ['disk', 'inodes', 'time', 'network', 'seccomp', 'privileges'])
      expect(report.limits.find((each) => each.part === part)).toMatchObject({ ok: true });
    for (const each of [...report.limits, ...report.machine])
      expect(each.ok || (each.next ?? '') !== '').toBe(true);
    expect(json.status).toBe(report.limits.every(({ ok }) => ok) ? 0 : 1);
    expect(report.verdict).toBe(json.status);
    expect(report.durable).toEqual({ count: 0, bytes: 0 });

    const table = doctor([]);
    expect(table.status).toBe(json.status);
    for (const { part, how } of report.limits)
      expect(table.stdout).toMatch(new RegExp(`(ok|weak) +${part} +${how}`));
  },
);

test.skipIf(needsRoot !== '')(
  `a present bubblewrap that does not run is told with the reason and the next step${needsRoot}`,
  () => {
    const hidden = [
      ...['unshare', '--mount', 'sh', '-ec'],
      'mount --bind /dev/null "$(command -v bwrap)"; exec "$@"',
      'sh',
    ];
    const { status, stdout } = doctor(['--json'], hidden);
    const report = JSON.parse(stdout) as SandboxReport;
    expect(report.drivers[0]).toMatchObject({ name: 'bubblewrap', ok: false });
    expect(report.drivers[0]).toHaveProperty('reason', expect.stringMatching(/^bubblewrap: /));
    expect(report.drivers[0]).toHaveProperty('next', expect.stringMatching(/\w+/));
    expect(report.default).not.toBe('bubblewrap');
    expect(status).toBe(report.default === null ? 3 : 1);
    expect(report.limits.some(({ ok }) => !ok)).toBe(report.default !== null);
  },
);

test.skipIf(needsRoot !== '')(
  `a user without control groups is told what is weaker${needsRoot}`,
  () => {
    const folder = mkdtempSync(join(tmpdir(), 'longhaul-sandbox-doctor-user-'));
    chmodSync(folder, 0o777);
    const user = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups'];
    const { status, stdout, stderr } = doctor(['--json'], user, join(folder, 'home'));
    rmSync(folder, { recursive: true, force: true });
    expect(stderr).toBe('');
    const report = JSON.parse(stdout) as SandboxReport;
    const part = (name: string) => report.limits.find((each) => each.part === name);
    expect(status).toBe(1);
    expect(report.default).toBe('bubblewrap');
    expect(part('memory')).toMatchObject({ ok: false, how: 'rlimit' });
    expect(part('memory')!.found).toMatch(/for each process/);
    expect(part('cpu')).toMatchObject({ ok: false, how: 'none' });
    expect(part('own uid')).toMatchObject({ ok: false, how: 'user namespace' });
    expect(part('disk')).toMatchObject({ ok: true });
  },
);
