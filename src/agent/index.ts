export { checkCall, runCall } from './call.ts';
export { coder } from './coder.ts';
export type { AgentDefinition } from './contract.ts';
export { type Action, decide } from './decide.ts';
export { cut, describeExec } from './observation.ts';
