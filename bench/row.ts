/** One row of `longhaul bench ROOM --json`. */
export interface Row {
  name: string;
  /** Unit of `p50`, `p99` and `value`. */
  unit: string;
  /** Measurements taken. */
  n: number;
  p50: number;
  p99: number;
  /** The figure the bar speaks of. */
  value: number;
  /** What it was compared with, in `unit`, measured in the same run. */
  baseline?: number;
  ratio?: number;
  /** The bar in words. */
  bar: string;
  pass: boolean;
  /** How it was measured, what the baseline is, and what could not be measured, in words. */
  note?: string;
}

/** The q-th quantile (0 to 1) of measurements, by nearest rank. */
export function quantile(samples: readonly number[], q: number): number {
  const sorted = samples.slice().sort((a, b) => a - b);
  const rank = Math.min(sorted.length - 1, Math.max(0, Math.ceil(q * sorted.length) - 1));
  const value = sorted[rank];
  if (value === undefined) throw new RangeError('quantile of no samples');
  return value;
}

export interface BenchRun {
  /** Fewer measurements, to see that a row works; bars are not meant for it. */
  quick: boolean;
  /** One line for whoever waits. */
  progress(line: string): void;
}

/** Rows that are measured in one go, in a folder below the home. */
export interface RowGroup {
  names: readonly string[];
  measure: (home: string, run: BenchRun) => Promise<Row[]>;
}
