import {
  attribute,
  type ExecResult,
  type FileEntry,
  type GradedStatus,
  LonghaulError,
  type Reward,
  type RunState,
  type UngradedStatus,
} from '../../core/index.ts';
import type { Sandbox } from '../../sandbox/contract.ts';
import { WORKSPACE } from './dockerfile.ts';
import { CLEAN_ENV, upload } from './pack.ts';
import { parseRewardJson, parseRewardText, type ScoreOrProblem } from './reward-file.ts';
import type { HarborTask } from './task.ts';

const TESTS = '/tests';
const LOGS = '/logs/verifier';
const HOME = '/tmp/verifier-home';
const REWARD_BYTES = 64 * 1024;
/** Bytes of the verifier's output that are kept; its tail says what failed. */
const OUTPUT_BYTES = 16 * 1024;
/** What tests, logs and the verifier's own files may take beside a workspace. */
const GRADER_DISK_BYTES = 64 * 1024 * 1024;

export interface Grade {
  reward: Reward;
  output?: string;
}

/**
 * Runs the task's verifier on the workspace as the agent left it and reads the reward it wrote.
 *
 * The verifier works in a fork: processes of the agent are gone, /tests and /logs are new, and what
 * the verifier does to the workspace is discarded. Where the root is an image, that fork holds all that the
 * agent changed in it, programs included: the format wants the container that the agent worked in. Never
 * throws. What the guest caused (the verifier killed by a signal or by the memory limit, its log directory
 * or an image's programs taken away) is `agent_error` with the lowest score; a missing or malformed reward,
 * a verifier out of time and a failing sandbox are ungraded, never a zero.
 */
export async function gradeHarborTask(
  task: HarborTask,
  state: RunState,
  sandbox: Sandbox,
): Promise<Grade> {
  let copy: Sandbox | undefined;
  try {
    const { diskBytes } = await sandbox.usage();
    // The agent may have filled its disk; tests, logs and rewards need some of their own.
    const tight = sandbox.spec.diskBytes - diskBytes < GRADER_DISK_BYTES;
    [copy] = await sandbox.fork(1, {
      // Otherwise the last saved workspace would be graded, the wrong one, without a word.
      stopProcesses: true,
      ...(tight && { moreDiskBytes: GRADER_DISK_BYTES }),
    });
    if (copy === undefined)
      throw new LonghaulError('SandboxUnavailable', 'the fork gave no sandbox');
    return await verify(task, state, copy);
  } catch (thrown) {
    const error = attribute(thrown, 'Internal', 'grading');
    // They were there before the agent came, see `requirePrograms`.
    if (copy !== undefined && task.ownRoot && error.code === 'CapabilityMissing')
      return sabotaged(task, `what grading needs is gone: ${error.message}`);
    const infrastructure = error.code === 'SandboxBroken' || error.code === 'SandboxUnavailable';
    return { reward: ungraded(infrastructure ? 'env_error' : 'grader_error', error.message) };
  } finally {
    // The grade stands whatever happens to the sandbox afterwards.
    await copy?.stop().catch(() => undefined);
  }
}

async function verify(task: HarborTask, state: RunState, sandbox: Sandbox): Promise<Grade> {
  await empty(task, sandbox);
  await upload(sandbox, TESTS, task.tests);
  const result = await sandbox.exec({
    argv: [
      ...(task.ownRoot ? [] : onlyThese({ ...VERIFIER_ENV, ...task.verifier.env })),
      'bash',
      '-c',
      // An agent that removed the directory, or its own right to enter it, gets graded all the same.
      `exec 2>&1 </dev/null; chmod u+rwx ${WORKSPACE}; cd ${WORKSPACE}; cd -- "$0" || :; exec bash ${TESTS}/test.sh`,
      task.workdir,
    ],
    cwd: '/',
    env: task.ownRoot ? { ...IMAGE_VERIFIER_ENV, ...task.verifier.env } : CLEAN_ENV,
    timeoutMs: task.verifier.timeoutMs,
    keepBytes: OUTPUT_BYTES,
  });
  const output = `${result.stdout}${result.stderr}`;
  const fail = (why: string): Grade => ({ reward: ungraded('grader_error', why), output });
  if (result.cause === 'timeout')
    return fail(`the verifier did not end within ${task.verifier.timeoutMs / 1000} s`);

  // Whatever lies there now: who can kill the verifier can also write in its place.
  if (result.cause === 'signalled' || result.cause === 'out_of_memory')
    return sabotaged(task, output);
  const score = await readReward(sandbox, task.rewardRange);
  if (score === 'gone') return sabotaged(task, output);
  if (score === null) return fail(`the verifier wrote no reward file (${ending(result)})`);
  if ('problem' in score) return fail(score.problem);
  const { value, components } = score;
  return { reward: { status: statusOf(state), value, components }, output };
}

/** The lowest score, for work that took the verifier down: ungraded would let it pay. */
function sabotaged(task: HarborTask, output: string): Grade {
  const [low, high] = task.rewardRange;
  const value = Math.min(Math.max(0, low), high);
  return { reward: { status: 'agent_error', value, components: {} }, output };
}

/**
 * The environment of a verifier. HOME is empty and not the agent's; user site packages are off.
 */
const VERIFIER_ENV = {
  ...CLEAN_ENV,
  HOME,
  PYTHONDONTWRITEBYTECODE: '1',
  PYTHONNOUSERSITE: '1',
  PYTHONHASHSEED: '0',
} as const;

/** In an image: what it says of itself (its ENV) stays, PATH above all. */
const { PATH: _, ...IMAGE_VERIFIER_ENV } = VERIFIER_ENV;

/** Whatever the driver sets for the agent does not reach the verifier, but for the way to the network. */
function onlyThese(env: Readonly<Record<string, string>>): string[] {
  const proxies = ['HTTP_PROXY', 'HTTPS_PROXY', 'NO_PROXY'].flatMap((name) => [
    name,
    name.toLowerCase(),
  ]);
  const script = `set --${proxies.map((name) => ` \${${name}+"${name}=$${name}"}`).join('')} "$@"; exec /usr/bin/env -i "$@"`;
  const values = Object.entries(env).map(([name, value]) => `${name}=${value}`);
  return ['/bin/sh', '-c', script, 'sh', ...values];
}

/**
 * New directories for the verifier. The workspace loses its Python byte code: a cache can be made so
 * that it is used whatever the source beside it says (PEP 552), also when the tests bring their own.
 */
async function empty(task: HarborTask, sandbox: Sandbox): Promise<void> {
  const works = task.workdir === '/' ? [WORKSPACE] : [WORKSPACE, task.workdir];
  const script =
    'while [ "$1" != : ]; do find "$1" -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null; shift; done; shift; ' +
    'set -e; for d in "$@"; do r=$(readlink -m -- "$d" 2>/dev/null) && d=$r; mkdir -p -- "$d"; find "$d" -mindepth 1 -maxdepth 1 -exec rm -rf {} +; test -w "$d"; done';
  const dirs = [TESTS, LOGS, HOME];
  const result = await sandbox.exec({
    argv: ['/bin/sh', '-c', script, 'sh', ...works, ':', ...dirs],
    cwd: '/',
    env: CLEAN_ENV,
    keepBytes: 4096,
  });
  if (result.cause === 'exited' && result.code === 0) return;
  throw new LonghaulError(
    'CapabilityMissing',
    `the sandbox gives no writable ${dirs.join(', ')}: ${result.stderr.trim() || ending(result)}`,
  );
}

/**
 * Null if neither file is there, `gone` if their directory is not either: only work that runs inside the
 * verifier takes that away. Only regular files count: reading a pipe would never end.
 */
async function readReward(
  sandbox: Sandbox,
  range: readonly [number, number],
): Promise<ScoreOrProblem | 'gone' | null> {
  let entries: FileEntry[];
  try {
    entries = await sandbox.listFiles(LOGS);
  } catch (thrown) {
    const { code } = attribute(thrown, 'Internal');
    if (code === 'NotFound' || code === 'FileRefused') return 'gone';
    throw thrown;
  }
  for (const [name, parse] of [
    ['reward.json', parseRewardJson],
    ['reward.txt', parseRewardText],
  ] as const) {
    const entry = entries.find((candidate) => candidate.name === name);
    if (entry === undefined) continue;
    if (entry.kind !== 'file')
      return { problem: `${name}: expected a file, found a ${entry.kind}` };
    if (entry.bytes > REWARD_BYTES)
      return { problem: `${name}: ${entry.bytes} bytes are too many` };
    const bytes = await sandbox.readFile(`${LOGS}/${name}`, REWARD_BYTES);
    return parse(Buffer.from(bytes).toString('utf8'), range);
  }
  return null;
}

/** How the agent's part ended, which the score alone does not tell. */
function statusOf(state: RunState): GradedStatus {
  const { budget } = state.spec;
  const elapsedMs = Date.parse(state.updatedAt) - Date.parse(state.createdAt);
  const last = state.messages.at(-1);
  const finished = last?.role === 'assistant' && !last.toolCalls?.length;
  if (finished) return 'ok';
  if (budget.wallMs !== undefined && elapsedMs >= budget.wallMs) return 'agent_timeout';
  const used = state.used;
  const spent =
    state.error?.code === 'BudgetExceeded' ||
    (budget.modelCalls !== undefined && used.modelCalls >= budget.modelCalls) ||
    (budget.toolCalls !== undefined && used.toolCalls >= budget.toolCalls) ||
    (budget.outputTokens !== undefined && used.outputTokens >= budget.outputTokens);
  return spent ? 'truncated' : 'ok';
}

function ungraded(status: UngradedStatus, reason: string): Reward {
  return { status, value: null, components: {}, reason };
}

function ending(result: ExecResult): string {
  if (result.cause !== 'exited') return `ended by ${result.signal ?? result.cause}`;
  return result.code === 127
    ? 'exit code 127: a command was not found'
    : `exit code ${result.code}`;
}
