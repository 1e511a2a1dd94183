import { createHash } from 'node:crypto';
import { z } from 'zod';
import { LonghaulError, type Reward, Rng, type RunState, type Tool } from '../../core/index.ts';
import type { SandboxSpec } from '../../sandbox/contract.ts';
import type { Environment, Split, TaskRef, TaskSession } from '../contract.ts';
import { type Case, drawCases } from './cases.ts';
import { codeRequest, readResults } from './harness.ts';
import type { Language } from './operations.ts';
import { bucket, DOMAINS, drawSpec, formatSpec, parseSpec, type Spec } from './spec.ts';
import { observation, readObservation, verdict } from './verdict.ts';

/** Programs an agent may submit for one task. */
export const TRIES = 3;
const SUBMIT = 'submit';

/** Changes with anything that decides an outcome and is not in a task: observations, rewards, limits. */
const RULES = 2;
export const REWARD = { solved: 1, furtherTry: -0.1, invalid: -0.05 } as const;

const SANDBOX: Partial<SandboxSpec> = { memoryBytes: 1 << 30, pids: 64, diskBytes: 16 << 20 };

/** A task with what is hidden from the agent. */
export interface ProgramTask {
  ref: TaskRef;
  spec: Spec;
  cases: readonly Case[];
}

/**
 * Tasks of a bucket: domains in turn, in an order fixed by the seed. `validation` is a part of the
 * training split that is never trained on. Specs of validation and held-out tasks are distinct; there
 * are fewer than `count` where a bucket has no more.
 */
export function drawTasks(
  bucketName: ReturnType<typeof bucket>,
  seed: number,
  count: number,
): ProgramTask[] {
  const rng = Rng.of(seed, 'programs', bucketName);
  const seen = new Set<string>();
  const tasks: ProgramTask[] = [];
  for (let misses = 0; tasks.length < count && misses < 1000; misses++) {
    const spec = drawSpec(rng, DOMAINS[tasks.length % DOMAINS.length]!, bucketName);
    // A training stream may be longer than there are short specs; held-out tasks never repeat one.
    const text = bucketName === 'train' ? `${formatSpec(spec)}#${tasks.length}` : formatSpec(spec);
    if (seen.has(text)) continue;
    seen.add(text);
    const caseSeed = rng.uint32();
    const cases = drawCases(spec, caseSeed);
    if (cases === null) continue;
    tasks.push({ ref: refOf(spec, caseSeed), spec, cases });
    misses = 0;
  }
  return tasks;
}

function refOf(spec: Spec, caseSeed: number): TaskRef {
  return {
    environment: 'programs',
    id: `${formatSpec(spec)}#${caseSeed}`,
    domain: spec.domain,
    split: bucket(spec) === 'heldout' ? 'heldout' : 'train',
  };
}

/** Opens a task by its id, `SPEC#CASE-SEED`. `TaskInvalid` says what is wrong with it. */
export function readTask(ref: TaskRef): ProgramTask {
  const [, text = '', seed = ''] = /^(.*)#(\d+)$/.exec(ref.id) ?? [];
  if (text === '')
    throw new LonghaulError('TaskInvalid', `"${ref.id}" is not SPEC#SEED, such as s:rev,bang#7`);
  const spec = parseSpec(text);
  const cases = drawCases(spec, Number(seed));
  if (cases === null)
    throw new LonghaulError(
      'TaskInvalid',
      `no cases tell ${text} from its wrong variants with seed ${seed}`,
    );
  const known = refOf(spec, Number(seed));
  if (known.split !== ref.split)
    throw new LonghaulError('TaskInvalid', `${text} belongs to ${known.split}, not ${ref.split}`);
  return { ref: known, spec, cases };
}

/**
 * The environment `programs`: write an expression over `x` that does what a short spec says. A failed
 * program comes back as the first case it got wrong, or as the kind of its error.
 */
export function programs(language: Language): Environment {
  return {
    name: 'programs',
    tasks: (split: Split, seed, count) => drawTasks(split, seed, count).map((task) => task.ref),
    open: async (ref) => openTask(readTask(ref), language),
  };
}

export function openTask(task: ProgramTask, language: Language): TaskSession {
  return {
    ref: task.ref,
    name: `programs ${task.ref.id}`,
    hash: createHash('sha256')
      .update(JSON.stringify([RULES, language, task.ref.id, task.cases]))
      .digest('hex'),
    messages: [{ role: 'user', content: `${formatSpec(task.spec)}=` }],
    tools: [submit(task, language)],
    sandbox: SANDBOX,
    prepare: async () => {},
    isOver: (state) => {
      const kinds = tries(state);
      return kinds.length >= TRIES || kinds.at(-1) === 'solved';
    },
    grade: async (state) => ({ reward: rewardOf(state) }),
  };
}

function submit(task: ProgramTask, language: Language): Tool {
  return {
    name: SUBMIT,
    description: `Runs a ${language} expression over x on hidden cases.`,
    input: z.object({ program: z.string() }),
    effect: 'none',
    timeoutMs: 60_000,
    async run(input, { sandbox }) {
      const { program } = input as { program: string };
      const [result] = await sandbox.runCode([codeRequest(language, program, task.cases)]);
      if (result === undefined)
        throw new LonghaulError('SandboxBroken', 'the sandbox gave no result for a program');
      const judged = verdict(task.cases, readResults(result));
      return { output: observation(judged), isError: judged.kind !== 'solved' };
    },
  };
}

/** How each try of a run ended: a function of its messages alone. */
function tries(state: Pick<RunState, 'messages'>) {
  return state.messages.flatMap((message) =>
    message.role === 'tool' && message.tool === SUBMIT ? [readObservation(message.content)] : [],
  );
}

/**
 * 1 for a solved task, less 0.1 for each try after the first; up to 0.05 less for invalid programs, as
 * their share of all tries. An answer that submits nothing counts as an invalid try and ends the run.
 * `perStep` holds each try's own outcome: 1 solved, 0 wrong, −0.05 invalid.
 */
export function rewardOf(state: Pick<RunState, 'messages'>): Reward {
  const kinds = tries(state);
  const last = state.messages.at(-1);
  const abandoned = last?.role === 'assistant' && (last.toolCalls ?? []).length === 0;
  const solved = kinds.at(-1) === 'solved';
  const made = kinds.length + (abandoned ? 1 : 0);
  const invalid = kinds.filter((kind) => kind === 'invalid').length + (abandoned ? 1 : 0);
  const perTry = { solved: REWARD.solved, wrong: 0, invalid: REWARD.invalid };
  return {
    status: abandoned ? 'truncated' : 'ok',
    value:
      (solved ? REWARD.solved + REWARD.furtherTry * (kinds.length - 1) : 0) +
      (made > 0 ? (REWARD.invalid * invalid) / made : 0),
    components: { solved: solved ? 1 : 0, tries: kinds.length, invalid },
    perStep: [...kinds, ...(abandoned ? ['invalid' as const] : [])].map((kind) => perTry[kind]),
  };
}
