import { isGraded, Rng } from '../core/index.ts';
import type { TaskRef } from '../env/contract.ts';
import { wilson } from './algorithms/interval.ts';
import type { Played, RolloutPlan, RolloutRunner } from './rollouts.ts';

/** A share with its 95 % interval (Wilson). */
export interface Share {
  value: number;
  low: number;
  high: number;
  count: number;
}

export interface Evaluation {
  /** Solved at the first try, sampled at temperature 1. */
  first: Share;
  /** Solved at any of the tries, sampled at temperature 1. */
  any: Share;
  /** Solved at the first try, greedily; absent where it was not measured. */
  greedy?: Share;
  byDomain: Record<string, Pick<Evaluation, 'first' | 'any' | 'greedy'>>;
  /** Runs that the infrastructure failed: in no share. */
  ungraded: number;
  seconds: number;
}

/**
 * Plays each task once at temperature 1 with all its tries, and once greedily with one try.
 *
 * @param seed of the sampling; equal seeds make two evaluations of equal weights equal
 */
export async function evaluate(
  runner: RolloutRunner,
  tasks: readonly TaskRef[],
  seed: number,
  options: { greedy: boolean; tries?: number },
): Promise<{ evaluation: Evaluation; sampled: Played[] }> {
  const startedAt = performance.now();
  const plans: RolloutPlan[] = tasks.map((task, i) => ({
    task,
    group: `evaluation ${i}`,
    indexInGroup: 0,
    seed: Rng.of(seed, 'evaluation', i).uint32(),
  }));
  const sampled = await runner.play(plans, 'eval', {
    temperature: 1,
    ...(options.tries === undefined ? {} : { tries: options.tries }),
  });
  const greedy = options.greedy
    ? await runner.play(plans, 'eval', { temperature: 0, tries: 1 })
    : null;
  const domains = [...new Set(tasks.map((task) => task.domain))];
  const measure = (domain: string | null) => {
    const of = (played: readonly Played[]) =>
      played.filter((item) => domain === null || item.trajectory.domain === domain);
    return {
      first: share(of(sampled), (tries) => tries === 1),
      any: share(of(sampled), () => true),
      ...(greedy === null ? {} : { greedy: share(of(greedy), (tries) => tries === 1) }),
    };
  };
  return {
    evaluation: {
      ...measure(null),
      byDomain: Object.fromEntries(domains.map((domain) => [domain, measure(domain)])),
      ungraded: [...sampled, ...(greedy ?? [])].filter((item) => !isGraded(item.rollout.reward))
        .length,
      seconds: (performance.now() - startedAt) / 1000,
    },
    sampled,
  };
}

function share(played: readonly Played[], counts: (tries: number) => boolean): Share {
  const graded = played.map((item) => item.rollout.reward).filter(isGraded);
  const solved = graded.filter(
    ({ components }) => components.solved === 1 && counts(components.tries ?? 0),
  ).length;
  const [low, high] = wilson(solved, graded.length);
  return {
    value: graded.length === 0 ? 0 : solved / graded.length,
    low,
    high,
    count: graded.length,
  };
}
