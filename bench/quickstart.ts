import { spawn } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { mkdir, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import type { QuickstartResults } from '../src/train/index.ts';
import type { Row, RowGroup } from './row.ts';

/** One quickstart from its command line, as a person starts it, with what it cost. */
interface Measured {
  results: QuickstartResults;
  seconds: number;
  /** Largest sum of proportional set sizes of all its processes, sampled twice a second. */
  peakGiB: number;
}

const MEMORY_EVERY_MS = 500;
const SEEDS = [1, 2, 3] as const;
/** Controls are compared with the run of this seed. */
const CONTROL_SEED = SEEDS[0];

/**
 * Runs it, or takes it from an earlier row of the same bench folder: a control is compared with the very
 * run whose row is printed.
 */
async function quickstart(home: string, seed: number, control: string | null): Promise<Measured> {
  const folder = join(home, 'bench', 'quickstart');
  const name = `seed${seed}${control === null ? '' : `-${control}`}`;
  const file = join(folder, `${name}.json`);
  try {
    return JSON.parse(readFileSync(file, 'utf8')) as Measured;
  } catch {}
  await mkdir(folder, { recursive: true });
  const runHome = join(folder, name);
  await rm(runHome, { recursive: true, force: true });
  const cli = join(import.meta.dirname, '..', 'bin', 'longhaul.js');
  const args = [cli, 'quickstart', '--json', '--home', runHome, '--seed', String(seed)];
  if (control !== null) args.push('--control', control);
  const startedAt = performance.now();
  const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'] });
  let peak = 0;
  const sampling = setInterval(() => {
    peak = Math.max(peak, proportionalKiB(child.pid!, runHome));
  }, MEMORY_EVERY_MS);
  let stdout = '';
  child.stdout.on('data', (data) => {
    stdout += data;
  });
  await new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('close', resolve);
  });
  clearInterval(sampling);
  const documents = stdout.split('\n').flatMap((line) => (line.startsWith('{"job"') ? [line] : []));
  const last = documents.at(-1);
  if (last === undefined) throw new Error(`the quickstart ${name} gave no results`);
  const { results } = JSON.parse(last) as { results: QuickstartResults };
  const measured = {
    results,
    seconds: (performance.now() - startedAt) / 1000,
    peakGiB: peak / 2 ** 20,
  };
  await writeFile(file, JSON.stringify(measured, null, 2));
  return measured;
}

/** Proportional set size, in KiB, of a process, its descendants, and whatever names the home folder (Postgres). */
function proportionalKiB(root: number, home: string): number {
  const parents = new Map<number, number>();
  const ours = new Set([root]);
  for (const entry of readdirSync('/proc')) {
    const pid = Number(entry);
    if (!Number.isInteger(pid)) continue;
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
      parents.set(pid, Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]));
      if (readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(home)) ours.add(pid);
    } catch {}
  }
  for (let grew = true; grew; ) {
    grew = false;
    for (const [pid, parent] of parents) {
      if (ours.has(parent) && !ours.has(pid)) {
        ours.add(pid);
        grew = true;
      }
    }
  }
  let sum = 0;
  for (const pid of ours) {
    try {
      sum += Number(
        /^Pss:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8'))?.[1] ?? 0,
      );
    } catch {}
  }
  return sum;
}

function gains({ results }: Measured): { start: number; first: number; greedy: number } {
  const { before, after } = results;
  if (!before?.greedy || !after?.greedy) throw new Error('the quickstart did not measure');
  return {
    start: before.first.value,
    first: after.first.value - before.first.value,
    greedy: after.greedy.value - before.greedy.value,
  };
}

const figure = (name: string, unit: string, value: number, bar: string, pass: boolean): Row => ({
  name,
  unit,
  n: 1,
  p50: value,
  p99: value,
  value,
  bar,
  pass,
});

async function seedRows(home: string, seed: number): Promise<Row[]> {
  const measured = await quickstart(home, seed, null);
  const { start, first, greedy } = gains(measured);
  const { curve, after } = measured.results;
  const best = Math.max(...curve.map((point) => point.first));
  const fall = best - (curve.at(-1)?.first ?? 0);
  const name = `seed${seed}`;
  return [
    figure(
      `${name}.tasks`,
      'held-out tasks',
      after!.first.count,
      '≥ 800',
      after!.first.count >= 800,
    ),
    figure(
      `${name}.start`,
      'solved at first try',
      start,
      '0.20 to 0.40',
      start >= 0.2 && start <= 0.4,
    ),
    figure(`${name}.first`, 'gain of first tries', first, '≥ 0.30', first >= 0.3),
    figure(`${name}.greedy`, 'gain of greedy', greedy, '≥ 0.30', greedy >= 0.3),
    figure(`${name}.fall`, 'below the best of the run', fall, '≤ 0.05', fall <= 0.05),
    figure(`${name}.wall`, 's', measured.seconds, '≤ 600', measured.seconds <= 600),
    figure(`${name}.memory`, 'GiB', measured.peakGiB, '≤ 2.5', measured.peakGiB <= 2.5),
  ];
}

async function controlRows(home: string, control: string): Promise<Row[]> {
  const measured = await quickstart(home, CONTROL_SEED, control);
  const { first, greedy } = gains(measured);
  if (control === 'random-reward') {
    return [
      figure('random-reward.first', 'gain of first tries', first, '≤ 0.05', first <= 0.05),
      figure('random-reward.greedy', 'gain of greedy', greedy, '≤ 0.05', greedy <= 0.05),
    ];
  }
  const grpo = gains(await quickstart(home, CONTROL_SEED, null));
  if (control === 'supervised') {
    const ahead = grpo.first - first;
    return [
      {
        ...figure('supervised.first', 'GRPO ahead by', ahead, '≥ 0.10', ahead >= 0.1),
        baseline: first,
      },
      {
        ...figure(
          'supervised.greedy',
          'GRPO ahead by',
          grpo.greedy - greedy,
          '≥ 0.10',
          grpo.greedy - greedy >= 0.1,
        ),
        baseline: greedy,
      },
    ];
  }
  return [
    {
      ...figure(`${control}.first`, 'gain of first tries', first, 'reported', true),
      baseline: grpo.first,
    },
  ];
}

/** Rows of `longhaul bench quickstart`: about six minutes each on two cores, so name the one you want. */
export const quickstartBench: readonly RowGroup[] = [
  ...SEEDS.map((seed) => ({
    names: ['tasks', 'start', 'first', 'greedy', 'fall', 'wall', 'memory'].map(
      (row) => `seed${seed}.${row}`,
    ),
    measure: (home: string) => seedRows(home, seed),
  })),
  ...(['random-reward', 'supervised', 'shuffled-feedback'] as const).map((control) => ({
    names:
      control === 'shuffled-feedback'
        ? [`${control}.first`]
        : [`${control}.first`, `${control}.greedy`],
    measure: (home: string) => controlRows(home, control),
  })),
];
