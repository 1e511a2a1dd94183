import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  cpSync,
  existsSync,
  lstatSync,
  mkdtempSync,
  readdirSync,
  rmSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { findBinaries, linkLibraries } from './binaries.ts';
import { TestHomes } from './test-home.ts';

const homes = new TestHomes();
let folder: string;
let root: string;

// The package as npm unpacks it when install scripts are blocked: without symbolic links.
beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'lh-store-test-'));
  chmodSync(folder, 0o755);
  root = join(folder, 'package');
  const { postgres } = await findBinaries(join(folder, 'unused'));
  cpSync(dirname(dirname(postgres)), join(root, 'native'), {
    recursive: true,
    filter: (path) => !lstatSync(path).isSymbolicLink() && !path.endsWith('.a'),
  });
});
afterEach(async () => {
  await homes.removeAll();
  rmSync(folder, { recursive: true, force: true });
});

const version = (env: Record<string, string>) =>
  execFileSync(join(root, 'native', 'bin', 'postgres'), ['--version'], {
    env,
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'ignore'],
  });

test('missing library links are created in the package', async () => {
  expect(() => version({})).toThrow();
  const links = join(folder, 'links');
  const results = await Promise.all([linkLibraries(root, links), linkLibraries(root, links)]);
  expect(results).toEqual([{}, {}]);
  expect(version({})).toMatch(/^postgres \(PostgreSQL\) 18/);
  expect(existsSync(links)).toBe(false);
});

test('where the package is read-only they lie in the home', async () => {
  const links = join(folder, 'links');
  const lib = join(root, 'native', 'lib');
  const before = readdirSync(lib);
  chmodSync(lib, 0o555);
  chmodSync(folder, 0o777);
  // Root may write everywhere, so another user tries.
  const linker = homes.process(
    `
    import { linkLibraries } from '${import.meta.resolve('./binaries.ts')}';
    console.log(JSON.stringify(await linkLibraries(...process.argv.slice(1))));
    `,
    [root, links],
    process.getuid?.() === 0 ? { uid: 65534, gid: 65534 } : {},
  );
  const env = JSON.parse(await linker.line());
  expect(Object.values(env)).toEqual([links]);
  expect(version(env)).toMatch(/^postgres \(PostgreSQL\) 18/);
  expect(readdirSync(lib)).toEqual(before);
  chmodSync(lib, 0o755);
});
