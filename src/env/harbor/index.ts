export {
  type HarborEnvironment,
  type HarborOptions,
  type HarborSession,
  harborEnvironment,
} from './environment.ts';
export { runSolution } from './solution.ts';
export {
  type BuildRequest,
  type HarborTask,
  type LoadOptions,
  loadHarborTask,
  type TaskImage,
} from './task.ts';
