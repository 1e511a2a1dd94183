import type { RowGroup } from '../row.ts';
import { handoutRow, pythonRow } from './latency.ts';
import { durableRows, volatileRows } from './layers.ts';
import { idleMemoryRow } from './memory.ts';
import { soakRow } from './soak.ts';
import { freshRow, resetRow } from './throughput.ts';

/** Rows of `longhaul bench sandbox`, by what is measured together. */
export const sandbox: readonly RowGroup[] = [
  { names: ['handout'], measure: async (home, run) => [await handoutRow(home, run)] },
  { names: ['exec.python'], measure: async (home, run) => [await pythonRow(home, run)] },
  { names: ['throughput.reset'], measure: async (home, run) => [await resetRow(home, run)] },
  { names: ['throughput.fresh'], measure: async (home, run) => [await freshRow(home, run)] },
  { names: ['snapshot', 'rollback', 'fork8'], measure: volatileRows },
  { names: ['snapshot.durable', 'rollback.durable'], measure: durableRows },
  { names: ['idle.memory'], measure: async (home, run) => [await idleMemoryRow(home, run)] },
  { names: ['soak'], measure: async (home, run) => [await soakRow(home, run)] },
];
