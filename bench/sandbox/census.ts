import { lstatSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { BubblewrapDriver } from '../../src/sandbox/index.ts';
import { quantile } from '../row.ts';
import { settle } from './measure.ts';
import { descendants, groupsOf, mountCount, openDescriptors, residentBytes } from './processes.ts';

const MIB = 2 ** 20;

/**
 * What must not grow with the number of executions, and how much of a trend over the whole run counts as
 * noise: counts may differ by what is in flight at a sample, memory by what an allocator keeps.
 */
export const QUANTITIES = {
  'own resident MiB': 8,
  'own heap MiB': 1,
  'supervisor resident MiB': 1,
  'mounts of the supervisor': 1,
  'control groups': 1,
  'own descriptors': 2,
  'descriptors of the supervisor': 2,
  processes: 1,
  'MiB on disk': 0.5,
  'inodes on disk': 4,
  'entries in volatile layers': 8,
} as const;

export type Quantity = keyof typeof QUANTITIES;
export type Census = Record<Quantity, number>;

setFlagsFromString('--expose-gc');
const gc = runInNewContext('gc') as (options: object) => void;
/** As thoroughly as before a heap snapshot: an ordinary collection keeps megabytes that nothing reaches. */
const collectGarbage = (): void => gc({ type: 'major', execution: 'sync', flavor: 'last-resort' });

/**
 * Bytes and entries below a folder, without those of another file system where one is named. What
 * disappears meanwhile is not counted.
 */
function holdings(folder: string, without?: number): { bytes: number; inodes: number } {
  const total = { bytes: 0, inodes: 0 };
  const visit = (path: string) => {
    let names: string[];
    try {
      names = readdirSync(path);
    } catch {
      return;
    }
    for (const name of names) {
      try {
        const info = lstatSync(join(path, name));
        if (info.dev === without) continue;
        total.bytes += info.blocks * 512;
        total.inodes++;
        if (info.isDirectory()) visit(join(path, name));
      } catch {
        // removed since it was listed
      }
    }
  };
  visit(folder);
  return total;
}

/** Counts everything once the pool has refilled and what was deleted is gone. */
export async function takeCensus(driver: BubblewrapDriver, dir: string): Promise<Census> {
  const supervisor = driver.supervisorPid;
  let before = -1;
  for (let i = 0; i < 20; i++) {
    await settle(200);
    const now = descendants(supervisor).size * 1000 + mountCount(supervisor);
    if (now === before) break;
    before = now;
  }
  collectGarbage();
  const disk = holdings(dir);
  return {
    'own resident MiB': process.memoryUsage.rss() / MIB,
    'own heap MiB': process.memoryUsage().heapUsed / MIB,
    'supervisor resident MiB': residentBytes(supervisor) / MIB,
    'mounts of the supervisor': mountCount(supervisor),
    'control groups': groupsOf(driver).length,
    'own descriptors': openDescriptors(process.pid),
    'descriptors of the supervisor': openDescriptors(supervisor),
    processes: descendants(supervisor).size,
    'MiB on disk': disk.bytes / MIB,
    'inodes on disk': disk.inodes,
    // The sandboxes' memory file systems show only in the supervisor's mount namespace, beside a view
    // of the folder on disk.
    'entries in volatile layers': holdings(`/proc/${supervisor}/root/tmp`, lstatSync(dir).dev)
      .inodes,
  };
}

/**
 * Trend of a series over its whole span: the median of the slopes between all pairs of samples
 * (Theil 1950, Sen 1968), which single outliers do not move, times the span.
 */
export function trend(samples: readonly { at: number; value: number }[]): number {
  const slopes = samples.flatMap((a, i) =>
    samples.slice(i + 1).map((b) => (b.value - a.value) / (b.at - a.at)),
  );
  return quantile(slopes, 0.5) * (samples.at(-1)!.at - samples[0]!.at);
}
