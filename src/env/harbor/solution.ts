import { type ExecResult, LonghaulError } from '../../core/index.ts';
import type { Sandbox } from '../../sandbox/contract.ts';
import { CLEAN_ENV, upload } from './pack.ts';
import type { HarborTask } from './task.ts';

/**
 * Runs the task's reference solution where an agent would work: the control that a task can be
 * solved and that its verifier knows it. `TaskInvalid` if the task brings none. The solution lies in
 * the sandbox afterwards: use one that no agent gets.
 */
export async function runSolution(task: HarborTask, sandbox: Sandbox): Promise<ExecResult> {
  if (task.solution === null)
    throw new LonghaulError('TaskInvalid', `${task.dir}: has no solution/solve.sh to run`);
  await upload(sandbox, '/solution', task.solution);
  return sandbox.exec({
    argv: ['bash', '/solution/solve.sh'],
    cwd: task.workdir,
    // An image says itself where its programs are.
    env: { ...(!task.ownRoot && CLEAN_ENV), HOME: '/tmp', ...task.solutionEnv },
    timeoutMs: task.agentTimeoutMs ?? 600_000,
  });
}
