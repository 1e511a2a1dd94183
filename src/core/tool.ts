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
  | 'output_limit';

export interface ExecRequest {
  argv: readonly string[];
  cwd?: string;
  env?: Readonly<Record<string, string>>;
  stdin?: Uint8Array | string;
  /** Wall clock; the whole process tree is killed at its end. Default 60 s. */
  timeoutMs?: number;
  /** Bytes kept of stdout and stderr each: half from the head, half from the tail. Default 256 KiB. */
  keepBytes?: number;
}

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
}

export interface CodeRequest {
  language: 'python' | 'javascript';
  source: string;
  stdin?: string;
  timeoutMs?: number;
}

export interface FileEntry {
  name: string;
  kind: 'file' | 'directory' | 'symlink' | 'other';
  bytes: number;
}

/**
 * What a tool sees of a sandbox: commands and files, no lifecycle. Paths are absolute inside the
 * sandbox or relative to the workspace; file calls run inside, so a link never leads outside.
 * What the guest causes comes back as a result; what the host causes throws `SandboxBroken` or
 * `SandboxUnavailable`.
 */
export interface ToolSandbox {
  exec(request: ExecRequest): Promise<ExecResult>;
  /** Runs snippets in warm interpreters, each in a process of its own, in order. One round trip. */
  runCode(requests: readonly CodeRequest[]): Promise<ExecResult[]>;
  /** Usage error `NotFound` for a missing file; `limit` bytes at most (default 1 MiB). */
  readFile(path: string, limit?: number): Promise<Uint8Array>;
  writeFile(path: string, data: Uint8Array | string): Promise<void>;
  listFiles(path: string): Promise<FileEntry[]>;
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
