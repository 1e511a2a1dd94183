import { cpus, release, totalmem } from 'node:os';
import type { Row } from '../../../bench/row.ts';
import { skeleton } from '../../../bench/skeleton/index.ts';
import { LonghaulError } from '../../core/index.ts';
import { style } from '../output.ts';
import type { Platform } from '../platform.ts';

const BENCHES: Record<string, Record<string, (home: string) => Promise<Row[]>>> = { skeleton };

/** `longhaul bench ROOM [ROW]`: one document with every row, its bar and whether it held. */
export async function bench(platform: Platform, room: string, only?: string): Promise<number> {
  const { output } = platform;
  const parts = BENCHES[room];
  if (parts === undefined) {
    throw new LonghaulError('ConfigInvalid', `there is no bench "${room}"`, {
      next: `Benches: ${Object.keys(BENCHES).join(', ')}.`,
    });
  }
  if (only !== undefined && !(only in parts)) {
    throw new LonghaulError('ConfigInvalid', `bench ${room} has no row "${only}"`, {
      next: `Rows: ${Object.keys(parts).join(', ')}.`,
    });
  }
  const rows: Row[] = [];
  for (const [name, measure] of Object.entries(parts)) {
    if (only !== undefined && name !== only) continue;
    output.say(`measuring ${name}`);
    for (const row of await measure(platform.home)) {
      rows.push(row);
      const ratio = row.ratio === undefined ? '' : `  ratio ${row.ratio.toFixed(2)}`;
      output.say(
        `  ${style(row.pass ? 'green' : 'red', row.pass ? 'holds' : 'fails')}  ${row.name.padEnd(12)} ${row.value.toFixed(3)} ${row.unit}  p50 ${row.p50.toFixed(3)}  p99 ${row.p99.toFixed(3)}  n ${row.n}${ratio}  bar: ${row.bar}`,
      );
    }
  }
  output.document({ bench: room, machine: machine(), rows });
  return rows.every((row) => row.pass) ? 0 : 1;
}

function machine(): Record<string, unknown> {
  return {
    cpu: cpus()[0]?.model,
    cores: cpus().length,
    memoryGiB: Math.round(totalmem() / 2 ** 30),
    kernel: release(),
    node: process.versions.node,
  };
}
