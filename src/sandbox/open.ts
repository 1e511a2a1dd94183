import { join } from 'node:path';
import { LonghaulError } from '../core/index.ts';
import { BubblewrapDriver, type BubblewrapOptions } from './bubblewrap/driver.ts';
import type { SandboxDriver, SandboxDriverName } from './contract.ts';
import { MicroVmDriver, type MicroVmOptions } from './microvm/driver.ts';
import { OciDriver } from './oci/index.ts';
import { WasmDriver } from './wasm/driver.ts';

export interface OpenSandboxesOptions extends BubblewrapOptions {
  /** The driver to use or fail; without it bubblewrap where it runs, else wasm. */
  prefer?: SandboxDriverName;
  /** For `microvm`: the guest's kernel, and how its processor is had. */
  machine?: Pick<MicroVmOptions, 'kernel' | 'accel' | 'machine'>;
}

export interface OpenedSandboxes {
  driver: SandboxDriver;
  /** One line for the user: what was chosen and why. */
  saidAloud: string;
  /** Why bubblewrap is not used; null when it is. */
  reason: string | null;
  /** What a person does to get bubblewrap; null when it is used. */
  next: string | null;
}

export type Probe = { ok: true; said: string } | { ok: false; reason: string; next: string };

function describe(driver: BubblewrapDriver): string {
  const { cpu, memory, pids, ownUid } = driver.capabilities;
  const limits = driver.cgroups
    ? `cgroup ${driver.cgroups.version} ${Object.entries({ memory, cpu, pids })
        .filter(([, how]) => how === 'cgroup')
        .map(([name]) => name)
        .join('/')}`
    : 'memory and pids by rlimit only (no writable cgroup)';
  return `sandbox: bubblewrap (${ownUid ? 'own uid' : process.getuid?.() === 0 ? 'one uid for all' : 'user namespace'}, ${limits}, overlay layers)`;
}

/** Opens bubblewrap and runs one command in it: only that proves that it works here. */
async function openBubblewrap(options: BubblewrapOptions): Promise<BubblewrapDriver> {
  const driver = await BubblewrapDriver.open(options);
  try {
    const sandbox = await driver.create({});
    const result = await sandbox.exec({ argv: ['true'] });
    await sandbox.stop();
    if (result.code !== 0)
      throw new LonghaulError(
        'SandboxUnavailable',
        `bubblewrap: \`true\` failed: ${result.stderr}`,
      );
    return driver;
  } catch (error) {
    await driver.close();
    throw error;
  }
}

/** Whether bubblewrap works on this machine, found out by running it, or why not and what to do. */
export async function probeBubblewrap(options: BubblewrapOptions): Promise<Probe> {
  try {
    const driver = await openBubblewrap({ ...options, warm: 0 });
    const said = describe(driver);
    await driver.close();
    return { ok: true, said };
  } catch (error) {
    const known = error instanceof LonghaulError ? error : null;
    const message = error instanceof Error ? error.message : String(error);
    return { ok: false, reason: message.split('\n')[0]!, next: known?.next ?? 'Report it.' };
  }
}

/** QEMU machines with the kernel that `machine` names; `SandboxUnavailable` without one. */
export async function openMicroVm(
  dir: string,
  machine: OpenSandboxesOptions['machine'],
): Promise<MicroVmDriver> {
  if (machine === undefined)
    throw new LonghaulError('SandboxUnavailable', 'microvm: no kernel was named', {
      next: 'Set LONGHAUL_MICROVM_KERNEL to a kernel; docs/sandbox.md tells which.',
    });
  return MicroVmDriver.open({ dir: join(dir, 'microvm'), ...machine });
}

/** The machine's sandboxes. `SandboxUnavailable` when the preferred driver, or none, works here. */
export async function openSandboxes(options: OpenSandboxesOptions): Promise<OpenedSandboxes> {
  const { prefer, machine, ...rest } = options;
  const weaker = (driver: WasmDriver) =>
    `wasm (${driver.capabilities.languages.join(' and ')} in a WebAssembly process each): weaker boundary, no commands`;
  if (prefer === 'wasm') {
    const driver = await WasmDriver.open(rest);
    return {
      driver,
      saidAloud: `sandbox: ${weaker(driver)}; as asked`,
      reason: 'wasm was asked for',
      next: "Leave `prefer` out, or set it to 'bubblewrap'.",
    };
  }
  if (prefer === 'microvm') {
    const driver = await openMicroVm(rest.dir, machine);
    return { driver, saidAloud: 'sandbox: microvm; as asked', reason: null, next: null };
  }
  if (prefer !== undefined && prefer !== 'bubblewrap') {
    const runtime = prefer;
    // Layers of different drivers are different things.
    const driver = await OciDriver.open({ ...rest, dir: join(rest.dir, 'oci', runtime), runtime });
    const { isolation, memory, cpu, pids } = driver.capabilities;
    return {
      driver,
      saidAloud: `sandbox: ${runtime} (${isolation}, memory by ${memory}, cpu by ${cpu}, pids by ${pids}, copied layers); as asked`,
      reason: null,
      next: null,
    };
  }
  try {
    const driver = await openBubblewrap(rest);
    return { driver, saidAloud: describe(driver), reason: null, next: null };
  } catch (error) {
    if (prefer === 'bubblewrap' || !(error instanceof LonghaulError)) throw error;
    const driver = await WasmDriver.open(rest);
    const reason = error.message.split('\n')[0]!;
    const next = error.next ?? 'Run `longhaul doctor` to see what this machine lacks.';
    return { driver, saidAloud: `sandbox: ${weaker(driver)}; ${reason} (${next})`, reason, next };
  }
}
