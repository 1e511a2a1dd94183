import { type Clock, LonghaulError, type MetricSink, type Redactor, Rng } from '../core/index.ts';
import type { Engine, Sampler, Trainer } from '../engine/contract.ts';
import type { Environment, TaskRef } from '../env/contract.ts';
import { type AuditReport, auditPrograms } from '../env/programs/audit.ts';
import { drawTasks, programs } from '../env/programs/environment.ts';
import type { Language } from '../env/programs/operations.ts';
import { shuffledFeedback } from '../env/programs/shuffled-feedback.ts';
import { tinyRenderer } from '../model/render/tiny.ts';
import type { RunContext } from '../run/index.ts';
import { type Evaluation, evaluate } from './evaluate.ts';
import { batchMetrics, grpoStep, randomReward, trueReward } from './grpo.ts';
import { Job } from './job.ts';
import { programmer } from './programmer.ts';
import { type RolloutPlan, RolloutRunner, type RolloutStore } from './rollouts.ts';
import { expectedSeconds, grpoRate, type Schedule, scheduleFor, warmupRate } from './schedule.ts';
import { type SupervisedSettings, supervisedStep } from './supervised.ts';

/** What takes GRPO's place, or its signal: each tells how much of the gain is due to it. */
export type Control = 'random-reward' | 'supervised' | 'shuffled-feedback';

export interface QuickstartOptions {
  seed: number;
  /** Time budget on the reference machine; it chooses the number of steps. */
  minutes: number;
  control?: Control;
}

/** What is fixed when a job is created, and read back when it resumes. */
export interface QuickstartSpec extends QuickstartOptions {
  language: Language;
  schedule: Schedule;
}

export interface QuickstartResults {
  audit: Omit<AuditReport, 'lines'> | null;
  before: Evaluation | null;
  /** Measured on validation tasks while training; step 0 is before. */
  curve: { step: number; first: number; greedy: number }[];
  after: Evaluation | null;
  seconds: Record<string, number>;
}

type Stage = 'audit' | 'warmup' | 'before' | 'train' | 'after' | 'host';

export type QuickstartProgress =
  | { kind: 'stage'; stage: Stage; text: string }
  | { kind: 'audit'; report: AuditReport }
  /** `secondsLeft` is of the whole quickstart, from the speed so far. */
  | {
      kind: 'step';
      stage: Stage;
      step: number;
      of: number;
      values: Record<string, number>;
      secondsLeft: number;
    }
  | { kind: 'evaluation'; when: 'before' | 'after'; evaluation: Evaluation }
  | { kind: 'validation'; step: number; first: number; greedy: number };

/** Which rollouts go to the store, where `longhaul show` opens them; all of them would be 20,000. */
interface KeptRollouts {
  /** Of each measurement on held-out tasks. */
  evaluation: number;
  /** Groups of each training step. */
  groups: number;
}

export interface QuickstartDeps {
  engine: Engine;
  sandboxes: RunContext['sandboxes'] & { capabilities: { languages: readonly Language[] } };
  /** The job's folder; state, checkpoints, metrics and the trained model lie in it. */
  folder: string;
  jobId: string;
  clock: Clock;
  redactor: Redactor;
  /** Aborted on Ctrl-C: the present step is given up, a checkpoint written, `Interrupted` thrown. */
  signal: AbortSignal;
  onProgress: (event: QuickstartProgress) => void;
  metrics?: MetricSink;
  rollouts?: RolloutStore;
  keep?: KeptRollouts;
  /** Hosts the trained agent for one held-out task, as a durable run. */
  host?: (job: { checkpoint: string; task: TaskRef; spec: QuickstartSpec }) => Promise<void>;
}

const KEEP: KeptRollouts = { evaluation: 32, groups: 1 };
const MODEL = 'embedded/quickstart';
/** Episodes in one lockstep batch, and the sandboxes that share their programs: one a core. */
const WAVE = 208;
const SANDBOXES = 2;
type QuickstartJob = Job<QuickstartSpec, QuickstartResults>;

/**
 * Audits the environment, teaches a model from scratch by a faulty teacher, measures it on held-out
 * tasks, post-trains it by GRPO on what its programs do, measures again and hosts it.
 */
export async function runQuickstart(
  options: QuickstartOptions,
  deps: QuickstartDeps,
): Promise<QuickstartResults> {
  const [language = 'python'] = deps.sandboxes.capabilities.languages;
  const schedule = scheduleFor(options.minutes, language);
  return startQuickstart({ ...options, language, schedule }, deps);
}

/** The same with a schedule of one's own. */
export async function startQuickstart(
  spec: QuickstartSpec,
  deps: QuickstartDeps,
): Promise<QuickstartResults> {
  const results = { audit: null, before: null, curve: [], after: null, seconds: {} };
  return drive(await Job.create(deps.folder, deps.jobId, spec, results, deps.metrics), deps);
}

/** Goes on from the last checkpoint of an interrupted quickstart, on the same schedule. */
export async function resumeQuickstart(deps: QuickstartDeps): Promise<QuickstartResults> {
  return drive(await Job.resume(deps.folder, deps.jobId, deps.metrics), deps);
}

async function drive(job: QuickstartJob, deps: QuickstartDeps): Promise<QuickstartResults> {
  const { spec } = job.state;
  if (!deps.sandboxes.capabilities.languages.includes(spec.language))
    throw new LonghaulError(
      'CapabilityMissing',
      `this job's programs are ${spec.language}, which the sandbox cannot run`,
    );
  if (job.state.results.audit === null) await audit(job, deps);

  const from = job.checkpoint;
  const trainer = await deps.engine.createTrainer(
    from === null ? { config: spec.schedule.model, seed: spec.seed } : { checkpoint: from },
  );
  try {
    await warmUp(job, deps, trainer);
    await postTrain(job, deps, trainer);
  } catch (error) {
    if (!deps.signal.aborted) throw error;
    await job.save(trainer, job.state.phase, job.state.step);
    throw new LonghaulError(
      'Interrupted',
      `stopped after step ${job.state.step}; ${job.folder} has all`,
    );
  } finally {
    await trainer.close();
  }

  const [task] = drawTasks('heldout', spec.seed + 1, 1);
  if (deps.host !== undefined && task !== undefined && job.checkpoint !== null) {
    deps.onProgress({ kind: 'stage', stage: 'host', text: 'hosting the trained agent' });
    await deps.host({ checkpoint: job.checkpoint, task: task.ref, spec });
  }
  return job.state.results;
}

async function audit(job: QuickstartJob, deps: QuickstartDeps): Promise<void> {
  const { spec, results } = job.state;
  deps.onProgress({ kind: 'stage', stage: 'audit', text: 'auditing the environment' });
  const report = await auditPrograms(
    deps.sandboxes,
    spec.language,
    spec.schedule.evaluation.auditTasks,
    spec.seed,
  );
  deps.onProgress({ kind: 'audit', report });
  if (!report.passed)
    throw new LonghaulError('TaskInvalid', 'the environment failed its audit; nothing was trained');
  results.audit = { tasks: report.tasks, passed: report.passed, checks: report.checks };
}

/** Teaches the model from scratch what the faulty teacher does. */
async function warmUp(job: QuickstartJob, deps: QuickstartDeps, trainer: Trainer): Promise<void> {
  const { spec } = job.state;
  const { warmup, saveEvery } = spec.schedule;
  if (job.state.phase === 'train') return;
  deps.onProgress({ kind: 'stage', stage: 'warmup', text: 'imitating a faulty teacher' });
  const settings = supervisedSettings(spec, trainer);
  const timer = stopwatch(job, deps, 'warmup');
  for (let step = job.state.phase === 'warmup' ? job.state.step : 0; step < warmup.steps; ) {
    stopIfAborted(deps);
    const { tokens, ...values } = await supervisedStep(settings, step, warmupRate(warmup, step));
    step += 1;
    job.state = { ...job.state, phase: 'warmup', step };
    await timer.step(step, { ...values, tokens });
    if (step % (10 * saveEvery) === 0) await job.save(trainer, 'warmup', step);
  }
  await job.save(trainer, 'train', 0);
}

/** Measures, post-trains on the reward of execution, and measures again. */
async function postTrain(
  job: QuickstartJob,
  deps: QuickstartDeps,
  trainer: Trainer,
): Promise<void> {
  const { spec } = job.state;
  const { grpo, validateEvery, saveEvery, evaluation } = spec.schedule;
  const sampler = await deps.engine.sampler(await trainer.publish());
  const plain = programs(spec.language);
  const runner = newRunner(spec, deps, sampler, plain);
  const trained =
    spec.control === 'shuffled-feedback'
      ? newRunner(spec, deps, sampler, shuffledFeedback(plain, spec.seed))
      : runner;
  const heldout = plain.tasks('heldout', spec.seed, evaluation.tasks);
  const validation = drawTasks('validation', spec.seed, evaluation.validationTasks);

  const measure = async (when: 'before' | 'after', by: RolloutRunner) => {
    deps.onProgress({ kind: 'stage', stage: when, text: `${heldout.length} held-out tasks` });
    const { evaluation, sampled } = await evaluate(by, heldout, spec.seed, { greedy: true });
    await deps.rollouts?.write(
      sampled.slice(0, (deps.keep ?? KEEP).evaluation).map((item) => item.rollout),
    );
    deps.onProgress({ kind: 'evaluation', when, evaluation });
    job.state.results[when] = evaluation;
    await job.save(trainer, 'train', job.state.step);
  };
  const validate = async (step: number) => {
    const tasks = validation.map((task) => task.ref);
    const options = { greedy: true, tries: 1 };
    const { evaluation } = await evaluate(trained, tasks, spec.seed, options);
    const point = { step, first: evaluation.first.value, greedy: evaluation.greedy?.value ?? 0 };
    job.state.results.curve.push(point);
    deps.onProgress({ kind: 'validation', ...point });
  };

  try {
    if (job.state.results.before === null) await measure('before', runner);
    deps.onProgress({ kind: 'stage', stage: 'train', text: spec.control ?? 'GRPO' });
    const timer = stopwatch(job, deps, 'train');
    const advance =
      spec.control === 'supervised'
        ? supervisedControl(spec, trainer)
        : policyUpdates(spec, deps, trainer, trained);
    for (;;) {
      stopIfAborted(deps);
      const { step, results } = job.state;
      const due = step % validateEvery === 0 || step === grpo.steps;
      const isNew = results.curve.every((point) => point.step !== step);
      if (due && isNew) await validate(step);
      if ((due && isNew) || step % saveEvery === 0) await job.save(trainer, 'train', step);
      if (step === grpo.steps) break;
      const values = await advance(step);
      await sampler.load(await trainer.publish());
      job.state = { ...job.state, step: step + 1 };
      await timer.step(step + 1, values);
    }
    if (job.state.results.after === null) await measure('after', trained);
  } finally {
    await runner.close();
    await trained.close();
    await sampler.close();
  }
}

type Advance = (step: number) => Promise<Record<string, number>>;

/** One step: groups of rollouts of the same task, their advantages, one update. */
function policyUpdates(
  spec: QuickstartSpec,
  deps: QuickstartDeps,
  trainer: Trainer,
  runner: RolloutRunner,
): Advance {
  const { grpo } = spec.schedule;
  const reward = spec.control === 'random-reward' ? randomReward(spec.seed) : trueReward;
  return async (step) => {
    const tasks = drawTasks('train', Rng.of(spec.seed, 'tasks', step).uint32(), grpo.groups);
    const plans = tasks.flatMap((task, group) =>
      Array.from({ length: grpo.groupSize }, (_, indexInGroup): RolloutPlan => {
        const seed = Rng.of(spec.seed, 'rollout', step, group, indexInGroup).uint32();
        return { task: task.ref, group: `step ${step + 1} group ${group}`, indexInGroup, seed };
      }),
    );
    const startedAt = performance.now();
    const played = await runner.play(plans, 'rollout', { temperature: 1 });
    const sampledAt = performance.now();
    const update = await grpoStep(
      trainer,
      played.map((item) => item.trajectory),
      reward,
      { learningRate: grpoRate(grpo, step), discount: grpo.discount },
    );
    const kept = (deps.keep ?? KEEP).groups * grpo.groupSize;
    await deps.rollouts?.write(played.slice(0, kept).map((item) => item.rollout));
    return {
      ...batchMetrics(played.map((item) => item.rollout.reward)),
      ...update,
      rollouts: played.length,
      sampleSeconds: (sampledAt - startedAt) / 1000,
      updateSeconds: (performance.now() - sampledAt) / 1000,
    };
  };
}

/** The control of equal time: more of the same teacher instead of rewards. */
function supervisedControl(spec: QuickstartSpec, trainer: Trainer): Advance {
  const { grpo, warmup, supervisedPerGrpo } = spec.schedule;
  const settings = supervisedSettings(spec, trainer);
  return async (step) => {
    let values = {};
    const first = Math.round(step * supervisedPerGrpo);
    const last = Math.round((step + 1) * supervisedPerGrpo);
    for (let i = first; i < last; i++)
      values = await supervisedStep(settings, warmup.steps + i, grpoRate(grpo, step));
    return values;
  };
}

function supervisedSettings(spec: QuickstartSpec, trainer: Trainer): SupervisedSettings {
  const { language, seed, schedule } = spec;
  return { trainer, renderer: tinyRenderer, language, seed, rows: schedule.warmup.rows };
}

function newRunner(
  spec: QuickstartSpec,
  deps: QuickstartDeps,
  sampler: Sampler,
  environment: Environment,
): RolloutRunner {
  const { sandboxes, clock, redactor, signal } = deps;
  return new RolloutRunner({
    environment,
    sampler,
    renderer: tinyRenderer,
    sandboxes,
    agent: programmer(spec.schedule.maxOutputTokens, { temperature: 1 }),
    modelRef: MODEL,
    clock,
    redactor,
    signal,
    wave: WAVE,
    sandboxCount: SANDBOXES,
  });
}

/** Reports each step with its speed and what is left, and adds up the seconds of the phase. */
function stopwatch(job: QuickstartJob, deps: QuickstartDeps, stage: 'warmup' | 'train') {
  const { schedule } = job.state.spec;
  const of = stage === 'warmup' ? schedule.warmup.steps : schedule.grpo.steps;
  const expected = expectedSeconds(schedule);
  const perStep = stage === 'warmup' ? expected.warmupStep : expected.grpoStep;
  let last = performance.now();
  let done = 0;
  let spent = 0;
  return {
    async step(step: number, values: Record<string, number>): Promise<void> {
      const now = performance.now();
      const seconds = (now - last) / 1000;
      last = now;
      done += 1;
      spent += seconds;
      const { results } = job.state;
      results.seconds[stage] = (results.seconds[stage] ?? 0) + seconds;
      const slowness = spent / (done * perStep);
      const later = stage === 'warmup' ? expected.afterWarmup : expected.afterTraining;
      const secondsLeft = slowness * ((of - step) * perStep + later);
      const record = { ...values, seconds };
      await job.record(stage, step, record);
      deps.onProgress({ kind: 'step', stage, step, of, values: record, secondsLeft });
    },
  };
}

function stopIfAborted(deps: QuickstartDeps): void {
  if (deps.signal.aborted) throw new LonghaulError('Interrupted', 'the training was interrupted');
}
