import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { LonghaulError } from '../core/index.ts';
import { BubblewrapDriver, DRIVER_PROBES, probeBubblewrap, probeDriver } from './index.ts';
import { durableLayers } from './machine.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-probes-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const without = probe.ok ? '' : ` (skipped: ${probe.reason})`;

afterAll(() => rmSync(home, { recursive: true, force: true }));

test('names are those of the drivers, each once', () => {
  const names = DRIVER_PROBES.map(({ name }) => name);
  expect(new Set(names).size).toBe(names.length);
  expect(names[0]).toBe('bubblewrap');
});

test('a driver that cannot be opened is an answer with its reason and next step', async () => {
  const report = await probeDriver(
    {
      name: 'absent',
      automatic: false,
      open: async () => {
        throw new LonghaulError('SandboxUnavailable', 'absent: not installed\nmore', {
          next: 'Install it.',
        });
      },
    },
    home,
  );
  expect(report).toEqual({
    name: 'absent',
    ok: false,
    reason: 'absent: not installed',
    next: 'Install it.',
  });
});

test.skipIf(without !== '')(`a folder that cannot be made is an answer too${without}`, async () => {
  const file = join(home, 'file');
  writeFileSync(file, '');
  const report = await probeDriver(DRIVER_PROBES[0]!, join(file, 'below'));
  expect(report).toMatchObject({ name: 'bubblewrap', ok: false });
});

test.skipIf(without !== '')(
  `what works is closed again, whatever the caller did${without}`,
  async () => {
    let pid = 0;
    const dir = join(home, 'closed');
    const entry = {
      name: 'bubblewrap',
      automatic: true,
      open: async () => {
        const driver = await BubblewrapDriver.open({ dir, warm: 0 });
        pid = driver.supervisorPid;
        return { driver };
      },
    };
    await expect(
      probeDriver(entry, dir, async () => {
        throw new Error('mine');
      }),
    ).rejects.toThrow('mine');
    expect(pid).toBeGreaterThan(0);
    expect(existsSync(`/proc/${pid}`)).toBe(false);
    expect(await probeDriver(entry, dir)).toMatchObject({ ok: true, firstMs: expect.any(Number) });
  },
);

test.skipIf(without !== '')(`durable layers are counted with their bytes${without}`, async () => {
  const dir = join(home, 'durable');
  expect(durableLayers(dir)).toEqual({ count: 0, bytes: 0 });
  const driver = await BubblewrapDriver.open({ dir, warm: 0 });
  try {
    const sandbox = await driver.create();
    await sandbox.writeFile('file', 'x'.repeat(10_000));
    const layer = await sandbox.snapshot({ durable: true });
    await sandbox.stop();
    const meta = JSON.parse(readFileSync(join(dir, 'layers', layer, 'layer.json'), 'utf8'));
    expect(durableLayers(dir)).toEqual({ count: 1, bytes: meta.bytes });
    expect(meta.bytes).toBeGreaterThanOrEqual(10_000);
    await driver.dropLayer(layer);
    expect(durableLayers(dir).count).toBe(0);
  } finally {
    await driver.close();
  }
});
