import { spawnSync } from 'node:child_process';
import { accessSync, constants } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';

/** The path of a program; `SandboxUnavailable` with Debian's package that has it. */
export function findProgram(what: string, name: string, pack: string): string {
  const folders = (process.env.PATH ?? '').split(':').filter((path) => path.startsWith('/'));
  const paths = name.startsWith('/') ? [name] : folders.map((folder) => join(folder, name));
  for (const path of paths) {
    try {
      accessSync(path, constants.X_OK);
      return path;
    } catch {
      // try the next
    }
  }
  throw new LonghaulError('SandboxUnavailable', `microvm: ${what} is missing (${name})`, {
    next: `Install it: \`apt-get install ${pack}\` (or dnf, apk, pacman).`,
  });
}

/** QEMU's version in full: the state of a machine is good for the very one that saved it. */
export function qemuVersion(qemu: string): string {
  const { stdout, error } = spawnSync(qemu, ['--version'], { encoding: 'utf8' });
  const version = stdout?.split('\n')[0]?.trim();
  if (version) return version;
  throw new LonghaulError(
    'SandboxUnavailable',
    `microvm: ${qemu} does not run: ${error?.message}`,
    {
      next: 'Install it again: `apt-get install qemu-system-x86`.',
    },
  );
}
