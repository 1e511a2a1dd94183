import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Row } from '../row.ts';

const BAR_S = 60;

/** From a bare clone: `npm ci`, then `npm start` until it says its first word. Packages come from npm's cache. */
export async function startRow(): Promise<Row> {
  const repository = join(import.meta.dirname, '..', '..');
  const folder = mkdtempSync(join(tmpdir(), 'longhaul-start-'));
  try {
    const clone = join(folder, 'longhaul');
    must('git', ['clone', '--quiet', repository, clone], folder);
    must('npm', ['ci', '--prefer-offline'], clone, true);
    const startedAt = performance.now();
    must('npm', ['ci', '--prefer-offline'], clone, true);
    const installed = performance.now();
    const spoke = await firstOutput(clone);
    const seconds = (spoke - startedAt) / 1000;
    return {
      name: 'start',
      unit: 's',
      n: 1,
      p50: seconds,
      p99: seconds,
      value: seconds,
      baseline: (installed - startedAt) / 1000,
      bar: `npm ci + first output of npm start ≤ ${BAR_S} s (baseline: npm ci alone)`,
      pass: seconds <= BAR_S,
    };
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

function must(program: string, args: string[], cwd: string, quiet = false): void {
  const done = spawnSync(program, args, { cwd, stdio: quiet ? 'ignore' : 'inherit' });
  if (done.status !== 0) throw new Error(`${program} ${args.join(' ')} failed`);
}

/** When the command itself says something: npm's own two lines about the script do not count. */
function firstOutput(cwd: string): Promise<number> {
  const child = spawn('npm', ['start', '--silent'], {
    cwd,
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  return new Promise((resolve, reject) => {
    const heard = () => {
      resolve(performance.now());
      process.kill(-child.pid!, 'SIGINT');
    };
    child.stdout.once('data', heard);
    child.stderr.once('data', heard);
    child.once('error', reject);
    child.once('exit', (code) =>
      reject(new Error(`npm start said nothing and ended with ${code}`)),
    );
  });
}
