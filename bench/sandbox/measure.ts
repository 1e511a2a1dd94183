import { setTimeout as sleep } from 'node:timers/promises';
import { quantile, type Row } from '../row.ts';

/** Milliseconds that a job took. */
export async function timed(job: () => Promise<unknown>): Promise<number> {
  const started = performance.now();
  await job();
  return performance.now() - started;
}

/**
 * Lets what the measured code does afterwards (a pool that refills, trees that are deleted) end before
 * the next measurement, so that neither it nor the baseline pays for the other.
 */
export const settle = (ms = 150): Promise<void> => sleep(ms);

/** A row of times whose bar speaks of the median, compared with the median of its baseline. */
export function latencyRow(
  name: string,
  samples: readonly number[],
  baseline: readonly number[],
  bar: { words: string; holds: (row: { p50: number; p99: number; ratio: number }) => boolean },
  note: string,
): Row {
  const p50 = quantile(samples, 0.5);
  const p99 = quantile(samples, 0.99);
  const compared = quantile(baseline, 0.5);
  const ratio = p50 / compared;
  return {
    name,
    unit: 'ms',
    n: samples.length,
    p50,
    p99,
    value: p50,
    baseline: compared,
    ratio,
    bar: bar.words,
    pass: bar.holds({ p50, p99, ratio }),
    note,
  };
}

/** Seconds that `workers` loops side by side need for `count` jobs between them. */
export async function seconds(
  workers: number,
  count: number,
  job: (worker: number) => Promise<unknown>,
): Promise<number> {
  let left = count;
  const loop = async (worker: number) => {
    while (left-- > 0) await job(worker);
  };
  const ms = await timed(() => Promise.all(Array.from({ length: workers }, (_, i) => loop(i))));
  return ms / 1000;
}

/** What was done in slices of a run, as rates. */
export class Rates {
  readonly #slices: number[] = [];
  #count = 0;
  #seconds = 0;

  add(count: number, took: number): void {
    this.#slices.push(count / took);
    this.#count += count;
    this.#seconds += took;
  }

  get count(): number {
    return this.#count;
  }

  /** Everything that was done, over all the time it took. */
  get rate(): number {
    return this.#count / this.#seconds;
  }

  get p50(): number {
    return quantile(this.#slices, 0.5);
  }

  /** The rate that 99 of 100 slices reach. */
  get p99(): number {
    return quantile(this.#slices, 0.01);
  }
}

export const COLD_ROW_NOTE = 'baseline: cold `bwrap … python3 -c` of the same snippet';

/** A row that could not be measured: it fails and says why. */
export function unmeasured(name: string, unit: string, bar: string, reason: string): Row {
  return { name, unit, n: 0, p50: 0, p99: 0, value: 0, bar, pass: false, note: reason };
}
