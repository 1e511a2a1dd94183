import { accessSync, constants, existsSync } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import type { SandboxCapabilities } from '../contract.ts';

export const OCI_RUNTIMES = ['crun', 'runc', 'runsc', 'kata'] as const;
export type OciRuntimeName = (typeof OCI_RUNTIMES)[number];

/** What differs between runtimes that take the same bundle. */
export interface OciRuntime {
  binary: string;
  /** Global options, before the subcommand. */
  flags: string[];
  isolation: SandboxCapabilities['isolation'];
  /** `create` and `start` return, and the container's first process is a process of this machine. */
  detached: boolean;
  /** Its guests call the host's kernel, so that the filter, its processes and its uids are the host's. */
  hostKernel: boolean;
  /** Runs as root of a user namespace that the driver makes, rather than making the container's itself. */
  inUserNamespace: boolean;
  /** Memory of the runtime's own parts in the sandbox's control group. */
  overheadBytes: number;
  /** And for each process that the guest may have. */
  overheadPerProcess: number;
  /** Refuses to run where control groups of both versions are mounted. */
  hideUnified: boolean;
  install: string;
}

const MIB = 1024 * 1024;

const RUNTIMES: Record<OciRuntimeName, OciRuntime> = {
  crun: {
    binary: 'crun',
    flags: ['--cgroup-manager=disabled'],
    isolation: 'namespaces',
    detached: true,
    hostKernel: true,
    inUserNamespace: false,
    overheadBytes: 0,
    overheadPerProcess: 0,
    hideUnified: true,
    install: 'Install it: `apt-get install crun`.',
  },
  runc: {
    binary: 'runc',
    flags: [],
    isolation: 'namespaces',
    detached: true,
    hostKernel: true,
    inUserNamespace: false,
    overheadBytes: 0,
    overheadPerProcess: 0,
    hideUnified: false,
    install: 'Install it: `apt-get install runc`.',
  },
  runsc: {
    binary: 'runsc',
    flags: ['--rootless', '--network=none', '--ignore-cgroups', '--oci-seccomp'],
    isolation: 'gvisor',
    detached: false,
    hostKernel: false,
    inUserNamespace: true,
    overheadBytes: 128 * MIB,
    overheadPerProcess: 4 * MIB,
    hideUnified: false,
    install: 'Install it: `apt-get install runsc`, or a newer one from gvisor.dev.',
  },
  kata: {
    binary: 'kata-runtime',
    flags: [],
    isolation: 'vm',
    detached: false,
    hostKernel: false,
    inUserNamespace: false,
    overheadBytes: 256 * MIB,
    overheadPerProcess: 0,
    hideUnified: false,
    install: 'Install a Kata Containers whose `kata-runtime` has the `run` command.',
  },
};

/**
 * The runtime with the path of its program. `SandboxUnavailable` where it is not installed; that it is
 * proves nothing yet, so `probeOci` runs it.
 */
export function findRuntime(name: OciRuntimeName): OciRuntime {
  const runtime = RUNTIMES[name];
  if (process.platform !== 'linux')
    throw new LonghaulError('SandboxUnavailable', `${name}: needs Linux`);
  const folders = ['/usr/bin', '/usr/local/bin', '/usr/sbin', '/usr/local/sbin', '/opt/kata/bin'];
  for (const folder of [...folders, ...(process.env.PATH ?? '').split(':')]) {
    if (!folder.startsWith('/')) continue;
    const path = join(folder, runtime.binary);
    try {
      accessSync(path, constants.X_OK);
      return { ...runtime, binary: path };
    } catch {
      // try the next
    }
  }
  throw new LonghaulError('SandboxUnavailable', `${name}: ${runtime.binary} is not installed`, {
    next: runtime.install,
  });
}

/** Options of gVisor's platform: how it intercepts system calls. Tried in this order; never kvm by itself. */
export const GVISOR_PLATFORMS = ['systrap', 'ptrace'] as const;

export const hybridCgroups = () => existsSync('/sys/fs/cgroup/unified/cgroup.procs');
