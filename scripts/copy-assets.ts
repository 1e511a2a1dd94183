import { cpSync, globSync } from 'node:fs';

// What the compiler leaves behind: the programs that run inside and around a sandbox.
for (const file of globSync('src/**/*.py')) cpSync(file, `dist/${file}`);
