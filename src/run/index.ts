export type { RunContext } from './context.ts';
export { execute } from './executor.ts';
export {
  answerRun,
  createRun,
  forkRun,
  type HostedContext,
  runHosted,
  stopRun,
} from './hosted.ts';
export { type Journal, LogJournal, MemoryJournal } from './journal.ts';
export { MemoryArtifacts, type Rollout, rollout, segmentsOf } from './rollout.ts';
