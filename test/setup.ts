import { spawnSync } from 'node:child_process';
import { NEEDS } from './machine.ts';

/** `npm run setup`: installs what the whole test suite can use. Called by `npm test` only where CI=true. */
export function setup(): void {
  const missing = NEEDS.filter((need) => !need.present());
  if (missing.some((need) => need.install?.()[0] === 'apt-get')) run(['apt-get', 'update', '-qq']);
  for (const need of missing) {
    process.stderr.write(`installing ${need.name}\n`);
    if (need.install) run(need.install());
    if (!need.present())
      process.stderr.write(`could not install ${need.name}; skipped: ${need.without}\n`);
  }
}

function run(command: string[]): void {
  const [program = '', ...args] = command;
  const asRoot = process.getuid?.() === 0 || program !== 'apt-get';
  const argv = asRoot ? [program, ...args] : ['sudo', program, ...args];
  spawnSync(argv[0]!, argv.slice(1), {
    stdio: ['ignore', 'ignore', 'inherit'],
    env: { ...process.env, DEBIAN_FRONTEND: 'noninteractive' },
  });
}

if (process.argv[1] === import.meta.filename) setup();
