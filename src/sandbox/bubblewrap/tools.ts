import { accessSync, constants } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';

function executable(paths: string[]): string | null {
  for (const path of paths) {
    try {
      accessSync(path, constants.X_OK);
      return path;
    } catch {
      // try the next
    }
  }
  return null;
}

/**
 * Paths of bubblewrap and of a Python that is visible inside, that is below /usr. A found binary
 * proves nothing (AppArmor may forbid namespaces): `probeBubblewrap` runs it.
 */
export function findTools(): { bwrap: string; python: string } {
  if (process.platform !== 'linux')
    throw new LonghaulError('SandboxUnavailable', 'bubblewrap: needs Linux', {
      next: 'Run Longhaul on Linux, or use the wasm driver.',
    });
  const folders = (process.env.PATH ?? '').split(':').filter((path) => path.startsWith('/'));
  const bwrap = executable([
    '/usr/bin/bwrap',
    '/usr/local/bin/bwrap',
    ...folders.map((folder) => join(folder, 'bwrap')),
  ]);
  if (!bwrap)
    throw new LonghaulError('SandboxUnavailable', 'bubblewrap: not installed', {
      next: 'Install it: `apt-get install bubblewrap` (or dnf, apk, pacman).',
    });
  const python = executable(['/usr/bin/python3', '/usr/local/bin/python3']);
  if (!python)
    throw new LonghaulError('SandboxUnavailable', 'bubblewrap: no python3 in /usr/bin', {
      next: 'Install it: `apt-get install python3` (3.9 or later).',
    });
  return { bwrap, python };
}
