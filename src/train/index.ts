export type { Evaluation, Share } from './evaluate.ts';
export { programmer } from './programmer.ts';
export {
  type Control,
  type QuickstartDeps,
  type QuickstartProgress,
  type QuickstartResults,
  type QuickstartSpec,
  resumeQuickstart,
  runQuickstart,
} from './quickstart.ts';
export { logRollouts } from './rollouts.ts';
