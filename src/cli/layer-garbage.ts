import { createHash } from 'node:crypto';
import { mkdirSync, readdirSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { LayerNames } from '../core/index.ts';
import type { SandboxDriver } from '../sandbox/contract.ts';

const EVERY_MS = 3_600_000;

/**
 * Removes durable layers that no log names and no process uses, at most once an hour for a sandbox folder.
 * A folder that was ever used with another store is left alone, since that store's logs cannot be asked:
 * the answer is then a line for the user; null otherwise.
 */
export async function collectLayers(options: {
  /** The sandbox driver's folder. */
  dir: string;
  /** The store's, where it is not the embedded one of the same home. */
  databaseUrl: string | undefined;
  names: LayerNames;
  driver: SandboxDriver;
}): Promise<string | null> {
  const { dir, databaseUrl, names, driver } = options;
  const stores = join(dir, 'stores');
  mkdirSync(stores, { recursive: true, mode: 0o700 });
  // Before anything of this store's runs can be saved here, and whether or not it is time.
  writeFileSync(join(stores, storeName(databaseUrl)), '');
  const last = join(dir, 'collected');
  const at = statSync(last, { throwIfNoEntry: false })?.mtimeMs ?? 0;
  if (Math.abs(Date.now() - at) < EVERY_MS) return null;
  writeFileSync(last, '');
  const others = readdirSync(stores).length - 1;
  if (others > 0)
    return `workspace layers in ${dir} are kept: the logs of ${others} other store${others > 1 ? 's' : ''} may name them`;
  await driver.prune(() => names.namedLayers());
  return null;
}

/** The same for the same database, whoever logs in; says nothing of a password. */
function storeName(databaseUrl: string | undefined): string {
  if (!databaseUrl) return 'embedded';
  const { hostname, port, pathname, searchParams } = new URL(databaseUrl);
  const place = JSON.stringify([searchParams.get('host') ?? hostname, port || '5432', pathname]);
  return createHash('sha256').update(place).digest('hex');
}
