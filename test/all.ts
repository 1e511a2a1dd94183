import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { NEEDS } from './machine.ts';
import { setup } from './setup.ts';

// `npm test`: what CI runs and what a newcomer runs. Stages in order of how fast they tell.

if (process.env.CI === 'true') setup();
for (const need of NEEDS) {
  if (!need.present())
    process.stdout.write(
      `missing: ${need.name}; skipped: ${need.without}. \`npm run setup\` installs it.\n`,
    );
}

const stages: [string, string[]][] = [
  ['lint', ['npx', '--no-install', 'biome', 'check', '.']],
  ['types', ['npx', '--no-install', 'tsc', '--noEmit']],
  [
    'structure',
    [
      'npx',
      '--no-install',
      'depcruise',
      '--config',
      '.dependency-cruiser.cjs',
      'src',
      'bench',
      'test',
    ],
  ],
  ['file sizes', [process.execPath, 'test/sizes.ts']],
  ['dead code', ['npx', '--no-install', 'knip']],
];
let failedStages = 0;
for (const [name, [program = '', ...args]] of stages) {
  process.stdout.write(`\n== ${name}\n`);
  if (spawnSync(program, args, { stdio: 'inherit' }).status !== 0) {
    failedStages += 1;
    process.stdout.write(`${name} failed\n`);
  }
}

process.stdout.write('\n== tests\n');
const folder = mkdtempSync(join(tmpdir(), 'longhaul-test-'));
const report = join(folder, 'report.json');
const vitest = spawnSync(
  process.execPath,
  [
    'node_modules/vitest/vitest.mjs',
    'run',
    '--reporter=default',
    '--reporter=json',
    `--outputFile.json=${report}`,
  ],
  { stdio: 'inherit' },
);
const counts = readCounts(report);
rmSync(folder, { recursive: true });
const failed = counts.failed + failedStages + (vitest.status !== 0 && counts.failed === 0 ? 1 : 0);
process.stdout.write(`\n${counts.passed} passed, ${failed} failed, ${counts.skipped} skipped\n`);
process.exitCode = failed > 0 ? 1 : 0;

function readCounts(path: string): { passed: number; failed: number; skipped: number } {
  try {
    const json = JSON.parse(readFileSync(path, 'utf8')) as Record<string, number>;
    return {
      passed: json.numPassedTests ?? 0,
      failed: json.numFailedTests ?? 0,
      skipped: (json.numPendingTests ?? 0) + (json.numTodoTests ?? 0),
    };
  } catch {
    return { passed: 0, failed: 1, skipped: 0 };
  }
}
