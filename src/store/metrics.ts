import type { MetricSink } from '../core/index.ts';
import { build, type Database } from './database.ts';

export interface MetricRecord {
  step: number;
  values: Record<string, number>;
  at: string;
}

/** What training jobs measured, one record a step. Writing a step again, after a resume, replaces it. */
export class PostgresMetrics implements MetricSink {
  readonly #database: Database;

  constructor(database: Database) {
    this.#database = database;
  }

  /** Figures that are not finite (a diverged loss) are kept as `null` in the table and left out on read. */
  async write(record: {
    job: string;
    step: number;
    values: Record<string, number>;
  }): Promise<void> {
    const values = JSON.stringify(record.values);
    await this.#database.query({
      name: 'longhaul.metric',
      text: `
        insert into longhaul.metrics (job, step, values) values ($1, $2, $3)
        on conflict (job, step) do update set values = excluded.values, at = now()`,
      values: [record.job, record.step, values],
    });
  }

  /** Records of a job in order of step, from `fromStep` on. Empty for an unknown job. */
  async read(job: string, fromStep = 0): Promise<MetricRecord[]> {
    const rows = await this.#database.run(
      build
        .selectFrom('longhaul.metrics')
        .select(['step', 'values', 'at'])
        .where('job', '=', job)
        .where('step', '>=', fromStep)
        .orderBy('step')
        .compile(),
    );
    return rows.map((row) => ({
      step: row.step,
      values: finite(row.values as Record<string, number | null>),
      at: row.at.toISOString(),
    }));
  }
}

function finite(values: Record<string, number | null>): Record<string, number> {
  const entries = Object.entries(values).filter((entry): entry is [string, number] => {
    return entry[1] !== null;
  });
  return Object.fromEntries(entries);
}
