import { spawnSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';

/** Something tests need beside npm: how to see it and how to get it. */
export interface Need {
  name: string;
  /** What is skipped without it, in words. */
  without: string;
  present: () => boolean;
  install: (() => string[]) | null;
}

const repository = join(import.meta.dirname, '..');

function runs(command: string, ...args: string[]): boolean {
  return spawnSync(command, args, { stdio: 'ignore' }).status === 0;
}

const llamaCache = join(repository, '.cache', 'llama');

export const NEEDS: readonly Need[] = [
  {
    name: 'bubblewrap',
    without: 'the bubblewrap sandbox and everything that runs a shell or Python in it',
    present: () => runs('bwrap', '--version'),
    install: () => ['apt-get', 'install', '-y', '--no-install-recommends', 'bubblewrap'],
  },
  {
    name: 'python3',
    without: 'the bubblewrap sandbox (its agent is a Python program)',
    present: () => runs('python3', '--version'),
    install: () => ['apt-get', 'install', '-y', '--no-install-recommends', 'python3'],
  },
  ...[
    { name: 'busybox-static', program: 'busybox', without: 'images with a root of their own' },
    { name: 'runc', program: 'runc', without: 'OCI sandboxes by runc' },
    { name: 'crun', program: 'crun', without: 'OCI sandboxes by crun' },
    { name: 'runsc', program: 'runsc', without: 'OCI sandboxes by gVisor' },
    { name: 'qemu-system-x86', program: 'qemu-system-x86_64', without: 'virtual machines' },
  ].map(({ name, program, without }) => ({
    name,
    without,
    present: () => runs(program, program === 'busybox' ? 'true' : '--version'),
    install: () => ['apt-get', 'install', '-y', '--no-install-recommends', name],
  })),
  {
    name: 'a kernel for virtual machines',
    without: 'virtual machines',
    present: () => existsSync(join(repository, '.cache', 'microvm', 'vmlinuz')),
    install: () => [process.execPath, join(repository, 'test', 'setup-microvm.ts')],
  },
  {
    name: 'a small local model (node-llama-cpp + SmolLM2)',
    without: 'the tests of the llama-cpp driver with a real model',
    present: () =>
      existsSync(join(llamaCache, 'SmolLM2-135M-Instruct.Q4_1.gguf')) &&
      existsSync(join(llamaCache, 'node_modules', 'node-llama-cpp')),
    install: () => [process.execPath, join(repository, 'test', 'setup-llama.ts')],
  },
];
