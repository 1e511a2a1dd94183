import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { BubblewrapDriver, type Sandbox } from '../../src/sandbox/index.ts';
import type { Row } from '../row.ts';

const EXECUTIONS = 300;
const COLD_STARTS = 20;
const LAYER_ROUNDS = 100;
const WORKSPACE_FILES = 3000;

function percentile(sorted: number[], share: number): number {
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))]!;
}

async function measure(times: number, job: () => Promise<unknown>): Promise<number[]> {
  const taken: number[] = [];
  for (let i = 0; i < times; i++) {
    const started = performance.now();
    await job();
    taken.push(performance.now() - started);
  }
  return taken.sort((a, b) => a - b);
}

function row(name: string, sorted: number[], barMs: number): Row {
  const p50 = percentile(sorted, 0.5);
  return {
    name,
    unit: 'ms',
    n: sorted.length,
    p50,
    p99: percentile(sorted, 0.99),
    value: p50,
    bar: `p50 <= ${barMs} ms`,
    pass: p50 <= barMs,
  };
}

/** What an execution costs without a warm sandbox: a bare bubblewrap with a new interpreter. */
async function coldPython(): Promise<void> {
  const child = spawn(
    'bwrap',
    [
      ...['--unshare-all', '--die-with-parent', '--ro-bind', '/usr', '/usr'],
      ...['--symlink', 'usr/bin', '/bin', '--symlink', 'usr/lib', '/lib'],
      ...['--symlink', 'usr/lib64', '/lib64', '--proc', '/proc', '--dev', '/dev'],
      ...['--', '/usr/bin/python3', '-c', 'print(1)'],
    ],
    { stdio: ['ignore', 'pipe', 'inherit'] },
  );
  child.stdout.resume();
  const [code] = await once(child, 'close');
  if (code !== 0) throw new Error(`cold bwrap ended with ${code}`);
}

async function fill(sandbox: Sandbox): Promise<void> {
  const source = `
import os
for i in range(${WORKSPACE_FILES}):
    os.makedirs(f"d{i % 50}", exist_ok=True)
    with open(f"d{i % 50}/f{i}", "wb") as file: file.write(bytes(20000))
`;
  const [made] = await sandbox.runCode([{ language: 'python', source, timeoutMs: 60_000 }]);
  if (made!.code !== 0) throw new Error(`cannot fill the workspace: ${made!.stderr}`);
}

/** Rows `exec`, `snapshot` and `rollback`, measured in one warm bubblewrap sandbox below `dir`. */
export async function rows(dir: string): Promise<Row[]> {
  const driver = await BubblewrapDriver.open({ dir: join(dir, 'sandbox'), warm: 0 });
  try {
    const sandbox = await driver.create({ cpus: 2 });
    const run = async () => {
      const [result] = await sandbox.runCode([{ language: 'python', source: 'print(1)' }]);
      if (result!.stdout !== '1\n') throw new Error(`execution failed: ${result!.stderr}`);
    };
    await measure(20, run);
    // Interleaved, so that a change of the machine's load meets both.
    const executions: number[] = [];
    const cold: number[] = [];
    for (let i = 0; i < COLD_STARTS; i++) {
      executions.push(...(await measure(EXECUTIONS / COLD_STARTS, run)));
      cold.push(...(await measure(1, coldPython)));
    }
    const exec = row(
      'exec',
      executions.sort((a, b) => a - b),
      5,
    );
    exec.baseline = percentile(
      cold.sort((a, b) => a - b),
      0.5,
    );
    exec.ratio = exec.value / exec.baseline;

    await fill(sandbox);
    const base = await sandbox.snapshot();
    const touch = () => sandbox.writeFile('d1/f1', 'changed');
    const snapshots: number[] = [];
    const rollbacks: number[] = [];
    for (let i = 0; i < LAYER_ROUNDS; i++) {
      await touch();
      let layer = '';
      snapshots.push(
        ...(await measure(1, async () => {
          layer = await sandbox.snapshot();
        })),
      );
      await touch();
      rollbacks.push(...(await measure(1, () => sandbox.rollback(base))));
      await driver.dropLayer(layer);
    }
    const ascending = (a: number, b: number) => a - b;
    return [
      exec,
      row('snapshot', snapshots.sort(ascending), 3),
      row('rollback', rollbacks.sort(ascending), 3),
    ];
  } finally {
    await driver.close();
  }
}
