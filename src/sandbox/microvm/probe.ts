import { LonghaulError } from '../../core/index.ts';
import { MicroVmDriver, type MicroVmOptions } from './driver.ts';

export type MicroVmProbe = { ok: true; said: string } | { ok: false; reason: string; next: string };

/** Whether virtual machines work here, found out by booting one and running a command in it. */
export async function probeMicroVm(options: MicroVmOptions): Promise<MicroVmProbe> {
  let driver: MicroVmDriver | null = null;
  try {
    driver = await MicroVmDriver.open(options);
    const sandbox = await driver.create();
    const { code, stderr } = await sandbox.exec({ argv: ['true'] });
    if (code !== 0)
      throw new LonghaulError('SandboxUnavailable', `microvm: \`true\` failed: ${stderr}`);
    const { accel = 'tcg', machine = 'q35' } = options;
    const how = accel === 'kvm' ? 'KVM' : 'emulated processor, slow';
    return { ok: true, said: `sandbox: QEMU ${machine} (${how}), machine snapshots, no network` };
  } catch (error) {
    const known = error instanceof LonghaulError ? error : null;
    const message = error instanceof Error ? error.message : String(error);
    return { ok: false, reason: message.split('\n')[0]!, next: known?.next ?? 'Report it.' };
  } finally {
    await driver?.close();
  }
}
