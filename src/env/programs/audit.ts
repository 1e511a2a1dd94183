import { Rng } from '../../core/index.ts';
import type { SandboxDriver } from '../../sandbox/contract.ts';
import { drawTasks, type ProgramTask, REWARD, rewardOf } from './environment.ts';
import { codeRequest, readResults } from './harness.ts';
import type { Language } from './operations.ts';
import { parts, writeProgram } from './spec.ts';
import { teacherHabit } from './teacher.ts';
import { observation, verdict } from './verdict.ts';

/** One claim about the environment, tried on many tasks. */
interface AuditCheck {
  name: string;
  tried: number;
  held: number;
  /** First few tasks for which it does not hold. */
  exceptions: string[];
}
export interface AuditReport {
  tasks: number;
  passed: boolean;
  checks: AuditCheck[];
  /** One line a check, for people. */
  lines: string[];
}

/** Programs a round trip of the audit. */
const BATCH = 128;

/**
 * Audits the environment before it is trusted, in a real sandbox, on tasks of both splits: the
 * reference program scores 1; an agent that does nothing scores at most 0; the program with any single
 * part in its wrong form fails; what the teacher habitually writes fails wherever its habit is wrong;
 * programs that print, exit or patch built-ins gain nothing.
 */
export async function auditPrograms(
  driver: Pick<SandboxDriver, 'create'>,
  language: Language,
  count: number,
  seed = 0,
): Promise<AuditReport> {
  const half = Math.ceil(count / 2);
  const tasks = [...drawTasks('train', seed, half), ...drawTasks('heldout', seed, count - half)];
  const probes = tasks.flatMap((task, i) => [
    ...probesOf(task, language, Rng.of(seed, 'audit', i)),
  ]);
  const scores = await score(driver, language, probes);

  const checks = new Map<string, AuditCheck>();
  const note = (name: string, held: boolean, what: string) => {
    const check = checks.get(name) ?? { name, tried: 0, held: 0, exceptions: [] };
    checks.set(name, check);
    check.tried += 1;
    if (held) check.held += 1;
    else if (check.exceptions.length < 5) check.exceptions.push(what);
  };
  for (const [i, probe] of probes.entries()) {
    const value = scores[i]!;
    const held = probe.solves ? value === REWARD.solved : value <= 0;
    note(probe.check, held, `${probe.task.ref.id}: ${probe.program} scored ${value}`);
  }
  for (const task of tasks) {
    const value = rewardOf({ messages: [] }).value ?? Number.NaN;
    note('doing nothing scores 0', value === 0, task.ref.id);
  }
  const list = [...checks.values()];
  return {
    tasks: tasks.length,
    passed: list.every((check) => check.held === check.tried),
    checks: list,
    lines: list.flatMap((check) => [
      `${check.held === check.tried ? 'ok  ' : 'FAIL'} ${check.name}: ${check.held} of ${check.tried}`,
      ...check.exceptions.map((text) => `     ${text}`),
    ]),
  };
}

interface Probe {
  task: ProgramTask;
  check: string;
  program: string;
  solves: boolean;
}

function* probesOf(task: ProgramTask, language: Language, rng: Rng): Generator<Probe> {
  const { spec } = task;
  const all = parts(spec).map(() => false);
  const write = (wrong: readonly boolean[]) => writeProgram(spec, language, wrong);
  yield { task, check: 'the reference program scores 1', program: write(all), solves: true };
  for (const part of all.keys()) {
    const program = write(all.map((_, i) => i === part));
    yield { task, check: 'one wrong part fails', program, solves: false };
  }
  const habit = teacherHabit(spec);
  if (habit.filter(Boolean).length === 1)
    yield { task, check: "the teacher's wrong habit fails", program: write(habit), solves: false };
  const program = rng.pick(HOSTILE[language])(write(all));
  yield { task, check: 'a hostile program fails', program, solves: false };
}

/** Every process of the sandbox but the program's own: the agent and the one that waits for the next program. */
const onOthers = (action: string) =>
  `(lambda o,r:[${action} for p in map(int,filter(str.isdigit,o.listdir('/proc'))) if p!=o.getpid()])(__import__('os'),__import__('resource'))`;
const onWaiting = (action: string) => onOthers(`p>1 and ${action}`);

/** Programs that fail themselves and try to take the others of their batch along. */
export const AGAINST_NEIGHBOURS: readonly string[] = [
  `__import__('resource').prlimit(1,7,(0,0))`,
  `__import__('resource').prlimit(1,9,(1,1))`,
  `__import__('resource').prlimit(1,0,(0,0))`,
  onOthers('r.prlimit(p,7,(0,0))'),
  onOthers('r.prlimit(p,0,(0,0))'),
  onOthers('o.setpriority(0,p,19)'),
  onOthers('o.sched_setscheduler(p,5,o.sched_param(0))'),
  onWaiting('o.kill(p,9)'),
  onWaiting('(o.kill(p,19),o.kill(p,15))'),
  onWaiting('(o.kill(p,2),o._exit(0))'),
  `__import__('os').kill(-1,9)`,
  `[__import__('ctypes').CDLL(None).shmget(0,1<<26,0o1600) for i in range(8)][9:]+[None]`,
];

/** Each stops short of computing the right values. */
const HOSTILE: Record<Language, readonly ((right: string) => string)[]> = {
  python: [
    () => '',
    () => 'x if',
    () => `print('[{"i":1}]')`,
    () => '__import__("os")._exit(0)',
    () => `__import__("os").write(1,b'[{"s":"61"}]')`,
    () => '[].append(1)',
    () => '__import__("sys").exit()',
    (right) => `(${right},)`,
    (right) => `lambda:${right}`,
    ...AGAINST_NEIGHBOURS.map((program) => () => program),
  ],
  javascript: [
    () => '',
    () => 'x if',
    () => `console.log('[{"i":1}]')`,
    () => 'JSON.stringify=()=>1',
    () => '(()=>{throw 1})()',
    (right) => `[[${right}]]`,
    (right) => `()=>${right}`,
  ],
};

async function score(
  driver: Pick<SandboxDriver, 'create'>,
  language: Language,
  probes: readonly Probe[],
): Promise<number[]> {
  const scores: number[] = [];
  const sandbox = await driver.create();
  try {
    for (let at = 0; at < probes.length; at += BATCH) {
      const batch = probes.slice(at, at + BATCH);
      const results = await sandbox.runCode(
        batch.map((probe) => codeRequest(language, probe.program, probe.task.cases)),
      );
      for (const [i, probe] of batch.entries()) {
        const judged = verdict(probe.task.cases, readResults(results[i]!));
        const message = { role: 'tool' as const, callId: 'submit', tool: 'submit' };
        const messages = [{ ...message, content: observation(judged) }];
        scores.push(rewardOf({ messages }).value ?? Number.NaN);
      }
    }
  } finally {
    await sandbox.stop();
  }
  return scores;
}
