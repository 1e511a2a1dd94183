export { BubblewrapDriver, type BubblewrapOptions } from './bubblewrap/driver.ts';
export * from './contract.ts';
export {
  type OpenedSandboxes,
  type OpenSandboxesOptions,
  openSandboxes,
  type Probe,
  probeBubblewrap,
} from './open.ts';
export { WasmDriver, type WasmOptions } from './wasm/driver.ts';
