import { Rng, type Tool } from '../../core/index.ts';
import type { Environment } from '../contract.ts';
import { drawTasks } from './environment.ts';
import { demonstrate } from './teacher.ts';
import { observation, readObservation } from './verdict.ts';

/**
 * A control: the environment as it is, but the case that a wrong program comes back with belongs to
 * another task and another program. Success, errors and rewards are the true ones, so what is lost
 * is exactly what the agent could read from its feedback.
 */
export function shuffledFeedback(environment: Environment, seed: number): Environment {
  const pool = drawTasks('train', seed, 256).flatMap((task, i) => {
    const [turn] = demonstrate(Rng.of(seed, 'shuffle', i), task.spec, task.cases, 'python', 1);
    return turn?.verdict.kind === 'wrong' ? [observation(turn.verdict)] : [];
  });
  const shuffled = (tool: Tool): Tool => ({
    ...tool,
    async run(input, context) {
      const result = await tool.run(input, context);
      if (readObservation(result.output) !== 'wrong') return result;
      const rng = Rng.of(seed, 'shuffle', JSON.stringify(input), result.output);
      return { ...result, output: rng.pick(pool) };
    },
  });
  return {
    ...environment,
    async open(ref) {
      const session = await environment.open(ref);
      return { ...session, tools: session.tools.map(shuffled) };
    },
  };
}
