export { BubblewrapDriver, type BubblewrapOptions } from './bubblewrap/driver.ts';
export * from './contract.ts';
export { examineLimits, type LimitFinding } from './examine.ts';
export * from './images/index.ts';
export { durableLayers, examineMachine, type MachineFinding } from './machine.ts';
export { MicroVmDriver, type MicroVmOptions } from './microvm/driver.ts';
export { OciDriver, type OciOptions } from './oci/index.ts';
export {
  type OpenedSandboxes,
  type OpenSandboxesOptions,
  openSandboxes,
  type Probe,
  probeBubblewrap,
} from './open.ts';
export {
  DRIVER_PROBES,
  type DriverReport,
  machineOf,
  type ProbedDriver,
  probeDriver,
} from './probes.ts';
export { WasmDriver, type WasmOptions } from './wasm/driver.ts';
