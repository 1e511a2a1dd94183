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
  output.document({ runs: rows });
  if (rows.length === 0)
    output.print('no runs yet; `npx longhaul run TASK_DIR --model PROVIDER/MODEL` starts one');
  for (const row of rows) {
    const reward = row.reward === null ? '' : `  reward ${row.reward}`;
    const worker = row.worker === null ? '' : `  on ${row.worker}`;
    output.print(
      `${row.runId}  ${row.status.padEnd(9)}  ${row.kind.padEnd(7)}  ${row.createdAt.slice(0, 19)}  ${printable(row.task)}  ${printable(row.model)}${reward}${worker}`,
    );
  }
  return 0;
}
