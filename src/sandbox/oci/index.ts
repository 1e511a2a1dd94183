export { OciDriver, type OciOptions } from './driver.ts';
export { probeOci } from './probe.ts';
export { OCI_RUNTIMES, type OciRuntimeName } from './runtimes.ts';
