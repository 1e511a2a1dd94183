import { z } from 'zod';
import type { Effect, Tool } from '../../core/index.ts';
import { describeExec } from '../observation.ts';

const Input = z.object({
  command: z
    .string()
    .min(1)
    .describe(
      'A bash command line. Starts in the working directory; state other than files does not persist.',
    ),
  timeout_seconds: z.number().int().min(1).max(600).optional().describe('Default 60.'),
});

/** A command line in the sandbox. `effect`: what it may have done when nobody knows how it ended. */
export function shell(effect: Effect): Tool {
  return {
    name: 'shell',
    description: 'Run a bash command and return its output and exit code.',
    input: Input,
    effect,
    timeoutMs: 600_000,
    async run(input, { sandbox }) {
      const { command, timeout_seconds = 60 } = input as z.infer<typeof Input>;
      return describeExec(
        await sandbox.exec({ argv: ['bash', '-c', command], timeoutMs: timeout_seconds * 1000 }),
      );
    },
  };
}
