import { join } from 'node:path';
import { attribute, LonghaulError } from '../core/index.ts';
import { BubblewrapDriver } from './bubblewrap/driver.ts';
import type { SandboxCapabilities, SandboxDriver } from './contract.ts';
import { OCI_RUNTIMES, OciDriver } from './oci/index.ts';
import { type OpenSandboxesOptions, openMicroVm } from './open.ts';
import { WasmDriver } from './wasm/driver.ts';

/** A driver that a probe has opened, with what only this driver can tell. */
export interface ProbedDriver {
  driver: SandboxDriver;
  /** Version of the control groups behind the limits. */
  cgroups?: 'v1' | 'v2' | null;
  /** Crashed owners whose leftovers this start removed. */
  orphansCleaned?: number;
}

export interface DriverProbe {
  name: string;
  /** Whether it is chosen without being asked for, where those before it do not run. */
  automatic: boolean;
  /** Starts it in a folder; throws with the reason and the next step where it does not run here. */
  open(dir: string): Promise<ProbedDriver>;
}

/** What became of running a driver. */
export type DriverReport =
  | {
      name: string;
      ok: true;
      capabilities: SandboxCapabilities;
      /** From nothing to the end of a first command or snippet. */
      firstMs: number;
    }
  | { name: string; ok: false; reason: string; next: string };

/** What the environment says of virtual machines; nothing where it names no kernel. */
export function machineOf(environment: NodeJS.ProcessEnv): OpenSandboxesOptions['machine'] {
  const kernel = environment.LONGHAUL_MICROVM_KERNEL;
  if (!kernel) return undefined;
  const accel = environment.LONGHAUL_MICROVM_ACCEL;
  if (accel !== undefined && accel !== 'kvm' && accel !== 'tcg')
    throw new LonghaulError(
      'ConfigInvalid',
      `LONGHAUL_MICROVM_ACCEL is ${JSON.stringify(accel)}, neither kvm nor tcg`,
    );
  return { kernel, ...(accel && { accel }) };
}

/** Every driver, the default first; those after it in the order of their strength. */
export const DRIVER_PROBES: readonly DriverProbe[] = [
  {
    name: 'bubblewrap',
    automatic: true,
    open: async (dir) => {
      const driver = await BubblewrapDriver.open({ dir, warm: 0 });
      return {
        driver,
        cgroups: driver.cgroups?.version ?? null,
        orphansCleaned: driver.cleaned,
      };
    },
  },
  ...OCI_RUNTIMES.map((runtime) => ({
    name: runtime,
    automatic: false,
    open: async (dir: string) => ({
      driver: await OciDriver.open({ dir: join(dir, 'oci', runtime), runtime, warm: 0 }),
    }),
  })),
  {
    name: 'microvm',
    automatic: false,
    open: async (dir) => ({ driver: await openMicroVm(dir, machineOf(process.env)) }),
  },
  {
    name: 'wasm',
    automatic: true,
    open: async (dir) => ({ driver: await WasmDriver.open({ dir, processes: 1 }) }),
  },
];

/** One command where the driver runs commands, else one snippet: only that proves that it works. */
async function useOnce(driver: SandboxDriver): Promise<void> {
  const sandbox = await driver.create();
  try {
    const [language = 'python'] = driver.capabilities.languages;
    const source = language === 'python' ? 'print(6*7)' : 'console.log(6*7)';
    const result = driver.capabilities.exec
      ? await sandbox.exec({ argv: ['echo', '42'] })
      : (await sandbox.runCode([{ language, source }]))[0]!;
    if (result.stdout !== '42\n')
      throw new Error(
        `a first ${driver.capabilities.exec ? 'command' : 'snippet'} ended with ${result.cause} ${result.code ?? result.signal}: ${result.stderr.trim()}`,
      );
  } finally {
    await sandbox.stop();
  }
}

/**
 * Finds out by running a driver whether it works here. Where it does, `whileOpen` gets it before it is
 * closed again. A driver that does not work is an answer; what `whileOpen` throws is passed on.
 */
export async function probeDriver(
  probe: DriverProbe,
  dir: string,
  whileOpen?: (opened: ProbedDriver) => Promise<void>,
): Promise<DriverReport> {
  const { name } = probe;
  const failed = (thrown: unknown): DriverReport => {
    const error = attribute(thrown, 'SandboxUnavailable');
    return { name, ok: false, reason: error.message.split('\n')[0]!, next: error.next };
  };
  const startedAt = performance.now();
  let opened: ProbedDriver;
  try {
    opened = await probe.open(dir);
  } catch (thrown) {
    return failed(thrown);
  }
  try {
    try {
      await useOnce(opened.driver);
    } catch (thrown) {
      return failed(thrown);
    }
    const firstMs = performance.now() - startedAt;
    await whileOpen?.(opened);
    return { name, ok: true, capabilities: opened.driver.capabilities, firstMs };
  } finally {
    await opened.driver.close();
  }
}
