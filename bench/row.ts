/** One measured figure. `value` is what the bar speaks of; `ratio` compares with a baseline of the same run. */
export interface Row {
  name: string;
  unit: string;
  n: number;
  p50: number;
  p99: number;
  value: number;
  baseline?: number;
  ratio?: number;
  /** The bar in words. */
  bar: string;
  pass: boolean;
}

/** Nearest-rank percentile of samples, which need not be sorted. NaN for none. */
export function percentile(samples: readonly number[], p: number): number {
  const sorted = samples.toSorted((a, b) => a - b);
  return (
    sorted[Math.min(sorted.length - 1, Math.ceil((p / 100) * sorted.length) - 1)] ?? Number.NaN
  );
}
