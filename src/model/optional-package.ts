import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { LonghaulError } from '../core/index.ts';

/**
 * Loads a package that Longhaul does not depend on: from its own surroundings first, then from the
 * `node_modules` of the given folders (a user's project, where Longhaul itself runs from a checkout).
 * `ConfigInvalid` with the line to install it when none has it.
 */
export async function importOptional(
  name: string,
  install: string,
  folders: readonly string[],
): Promise<Record<string, unknown>> {
  for (const folder of [import.meta.dirname, ...folders]) {
    let path: string;
    try {
      path = createRequire(join(folder, 'package.json')).resolve(name);
    } catch {
      continue;
    }
    try {
      return await load(pathToFileURL(path).href);
    } catch (error) {
      throw broken(name, install, error);
    }
  }
  throw new LonghaulError('ConfigInvalid', `The package ${name} is not installed`, {
    next: `Run \`npm install ${install}\` in your project, then again.`,
  });
}

async function load(specifier: string): Promise<Record<string, unknown>> {
  return (await import(specifier)) as Record<string, unknown>;
}

function broken(name: string, install: string, cause: unknown): LonghaulError {
  const text = cause instanceof Error ? cause.message : String(cause);
  return new LonghaulError('ConfigInvalid', `The package ${name} does not load: ${text}`, {
    next: `Install it again with \`npm install ${install}\`.`,
    cause,
  });
}
