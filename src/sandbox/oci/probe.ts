import { LonghaulError } from '../../core/index.ts';
import { OciDriver, type OciOptions } from './driver.ts';

/**
 * Whether a runtime works on this machine, found out by running a command in it, or why not and what to
 * do. Shaped as the `Probe` of open.ts.
 */
export async function probeOci(
  options: OciOptions,
): Promise<{ ok: true; said: string } | { ok: false; reason: string; next: string }> {
  try {
    const driver = await OciDriver.open({ ...options, warm: 0 });
    try {
      const { isolation, memory, cpu, pids, ownUid } = driver.capabilities;
      const limits = Object.entries({ memory, cpu, pids }).map(
        ([name, how]) => `${name} by ${how}`,
      );
      const said = `sandbox: ${driver.name} (${isolation}, ${ownUid ? 'own uid' : 'one uid for all'}, ${limits.join(', ')}, copied layers)`;
      return { ok: true, said };
    } finally {
      await driver.close();
    }
  } catch (error) {
    const known = error instanceof LonghaulError ? error : null;
    const message = error instanceof Error ? error.message : String(error);
    return { ok: false, reason: message.split('\n')[0]!, next: known?.next ?? 'Report it.' };
  }
}
