import { join, resolve } from 'node:path';
import { Redactor } from '../core/index.ts';
import { FolderArtifacts } from './artifacts.ts';
import { Database } from './database.ts';
import { makeFolder } from './folders.ts';
import { PostgresJobs } from './jobs.ts';
import { PostgresRunLog } from './log.ts';
import { PostgresMetrics } from './metrics.ts';
import { migrate } from './migrations.ts';

export { type EmbeddedStatus, embeddedStatus, stopEmbedded } from './embedded.ts';
export { MAX_EVENT_BYTES } from './events.ts';
export type { FollowedEvent, FollowOptions } from './follow.ts';
export type { JobRecord, JobStatus, PostgresJobs } from './jobs.ts';
export type { PostgresRunLog } from './log.ts';
export type { MetricRecord, PostgresMetrics } from './metrics.ts';
export type { FinishedRun } from './rollouts.ts';

/** Everything of a home folder that must last. */
export interface Store {
  log: PostgresRunLog;
  artifacts: FolderArtifacts;
  metrics: PostgresMetrics;
  jobs: PostgresJobs;
  /** Ends the connections. The last process to leave an embedded server stops it; others keep it. */
  close(): Promise<void>;
}

/**
 * Opens the store of a home folder. Without `databaseUrl` an embedded Postgres is attached to or started
 * below it; a URL (the caller reads DATABASE_URL) names a team's Postgres, and only artifacts lie in the
 * home. The schema is brought up to date. Fails with `StoreReadOnly`, `DiskFull`, `StoreTooNew`,
 * `ConfigInvalid` or `StoreUnavailable`, each with a next step.
 */
export async function openStore(options: {
  home: string;
  databaseUrl?: string | undefined;
  redactor?: Redactor;
}): Promise<Store> {
  const home = resolve(options.home);
  const redactor = options.redactor ?? new Redactor();
  const artifacts = join(home, 'artifacts');
  await makeFolder(artifacts);
  const database = options.databaseUrl
    ? await Database.connect(options.databaseUrl)
    : await Database.embedded(home);
  try {
    await migrate(database);
  } catch (thrown) {
    await database.close();
    throw thrown;
  }
  return {
    log: new PostgresRunLog(database, redactor),
    artifacts: new FolderArtifacts(artifacts, redactor),
    metrics: new PostgresMetrics(database),
    jobs: new PostgresJobs(database, redactor),
    close: () => database.close(),
  };
}
