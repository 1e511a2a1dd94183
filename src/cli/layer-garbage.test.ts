import { mkdtempSync, readdirSync, rmSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import {
  BubblewrapDriver,
  type LayerId,
  probeBubblewrap,
  type Sandbox,
  type SandboxDriver,
} from '../sandbox/index.ts';
import { openStore, type Store } from '../store/index.ts';
import { newRunId, SPEC, TestHomes } from '../store/test-home.ts';
import { collectLayers } from './layer-garbage.ts';

const folder = mkdtempSync(join(tmpdir(), 'longhaul-garbage-'));
const dir = join(folder, 'sandbox');
const probe = await probeBubblewrap({ dir: join(folder, 'probe') });
const skipped = probe.ok ? '' : ` (skipped: ${probe.reason})`;
const homes = new TestHomes();
let store: Store;
let driver: SandboxDriver;

beforeAll(async () => {
  if (!probe.ok) return;
  store = await openStore({ home: await homes.initialised() });
  driver = await BubblewrapDriver.open({ dir, warm: 0 });
});
afterAll(async () => {
  await driver?.close();
  await store?.close();
  await homes.removeAll();
  rmSync(folder, { recursive: true, force: true });
});

const collect = (databaseUrl?: string) =>
  collectLayers({ dir, databaseUrl, names: store.log, driver });
const anHourLater = () => {
  const before = new Date(Date.now() - 2 * 3_600_000);
  for (const id of readdirSync(join(dir, 'layers')))
    utimesSync(join(dir, 'layers', id), before, before);
  rmSync(join(dir, 'collected'), { force: true });
};
const save = async (sandbox: Sandbox, name: string): Promise<LayerId> => {
  await sandbox.writeFile(name, name);
  return sandbox.snapshot({ durable: true });
};

test.skipIf(!probe.ok)(
  `layers that logs name stay, with what they stand on${skipped}`,
  async () => {
    const sandbox = await driver.create();
    const layers: LayerId[] = [];
    for (const name of ['a', 'b', 'c', 'd']) layers.push(await save(sandbox, name));
    const [a, b, c, d] = layers as [LayerId, LayerId, LayerId, LayerId];
    // A hosted run that goes on, and one that was written whole and has ended.
    const running = newRunId();
    await store.log.create(running, SPEC);
    const lease = (await store.log.acquire(running, 'worker', 600_000))!;
    const saved = (layer: LayerId) =>
      ({ type: 'workspace.saved', data: { layer, afterCallId: null } }) as const;
    await store.log.append(lease, [saved(b)]);
    await store.log.writeRun(newRunId(), SPEC, [
      saved(a),
      { type: 'run.cancelled', data: { by: 'test', reason: 'x' } },
    ] as never);
    expect(await store.log.namedLayers()).toEqual(new Set([a, b]));

    expect(await collect()).toBe(null);
    expect(await driver.hasLayer(d)).toBe(true); // an hour has not passed
    anHourLater();
    expect(await collect()).toBe(null);
    expect(await driver.hasLayer(d)).toBe(true); // its sandbox lives
    await sandbox.stop();
    expect(await collect()).toBe(null);
    expect(await driver.hasLayer(d)).toBe(true); // not yet again
    anHourLater();
    // Named while the collector is at work.
    const names = {
      namedLayers: async () => {
        await store.log.append(lease, [saved(c)]);
        return store.log.namedLayers();
      },
    };
    await collectLayers({ dir, databaseUrl: undefined, names, driver });
    for (const layer of [a, b, c]) expect(await driver.hasLayer(layer)).toBe(true);
    expect(await driver.hasLayer(d)).toBe(false);
    const resumed = await driver.create({}, c);
    expect((await resumed.listFiles('.')).map(({ name }) => name)).toEqual(['a', 'b', 'c']);
    await resumed.stop();
  },
);

test.skipIf(!probe.ok)(`a folder that two stores share is left alone${skipped}`, async () => {
  const sandbox = await driver.create();
  const layer = await save(sandbox, 'e');
  await sandbox.stop();
  anHourLater();
  const said = await collect('postgres://me:password-of-mine@db.example:5433/team');
  expect(said).toMatch(/kept: the logs of 1 other store may name them/);
  anHourLater();
  expect(await collect()).toMatch(/kept/);
  expect(await driver.hasLayer(layer)).toBe(true);
  expect(readdirSync(join(dir, 'stores')).join()).not.toContain('password-of-mine');
});

test.skipIf(!probe.ok)(`logs that cannot be read: nothing is removed${skipped}`, async () => {
  const sandbox = await driver.create();
  const layer = await save(sandbox, 'f');
  await sandbox.stop();
  const own = join(folder, 'sandbox');
  for (const other of readdirSync(join(own, 'stores'))) rmSync(join(own, 'stores', other));
  anHourLater();
  writeFileSync(join(own, 'stores', 'embedded'), '');
  const names = { namedLayers: () => Promise.reject(new Error('the store is gone')) };
  await expect(collectLayers({ dir, databaseUrl: undefined, names, driver })).rejects.toThrow(
    /gone/,
  );
  expect(await driver.hasLayer(layer)).toBe(true);
});
