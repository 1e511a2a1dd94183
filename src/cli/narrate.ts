import type { Event, Reward } from '../core/index.ts';
import { duration, excerpt, type Output, printable, style } from './output.ts';

/** Tells a run's events to a person as they happen, or afterwards for `show`. */
export function narrate(write: (line: string) => void, event: Event): void {
  switch (event.type) {
    case 'run.started':
    case 'run.resumed':
      write(
        style(
          'dim',
          `${event.type === 'run.started' ? 'started' : 'resumed'} by ${event.data.worker}`,
        ),
      );
      break;
    case 'message.added':
      write(style('bold', `${event.data.message.role}:`));
      for (const line of excerpt(event.data.message.content, 12)) write(`  ${line}`);
      break;
    case 'model.completed': {
      const { completion, latencyMs, tokens } = event.data;
      const used =
        completion.usage.outputTokens === null ? '' : `, ${completion.usage.outputTokens} tokens`;
      write(
        style(
          'cyan',
          `[${event.data.callId}] model, ${duration(latencyMs)}${used}${tokens ? ', exact tokens' : ''}`,
        ),
      );
      for (const line of excerpt(completion.message.content)) if (line !== '') write(`  ${line}`);
      break;
    }
    case 'model.failed':
      write(
        style(
          'yellow',
          `  ${event.data.error.code}: ${printable(event.data.error.message)}${event.data.willRetry ? ' (trying again)' : ''}`,
        ),
      );
      break;
    case 'tool.requested':
      write(
        `  ${style('bold', printable(event.data.tool))} ${excerpt(inputText(event.data.input), 4).join('\n    ')}`,
      );
      break;
    case 'tool.completed':
      for (const line of excerpt(event.data.output, 8))
        write(style(event.data.isError ? 'yellow' : 'dim', `    ${line}`));
      break;
    case 'tool.failed':
      write(
        style(
          'yellow',
          `    the machine failed the call (${event.data.error.code}): ${printable(event.data.error.message)}`,
        ),
      );
      break;
    case 'tool.unknown':
      write(
        style(
          'yellow',
          `    ${event.data.callId}: how it ended is unknown; ${RESOLUTIONS[event.data.resolution]}`,
        ),
      );
      break;
    case 'signal.received':
      write(style('yellow', `signal: ${event.data.signal}`));
      break;
    case 'budget.exceeded':
      write(
        style(
          'yellow',
          `limit reached: ${event.data.used} of ${event.data.allowed} ${event.data.limit}`,
        ),
      );
      break;
    case 'grade.recorded':
      write(`${style('bold', 'grade')} ${rewardText(event.data.reward)} by ${event.data.grader}`);
      break;
    case 'run.paused':
      write(
        style(
          'yellow',
          `paused (${event.data.error.code}): ${printable(event.data.error.message)}`,
        ),
      );
      break;
    case 'run.cancelled':
      write(style('yellow', `cancelled: ${printable(event.data.reason)}`));
      break;
    case 'run.finished':
      write(style(event.data.status === 'succeeded' ? 'green' : 'red', event.data.status));
      break;
  }
}

const RESOLUTIONS = {
  repeat: 'it is repeated, which is harmless',
  rolled_back: 'the workspace is as before it, and it is repeated',
  ask: 'a person must say',
} as const;

function inputText(input: unknown): string {
  if (typeof input === 'string') return input;
  if (input === null || typeof input !== 'object') return JSON.stringify(input);
  const values = Object.values(input);
  const [only] = values;
  return values.length === 1 && typeof only === 'string' ? only : JSON.stringify(input);
}

const round = (value: number) => Number(value.toFixed(4));

export function rewardText(reward: Reward): string {
  if (reward.value === null) return `none (${reward.status}: ${printable(reward.reason)})`;
  const parts = Object.entries(reward.components).map(([name, value]) => `${name} ${round(value)}`);
  return `${round(reward.value)}${reward.status === 'ok' ? '' : ` (${reward.status})`}${parts.length > 0 ? ` [${parts.join(', ')}]` : ''}`;
}

export function narrator(output: Output): (event: Event) => void {
  return (event) => narrate((line) => output.say(line), event);
}
