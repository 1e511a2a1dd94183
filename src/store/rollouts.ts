import { LonghaulError, type NewEvent, type Redactor, type RunSpec } from '../core/index.ts';
import type { Database } from './database.ts';
import { encode, projectionChange } from './events.ts';

/** A run that is written at once. `events` come after `run.created`, which comes from the spec. */
export interface FinishedRun {
  runId: string;
  spec: RunSpec;
  events: readonly NewEvent[];
}

const INSERT = {
  name: 'longhaul.insert_runs',
  text: `
    with r as (
      insert into longhaul.runs
        (run_id, kind, status, head, task, agent, model, seed, reward, last_step, created_at, updated_at)
      select run_id, kind, status, head, task, agent, model, seed, reward, last_step, now(), now()
      from jsonb_to_recordset($1::jsonb) as x (
        run_id text, kind text, status text, head int, task text, agent text, model text, seed bigint,
        reward float8, last_step int)
      on conflict do nothing
      returning run_id
    ),
    e as (
      insert into longhaul.events (run_id, seq, type, v, data, at)
      select run_id, seq, type, v, data, now()
      from jsonb_to_recordset($2::jsonb) as x (run_id text, seq int, type text, v smallint, data jsonb)
      join r using (run_id)
    )
    select run_id from r`,
};

/** Bytes of events that go into one statement. */
const CHUNK_BYTES = 4 * 1024 * 1024;

interface Chunk {
  runs: Record<string, unknown>[];
  events: string[];
  bytes: number;
}

/**
 * Inserts runs with all their events: one statement where they fit into one, else one transaction.
 * Usage error when an id exists: nothing was written then.
 */
export async function insertRuns(
  database: Database,
  redactor: Redactor,
  runs: readonly FinishedRun[],
): Promise<void> {
  const chunks = encodeRuns(redactor, runs);
  let repeated = false;
  const onRepeat = () => {
    repeated = true;
  };
  const written = new Set<string>();
  const [only] = chunks;
  if (chunks.length === 1 && only !== undefined && runs.length === 1) {
    for (const row of await database.query<{ run_id: string }>(insertion(only), onRepeat))
      written.add(row.run_id);
    check(runs, written, repeated);
    return;
  }
  await database.transaction(async (session) => {
    written.clear();
    for (const chunk of chunks)
      for (const row of await session.query<{ run_id: string }>(insertion(chunk)))
        written.add(row.run_id);
    check(runs, written, repeated);
  }, onRepeat);
}

/** After a lost connection, finding every id there means that the first try was committed. */
function check(
  runs: readonly FinishedRun[],
  written: ReadonlySet<string>,
  repeated: boolean,
): void {
  if (written.size === runs.length || (repeated && written.size === 0)) return;
  const existing = runs.find(({ runId }) => !written.has(runId));
  throw new LonghaulError('ConfigInvalid', `the run ${existing?.runId} exists already`, {
    next: 'Give each run an id of its own.',
  });
}

function insertion(chunk: Chunk) {
  return { ...INSERT, values: [JSON.stringify(chunk.runs), `[${chunk.events.join(',')}]`] };
}

function encodeRuns(redactor: Redactor, runs: readonly FinishedRun[]): Chunk[] {
  const chunks: Chunk[] = [];
  for (const { runId, spec, events } of runs) {
    const all: NewEvent[] = [{ type: 'run.created', data: spec }, ...events];
    const encoded = all.map((event) => encode(event, redactor));
    const change = projectionChange(encoded.map(({ event }) => event));
    const [created] = encoded;
    // The row shows what the log shows: the redacted spec.
    const stored = created?.event.data as RunSpec;
    let chunk = chunks.at(-1);
    if (chunk === undefined || chunk.bytes > CHUNK_BYTES) {
      chunk = { runs: [], events: [], bytes: 0 };
      chunks.push(chunk);
    }
    chunk.runs.push({
      run_id: runId,
      kind: stored.kind,
      status: change.status,
      head: encoded.length,
      task: stored.task.name,
      agent: stored.agent,
      model: stored.model.ref,
      seed: stored.seed,
      reward: change.reward,
      last_step: change.step ?? 0,
    });
    for (const [i, { event, v, json }] of encoded.entries()) {
      chunk.events.push(
        `{"run_id":"${runId}","seq":${i + 1},"type":"${event.type}","v":${v},"data":${json}}`,
      );
      chunk.bytes += json.length;
    }
  }
  return chunks;
}
