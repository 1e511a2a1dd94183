import { accessSync, constants, existsSync, mkdirSync, statSync } from 'node:fs';
import { dirname, resolve } from 'node:path';
import { LonghaulError } from '../core/index.ts';

/** The folder where runs, weights and the embedded store live: made on first use, readable by its owner only. */
export function openHome(path: string): string {
  const home = resolve(path);
  try {
    makeFolder(home);
    accessSync(home, constants.W_OK);
    return home;
  } catch (error) {
    const code = (error as NodeJS.ErrnoException).code;
    if (code === 'ENOSPC' || code === 'EDQUOT') {
      throw new LonghaulError('DiskFull', `no space left for ${home}`, { cause: error });
    }
    if (code === 'ENOTDIR' || code === 'EEXIST') {
      throw new LonghaulError('StoreReadOnly', `${home} is not a folder`, { cause: error });
    }
    throw new LonghaulError(
      'StoreReadOnly',
      `the home folder ${home} cannot be written (${code})`,
      { cause: error },
    );
  }
}

/** Step by step: Node's recursive mkdir never returns below /proc. */
function makeFolder(path: string): void {
  try {
    mkdirSync(path, { mode: 0o700 });
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'EEXIST' && statSync(path).isDirectory()) return;
    if (code !== 'ENOENT' || dirname(path) === path || existsSync(dirname(path))) throw error;
    makeFolder(dirname(path));
    mkdirSync(path, { mode: 0o700 });
  }
}

/** Values that must never be logged: whatever the environment names like a credential. */
export function secretsOf(env: NodeJS.ProcessEnv): string[] {
  return Object.entries(env)
    .filter(
      ([name, value]) =>
        value && /(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|DATABASE_URL)$/i.test(name),
    )
    .map(([, value]) => value as string);
}
