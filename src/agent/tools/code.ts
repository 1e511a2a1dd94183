import { z } from 'zod';
import { type Effect, LonghaulError, type Tool } from '../../core/index.ts';
import { describeExec } from '../observation.ts';

/** Runs a snippet in a warm interpreter: milliseconds, where the shell starts a new one each time. */
export function executeCode(languages: readonly ('python' | 'javascript')[], effect: Effect): Tool {
  const [first = 'python', ...rest] = languages;
  const Input = z.object({
    language: z.enum([first, ...rest]),
    code: z.string().min(1),
    timeout_seconds: z.number().int().min(1).max(120).optional().describe('Default 30.'),
  });
  return {
    name: 'execute_code',
    description:
      'Run a short program in a fresh process in the working directory and return what it prints.',
    input: Input,
    effect,
    timeoutMs: 120_000,
    async run(input, { sandbox }) {
      const { language, code, timeout_seconds = 30 } = input as z.infer<typeof Input>;
      try {
        const [result] = await sandbox.runCode([
          { language, source: code, timeoutMs: timeout_seconds * 1000 },
        ]);
        return describeExec(result!);
      } catch (error) {
        // The image has no interpreter: commands may still do.
        if (error instanceof LonghaulError && error.code === 'CapabilityMissing')
          return { output: error.message, isError: true };
        throw error;
      }
    },
  };
}
