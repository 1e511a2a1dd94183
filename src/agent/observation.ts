import type { ExecResult } from '../core/index.ts';

/** Characters of one tool result that go into the context. */
export const OBSERVATION_LIMIT = 12_000;

/** Keeps head and tail, where commands put what matters, and says how much is missing. */
export function cut(text: string, limit: number = OBSERVATION_LIMIT): string {
  if (text.length <= limit) return text;
  const half = Math.floor(limit / 2);
  const gone = text.length - 2 * half;
  return `${text.slice(0, half)}\n[... ${gone} characters left out ...]\n${text.slice(-half)}`;
}

/** What a model reads of a finished process: how it ended first, then what it printed. */
export function describeExec(result: ExecResult): { output: string; isError: boolean } {
  const parts: string[] = [];
  const ending = ended(result);
  if (ending !== null) parts.push(ending);
  if (result.stdout !== '') parts.push(cut(result.stdout));
  if (result.stderr !== '') parts.push(`[stderr]\n${cut(result.stderr)}`);
  if (parts.length === 0) parts.push('[no output]');
  return { output: parts.join('\n'), isError: ending !== null };
}

function ended(result: ExecResult): string | null {
  switch (result.cause) {
    case 'exited':
      return result.code === 0 ? null : `[exit code ${result.code}]`;
    case 'signalled':
      return `[killed by ${result.signal}]`;
    case 'timeout':
      return `[stopped: ran past its time limit of ${(result.durationMs / 1000).toFixed(1)} s]`;
    case 'killed':
      return '[stopped before it was done]';
    case 'out_of_memory':
      return '[killed: out of memory]';
    case 'output_limit':
      return `[stopped: printed too much (${result.stdoutBytes + result.stderrBytes} bytes)]`;
  }
}
