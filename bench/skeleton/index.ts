import type { Row } from '../row.ts';
import { startRow } from './start.ts';

/** Rows of `longhaul bench skeleton`, by what is measured together. */
export const skeleton: Record<string, (home: string) => Promise<Row[]>> = {
  start: async () => [await startRow()],
};
