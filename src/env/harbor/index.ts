export {
  type HarborEnvironment,
  type HarborOptions,
  type HarborSession,
  harborEnvironment,
} from './environment.ts';
export { runSolution } from './solution.ts';
export { type HarborTask, type LoadOptions, loadHarborTask } from './task.ts';
