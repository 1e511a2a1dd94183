/**
 * Typed errors. An error is attributed once, at the boundary where it happened; its class, not its
 * text, decides what happens next:
 *
 * - `retryable`: again, with back-off. Nothing is lost.
 * - `terminal`: the run fails and says why.
 * - `pause`: a person or a budget must act; the run keeps its state and waits.
 * - `usage`: the caller is wrong; nothing was started.
 */
export type ErrorClass = 'retryable' | 'terminal' | 'pause' | 'usage';

/** Stable codes: programs match on these. Class, HTTP status and the default next step live here. */
export const ERROR_CODES = {
  TaskInvalid: {
    class: 'usage',
    status: 422,
    next: 'Fix the task directory; docs/tasks.md shows the format.',
  },
  ConfigInvalid: {
    class: 'usage',
    status: 422,
    next: 'Fix the named option; `longhaul help COMMAND` lists them.',
  },
  InputInvalid: {
    class: 'usage',
    status: 422,
    next: 'Fix the named sequence, token or request and call again; nothing was changed.',
  },
  NotFound: { class: 'usage', status: 404, next: 'List what exists with `longhaul runs`.' },
  CapabilityMissing: {
    class: 'usage',
    status: 409,
    next: 'Choose a driver that has the capability; `longhaul doctor` lists them.',
  },
  ModelUnknown: {
    class: 'usage',
    status: 404,
    next: 'Name a model the endpoint serves, as PROVIDER/MODEL.',
  },
  ModelUnreachable: {
    class: 'retryable',
    status: 503,
    next: 'Check that the model server runs and that --base-url points at it.',
  },
  ModelRefused: {
    class: 'pause',
    status: 502,
    next: 'Check the API key and what the endpoint accepts.',
  },
  ModelOverloaded: { class: 'retryable', status: 429, next: 'Wait, or lower the concurrency.' },
  ContextTooLong: {
    class: 'terminal',
    status: 413,
    next: 'Use a model with a larger context window, or let the agent compact its conversation.',
  },
  ModelMalformed: {
    class: 'retryable',
    status: 502,
    next: 'The endpoint broke its wire format; check its version.',
  },
  BudgetExceeded: {
    class: 'pause',
    status: 402,
    next: 'Raise the budget and resume the run, or stop it.',
  },
  LoopDetected: {
    class: 'pause',
    status: 409,
    next: 'Look at the repeated calls with `longhaul show RUN`, then resume or stop.',
  },
  EffectUnknown: {
    class: 'pause',
    status: 409,
    next: 'Say whether the call happened, with `longhaul resume RUN --answer done|repeat`.',
  },
  LeaseLost: {
    class: 'terminal',
    status: 409,
    next: 'Another worker owns the run now; nothing to do.',
  },
  SandboxBusy: {
    class: 'retryable',
    status: 409,
    next: 'Wait for the process inside to end, or ask for it to be stopped.',
  },
  SandboxUnavailable: {
    class: 'retryable',
    status: 503,
    next: 'Run `longhaul doctor` to see what this machine lacks.',
  },
  SandboxBroken: {
    class: 'retryable',
    status: 503,
    next: 'The sandbox was replaced; the call can be repeated.',
  },
  LayerDamaged: {
    class: 'terminal',
    status: 500,
    next: 'The disk lost or changed part of it: restore its folder from a backup, or fork the run at an earlier step; `longhaul sandbox doctor` lists the layers that are whole.',
  },
  FileRefused: {
    class: 'usage',
    status: 422,
    next: 'Choose another path, or free space in the sandbox.',
  },
  StoreUnavailable: {
    class: 'retryable',
    status: 503,
    next: 'Run `longhaul doctor`; the store log lies in the home folder.',
  },
  StoreReadOnly: {
    class: 'usage',
    status: 507,
    next: 'Give a home folder that can be written with --home.',
  },
  StoreTooNew: {
    class: 'usage',
    status: 409,
    next: 'Update Longhaul to the version that wrote this store, or use another home folder.',
  },
  DiskFull: { class: 'pause', status: 507, next: 'Free disk space, then resume.' },
  RolloutsFailed: {
    class: 'pause',
    status: 503,
    next: 'Run `longhaul doctor`, mend what it names, then go on with `longhaul train --resume`.',
  },
  GraderFailed: {
    class: 'pause',
    status: 502,
    next: "Look at the grader's output with `longhaul show RUN`.",
  },
  EngineFailed: {
    class: 'terminal',
    status: 500,
    next: 'Run `longhaul doctor`; report it with the printed seed.',
  },
  CheckpointInvalid: {
    class: 'usage',
    status: 422,
    next: 'Name a checkpoint folder written by this version.',
  },
  Interrupted: {
    class: 'pause',
    status: 499,
    next: 'Go on with `longhaul resume` or `longhaul train --resume`.',
  },
  Internal: {
    class: 'terminal',
    status: 500,
    next: 'This is a fault of Longhaul; please report it.',
  },
} as const satisfies Record<string, { class: ErrorClass; status: number; next: string }>;

export type ErrorCode = keyof typeof ERROR_CODES;

/** What is stored in the log and sent over HTTP: no stack, no cause. */
export interface ErrorData {
  code: ErrorCode;
  class: ErrorClass;
  message: string;
  next: string;
}

/** Every error that leaves a room is one of these. */
export class LonghaulError extends Error {
  readonly code: ErrorCode;
  readonly next: string;
  /** For retryable errors whose source said when to come back. */
  readonly retryAfterMs: number | undefined;

  constructor(
    code: ErrorCode,
    message: string,
    options: { next?: string; cause?: unknown; retryAfterMs?: number | undefined } = {},
  ) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = 'LonghaulError';
    this.code = code;
    this.next = options.next ?? ERROR_CODES[code].next;
    this.retryAfterMs = options.retryAfterMs;
  }

  get class(): ErrorClass {
    return ERROR_CODES[this.code].class;
  }

  get status(): number {
    return ERROR_CODES[this.code].status;
  }

  toJSON(): ErrorData {
    return { code: this.code, class: this.class, message: this.message, next: this.next };
  }
}

/** Attributes an unknown thrown value. One that is already attributed is returned unchanged; a full or read-only disk is what it is, wherever it was met. */
export function attribute(thrown: unknown, code: ErrorCode, context?: string): LonghaulError {
  if (thrown instanceof LonghaulError) return thrown;
  const errno = (thrown as { code?: unknown } | null)?.code;
  if (errno === 'ENOSPC' || errno === 'EDQUOT') code = 'DiskFull';
  if (errno === 'EROFS') code = 'StoreReadOnly';
  const text = thrown instanceof Error ? thrown.message : String(thrown);
  return new LonghaulError(code, context ? `${context}: ${text}` : text, { cause: thrown });
}
