import type { z } from 'zod';
import type { Effect } from './event.ts';

/** Why a process ended, with evidence from outside it. */
export type ExitCause =
  | 'exited'
  | 'signalled'
  /** Ran past its deadline; the whole tree was killed. */
  | 'timeout'
  /** The kernel's out-of-memory killer, seen in the cgroup's events or by rlimit. */
  | 'out_of_memory'
  | 'output_limit'
  /** Ended because the caller said so: by its abort signal, `kill` or `stop`. */
  | 'killed';

export interface ExecRequest {
  argv: readonly string[];
  cwd?: string;
  env?: Readonly<Record<string, string>>;
  stdin?: Uint8Array | string;
  /** Wall clock; the whole process tree is killed at its end. Default 60 s. */
  timeoutMs?: number;
  /** Bytes kept of stdout and stderr each: half from the head, half from the tail. Default 256 KiB. */
  keepBytes?: number;
  /** Told of output as it comes, chunks in the order of each stream; the result holds it too. */
  onOutput?: (stream: OutputStream, chunk: Uint8Array) => void;
  /** Aborting kills the whole process tree; the call then ends with cause `killed`. */
  signal?: AbortSignal;
}

export type OutputStream = 'stdout' | 'stderr';

export interface ExecResult {
  cause: ExitCause;
  /** Exit code; null when a signal ended it. */
  code: number | null;
  signal: string | null;
  /** Decoded as UTF-8 with replacement characters; a cut is marked with the number of bytes left out. */
  stdout: string;
  stderr: string;
  stdoutBytes: number;
  stderrBytes: number;
  durationMs: number;
  /** Limits that the guest ran into meanwhile, counted by the kernel outside it; absent: none was seen. */
  limitsHit?: readonly ('memory' | 'pids')[];
}

/** A process that goes on while other calls are made. It ends with the sandbox, a rollback or a fork. */
export interface SandboxProcess {
  /** Number within the sandbox, for `kill` and for people. */
  readonly id: number;
  /** Settles when the process has ended; what it printed is kept as `keepBytes` says. Never rejects on the guest's account. */
  readonly exited: Promise<ExecResult>;
  /** Resolves when the bytes have been handed to the process; `FileRefused` when it no longer reads. */
  write(data: Uint8Array | string): Promise<void>;
  /** Closes standard input. */
  end(): Promise<void>;
  /** Sends a signal to the process and its group; the default is SIGKILL. A process that is gone is no error. */
  kill(signal?: 'SIGTERM' | 'SIGINT' | 'SIGHUP' | 'SIGKILL' | 'SIGUSR1' | 'SIGUSR2'): Promise<void>;
}

export interface CodeRequest {
  language: 'python' | 'javascript';
  source: string;
  stdin?: string;
  timeoutMs?: number;
}

export type FileKind = 'file' | 'directory' | 'symlink' | 'other';

export interface FileEntry {
  /** Bytes that are not UTF-8 show as U+FFFD; `rawName` then holds the name as it is. */
  name: string;
  rawName?: Uint8Array;
  kind: FileKind;
  bytes: number;
}

/** Of the path itself: a symlink is not followed. */
export interface FileStat {
  kind: FileKind;
  bytes: number;
  /** Permission bits, as in `chmod`. */
  mode: number;
  modifiedMs: number;
  /** Where a symlink points, as written in it. */
  target?: string;
}

/** A path inside: absolute, or relative to where commands start. Bytes where the name is not UTF-8. */
export type SandboxPath = string | Uint8Array;

export interface ReadOptions {
  /** Most bytes to return. Default 1 MiB; a driver may carry less in one call, at least 64 MiB. */
  limit?: number;
  /** Where to begin. Default 0. */
  offset?: number;
}

/**
 * What a tool sees of a sandbox: commands and files, no lifecycle. Paths are absolute inside the
 * sandbox or relative to where commands start: the workspace, or the working directory of the image. File
 * calls run inside, so a link never leads outside.
 * What the guest causes comes back as a result; what the host causes throws `SandboxBroken` or
 * `SandboxUnavailable`.
 */
export interface ToolSandbox {
  exec(request: ExecRequest): Promise<ExecResult>;
  /** Starts a process that outlives the call. `timeoutMs` is absent unless given. */
  start(request: ExecRequest): Promise<SandboxProcess>;
  /** Runs snippets in warm interpreters, each in a process of its own, in order. One round trip. */
  runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]>;
  /** Usage error `NotFound` for a missing file; a plain number is the limit. */
  readFile(path: SandboxPath, options?: number | ReadOptions): Promise<Uint8Array>;
  writeFile(path: SandboxPath, data: Uint8Array | string): Promise<void>;
  /** Entries of a directory, sorted by name. */
  listFiles(path: SandboxPath): Promise<FileEntry[]>;
  stat(path: SandboxPath): Promise<FileStat>;
}

/** What a model is told of a tool, and what the ledger needs to know of it. */
export interface ToolSpec {
  name: string;
  description: string;
  /** Checked before the tool runs; a mismatch goes back to the model as an observation. */
  input: z.ZodType;
  effect: Effect;
  timeoutMs: number;
}

export interface ToolContext {
  sandbox: ToolSandbox;
  runId: string;
  callId: string;
  idempotencyKey: string;
  signal: AbortSignal;
}

/** `isError` marks an observation the agent should correct; it is not a failure of the run. */
export interface ToolResult {
  output: string;
  isError?: boolean;
}

export interface Tool extends ToolSpec {
  /** Throws only what the host caused. What the guest caused is a result with `isError`. */
  run(input: unknown, context: ToolContext): Promise<ToolResult>;
  /** For `once` tools: whether a call with this key happened. */
  status?(key: string): Promise<'done' | 'absent' | 'unknown'>;
}
