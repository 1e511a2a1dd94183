/** Rows as Kysely and the hand-written statements see them. Everything lies in the schema `longhaul`. */
import type { ColumnType, Generated } from 'kysely';

/** `bigint` comes back as text. */
type BigInt8 = ColumnType<string, number | string, number | string>;
type Time = ColumnType<Date, Date | string, Date | string>;
type Json = ColumnType<unknown, string, string>;

export interface RunsTable {
  run_id: string;
  kind: string;
  status: string;
  head: number;
  task: string;
  agent: string;
  model: string;
  seed: BigInt8;
  reward: number | null;
  last_step: number;
  worker: string | null;
  lease_token: BigInt8;
  lease_until: Time | null;
  created_at: Time;
  updated_at: Time;
}

export interface InboxTable {
  id: Generated<string>;
  run_id: string;
  key: string;
  signal: string;
  data: Json;
  posted_at: Generated<Date>;
  taken_at: Time | null;
}

export interface MetricsTable {
  job: string;
  step: number;
  values: Json;
  at: Generated<Date>;
}

export interface JobsTable {
  id: string;
  kind: string;
  spec: Json;
  status: string;
  checkpoint: string | null;
  created_at: Generated<Date>;
  updated_at: Time;
}

export interface Schema {
  'longhaul.runs': RunsTable;
  'longhaul.run_inbox': InboxTable;
  'longhaul.metrics': MetricsTable;
  'longhaul.jobs': JobsTable;
}
