import { execFileSync } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { probeBubblewrap, type Sandbox } from '../index.ts';
import { BubblewrapDriver } from './driver.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-layers-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const skipped = probe.ok ? '' : ` (skipped: ${probe.reason})`;
afterAll(() => rmSync(home, { recursive: true, force: true }));

const MiB = 1 << 20;
const open = (dir: string) => BubblewrapDriver.open({ dir, warm: 0 });
const sh = async (sandbox: Sandbox, line: string) => {
  const { stdout, stderr } = await sandbox.exec({ argv: ['sh', '-c', line] });
  return stdout + stderr;
};
const layersOf = (dir: string) =>
  readdirSync(join(dir, 'layers')).filter((name) => name.startsWith('d-'));
/** Makes layers look old that were saved more than `ms` ago. */
function ageLayers(dir: string, ms = 0): void {
  const before = new Date(Date.now() - 2 * 3_600_000);
  for (const id of layersOf(dir)) {
    const path = join(dir, 'layers', id);
    try {
      if (Date.now() - statSync(path).mtimeMs >= ms) utimesSync(path, before, before);
    } catch {
      // removed meanwhile
    }
  }
}
/** As if the machine had been started again since: layers of another boot are not trusted. */
function forgetBoot(dir: string, id: string): void {
  const path = join(dir, 'layers', id, 'layer.json');
  const script = `
import hashlib, json, sys
fields = json.load(open(sys.argv[1])); del fields["sum"]; fields["boot"] = "another"
text = json.dumps(fields)[:-1]
open(sys.argv[1], "w").write('%s,"sum":"%s"}' % (text, hashlib.sha256(text.encode()).hexdigest()))`;
  execFileSync('/usr/bin/python3', ['-c', script, path]);
}
const reports = async (driver: BubblewrapDriver, full: boolean) => {
  const found: Record<string, string> = {};
  for await (const { id, state } of driver.verifyLayers({ full })) found[id] = state;
  return found;
};
/** Everything with its times set, so that two sandboxes can make the same. */
const SAME =
  'mkdir d; echo same > d/a; ln -s d/a l; truncate -s 1M hole; echo x >> hole; find . -exec touch -hd @1000 {} +';

describe.skipIf(!probe.ok)(`durable layers${skipped}`, () => {
  test('nothing changed makes no second layer; the same content over the same parents is one', async () => {
    const dir = join(home, 'same');
    const driver = await open(dir);
    const [one, two] = await Promise.all([driver.create(), driver.create()]);
    for (const sandbox of [one, two]) await sh(sandbox, SAME);
    const first = await one.snapshot({ durable: true });
    expect(first).toMatch(/^d-/);
    expect(await one.snapshot({ durable: true })).toBe(first);
    expect(await two.snapshot({ durable: true })).toBe(first);
    expect(layersOf(dir)).toEqual([first]);
    await one.rollback(first);
    await one.exec({ argv: ['ls'] });
    expect(await one.snapshot({ durable: true })).toBe(first);
    await sh(two, 'chmod 700 d');
    const other = await two.snapshot({ durable: true });
    expect(other).not.toBe(first);
    // The same change over another parent is another layer.
    await sh(one, 'touch -d @5 new; touch -d @5 .');
    await sh(two, 'touch -d @5 new; touch -d @5 .');
    expect(await one.snapshot({ durable: true })).not.toBe(await two.snapshot({ durable: true }));
    expect(layersOf(dir)).toHaveLength(4);
    await driver.close();
  });

  test('zeros and holes are the same content, whatever the file system makes of them', async () => {
    const dir = join(home, 'zeros');
    const driver = await open(dir);
    const [one, two] = await Promise.all([driver.create(), driver.create()]);
    await sh(one, 'truncate -s 1000000 f; touch -d @9 f .');
    await sh(two, 'head -c 1000000 /dev/zero > f; touch -d @9 f .');
    expect(await one.snapshot({ durable: true })).toBe(await two.snapshot({ durable: true }));
    await driver.close();
  });

  test('two drivers that make the same layer at once make one, which both can use', async () => {
    const dir = join(home, 'race');
    const drivers = await Promise.all([open(dir), open(dir)]);
    for (let round = 0; round < 6; round++) {
      const sandboxes = await Promise.all(drivers.map((driver) => driver.create()));
      for (const each of sandboxes) await sh(each, `${SAME}; echo ${round} > r; touch -d @2 r .`);
      const made = await Promise.all(sandboxes.map((each) => each.snapshot({ durable: true })));
      expect(made[0]).toBe(made[1]);
      await sandboxes[0]!.stop();
      await drivers[0]!.dropLayer(made[0]!);
      expect(await sh(sandboxes[1]!, 'cat d/a r')).toBe(`same\n${round}\n`);
      // Saved again it is there again.
      expect(await drivers[0]!.hasLayer(made[0]!)).toBe(false);
      expect(await sandboxes[1]!.snapshot({ durable: true })).toBe(made[0]);
      expect(await drivers[0]!.hasLayer(made[0]!)).toBe(true);
      await sandboxes[1]!.stop();
    }
    expect(readdirSync(join(dir, 'layers')).filter((name) => !name.startsWith('d-'))).toEqual([]);
    await Promise.all(drivers.map((driver) => driver.close()));
  });

  test('layers of version 1 still open', async () => {
    const dir = join(home, 'old');
    const first = await open(dir);
    const sandbox = await first.create();
    await sandbox.writeFile('a', 'old');
    const layer = await sandbox.snapshot({ durable: true });
    await first.close();
    const old = `d-${'ab'.repeat(12)}`;
    const place = join(dir, 'layers', old);
    execFileSync('mv', [join(dir, 'layers', layer), place]);
    const { uid, bytes, inodes } = JSON.parse(readFileSync(join(place, 'layer.json'), 'utf8'));
    const meta = {
      version: 1,
      id: old,
      uid,
      parents: [],
      bytes,
      inodes,
      createdAt: '',
      internal: false,
    };
    writeFileSync(join(place, 'layer.json'), JSON.stringify(meta));
    const second = await open(dir);
    expect(await reports(second, true)).toEqual({ [old]: 'unverifiable' });
    const resumed = await second.create({}, old);
    expect(await sh(resumed, 'cat a; echo new > b')).toBe('old');
    const above = await resumed.snapshot({ durable: true });
    await resumed.rollback(old);
    await resumed.rollback(above);
    expect(await sh(resumed, 'cat a b')).toBe('oldnew\n');
    await second.close();
  });

  test('a layer of an earlier boot is looked at once, and one that changed is damaged', async () => {
    const dir = join(home, 'boot');
    const first = await open(dir);
    const sandbox = await first.create();
    await sh(sandbox, 'echo one > a; mkdir d; echo two > d/b');
    const below = await sandbox.snapshot({ durable: true });
    await sh(sandbox, 'echo three > c');
    const top = await sandbox.snapshot({ durable: true });
    await first.close();
    forgetBoot(dir, below);
    const second = await open(dir);
    expect(await reports(second, false)).toEqual({ [below]: 'unverified', [top]: 'whole' });
    await (await second.create({}, top)).stop();
    expect(await reports(second, false)).toEqual({ [below]: 'whole', [top]: 'whole' });
    await second.close();

    rmSync(join(dir, 'layers', below, 'verified'));
    const file = join(dir, 'layers', below, 'fs', 'd', 'b');
    writeFileSync(file, 'TWO\n'); // same size, and even the same time
    execFileSync('touch', ['-r', join(dir, 'layers', below, 'fs', 'a'), file]);
    const third = await open(dir);
    for (const layer of [below, top])
      await expect(third.create({}, layer)).rejects.toMatchObject({
        code: 'LayerDamaged',
        class: 'terminal',
        next: expect.stringMatching(/backup|earlier step/),
      });
    const fresh = await third.create();
    await expect(fresh.rollback(top)).rejects.toMatchObject({ code: 'LayerDamaged' });
    await fresh.writeFile('a', 'still usable');
    await fresh.snapshot({ durable: true });
    expect(await reports(third, true)).toMatchObject({ [below]: 'damaged', [top]: 'whole' });
    await third.close();
  });

  test('the same content saved again replaces a damaged layer', async () => {
    const dir = join(home, 'healed');
    const first = await open(dir);
    const sandbox = await first.create();
    await sh(sandbox, SAME);
    const layer = await sandbox.snapshot({ durable: true });
    await first.close();
    forgetBoot(dir, layer);
    writeFileSync(join(dir, 'layers', layer, 'fs', 'd', 'a'), 'SAME\n');
    const second = await open(dir);
    const again = await second.create();
    await sh(again, SAME);
    expect(await again.snapshot({ durable: true })).toBe(layer);
    expect(await reports(second, true)).toEqual({ [layer]: 'whole' });
    expect(await sh(await second.create({}, layer), 'cat d/a')).toBe('same\n');
    await second.close();
  });

  test.each(['changed', 'cut short', 'missing'])(
    'a description that is %s is a damaged layer',
    async (how) => {
      const dir = join(home, `description-${how}`);
      const driver = await open(dir);
      const sandbox = await driver.create();
      await sandbox.writeFile('a', 'x');
      const layer = await sandbox.snapshot({ durable: true });
      await sandbox.stop();
      const path = join(dir, 'layers', layer, 'layer.json');
      const text = readFileSync(path, 'utf8');
      if (how === 'missing') rmSync(path);
      else
        writeFileSync(
          path,
          how === 'changed' ? text.replace(/"bytes": \d+/, '"bytes": 0') : text.slice(0, 40),
        );
      expect(await driver.hasLayer(layer)).toBe(false);
      await expect(driver.create({}, layer)).rejects.toMatchObject({ code: 'LayerDamaged' });
      expect(await reports(driver, false)).toEqual({ [layer]: 'damaged' });
      await driver.dropLayer(layer);
      expect(layersOf(dir)).toEqual([]);
      await driver.close();
    },
  );

  test('what another process uses is not removed, by drop or by prune', async () => {
    const dir = join(home, 'used');
    const [mine, theirs] = await Promise.all([open(dir), open(dir)]);
    const sandbox = await mine.create();
    await sandbox.writeFile('a', 'base');
    const below = await sandbox.snapshot({ durable: true });
    await sandbox.writeFile('b', 'top');
    const top = await sandbox.snapshot({ durable: true });
    ageLayers(dir);
    await theirs.dropLayer(below);
    await theirs.dropLayer(top);
    expect((await theirs.prune(async () => new Set())).removed).toEqual([]);
    expect(await sh(sandbox, 'cat a b')).toBe('basetop');
    // A volatile snapshot stands on them too, after its sandbox has gone.
    await sandbox.writeFile('c', 'volatile');
    const volatile = await sandbox.snapshot();
    await sandbox.stop();
    ageLayers(dir);
    expect((await theirs.prune(async () => new Set())).removed).toEqual([]);
    const again = await mine.create({}, volatile);
    expect(await sh(again, 'cat a b c')).toBe('basetopvolatile');
    await again.stop();
    await mine.dropLayer(volatile);
    // The lock is let go of a moment after the call.
    let report = await theirs.prune(async () => new Set());
    for (let i = 0; i < 500 && report.removed.length === 0; i++) {
      await new Promise((resolve) => setTimeout(resolve, 10));
      report = await theirs.prune(async () => new Set());
    }
    expect(new Set(report.removed)).toEqual(new Set([below, top]));
    expect(report.bytesFreed).toBeGreaterThan(0);
    expect(layersOf(dir)).toEqual([]);
    await Promise.all([mine.close(), theirs.close()]);
  });

  test('prune keeps what is named, what that stands on, and what is fresh', async () => {
    const dir = join(home, 'prune');
    const driver = await open(dir);
    const sandbox = await driver.create();
    const layers: string[] = [];
    for (const name of ['a', 'b', 'c']) {
      await sandbox.writeFile(name, name);
      layers.push(await sandbox.snapshot({ durable: true }));
    }
    const [a, b, c] = layers as [string, string, string];
    await sandbox.stop();
    expect((await driver.prune(async () => new Set())).removed).toEqual([]);
    ageLayers(dir);
    const named = async () => {
      // Named after the candidates were fixed.
      return new Set([b]);
    };
    expect(await driver.prune(named)).toMatchObject({ removed: [c], kept: 2 });
    // A layer that is saved again is fresh again: its run has not named it yet.
    const back = await driver.create({}, b);
    expect(await back.snapshot({ durable: true })).toBe(b);
    await back.writeFile('c', 'c');
    await back.stop();
    ageLayers(dir);
    expect((await driver.prune(async () => new Set())).removed).toHaveLength(2);
    expect(await driver.hasLayer(a)).toBe(false);
    await driver.close();
  });

  test('layers come and go in several processes at once, and none that is used is lost', async () => {
    const dir = join(home, 'churn');
    const drivers = await Promise.all([open(dir), open(dir)]);
    let over = false;
    const pruning = (async () => {
      while (!over) {
        // An hour, shortened: it covers the moment between a layer's making and its use.
        ageLayers(dir, 300);
        await drivers[1]!.prune(async () => new Set());
      }
    })();
    const work = drivers.map(async (driver, i) => {
      for (let round = 0; round < 8; round++) {
        const sandbox = await driver.create();
        for (let j = 0; j < 3; j++) {
          await sh(sandbox, `echo ${i}${round}${j} > f${j}; mkdir -p d; touch d/${j}`);
          await sandbox.snapshot({ durable: true });
        }
        expect(await sh(sandbox, 'cat f*; ls d')).toBe(
          `${[0, 1, 2].map((j) => `${i}${round}${j}\n`).join('')}0\n1\n2\n`,
        );
        await sandbox.stop();
      }
    });
    await Promise.all(work).finally(() => {
      over = true;
    });
    await pruning;
    await Promise.all(drivers.map((driver) => driver.close()));
  });

  test('a deep durable history is merged by its newest layers, not copied whole', async () => {
    const dir = join(home, 'deep');
    const driver = await open(dir);
    const sandbox = await driver.create();
    await sh(
      sandbox,
      'head -c 20000000 /dev/urandom > big; mkdir t; for i in $(seq 300); do echo $i > t/$i; done',
    );
    const base = await sandbox.snapshot({ durable: true });
    for (let i = 0; i < 60; i++) {
      await sh(sandbox, `echo ${i} > f${i % 7}; rm -f t/${i + 1}`);
      await sandbox.snapshot({ durable: true });
    }
    const depth = () =>
      Math.max(
        ...layersOf(dir).map(
          (id) =>
            JSON.parse(readFileSync(join(dir, 'layers', id, 'layer.json'), 'utf8')).parents.length,
        ),
      );
    expect(depth()).toBeLessThan(32);
    const big = layersOf(dir).filter((id) => existsSync(join(dir, 'layers', id, 'fs', 'big')));
    expect(big).toEqual([base]);
    expect(await sh(sandbox, 'cat f0 f3; ls t | wc -l')).toBe('56\n59\n240\n');
    await driver.close();
  });
});

describe.skipIf(!probe.ok)(`disk limits of layers${skipped}`, () => {
  test('a fork counts what its parent’s layers show, and has the rest', async () => {
    const driver = await open(join(home, 'fork-limit'));
    const parent = await driver.create({ diskBytes: 64 * MiB });
    await sh(parent, 'head -c 40000000 /dev/zero > a');
    const [child] = await parent.fork(1);
    const fill = 'head -c 60000000 /dev/zero > b; stat -c %s b';
    const rest = async (sandbox: Sandbox) =>
      Number((await sh(sandbox, fill)).match(/^(\d+)$/m)![1]);
    const room = await rest(child!);
    expect(room).toBeLessThan(64 * MiB - 40_000_000);
    expect(room).toBeGreaterThan(20_000_000);
    const [grandchild] = await child!.fork(1);
    expect(await rest(grandchild!)).toBeLessThan(2 * MiB);
    // What the parent threw away does not count, though its layers hold it.
    await sh(parent, 'rm a; echo small > a');
    await parent.snapshot();
    const [light] = await parent.fork(1);
    expect(await rest(light!)).toBeGreaterThan(55_000_000);
    await driver.close();
  });

  const root = process.getuid?.() !== 0 ? ' (skipped: needs root to mount)' : '';
  test.skipIf(root !== '')(
    `a full host disk: DiskFull, no half layer, a usable sandbox${root}`,
    async () => {
      const dir = join(home, 'small');
      mkdirSync(dir);
      execFileSync('sh', ['-c', `mount -t tmpfs -o size=24m tmpfs ${dir}`]);
      try {
        const driver = await open(dir);
        const sandbox = await driver.create({ diskBytes: 64 * MiB });
        await sandbox.writeFile('kept', 'kept');
        const layer = await sandbox.snapshot({ durable: true });
        await sh(sandbox, 'head -c 30000000 /dev/urandom > big');
        await expect(sandbox.snapshot({ durable: true })).rejects.toMatchObject({
          code: 'DiskFull',
          class: 'pause',
        });
        expect(readdirSync(join(dir, 'layers'))).toEqual([layer]);
        expect(await sh(sandbox, 'cat kept; stat -c %s big')).toBe('kept30000000\n');
        // Volatile layers need none of that disk.
        const volatile = await sandbox.snapshot();
        await sh(sandbox, 'rm big; echo less > small');
        await sandbox.snapshot({ durable: true, onBusy: 'stop' }).catch(() => null);
        await sandbox.rollback(volatile);
        expect(await sh(sandbox, 'stat -c %s big')).toBe('30000000\n');
        await sandbox.rollback(layer);
        expect(await sh(sandbox, 'ls')).toBe('kept\n');
        // Room again, by the host's own files or by a layer.
        await sandbox.writeFile('more', 'more');
        const more = await sandbox.snapshot({ durable: true });
        await sandbox.stop();
        execFileSync('sh', ['-c', `cat /dev/zero > ${dir}/host 2> /dev/null || true`]);
        await driver.dropLayer(more);
        expect(await driver.hasLayer(more)).toBe(false);
        expect(readdirSync(join(dir, 'layers'))).toEqual([layer]);
        await driver.close();
      } finally {
        execFileSync('sh', ['-c', `umount -l ${dir}`]);
      }
    },
  );
});
