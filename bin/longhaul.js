#!/usr/bin/env node
// Plain JavaScript on purpose: an old Node must reach the message below instead of a syntax error.
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const [major, minor] = process.versions.node.split('.').map(Number);
if (major < 22 || (major === 22 && minor < 18)) {
  process.stderr.write(
    `longhaul needs Node 22.18 or newer; this is ${process.versions.node}.\n` +
      'Next: in a checkout use `npm start` or `npm run -s longhaul -- ARGS` (they bring Node 24), ' +
      'or install a newer Node.\n',
  );
  process.exit(3);
}

// A published package holds dist/; a checkout runs the TypeScript sources as they are.
const compiled = new URL('../dist/src/cli/main.js', import.meta.url);
const source = new URL('../src/cli/main.ts', import.meta.url);
const { main } = await import(existsSync(fileURLToPath(source)) ? source.href : compiled.href);
await main(process.argv.slice(2));
