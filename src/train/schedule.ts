import type { ModelConfig } from '../engine/contract.ts';
import type { Language } from '../env/programs/operations.ts';
import { tinyRenderer } from '../model/render/tiny.ts';

/** Everything a quickstart's training depends on, fixed before its first step. */
export interface Schedule {
  model: ModelConfig;
  maxOutputTokens: number;
  warmup: { steps: number; rows: number; learningRate: number; rampSteps: number };
  grpo: {
    steps: number;
    groups: number;
    groupSize: number;
    learningRate: number;
    /** How much a try answers for those after it. */
    discount: number;
  };
  /** Steps of supervised training that take as long as one GRPO step, for the control. */
  supervisedPerGrpo: number;
  /** Tasks of the audit, of the measurements before and after, and of those while training. */
  evaluation: { auditTasks: number; tasks: number; validationTasks: number };
  /** GRPO steps between two measurements on validation tasks. */
  validateEvery: number;
  /** Steps between two checkpoints. */
  saveEvery: number;
}

/** A budget below this only shows that everything works: it measures on a tenth of the tasks. */
const SMOKE_MINUTES = 3;

/** Reference machine: two cores of 2020; a slower one takes longer, the steps stay. */
const SECONDS = { overhead: 70, warmupStep: 0.1, grpoStep: 0.85 } as const;

/**
 * The schedule of a time budget. Steps are counted, not timed, so that equal options give equal
 * results on machines of any speed; the budget only chooses how many.
 *
 * @param minutes for everything on the reference machine
 */
export function scheduleFor(minutes: number, language: Language): Schedule {
  const measured = minutes < SMOKE_MINUTES ? 0.1 : 1;
  const seconds = Math.max(6, minutes * 60 - SECONDS.overhead * measured);
  const warmupSeconds = Math.min(300, seconds * 0.5);
  const grpoSteps = Math.round((seconds - warmupSeconds) / SECONDS.grpoStep);
  return {
    model: {
      vocabSize: tinyRenderer.vocabSize,
      dim: 128,
      layers: 2,
      heads: 4,
      kvHeads: 4,
      ffnDim: 344,
      // Spec, three programs and two observations at their longest.
      maxLength: language === 'python' ? 256 : 352,
      ropeTheta: 10_000,
      normEps: 1e-5,
      tiedHead: true,
    },
    maxOutputTokens: language === 'python' ? 48 : 80,
    warmup: {
      steps: Math.round(warmupSeconds / SECONDS.warmupStep),
      rows: 32,
      learningRate: 3e-3,
      rampSteps: 20,
    },
    grpo: { steps: grpoSteps, groups: 16, groupSize: 8, learningRate: 7e-4, discount: 0 },
    supervisedPerGrpo: SECONDS.grpoStep / SECONDS.warmupStep,
    evaluation: {
      auditTasks: Math.round(160 * measured),
      tasks: Math.round(832 * measured),
      validationTasks: Math.round(416 * measured),
    },
    validateEvery: Math.max(1, Math.ceil(grpoSteps / 5)),
    saveEvery: 25,
  };
}

/** Linear rise over `rampSteps`, then a cosine to a tenth. `step` counts from 0. */
export function warmupRate(schedule: Schedule['warmup'], step: number): number {
  const { learningRate, rampSteps, steps } = schedule;
  if (step < rampSteps) return (learningRate * (step + 1)) / rampSteps;
  const progress = Math.min(1, (step - rampSteps) / Math.max(1, steps - rampSteps));
  return learningRate * (0.1 + 0.45 * (1 + Math.cos(Math.PI * progress)));
}

/** Linear decay to 0: with a constant rate the policy got worse late in training. */
export function grpoRate(schedule: Schedule['grpo'], step: number): number {
  return schedule.learningRate * (1 - step / schedule.steps);
}

/** Seconds on the reference machine, for the time left: the speed so far scales them. */
export function expectedSeconds(schedule: Schedule) {
  const afterTraining = SECONDS.overhead / 2;
  return {
    ...SECONDS,
    afterTraining,
    afterWarmup: SECONDS.overhead + schedule.grpo.steps * SECONDS.grpoStep,
  };
}
