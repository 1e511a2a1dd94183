import { readdirSync, readFileSync, statSync } from 'node:fs';
import { isAbsolute, join, resolve } from 'node:path';
import { LonghaulError, Rng, type RunState } from '../../core/index.ts';
import type { Sandbox } from '../../sandbox/contract.ts';
import type { Environment, Split, TaskRef, TaskSession } from '../contract.ts';
import { parseTaskToml } from './config.ts';
import { WORKSPACE } from './dockerfile.ts';
import { type Grade, gradeHarborTask } from './grade.ts';
import { taskInvalid } from './invalid.ts';
import { upload } from './pack.ts';
import { splitOf } from './split.ts';
import { type HarborTask, type LoadOptions, loadHarborTask } from './task.ts';

export const HARBOR = 'harbor';

export interface HarborOptions extends LoadOptions {
  /** Directory whose subdirectories are tasks; what `tasks` lists. */
  root?: string;
}

/** A session that also shows the task it was opened from: hash, time limits, notes for the user. */
export interface HarborSession extends TaskSession {
  readonly task: HarborTask;
}

export interface HarborEnvironment extends Environment {
  open(ref: TaskRef): Promise<HarborSession>;
  /** Reference to one task directory, wherever it lies. */
  refOf(dir: string): Promise<TaskRef>;
}

/** Tasks in Harbor's directory format. A reference's `id` is the absolute path of the directory. */
export function harborEnvironment(options: HarborOptions = {}): HarborEnvironment {
  return {
    name: HARBOR,
    tasks(split: Split, seed: number, count: number): TaskRef[] {
      if (options.root === undefined)
        throw new LonghaulError('ConfigInvalid', 'a directory of tasks is needed to list tasks', {
          next: 'Name the directory whose subdirectories are tasks.',
        });
      const refs = listTasks(resolve(options.root)).filter((ref) => ref.split === split);
      return Rng.of(seed, HARBOR, split).shuffle(refs).slice(0, count);
    },
    async open(ref: TaskRef): Promise<HarborSession> {
      if (!isAbsolute(ref.id))
        throw taskInvalid(ref.id, null, 'expected the absolute path of a task directory');
      const allow = ref.allow ?? options.allow ?? [];
      return session(ref, await loadHarborTask(ref.id, { ...options, allow }));
    },
    async refOf(dir: string): Promise<TaskRef> {
      const task = await loadHarborTask(resolve(dir), options);
      return { environment: HARBOR, id: task.dir, domain: task.domain, split: task.split };
    },
  };
}

/** Subdirectories with a task.toml, by name. `TaskInvalid` if one of them is broken. */
function listTasks(root: string): TaskRef[] {
  let names: string[];
  try {
    names = readdirSync(root).sort();
  } catch (thrown) {
    throw taskInvalid(
      root,
      null,
      `expected a directory of tasks: ${(thrown as NodeJS.ErrnoException).code}`,
    );
  }
  const refs: TaskRef[] = [];
  for (const name of names) {
    const dir = join(root, name);
    const file = join(dir, 'task.toml');
    if (!statSync(file, { throwIfNoEntry: false })?.isFile()) continue;
    const { config } = parseTaskToml(readFileSync(file, 'utf8'), file);
    refs.push({
      environment: HARBOR,
      id: dir,
      domain: config.metadata?.category ?? HARBOR,
      split: config.metadata?.split ?? splitOf(config.task?.name ?? name),
    });
  }
  return refs;
}

function session(ref: TaskRef, task: HarborTask): HarborSession {
  return {
    ref,
    name: task.name,
    hash: task.hash,
    task,
    messages: [{ role: 'user', content: prompt(task) }],
    tools: [],
    sandbox: task.sandbox,
    async prepare(sandbox: Sandbox): Promise<void> {
      if (task.ownRoot) return requirePrograms(task, sandbox);
      await upload(sandbox, WORKSPACE, task.workspace);
      if (task.workdir !== WORKSPACE) await upload(sandbox, task.workdir, []);
    },
    // Only the agent says when it is done: the verifier is not asked before.
    isOver: (_state: RunState) => false,
    grade: (state: RunState, sandbox: Sandbox): Promise<Grade> =>
      gradeHarborTask(task, state, sandbox),
  };
}

/** What grading starts inside. Looked for before the agent comes, so that one that is gone later is its doing. */
const PROGRAMS = ['sh', 'bash', 'chmod', 'find', 'mkdir', 'tar'];

/** `CapabilityMissing` where the image of the task cannot be graded in. */
async function requirePrograms(task: HarborTask, sandbox: Sandbox): Promise<void> {
  const script = 'for p in "$@"; do command -v "$p" >/dev/null || echo "$p"; done';
  const result = await sandbox.exec({
    argv: ['/bin/sh', '-c', script, 'sh', ...PROGRAMS],
    cwd: '/',
    keepBytes: 4096,
  });
  const missing = result.stdout.split('\n').filter((name) => PROGRAMS.includes(name));
  if (result.cause === 'exited' && result.code === 0 && missing.length === 0) return;
  throw new LonghaulError(
    'CapabilityMissing',
    `${task.dir}: the image has no ${missing.join(', ') || '/bin/sh that runs'}, which grading needs`,
    { next: 'Add it to the image, or start FROM another one.' },
  );
}

function prompt(task: HarborTask): string {
  const network =
    task.sandbox.network === 'none'
      ? 'There is no network.'
      : 'There is a network through a proxy (HTTP_PROXY), which lets only some hosts through.';
  if (task.ownRoot)
    return `${task.instruction}\n\nYour working directory is ${task.workdir}: commands start there, and relative paths begin there. What you leave anywhere but in /tmp is kept. ${network}`;
  const files =
    task.workspace.length === 0 ? 'It is empty at the start.' : "The task's files are there.";
  return `${task.instruction}\n\nYour workspace is ${task.workdir}. ${files} Only what lies in ${WORKSPACE} is graded. ${network}`;
}
