import { spawnSync } from 'node:child_process';
import { join } from 'node:path';
import { BubblewrapDriver, type LayerId, type Sandbox } from '../../src/sandbox/index.ts';
import type { BenchRun, Row } from '../row.ts';
import { coldPython, RuncBundle } from './baseline.ts';
import { runSnippet } from './latency.ts';
import { COLD_ROW_NOTE, Rates, seconds, settle } from './measure.ts';
import { haunt, LITTERING, residueAfterRollback } from './residue.ts';

/** Executions side by side: one for each of the two cores that the bars speak of. */
const SIDE_BY_SIDE = 2;
const SNIPPET = 'print(1)';
/** One execution in so many leaves a process behind as well as files. */
const HAUNT_EVERY = 25;
const RESET_BAR = 250;
const FRESH_BAR = { rate: 40, ratio: 4 };

/**
 * Workspace, /tmp and processes fresh for each execution, by rollback to an empty layer; the namespaces
 * are those of one run. Every execution looks for what the one before it left: seeing anything fails the row.
 */
export async function resetRow(home: string, run: BenchRun): Promise<Row> {
  const [slices, size] = run.quick ? [4, 50] : [20, 200];
  const driver = await BubblewrapDriver.open({ dir: join(home, 'bench', 'sandbox'), warm: 0 });
  const bar = `≥ ${RESET_BAR}/s, and no execution sees what another left`;
  try {
    const places = await Promise.all(
      Array.from({ length: SIDE_BY_SIDE }, async () => {
        const sandbox = await driver.create();
        return { sandbox, base: await sandbox.snapshot() };
      }),
    );
    let done = 0;
    let residue: string | null = null;
    const execute = async ({ sandbox, base }: { sandbox: Sandbox; base: LayerId }) => {
      const [result] = await sandbox.runCode([{ language: 'python', source: LITTERING }]);
      if (++done % HAUNT_EVERY === 0) await haunt(sandbox);
      if (result!.stdout !== 'clean\n') residue ??= result!.stdout.trim() || JSON.stringify(result);
      await sandbox.rollback(base);
    };
    const residueTest = async () => {
      for (const { sandbox, base } of places) residue ??= await residueAfterRollback(sandbox, base);
    };
    await residueTest();
    await seconds(SIDE_BY_SIDE, 20, (worker) => execute(places[worker]!));
    const rates = new Rates();
    const cold = new Rates();
    const coldSize = Math.ceil(size / 20);
    for (let i = 0; i < slices; i++) {
      rates.add(size, await seconds(SIDE_BY_SIDE, size, (worker) => execute(places[worker]!)));
      cold.add(coldSize, await seconds(SIDE_BY_SIDE, coldSize, () => coldPython(SNIPPET, '1\n')));
    }
    await residueTest();
    const clean = residue === null ? 'residue tests passed' : `RESIDUE, the row fails: ${residue}`;
    return {
      ...rateRow('throughput.reset', rates, cold),
      bar,
      pass: rates.rate >= RESET_BAR && residue === null,
      note: `${SIDE_BY_SIDE} at once; ${clean}; ${COLD_ROW_NOTE} with the same concurrency`,
    };
  } finally {
    await driver.close();
  }
}

function rateRow(name: string, rates: Rates, baseline: Rates): Omit<Row, 'bar' | 'pass'> {
  return {
    name,
    unit: 'executions/s',
    n: rates.count,
    p50: rates.p50,
    p99: rates.p99,
    value: rates.rate,
    baseline: baseline.rate,
    ratio: rates.rate / baseline.rate,
  };
}

/**
 * A new sandbox for each execution, from a pool that refills meanwhile on the same cores, against
 * `runc run` of an equal bundle. The sandboxes that waited before the clock started are not counted.
 */
export async function freshRow(home: string, run: BenchRun): Promise<Row> {
  const bar = `≥ ${FRESH_BAR.rate}/s, and ≥ ${FRESH_BAR.ratio}x \`runc run\``;
  const [slices, size, runcSize] = run.quick ? [2, 30, 6] : [6, 100, 20];
  const warm = SIDE_BY_SIDE;
  const driver = await BubblewrapDriver.open({ dir: join(home, 'bench', 'sandbox'), warm });
  const bundle = runcMissing() === null ? new RuncBundle(SNIPPET) : null;
  try {
    const execute = async () => {
      const sandbox = await driver.create();
      await runSnippet(sandbox, SNIPPET, '1\n');
      await sandbox.stop();
    };
    const rates = new Rates();
    const runc = new Rates();
    let trouble = runcMissing();
    await execute();
    for (let i = 0; i < slices; i++) {
      await settle(400);
      rates.add(size - warm, await seconds(SIDE_BY_SIDE, size, execute));
      await settle(400);
      if (bundle === null || trouble !== null) continue;
      try {
        runc.add(runcSize, await seconds(SIDE_BY_SIDE, runcSize, () => bundle.run('1\n')));
      } catch (error) {
        trouble = `runc does not run here: ${(error as Error).message}`;
      }
    }
    if (trouble !== null) {
      const { baseline: _, ratio: __, ...row } = rateRow('throughput.fresh', rates, rates);
      return { ...row, bar, pass: false, note: `no baseline, so the bar cannot hold: ${trouble}` };
    }
    const row = rateRow('throughput.fresh', rates, runc);
    return {
      ...row,
      bar,
      pass: row.value >= FRESH_BAR.rate && (row.ratio ?? 0) >= FRESH_BAR.ratio,
      note: `${SIDE_BY_SIDE} at once, pool of ${warm} refilling meanwhile and not counted; baseline: \`runc run\` of an equal bundle, ${SIDE_BY_SIDE} at once`,
    };
  } finally {
    bundle?.remove();
    await driver.close();
  }
}

function runcMissing(): string | null {
  const found = spawnSync('runc', ['--version'], { stdio: 'ignore' });
  return found.error === undefined ? null : 'runc is not installed (`apt-get install runc`)';
}
