import { LonghaulError, type Redactor } from '../core/index.ts';
import { build, type Database } from './database.ts';
import { storable } from './events.ts';

export type JobStatus = 'running' | 'interrupted' | 'succeeded' | 'failed';

/** A long piece of work that is not a run, such as a training; its spec and last checkpoint. */
export interface JobRecord {
  id: string;
  kind: string;
  spec: unknown;
  status: JobStatus;
  /** Folder of the newest checkpoint, from which the job can go on. */
  checkpoint: string | null;
  createdAt: string;
  updatedAt: string;
}

export class PostgresJobs {
  readonly #database: Database;
  readonly #redactor: Redactor;

  constructor(database: Database, redactor: Redactor) {
    this.#database = database;
    this.#redactor = redactor;
  }

  /** Records a job as running. Usage error if the id exists. */
  async create(job: { id: string; kind: string; spec: unknown }): Promise<void> {
    const spec = JSON.stringify(this.#redactor.json(storable(job.spec ?? null)));
    let repeated = false;
    const { sql, parameters } = build
      .insertInto('longhaul.jobs')
      .values({
        id: job.id,
        kind: job.kind,
        spec,
        status: 'running',
        checkpoint: null,
        updated_at: new Date(),
      })
      .onConflict((conflict) => conflict.doNothing())
      .returning('id')
      .compile();
    const rows = await this.#database.query({ text: sql, values: parameters.slice() }, () => {
      repeated = true;
    });
    if (rows.length === 0 && !repeated)
      throw new LonghaulError('ConfigInvalid', `the job ${job.id} exists already`, {
        next: 'Resume it, or give another id.',
      });
  }

  /** Changes what is given. NotFound for an unknown job. */
  async update(id: string, change: { status?: JobStatus; checkpoint?: string }): Promise<void> {
    const rows = await this.#database.run(
      build
        .updateTable('longhaul.jobs')
        .set({ ...change, updated_at: new Date() })
        .where('id', '=', id)
        .returning('id')
        .compile(),
    );
    if (rows.length === 0)
      throw new LonghaulError('NotFound', `there is no job ${id}`, {
        next: 'List the jobs of this home folder.',
      });
  }

  async get(id: string): Promise<JobRecord | null> {
    const rows = await this.#database.run(
      build.selectFrom('longhaul.jobs').selectAll().where('id', '=', id).compile(),
    );
    return rows[0] === undefined ? null : jobRecord(rows[0]);
  }

  /** Most recently changed first. */
  async list(filter: { kind?: string; limit?: number } = {}): Promise<JobRecord[]> {
    let query = build
      .selectFrom('longhaul.jobs')
      .selectAll()
      .orderBy('updated_at', 'desc')
      .limit(filter.limit ?? 50);
    if (filter.kind !== undefined) query = query.where('kind', '=', filter.kind);
    return (await this.#database.run(query.compile())).map(jobRecord);
  }
}

function jobRecord(row: {
  id: string;
  kind: string;
  spec: unknown;
  status: string;
  checkpoint: string | null;
  created_at: Date;
  updated_at: Date;
}): JobRecord {
  return {
    id: row.id,
    kind: row.kind,
    spec: row.spec,
    status: row.status as JobStatus,
    checkpoint: row.checkpoint,
    createdAt: row.created_at.toISOString(),
    updatedAt: row.updated_at.toISOString(),
  };
}
