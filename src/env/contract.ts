import type { Message, Reward, RunState, Tool } from '../core/index.ts';
import type { NetworkRule, Sandbox, SandboxSpec } from '../sandbox/contract.ts';

export type Split = 'train' | 'heldout';

/** A task by reference: plain data that fits into `run.created` and is opened again on resume. */
export interface TaskRef {
  environment: string;
  id: string;
  domain: string;
  split: Split;
  /** What the user lets the task's sandboxes reach; absent: nothing. */
  allow?: readonly NetworkRule[];
}

/**
 * A task opened for one run. Everything that decides is a function of the run's state, so that resume,
 * fork and a second grading see the same: the session itself remembers nothing.
 */
export interface TaskSession {
  readonly ref: TaskRef;
  /** A name for people. */
  readonly name: string;
  /** Changes whenever anything that decides the task's outcome changes; runs and audits are bound to it. */
  readonly hash: string;
  /** First messages of the conversation. */
  readonly messages: readonly Message[];
  /** Tools of this task, beside those of the agent. */
  readonly tools: readonly Tool[];
  readonly sandbox: Partial<SandboxSpec>;
  /** Puts the task's files into a fresh sandbox. Tests and solution stay outside. */
  prepare(sandbox: Sandbox): Promise<void>;
  /** Whether the task itself is over (solved, attempts used up), whatever the model would say next. */
  isOver(state: RunState): boolean;
  /** Never throws: what the infrastructure causes is an ungraded reward. */
  grade(state: RunState, sandbox: Sandbox): Promise<{ reward: Reward; output?: string }>;
}

export interface Environment {
  readonly name: string;
  /** Tasks of a split in an order fixed by the seed; training and held-out are disjoint by construction. */
  tasks(split: Split, seed: number, count: number): TaskRef[];
  /** `TaskInvalid` with what is wrong and where. */
  open(ref: TaskRef): Promise<TaskSession>;
}
