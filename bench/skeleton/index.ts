import { join } from 'node:path';
import type { RowGroup } from '../row.ts';
import { rows as sandboxRows } from './sandbox.ts';
import { startRow } from './start.ts';
import { rows as storeRows } from './store.ts';

/** Rows of `longhaul bench skeleton`, by what is measured together. */
export const skeleton: readonly RowGroup[] = [
  { names: ['append', 'resume'], measure: (home) => storeRows(join(home, 'bench')) },
  {
    names: ['exec', 'snapshot', 'rollback'],
    measure: (home) => sandboxRows(join(home, 'bench', 'sandbox')),
  },
  { names: ['start'], measure: async () => [await startRow()] },
];
