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
      return session(ref, await loadHarborTask(ref.id, options));
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
      await upload(sandbox, WORKSPACE, task.workspace);
      if (task.workdir !== WORKSPACE) await upload(sandbox, task.workdir, []);
    },
    // Only the agent says when it is done: the verifier is not asked before.
    isOver: (_state: RunState) => false,
    grade: (state: RunState, sandbox: Sandbox): Promise<Grade> =>
      gradeHarborTask(task, state, sandbox),
  };
}

function prompt(task: HarborTask): string {
  const files =
    task.workspace.length === 0 ? 'It is empty at the start.' : "The task's files are there.";
  return `${task.instruction}\n\nYour workspace is ${task.workdir}. ${files} Only what lies in ${WORKSPACE} is graded. There is no network.`;
}
