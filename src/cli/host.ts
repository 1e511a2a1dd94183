import { type AgentDefinition, coder } from '../agent/index.ts';
import {
  attribute,
  type Event,
  isFinal,
  LonghaulError,
  type RunSpec,
  type RunState,
} from '../core/index.ts';
import type { Environment, TaskRef, TaskSession } from '../env/contract.ts';
import { harborEnvironment } from '../env/harbor/index.ts';
import { programs } from '../env/programs/environment.ts';
import { runHosted } from '../run/index.ts';
import type { SandboxCapabilities } from '../sandbox/contract.ts';
import { programmer } from '../train/index.ts';
import { systemClock } from './clock.ts';
import { taskImages } from './images.ts';
import { onInterrupt } from './interrupt.ts';
import { openModel } from './models.ts';
import { narrator, rewardText } from './narrate.ts';
import { printable, style } from './output.ts';
import type { Platform } from './platform.ts';

/** The environments a task reference may name. */
function environment(
  platform: Platform,
  name: string,
  languages: SandboxCapabilities['languages'],
): Environment {
  if (name === 'harbor') return harborEnvironment(taskImages(platform));
  if (name === 'programs') return programs(languages[0] ?? 'python');
  throw new LonghaulError('TaskInvalid', `this version knows no environment "${name}"`);
}

/** Opens the task that a run's spec names; refuses one whose files changed since the run began. */
async function openTask(
  platform: Platform,
  spec: RunSpec,
  languages: SandboxCapabilities['languages'],
): Promise<TaskSession> {
  const ref = JSON.parse(spec.task.ref) as TaskRef;
  const session = await environment(platform, ref.environment, languages).open(ref);
  if (spec.task.hash !== undefined && session.hash !== spec.task.hash) {
    throw new LonghaulError(
      'TaskInvalid',
      `the task ${spec.task.name} changed since this run began`,
      {
        next: 'Restore the task directory, or start a new run of it.',
      },
    );
  }
  return session;
}

function agentOf(
  spec: RunSpec,
  capabilities: SandboxCapabilities,
  sandbox: TaskSession['sandbox'],
): AgentDefinition {
  if (spec.agent === 'coder') return coder(capabilities, sandbox);
  // Sampled as it was trained: greedy decoding would answer a failed try with the same program again.
  if (spec.agent === 'programmer') return programmer(80, { temperature: 1, seed: spec.seed });
  throw new LonghaulError('ConfigInvalid', `this version knows no agent "${spec.agent}"`);
}

/** Everything a run refers to. What is missing or does not fit is found here, before anything happens. */
export async function openParts(platform: Platform, spec: RunSpec) {
  const model = await openModel(platform, spec.model);
  const driver = await platform.sandboxes();
  if (spec.agent === 'coder' && !driver.capabilities.exec) {
    const shortfall = platform.sandboxShortfall;
    throw new LonghaulError(
      'SandboxUnavailable',
      `coding tasks need commands, which the wasm sandbox does not run; ${shortfall?.reason ?? 'bubblewrap is not used'}`,
      shortfall ? { next: shortfall.next } : {},
    );
  }
  const session = await openTask(platform, spec, driver.capabilities.languages);
  return { driver, session, model, agent: agentOf(spec, driver.capabilities, session.sandbox) };
}

/** Drives a run to its end or pause while a person watches, and says what to do next. */
export async function host(platform: Platform, runId: string, spec: RunSpec): Promise<number> {
  const { output } = platform;
  const { driver, session, model, agent } = await openParts(platform, spec);
  const store = await platform.store();
  const interrupt = onInterrupt(() =>
    output.say(
      '\nstopping: the call in progress is cut off, and resume decides what becomes of it (Ctrl-C again ends at once; the log stays whole)',
    ),
  );
  try {
    const narrate = narrator(output);
    const state = await runHosted(runId, {
      log: store.log,
      session,
      agent,
      model,
      sandboxes: driver,
      artifacts: store.artifacts,
      clock: systemClock,
      redactor: platform.redactor,
      worker: platform.worker,
      signal: interrupt.signal,
      saveWorkspace: true,
      onEvent: (event: Event) => narrate(event),
      isDead: (worker) => platform.isDead(worker),
      onWaiting: (worker) =>
        output.say(`waiting for the lease of ${worker} to run out (at most 8 s)`),
    });
    return conclude(platform, state);
  } catch (thrown) {
    throw attribute(thrown, 'Internal');
  } finally {
    interrupt.dispose();
  }
}

function conclude(platform: Platform, state: RunState): number {
  const { output } = platform;
  const { runId } = state;
  output.say();
  output.say(`run    ${runId}  ${style('bold', state.status)}`);
  if (state.reward) output.say(`reward ${rewardText(state.reward)}`);
  output.say(
    `used   ${state.used.modelCalls} model calls, ${state.used.toolCalls} tool calls, ${state.used.outputTokens} output tokens`,
  );
  if (state.error) {
    output.say(`why    ${printable(state.error.message)}`);
    output.say(`next   ${printable(state.error.next)}`);
  }
  output.say(`look   ${platform.hint(`show ${runId}`)}`);
  if (!isFinal(state.status)) output.say(`go on  ${platform.hint(`resume ${runId}`)}`);
  output.document({
    runId,
    status: state.status,
    reward: state.reward,
    used: state.used,
    summary: state.summary,
    error: state.error,
  });
  if (state.status === 'succeeded') return 0;
  return state.error !== null && (state.error.class === 'retryable' || state.reward?.value === null)
    ? 3
    : 1;
}
