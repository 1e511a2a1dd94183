import { spawnSync } from 'node:child_process';
import {
  copyFileSync,
  existsSync,
  globSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmSync,
} from 'node:fs';
import { basename, join, resolve } from 'node:path';

// Prepares the folder the microVM tests use: node test/setup-microvm.ts [DIR]
// It holds Debian's kernel for clouds (GPL-2.0) and its virtio modules, taken out of the package; nothing
// is installed. Needs apt-get and dpkg-deb, and QEMU to run it: `apt-get install qemu-system-x86`.
const folder = resolve(process.argv[2] ?? '.cache/microvm');
const modules = join(folder, 'modules');
mkdirSync(modules, { recursive: true });

if (!existsSync(join(folder, 'vmlinuz'))) {
  const work = mkdtempSync(join(folder, 'unpack-'));
  const depends = output('apt-cache', ['depends', 'linux-image-cloud-amd64'], work);
  const kernel = /Depends: (linux-image-\S+)/.exec(depends)?.[1];
  if (!kernel) fail('apt-cache names no kernel for clouds; run `apt-get update`');
  output('apt-get', ['download', kernel], work);
  const file = readdirSync(work).find((name) => name.endsWith('.deb'));
  if (!file) fail('apt-get downloaded no package');
  output('dpkg-deb', ['-x', file, 'system'], work);
  const wanted = /^(virtio|virtio_ring|virtio_pci\w*|virtio_mmio|virtio_console)\.ko$/;
  for (const path of globSync('system/lib/modules/*/kernel/drivers/**/*.ko', { cwd: work }))
    if (wanted.test(basename(path))) copyFileSync(join(work, path), join(modules, basename(path)));
  copyFileSync(
    join(work, globSync('system/boot/vmlinuz-*', { cwd: work })[0]!),
    join(folder, 'vmlinuz'),
  );
  rmSync(work, { recursive: true });
}
console.log(`Ready: LONGHAUL_TEST_MICROVM=${folder}`);

function output(command: string, args: string[], cwd: string): string {
  const { status, error, stdout, stderr } = spawnSync(command, args, { cwd, encoding: 'utf8' });
  if (status !== 0) fail(`${command} ${args.join(' ')}: ${error?.message ?? stderr.trim()}`);
  return stdout;
}

function fail(message: string): never {
  console.error(message);
  process.exit(1);
}
