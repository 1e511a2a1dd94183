import type { AgentDefinition } from '../agent/index.ts';
import type { ArtifactStore, Clock, Redactor } from '../core/index.ts';
import type { TaskSession } from '../env/contract.ts';
import type { Model } from '../model/contract.ts';
import type { SandboxDriver } from '../sandbox/contract.ts';
import type { Journal } from './journal.ts';

/** What one run needs. The same for a hosted run and for a rollout; only the journal differs. */
export interface RunContext {
  journal: Journal;
  session: TaskSession;
  agent: AgentDefinition;
  model: Model;
  sandboxes: Pick<SandboxDriver, 'create'>;
  artifacts: ArtifactStore;
  clock: Clock;
  /** The journal's own. Prompts are made of what it let through. */
  redactor: Redactor;
  worker: string;
  leaseToken: number;
  /** Aborted with reason `stop` when a stop waits in the inbox, with anything else to pause the run. */
  signal: AbortSignal;
  /** Save the workspace durably after each call that may have changed it, so that the run can resume and fork. */
  saveWorkspace: boolean;
  onText?: (text: string) => void;
}
