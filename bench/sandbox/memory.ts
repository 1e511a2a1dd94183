import { once } from 'node:events';
import { join } from 'node:path';
import { BubblewrapDriver } from '../../src/sandbox/index.ts';
import { type BenchRun, quantile, type Row } from '../row.ts';
import { bareBubblewrap } from './baseline.ts';
import { settle, unmeasured } from './measure.ts';
import { commandOf, descendants, membersOf, privateBytes } from './processes.ts';

const MIB = 2 ** 20;
const BAR_MIB = 1;
const IDLE_MS = 1000;
const BAR = `≤ ${BAR_MIB} MiB private`;

function sum(pids: Iterable<number>): { mib: number; each: string[] } | null {
  let bytes = 0;
  const each: string[] = [];
  for (const pid of pids) {
    const own = privateBytes(pid);
    if (own === null) return null;
    bytes += own;
    each.push(`${commandOf(pid)} ${(own / MIB).toFixed(2)}`);
  }
  return { mib: bytes / MIB, each };
}

/** A bare bubblewrap around `sleep`: the least that namespaces cost this way. */
async function bare(): Promise<number> {
  const child = bareBubblewrap(['/usr/bin/sleep', '60']);
  try {
    await settle(300);
    return sum([child.pid!, ...descendants(child.pid!)])?.mib ?? Number.NaN;
  } finally {
    child.kill('SIGKILL');
    await once(child, 'close');
  }
}

/**
 * Private_Clean + Private_Dirty of every process that one ready sandbox adds: those of its control group,
 * and what is new below the supervisor. The figure is that of a sandbox left alone, which has let its
 * interpreter go and takes one in again with the next call; what it has while it is in use, and what all
 * sandboxes of a driver share, is told beside it.
 */
export async function idleMemoryRow(home: string, run: BenchRun): Promise<Row> {
  const rounds = run.quick ? 3 : 7;
  const driver = await BubblewrapDriver.open({
    dir: join(home, 'bench', 'sandbox'),
    warm: 0,
    idleMs: IDLE_MS,
  });
  try {
    await settle();
    const sandboxes: number[] = [];
    const awake: number[] = [];
    const baseline: number[] = [];
    let parts: string[] = [];
    for (let i = 0; i < rounds; i++) {
      const before = descendants(driver.supervisorPid);
      const sandbox = await driver.create();
      const find = () => {
        const fresh = [...descendants(driver.supervisorPid)].filter((pid) => !before.has(pid));
        return sum(new Set([...membersOf(driver, sandbox.id), ...fresh]));
      };
      await settle(IDLE_MS / 2);
      awake.push(find()?.mib ?? Number.NaN);
      await settle(IDLE_MS);
      const found = find();
      await sandbox.stop();
      await settle();
      if (found === null || found.each.length === 0)
        return unmeasured(
          'idle.memory',
          'MiB',
          BAR,
          'the memory of its processes cannot be read here',
        );
      sandboxes.push(found.mib);
      parts = found.each;
      baseline.push(await bare());
    }
    const shared = sum([driver.supervisorPid, ...descendants(driver.supervisorPid)]);
    const value = quantile(sandboxes, 0.5);
    const compared = quantile(baseline, 0.5);
    return {
      name: 'idle.memory',
      unit: 'MiB',
      n: rounds,
      p50: value,
      p99: quantile(sandboxes, 0.99),
      value,
      baseline: compared,
      ratio: value / compared,
      bar: BAR,
      pass: value <= BAR_MIB,
      note: `${parts.join(', ')}; with its interpreter ${quantile(awake, 0.5).toFixed(2)} MiB; once for all sandboxes of a driver: ${shared === null ? 'unknown' : `${shared.mib.toFixed(1)} MiB`}; baseline: bare bwrap with \`sleep\``,
    };
  } finally {
    await driver.close();
  }
}
