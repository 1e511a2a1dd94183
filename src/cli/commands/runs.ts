import type { RunKind, RunStatus } from '../../core/index.ts';
import { printable } from '../output.ts';
import type { Platform } from '../platform.ts';

/** `longhaul runs`: the newest first, a line each. */
export async function runs(
  platform: Platform,
  options: { kind?: RunKind; status?: RunStatus; limit: number },
): Promise<number> {
  const { output } = platform;
  const store = await platform.store();
  const rows = await store.log.list(options);
  output.document({ runs: rows, jobs: await store.jobs.list({ limit: options.limit }) });
  if (rows.length === 0)
    output.print('no runs yet; start one with `longhaul run TASK_DIR --model PROVIDER/MODEL`');
  for (const row of rows) {
    const reward = row.reward === null ? '' : `  reward ${row.reward}`;
    const gone = row.worker !== null && platform.isDead(row.worker);
    const worker =
      row.worker === null ? '' : `  on ${row.worker}${gone ? ' (dead: resume it)' : ''}`;
    output.print(
      `${row.runId}  ${row.status.padEnd(9)}  ${row.kind.padEnd(7)}  ${row.createdAt.slice(0, 19)}  ${printable(row.task)}  ${printable(row.model)}${reward}${worker}`,
    );
  }
  const jobs = await store.jobs.list({ limit: options.limit });
  if (jobs.length > 0) output.print('\ntraining jobs');
  for (const job of jobs) {
    output.print(`${job.id}  ${job.status.padEnd(11)}  ${job.kind}  ${job.createdAt.slice(0, 19)}`);
  }
  return 0;
}
