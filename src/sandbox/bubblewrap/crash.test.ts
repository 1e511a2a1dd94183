import { spawn } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  utimesSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, test } from 'vitest';
import { probeBubblewrap } from '../index.ts';
import { findCgroups, ownerGroups } from './cgroup.ts';
import { BubblewrapDriver } from './driver.ts';

/**
 * kill -9 of the owner at random moments. LONGHAUL_KILLS says how many; LONGHAUL_SEED where to begin. A
 * failure prints the seed of its moment.
 */

const home = mkdtempSync(join(tmpdir(), 'longhaul-crash-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const skipped = probe.ok ? '' : ` (skipped: ${probe.reason})`;
const KILLS = Number(process.env.LONGHAUL_KILLS ?? 12);
const FIRST = Number(process.env.LONGHAUL_SEED ?? 1);
const room = fileURLToPath(new URL('./driver.ts', import.meta.url));

afterAll(() => rmSync(home, { recursive: true, force: true }));

/** Works until it is killed; each durable layer is written to the report, on disk, before it goes on. */
const OWNER = `
import { fsyncSync, openSync, writeSync } from 'node:fs';
import { BubblewrapDriver } from ${JSON.stringify(room)};
const [dir, report, seed] = process.argv.slice(1);
const out = openSync(report, 'a');
let state = Number(seed);
const random = (below) => (state = (state * 48271) % 2147483647) % below;
const driver = await BubblewrapDriver.open({ dir, warm: 1 });
writeSync(1, 'open\\n');
let sandbox = await driver.create();
const volatile = [];
for (let i = 0; ; i++) {
  await sandbox.writeFile('f' + random(5), 'x'.repeat(random(200000)) + i);
  if (random(3) === 0) await sandbox.exec({ argv: ['sh', '-c', 'rm -rf d; mkdir d; cp f* d; ln -s d l' + i] });
  const next = random(8);
  if (next < 2) volatile.push(await sandbox.snapshot());
  else if (next < 5) {
    const layer = await sandbox.snapshot({ durable: true });
    writeSync(out, layer + '\\n');
    fsyncSync(out);
    if (random(3) === 0) await sandbox.rollback(layer);
  } else if (next === 5 && volatile.length > 0) {
    const layer = volatile[random(volatile.length)];
    await sandbox.rollback(layer);
    if (random(4) === 0) await driver.dropLayer(volatile.splice(volatile.indexOf(layer), 1)[0]);
  } else if (next === 6) {
    const children = await sandbox.fork(2);
    await sandbox.stop();
    await children.pop().stop();
    sandbox = children.pop();
  } else {
    await sandbox.stop();
    sandbox = await driver.create({}, random(2) === 0 ? undefined : volatile.at(-1));
  }
}
`;

/** Processes that hold a file below a folder, or stand in a mount namespace with a mount of its layers. */
function holders(dir: string): string[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name) && Number(name) !== process.pid)
    .filter((pid) => {
      try {
        const open = readdirSync(`/proc/${pid}/fd`).some((fd) => {
          try {
            return readlinkSync(`/proc/${pid}/fd/${fd}`).startsWith(join(dir, 'run'));
          } catch {
            return false;
          }
        });
        return open || readFileSync(`/proc/${pid}/mountinfo`, 'utf8').includes(`${dir}/`);
      } catch {
        return false;
      }
    });
}

function commandOf(pid: string): string {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, 'utf8');
  } catch {
    return '';
  }
}

function groupsOf(owner: string): string[] {
  const cgroups = findCgroups();
  return (cgroups ? ownerGroups(cgroups, owner) : []).filter((path) => existsSync(path));
}

async function until(condition: () => boolean, what: string): Promise<void> {
  for (let i = 0; i < 1000; i++) {
    if (condition()) return;
    await sleep(20);
  }
  throw new Error(`not within 20 s: ${what}`);
}

describe.skipIf(!probe.ok)(`kill -9 of the owner${skipped}`, () => {
  test(`at ${KILLS} random moments: nothing stays, no saved layer is lost, no half-written one is seen`, {
    timeout: 60_000 + KILLS * 20_000,
  }, async () => {
    const dir = join(home, 'driver');
    mkdirSync(join(dir, 'run'), { recursive: true }); // one may die before it makes that
    const reported = new Set<string>();
    let layers = 0;
    for (let kill = 0; kill < KILLS; kill++) {
      const seed = FIRST + kill;
      const report = join(home, `report${seed}`);
      const argv = [
        '--no-warnings',
        '--input-type=module',
        '--eval',
        OWNER,
        dir,
        report,
        `${seed}`,
      ];
      const child = spawn(process.execPath, argv, { stdio: ['ignore', 'pipe', 'inherit'] });
      const ended = new Promise((resolve) => child.once('close', resolve));
      const moment = (seed * 7919) % 1500;
      // One in six dies while it starts; the others once they work.
      if (seed % 6 !== 0)
        await Promise.race([new Promise((resolve) => child.stdout!.once('data', resolve)), ended]);
      await sleep(moment);
      expect(child.exitCode, `seed ${seed}: the owner ended by itself`).toBe(null);
      child.kill('SIGKILL');
      await ended;
      // bubblewrap's child waits for ever where bubblewrap is killed before it has set that up: the next
      // start ends it.
      const waiting = (pid: string) => commandOf(pid).startsWith('bwrap');
      await until(() => holders(dir).every(waiting), `seed ${seed}: all but bubblewrap ended`);
      const orphans = holders(dir);
      if (existsSync(report))
        for (const line of readFileSync(report, 'utf8').trim().split('\n'))
          if (line) reported.add(line);

      const owners = readdirSync(join(dir, 'run')).filter((name) => name !== 'gate');
      // Killed between making its folder and saying whose it is: kept for a minute, in case it starts.
      for (const owner of owners.filter(
        (each) => !existsSync(join(dir, 'run', each, 'owner.json')),
      ))
        utimesSync(join(dir, 'run', owner), 0, 0);
      const driver = await BubblewrapDriver.open({ dir, warm: 0 });
      await until(
        () => orphans.every((pid) => !existsSync(`/proc/${pid}`)),
        `seed ${seed}: the next start ended bubblewrap`,
      );
      const left = readdirSync(join(dir, 'run')).filter((name) => owners.includes(name));
      expect(left, `seed ${seed}: folders of owners`).toEqual([]);
      expect(owners.flatMap(groupsOf), `seed ${seed}: control groups`).toEqual([]);
      const names = readdirSync(join(dir, 'layers'));
      expect(
        names.filter((name) => !/^d-[0-9a-f]{64}$/.test(name)),
        `seed ${seed}: partial layers`,
      ).toEqual([]);
      const last = kill === KILLS - 1;
      const states = new Map<string, string>();
      // Every file of every layer now and then, since there are more each time.
      for await (const { id, state } of driver.verifyLayers({ full: last || kill % 10 === 9 }))
        states.set(id, state);
      layers = states.size;
      for (const [id, state] of states) expect(state, `seed ${seed}: ${id}`).toBe('whole');
      for (const id of reported) expect(states.get(id), `seed ${seed}: saved ${id}`).toBe('whole');
      const some = [...reported].at(-1);
      if (some) await (await driver.create({}, some)).stop();
      await driver.close();
    }
    process.stderr.write(`${KILLS} kills, ${reported.size} layers reported, ${layers} whole\n`);
    expect(reported.size).toBeGreaterThan(0);
  });

  const root = process.getuid?.() !== 0 ? ' (skipped: needs root to enter a namespace)' : '';
  test.skipIf(root !== '')(
    `a process left among the owner's mounts ends at the next start, without control groups too${root}`,
    async () => {
      const dir = join(home, 'left');
      const owner = `
      import { BubblewrapDriver } from ${JSON.stringify(room)};
      const driver = await BubblewrapDriver.open({ dir: process.argv[1], warm: 0, cgroups: false });
      console.log(driver.supervisorPid);
      setInterval(() => {}, 1000);`;
      const argv = ['--no-warnings', '--input-type=module', '--eval', owner, dir];
      const child = spawn(process.execPath, argv, { stdio: ['ignore', 'pipe', 'inherit'] });
      const said = await new Promise((resolve) => child.stdout!.once('data', resolve));
      const inside = ['-c', `exec nsenter -t ${Number(said)} -m sleep 1000`];
      const left = spawn('sh', inside, { stdio: 'ignore' });
      const ended = new Promise((resolve) => left.once('exit', (_, signal) => resolve(signal)));
      await until(() => commandOf(`${left.pid}`).startsWith('sleep'), 'it is inside');
      child.kill('SIGKILL');
      await until(() => !existsSync(`/proc/${Number(said)}`), 'the supervisor ended');
      expect(commandOf(`${left.pid}`)).toMatch(/^sleep/);
      const driver = await BubblewrapDriver.open({ dir, warm: 0, cgroups: false });
      expect(await ended).toBe('SIGKILL');
      expect(driver.cleaned).toBe(1);
      await driver.close();
    },
  );
});
