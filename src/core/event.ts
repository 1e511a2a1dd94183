import { z } from 'zod';
import { Completion } from './completion.ts';
import { Message } from './message.ts';
import { Reward } from './reward.ts';
import { RunId, RunSpec } from './run.ts';

/**
 * What a tool may do to the world, which decides what resume does with a call whose end is unknown.
 * `none` and `idempotent` are repeated; `workspace` rolls back to the last saved workspace and is
 * repeated; `once` asks the tool or a person.
 */
export const Effect = z.enum(['none', 'workspace', 'idempotent', 'once']);
export type Effect = z.infer<typeof Effect>;

const LoggedError = z.object({
  code: z.string(),
  class: z.string(),
  message: z.string(),
  next: z.string(),
});
/** A large result lies in the artifact store by hash; the event keeps head and tail. */
const ArtifactRef = z.object({ sha256: z.string(), bytes: z.number().int() });
export type ArtifactRef = z.infer<typeof ArtifactRef>;

/**
 * Payload of every event type. An assistant's message is part of `model.completed` and a tool's of
 * `tool.completed`, so that no crash can part them; `message.added` holds the others.
 * Names are noun.verb. `EVENT_VERSIONS` holds the version written today.
 */
export const EVENT_DATA = {
  'run.created': RunSpec,
  'run.started': z.object({ worker: z.string(), leaseToken: z.number().int() }),
  'run.paused': z.object({ error: LoggedError }),
  'run.resumed': z.object({ worker: z.string(), leaseToken: z.number().int() }),
  'run.forked': z.object({ childId: RunId, atSeq: z.number().int() }),
  'run.cancelled': z.object({ by: z.string(), reason: z.string() }),
  'run.finished': z.object({
    status: z.enum(['succeeded', 'failed']),
    summary: z.string(),
    error: LoggedError.optional(),
  }),
  'message.added': z.object({ message: Message }),
  'model.requested': z.object({
    callId: z.string(),
    model: z.string(),
    step: z.number().int(),
    attempt: z.number().int(),
  }),
  'model.completed': z.object({
    callId: z.string(),
    completion: Completion.omit({ tokens: true }),
    /** Exact tokens as a binary artifact, where the engine gives them. */
    tokens: ArtifactRef.optional(),
    latencyMs: z.number(),
  }),
  'model.failed': z.object({ callId: z.string(), error: LoggedError, willRetry: z.boolean() }),
  'tool.requested': z.object({
    callId: z.string(),
    tool: z.string(),
    input: z.unknown(),
    effect: Effect,
    idempotencyKey: z.string(),
    timeoutMs: z.number(),
  }),
  'tool.completed': z.object({
    callId: z.string(),
    tool: z.string(),
    output: z.string(),
    isError: z.boolean(),
    full: ArtifactRef.optional(),
    durationMs: z.number(),
  }),
  /** The host's doing, not the tool's answer: the call is decided again by its effect. */
  'tool.failed': z.object({ callId: z.string(), error: LoggedError }),
  'tool.unknown': z.object({
    callId: z.string(),
    resolution: z.enum(['repeat', 'rolled_back', 'ask']),
  }),
  'workspace.saved': z.object({ layer: z.string(), afterCallId: z.string().nullable() }),
  'signal.received': z.object({
    key: z.string(),
    signal: z.enum(['stop', 'answer']),
    data: z.unknown(),
  }),
  'budget.exceeded': z.object({ limit: z.string(), used: z.number(), allowed: z.number() }),
  'artifact.saved': z.object({ name: z.string(), artifact: ArtifactRef }),
  'grade.recorded': z.object({ reward: Reward, grader: z.string(), output: z.string().optional() }),
} as const;

export type EventType = keyof typeof EVENT_DATA;
export const EVENT_TYPES = Object.keys(EVENT_DATA) as EventType[];

/** The payload version written today, by type. Older ones are upgraded on read by `upgrade`. */
export const EVENT_VERSIONS = Object.fromEntries(EVENT_TYPES.map((type) => [type, 1])) as Record<
  EventType,
  number
>;

/** What a run's owner appends: the store adds run, seq and time. */
export type NewEvent = {
  [T in EventType]: { type: T; data: z.infer<(typeof EVENT_DATA)[T]> };
}[EventType];

/** An event as stored: `(runId, seq)` is unique, seq starts at 1 and has no gaps. */
export type Event = NewEvent & { runId: string; seq: number; at: string; v: number };

/** Checks a payload against its type; throws the zod error on a mismatch. */
export function parseEventData(type: EventType, data: unknown): NewEvent {
  return { type, data: EVENT_DATA[type].parse(data) } as NewEvent;
}
