/** The public surface of the package: shapes and contracts, and the drivers that implement them. */
export * from './agent/index.ts';
export * from './core/index.ts';
export type * from './engine/contract.ts';
export { createEmbeddedEngine } from './engine/embedded/index.ts';
export type * from './env/contract.ts';
export { harborEnvironment, loadHarborTask, runSolution } from './env/harbor/index.ts';
export { programs } from './env/programs/environment.ts';
export type * from './model/contract.ts';
export { aiSdkModel, llamaCppModel, resolveModel } from './model/index.ts';
export * from './run/index.ts';
export type * from './sandbox/contract.ts';
export { openSandboxes } from './sandbox/index.ts';
export { openStore, type Store } from './store/index.ts';
export * from './train/index.ts';
