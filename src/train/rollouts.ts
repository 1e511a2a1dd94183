import { setMaxListeners } from 'node:events';
import { ulid } from 'ulid';
import {
  type ArtifactStore,
  type Clock,
  isGraded,
  LonghaulError,
  type NewEvent,
  type Redactor,
  type RunKind,
  type RunSpec,
  type Trajectory,
} from '../core/index.ts';
import type { Sampler } from '../engine/contract.ts';
import type { Environment, TaskRef } from '../env/contract.ts';
import { SharedSandboxes } from '../env/programs/shared-sandbox.ts';
import { engineModel, sampleInLane } from '../model/engine-model.ts';
import { Lockstep } from '../model/lockstep.ts';
import type { Renderer } from '../model/render/renderer.ts';
import { type Rollout, type RunContext, rollout, segmentsOf } from '../run/index.ts';

/** One episode to be played. */
export interface RolloutPlan {
  task: TaskRef;
  /** Rollouts of one group share a baseline. */
  group: string;
  indexInGroup: number;
  seed: number;
}

/** An episode that was played: the run with its whole log, and its tokens as a trainer sees them. */
export interface Played {
  rollout: Rollout;
  trajectory: Trajectory;
}

export interface RolloutSettings {
  environment: Environment;
  sampler: Sampler;
  renderer: Renderer;
  sandboxes: RunContext['sandboxes'];
  agent: RunContext['agent'];
  modelRef: string;
  clock: Clock;
  redactor: Redactor;
  signal: AbortSignal;
  /** Episodes played at once; each wave is one lockstep batch. */
  wave: number;
  /** Sandboxes that share the programs of a wave. */
  sandboxCount: number;
}

/**
 * Plays episodes with the executor that hosts runs. All episodes of a wave move in lockstep: their
 * sampling calls form one batch and their programs one round trip a sandbox, in order of their index,
 * so equal seeds and weights give equal episodes.
 */
export class RolloutRunner {
  readonly #settings: RolloutSettings;
  readonly #lockstep = new Lockstep();
  readonly #shared: SharedSandboxes;
  readonly #sampling;

  constructor(settings: RolloutSettings) {
    this.#settings = settings;
    this.#shared = new SharedSandboxes(
      settings.sandboxes,
      {},
      this.#lockstep,
      settings.sandboxCount,
    );
    this.#sampling = this.#lockstep.channel(
      (requests: Parameters<Sampler['sample']>[0][number][]) =>
        settings.sampler.sample(requests, settings.signal),
    );
    // Every episode of a wave listens to the one signal.
    setMaxListeners(0, settings.signal);
  }

  /**
   * @param options.temperature 0 is greedy
   * @param options.tries model calls an episode may make; absent leaves it to the task
   */
  async play(
    plans: readonly RolloutPlan[],
    kind: RunKind,
    options: { temperature: number; tries?: number },
  ): Promise<Played[]> {
    const played: Played[] = [];
    for (let at = 0; at < plans.length; at += this.#settings.wave) {
      const wave = plans.slice(at, at + this.#settings.wave);
      played.push(
        ...(await Promise.all(
          wave.map((plan, index) => this.#playOne(plan, index, kind, options)),
        )),
      );
      this.#settings.signal.throwIfAborted();
      refuseFailed(played.slice(at));
    }
    return played;
  }

  close(): Promise<void> {
    return this.#shared.close();
  }

  async #playOne(
    plan: RolloutPlan,
    index: number,
    kind: RunKind,
    options: { temperature: number; tries?: number },
  ): Promise<Played> {
    const { environment, renderer, sampler, agent, modelRef, clock, redactor, signal } =
      this.#settings;
    const session = await environment.open(plan.task);
    const spec: RunSpec = {
      kind,
      task: { name: session.name, ref: JSON.stringify(plan.task), hash: session.hash },
      agent: agent.name,
      model: { ref: modelRef },
      seed: plan.seed,
      budget: options.tries === undefined ? {} : { modelCalls: options.tries },
    };
    return this.#lockstep.run(index, async (lane) => {
      const run = await rollout(ulid(), spec, {
        session,
        agent: {
          ...agent,
          sampling: { temperature: options.temperature, seed: plan.seed },
        },
        model: engineModel({
          ref: modelRef,
          renderer,
          maxLength: sampler.config.maxLength,
          sample: sampleInLane(lane, this.#sampling),
        }),
        sandboxes: this.#shared.forLane(lane),
        clock,
        redactor,
        worker: 'trainer',
        signal,
      });
      return { rollout: run, trajectory: await trajectoryOf(run, plan) };
    });
  }
}

/** A machine that fails most rollouts teaches nothing: training on would end as a success without any. */
function refuseFailed(wave: readonly Played[]): void {
  const failed = wave.filter(({ rollout }) => !isGraded(rollout.reward));
  if (failed.length * 4 <= wave.length * 3) return;
  const { reward } = failed[0]!.rollout;
  throw new LonghaulError(
    'RolloutsFailed',
    `the infrastructure failed ${failed.length} of ${wave.length} rollouts: ${isGraded(reward) ? '' : reward.reason}`,
  );
}

/** An ungraded or inexact run keeps its place in its group, without tokens. */
async function trajectoryOf(run: Rollout, plan: RolloutPlan): Promise<Trajectory> {
  return {
    runId: run.runId,
    taskId: plan.task.id,
    domain: plan.task.domain,
    group: plan.group,
    indexInGroup: plan.indexInGroup,
    segments: isGraded(run.reward) ? ((await segmentsOf(run.events, run.artifacts)) ?? []) : [],
    reward: run.reward,
    truncated: run.reward.status === 'truncated',
  };
}

/** Where rollouts go that should be opened later, with `longhaul show` or by a program. */
export interface RolloutStore {
  write(rollouts: readonly Rollout[]): Promise<void>;
}

/**
 * Writes rollouts to the log of hosted runs, in one batch: the same runs with the same events.
 *
 * @param log a run log that also takes whole finished runs
 */
export function logRollouts(log: FinishedRuns, artifacts: ArtifactStore): RolloutStore {
  return {
    async write(rollouts) {
      for (const run of rollouts) await run.artifacts.flush(artifacts);
      await log.writeRuns(
        rollouts.map(({ runId, spec, events }) => ({
          runId,
          spec,
          events: events.slice(1).map(({ type, data }) => ({ type, data }) as NewEvent),
        })),
      );
    },
  };
}

/** `events` come after `run.created`, which comes from the spec. */
interface FinishedRuns {
  writeRuns(
    runs: readonly { runId: string; spec: RunSpec; events: readonly NewEvent[] }[],
  ): Promise<void>;
}
