import { z } from 'zod';
import {
  EVENT_DATA,
  EVENT_VERSIONS,
  type Event,
  type EventType,
  LonghaulError,
  type NewEvent,
  type Redactor,
  statusAfter,
} from '../core/index.ts';

/** An event may have this many bytes of JSON; more belongs into an artifact. */
export const MAX_EVENT_BYTES = 1024 * 1024;
const MAX_DEPTH = 200;

/** An event ready to be stored: redacted, storable, checked, serialised. */
export interface EncodedEvent {
  event: NewEvent;
  v: number;
  json: string;
}

/**
 * The one way into the log. Redacts, makes text storable, checks the payload against its type.
 * `Internal` for a payload that has the wrong shape or more than `MAX_EVENT_BYTES`: a fault of the caller.
 */
export function encode(event: NewEvent, redactor: Redactor): EncodedEvent {
  const schema = EVENT_DATA[event.type];
  if (schema === undefined)
    throw new LonghaulError('Internal', `there is no event type ${JSON.stringify(event.type)}`);
  const clean = redactor.event({ type: event.type, data: storable(event.data) } as NewEvent);
  const parsed = schema.safeParse(clean.data);
  if (!parsed.success)
    throw new LonghaulError(
      'Internal',
      `the event ${event.type} is malformed: ${z.prettifyError(parsed.error)}`,
    );
  const json = toJson(parsed.data, event.type);
  const bytes = Buffer.byteLength(json);
  if (bytes > MAX_EVENT_BYTES)
    throw new LonghaulError(
      'Internal',
      `the event ${event.type} has ${bytes} bytes, more than the ${MAX_EVENT_BYTES} an event may have`,
      { next: 'Put the payload into the artifact store and refer to it by its hash.' },
    );
  return {
    event: { type: event.type, data: parsed.data } as NewEvent,
    v: EVENT_VERSIONS[event.type],
    json,
  };
}

function toJson(data: unknown, what: string): string {
  try {
    return JSON.stringify(data);
  } catch (cause) {
    throw new LonghaulError('Internal', `the payload of ${what} is not JSON: ${String(cause)}`, {
      cause,
    });
  }
}

/**
 * Postgres' jsonb takes neither NUL characters nor lone surrogates, and limits nesting; models and tools
 * write all three. They are replaced, so that the rest is kept. Returns the same object when nothing was.
 */
export function storable(value: unknown, depth = 0): unknown {
  if (typeof value === 'string') return storableText(value);
  if (value === null || typeof value !== 'object') return value;
  if (depth >= MAX_DEPTH) return '[nested too deeply]';
  if (Array.isArray(value)) {
    const out = value.map((item) => storable(item, depth + 1));
    return out.some((item, i) => item !== value[i]) ? out : value;
  }
  let changed = false;
  const entries = Object.entries(value).map(([key, item]): [string, unknown] => {
    const entry: [string, unknown] = [storableText(key), storable(item, depth + 1)];
    if (entry[0] !== key || entry[1] !== item) changed = true;
    return entry;
  });
  return changed ? Object.fromEntries(entries) : value;
}

function storableText(text: string): string {
  const formed = text.isWellFormed() ? text : text.toWellFormed();
  return formed.includes('\0') ? formed.replaceAll('\0', '\uFFFD') : formed;
}

/** Columns of an event for `decode`, in its order. Times are milliseconds since the epoch. */
export const EVENT_COLUMNS =
  'run_id, seq, type, v, data, floor(extract(epoch from at) * 1000)::bigint as at';

/** How to ask for events: long runs have many rows, so the driver neither names nor parses their columns. */
export const EVENT_ROWS = {
  rowMode: 'array' as const,
  types: { getTypeParser: () => (text: string) => text },
};

/** Columns as the server's text. */
export type EventRow = [
  runId: string,
  seq: string,
  type: string,
  v: string,
  data: string,
  at: string,
  ...more: string[],
];

/**
 * An event as it is read. Payloads of older versions are upgraded here, when there is one.
 * `StoreTooNew` for a type or version that a newer Longhaul wrote.
 */
export function decode([runId, seq, type, version, data, at]: EventRow): Event {
  const known = EVENT_VERSIONS[type as EventType] as number | undefined;
  const v = Number(version);
  if (known === undefined || v > known)
    throw new LonghaulError(
      'StoreTooNew',
      `event ${seq} of run ${runId} is ${type} version ${v}, written by a newer Longhaul`,
    );
  const time = new Date(Number(at)).toISOString();
  return { type, data: JSON.parse(data), runId, seq: Number(seq), at: time, v } as Event;
}

/** What a list of events changes in the run's row: null or absent where it changes nothing. */
export interface ProjectionChange {
  status: string | null;
  reward: number | null;
  graded: boolean;
  step: number | null;
}

export function projectionChange(events: readonly NewEvent[]): ProjectionChange {
  const change: ProjectionChange = { status: null, reward: null, graded: false, step: null };
  for (const event of events) {
    change.status = statusAfter(event) ?? change.status;
    if (event.type === 'grade.recorded') {
      change.reward = event.data.reward.value;
      change.graded = true;
    }
    if (event.type === 'model.requested') change.step = event.data.step;
  }
  return change;
}
