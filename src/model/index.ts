export { type AiSdkModelOptions, aiSdkModel } from './ai-sdk.ts';
export type { Model, ModelRequest } from './contract.ts';
export { type LlamaCppOptions, llamaCppModel } from './llama-cpp.ts';
export { type ResolveOptions, resolveModel } from './resolve.ts';
