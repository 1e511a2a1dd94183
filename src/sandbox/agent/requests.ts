import { constants as osConstants } from 'node:os';
import {
  type CodeRequest,
  type ExecRequest,
  type ExecResult,
  LonghaulError,
  type SandboxPath,
} from '../../core/index.ts';
import { DEFAULT_KEEP_BYTES, outputText } from '../output.ts';
import { type Frame, frameParts } from './channel.ts';

/** Most bytes of a file or an output stream that one call carries. */
export const MAX_TRANSFER_BYTES = 128 * 1024 * 1024;
const DEFAULT_CODE_TIMEOUT_MS = 10_000;
export const KILLED = osConstants.signals.SIGKILL;
const KILLED_CODE = 128 + KILLED;

const SIGNALS = new Map(
  Object.entries(osConstants.signals).map(([name, number]) => [number as number, name]),
);

/** What the kernel counted outside the guest since the last time. */
export interface Evidence {
  oomKills: number;
  pidsRefused: number;
}

/** How a process ended, as agent.py says it. */
export interface RawResult {
  cause: ExecResult['cause'];
  code: number | null;
  signal: number | null;
  totals: [number, number];
  ms: number;
}

export function pathHeader(path: SandboxPath): Record<string, string> {
  return typeof path === 'string' ? { path } : { raw: Buffer.from(path).toString('hex') };
}

/** Longer than this is no deadline but a mistake: timers hold 31 bits of milliseconds. */
const MOST_TIMEOUT_MS = 2 ** 31 - 1 - 60_000;

function checkNumbers(timeoutMs: number | null | undefined, keepBytes?: number): void {
  if (timeoutMs != null && !(timeoutMs >= 0 && timeoutMs <= MOST_TIMEOUT_MS))
    throw new LonghaulError('ConfigInvalid', `timeoutMs is ${timeoutMs}`, {
      next: `Give milliseconds between 0 and ${MOST_TIMEOUT_MS}.`,
    });
  if (keepBytes !== undefined && !(Number.isSafeInteger(keepBytes) && keepBytes >= 0))
    throw new LonghaulError('ConfigInvalid', `keepBytes is ${keepBytes}`, {
      next: 'Give a whole number of bytes.',
    });
}

/** The fields of a request for a process. `ConfigInvalid` for no command and for numbers that are none. */
export function commandHeader(
  request: ExecRequest,
  timeoutMs: number | null,
): Record<string, unknown> {
  if (request.argv.length === 0)
    throw new LonghaulError('ConfigInvalid', 'exec needs a command', {
      next: 'Give argv with at least one element.',
    });
  checkNumbers(timeoutMs, request.keepBytes);
  return {
    argv: request.argv,
    cwd: request.cwd ?? '',
    env: request.env ?? {},
    timeout: timeoutMs === null ? null : timeoutMs / 1000,
    keep: Math.min(request.keepBytes ?? DEFAULT_KEEP_BYTES, MAX_TRANSFER_BYTES),
  };
}

/** A batch of snippets as one request; `limitMs` is how long it may take in all. */
export function codeHeaders(requests: readonly CodeRequest[]) {
  const parts: Buffer[] = [];
  let limitMs = 0;
  const headers = requests.map((request) => {
    const source = Buffer.from(request.source);
    const stdin = Buffer.from(request.stdin ?? '');
    parts.push(source, stdin);
    const timeoutMs = request.timeoutMs ?? DEFAULT_CODE_TIMEOUT_MS;
    checkNumbers(timeoutMs);
    limitMs += timeoutMs;
    return {
      source: source.length,
      stdin: stdin.length,
      timeout: timeoutMs / 1000,
      keep: DEFAULT_KEEP_BYTES,
    };
  });
  return { headers, parts, limitMs };
}

function wasKilled(raw: RawResult): boolean {
  const byUs = raw.cause === 'timeout' || raw.cause === 'killed' || raw.cause === 'output_limit';
  return !byUs && (raw.signal === KILLED || raw.code === KILLED_CODE);
}

/** One result of the agent, with what the kernel says of its cause. `parts`: head and tail of both streams. */
export function execResult(raw: RawResult, parts: Buffer[], evidence: Evidence): ExecResult {
  const [head, tail, errHead, errTail] = parts;
  const oom = evidence.oomKills > 0 && wasKilled(raw);
  const limitsHit = [
    ...(evidence.oomKills > 0 ? (['memory'] as const) : []),
    ...(evidence.pidsRefused > 0 ? (['pids'] as const) : []),
  ];
  return {
    cause: oom ? 'out_of_memory' : raw.cause,
    code: raw.code,
    signal: raw.signal === null ? null : (SIGNALS.get(raw.signal) ?? `SIG${raw.signal}`),
    stdout: outputText(head!, tail!, raw.totals[0]),
    stderr: outputText(errHead!, errTail!, raw.totals[1]),
    stdoutBytes: raw.totals[0],
    stderrBytes: raw.totals[1],
    durationMs: raw.ms,
    ...(limitsHit.length > 0 && { limitsHit }),
  };
}

/** The results of one answer. Which snippet of a batch met a limit is not known, so all of it says so. */
export function execResults(frame: Frame, evidence: Evidence): ExecResult[] {
  const raws = frame.header.results as RawResult[];
  const parts = frameParts(frame);
  return raws.map((raw, index) => execResult(raw, parts.slice(index * 4, index * 4 + 4), evidence));
}

/** The result of a process that nobody saw end: its agent was lost or ended with it. */
export function lostResult(cause: ExecResult['cause'], durationMs: number): ExecResult {
  return {
    cause,
    code: null,
    signal: 'SIGKILL',
    stdout: '',
    stderr: '',
    stdoutBytes: 0,
    stderrBytes: 0,
    durationMs,
  };
}
