import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';

// A file aims at 400 lines and never passes 800: past that it is two files.
const LIMIT = 800;

const listed = spawnSync('git', ['ls-files', '-co', '--exclude-standard', '*.ts', '*.py', '*.js'], {
  encoding: 'utf8',
});
const tooLong = listed.stdout
  .split('\n')
  .filter((file) => file !== '')
  .map((file) => ({ file, lines: readFileSync(file, 'utf8').split('\n').length }))
  .filter(({ lines }) => lines > LIMIT);
for (const { file, lines } of tooLong)
  process.stdout.write(`${file} has ${lines} lines; the limit is ${LIMIT}\n`);
process.exitCode = tooLong.length > 0 ? 1 : 0;
