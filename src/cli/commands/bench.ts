import { cpus, release, totalmem } from 'node:os';
import { engine } from '../../../bench/engine.ts';
import { quickstartBench } from '../../../bench/quickstart.ts';
import type { Row, RowGroup } from '../../../bench/row.ts';
import { sandbox } from '../../../bench/sandbox/index.ts';
import { skeleton } from '../../../bench/skeleton/index.ts';
import { LonghaulError } from '../../core/index.ts';
import { style } from '../output.ts';
import type { Platform } from '../platform.ts';

const BENCHES: Record<string, readonly RowGroup[]> = {
  skeleton,
  engine,
  sandbox,
  quickstart: quickstartBench,
};

/** `longhaul bench ROOM [ROW]`: one document with every row, its bar and whether it held. */
export async function bench(
  platform: Platform,
  room: string,
  only: string | undefined,
  options: { quick?: boolean },
): Promise<number> {
  const { output } = platform;
  const groups = BENCHES[room];
  if (groups === undefined) {
    throw new LonghaulError('ConfigInvalid', `there is no bench "${room}"`, {
      next: `Benches: ${Object.keys(BENCHES).join(', ')}.`,
    });
  }
  const names = groups.flatMap((group) => group.names);
  if (only !== undefined && !names.includes(only)) {
    throw new LonghaulError('ConfigInvalid', `bench ${room} has no row "${only}"`, {
      next: `Rows: ${names.join(', ')}.`,
    });
  }
  const run = {
    quick: options.quick === true,
    progress: (line: string) => output.say(`  ${style('dim', line)}`),
  };
  const width = Math.max(...names.map((name) => name.length));
  const rows: Row[] = [];
  for (const group of groups) {
    if (only !== undefined && !group.names.includes(only)) continue;
    output.say(`measuring ${group.names.join(', ')}`);
    for (const row of await group.measure(platform.home, run)) {
      if (only !== undefined && row.name !== only) continue;
      rows.push(row);
      const ratio = row.ratio === undefined ? '' : `  ratio ${figure(row.ratio)}`;
      output.say(
        `  ${style(row.pass ? 'green' : 'red', row.pass ? 'holds' : 'fails')}  ${row.name.padEnd(width)} ${row.value.toFixed(3)} ${row.unit}  p50 ${row.p50.toFixed(3)}  p99 ${row.p99.toFixed(3)}  n ${row.n}${ratio}  bar: ${row.bar}`,
      );
      for (const line of row.note?.split('\n') ?? []) output.say(`         ${style('dim', line)}`);
    }
  }
  output.document({ bench: room, machine: machine(), quick: run.quick, rows });
  return rows.every((row) => row.pass) ? 0 : 1;
}

/** Two decimals, and two digits of what is smaller than that. */
const figure = (value: number): string =>
  value >= 0.1 || value === 0 ? value.toFixed(2) : value.toPrecision(2);

function machine(): Record<string, unknown> {
  return {
    cpu: cpus()[0]?.model,
    cores: cpus().length,
    memoryGiB: Math.round(totalmem() / 2 ** 30),
    kernel: release(),
    node: process.versions.node,
  };
}
