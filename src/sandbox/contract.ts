import type { Readable } from 'node:stream';
import type { ToolSandbox } from '../core/index.ts';

/** What a sandbox may use. All limits are hard; a driver that cannot enforce one refuses the spec. */
export interface SandboxSpec {
  /**
   * The read-only root file system. `host`: the machine's own system directories. `dir:PATH`: a
   * directory tree. `image:DIGEST`: an image of the image store (see images/), which also makes them of
   * OCI layouts, `docker save` archives and Dockerfiles. `rootfs:DIGEST`: such an image as the workspace
   * itself, so that every path can be written and is part of layers.
   */
  image: string;
  /**
   * Memory of the processes. Where files are kept in memory too and one group holds both (bubblewrap),
   * the kernel's bound is `memoryBytes + diskBytes` together: files never take from it.
   */
  memoryBytes: number;
  /** Share of one core: 1 is a whole core, 0.5 half of one. */
  cpus: number;
  pids: number;
  /** Bytes and inodes of workspace and /tmp together with what they hold. */
  diskBytes: number;
  inodes: number;
  /** `none`: no network at all, not even the host's loopback. A policy: what the filtering proxy lets through. */
  network: 'none' | NetworkPolicy;
}

export const DEFAULT_SPEC: SandboxSpec = {
  image: 'host',
  memoryBytes: 512 * 1024 * 1024,
  cpus: 1,
  pids: 128,
  diskBytes: 512 * 1024 * 1024,
  inodes: 50_000,
  network: 'none',
};

/** Drivers by name, the default first. */
export const SANDBOX_DRIVERS = [
  'bubblewrap',
  'crun',
  'runc',
  'runsc',
  'kata',
  'microvm',
  'wasm',
] as const;
export type SandboxDriverName = (typeof SANDBOX_DRIVERS)[number];

/** What may be reached, through an HTTP proxy that the guest finds in HTTP_PROXY and HTTPS_PROXY. */
export interface NetworkPolicy {
  allow: readonly NetworkRule[];
}

export interface NetworkRule {
  /** `example.org`, `*.example.org` (any name below it, not itself), an address, or a CIDR block. */
  host: string;
  /** Default 80 and 443. */
  ports?: readonly number[];
  /** Private, loopback and link-local addresses are refused, whatever a name resolves to, unless this is true. */
  private?: boolean;
  /**
   * Headers that the proxy adds, by name; the value is read from this variable of the host's environment
   * when the request passes, so that the secret is never inside. Only for plain HTTP requests to the
   * proxy; with `upgrade` the proxy itself speaks TLS to the server.
   */
  inject?: Readonly<Record<string, { env: string; prefix?: string }>>;
  /** Plain HTTP from inside becomes HTTPS outside; port 80 becomes 443, another port stays. */
  upgrade?: boolean;
}

/** One connection or request that the guest tried, whatever came of it. */
export interface NetworkAttempt {
  at: number;
  /** As asked for, before it was resolved. */
  host: string;
  port: number;
  method: string;
  outcome: 'allowed' | 'refused' | 'failed';
  /** Why it was refused or failed; the address that was connected to where it was allowed. */
  detail: string;
  bytesUp: number;
  bytesDown: number;
}

/** How strong each limit is on this machine. `rlimit` is per process and weaker than `cgroup`. */
export interface SandboxCapabilities {
  /**
   * What stands between guest and host. `namespaces`: the host's kernel behind namespaces, a uid and a
   * system call filter. `gvisor`: a kernel in user space. `vm`: a machine of its own. `wasm`: a
   * WebAssembly runtime in a separate process, the weakest.
   */
  isolation: 'namespaces' | 'gvisor' | 'vm' | 'wasm';
  languages: readonly ('python' | 'javascript')[];
  /** Whether arbitrary commands can be run, or only code in the listed languages. */
  exec: boolean;
  /** Whether `start` can keep processes between calls. */
  processes: boolean;
  pause: 'freezer' | 'machine' | 'none';
  network: 'none' | 'proxy';
  images: readonly ('host' | 'dir' | 'image')[];
  memory: 'cgroup' | 'rlimit' | 'runtime' | 'machine' | 'none';
  cpu: 'cgroup' | 'machine' | 'none';
  pids: 'cgroup' | 'rlimit' | 'runtime' | 'machine' | 'none';
  disk: 'filesystem' | 'runtime' | 'none';
  /** Overlay layers: snapshot, rollback and fork without copying. `machine`: memory is kept too. */
  layers: 'overlay' | 'copy' | 'machine';
  /** Whether each sandbox has a host uid of its own. */
  ownUid: boolean;
}

/** A frozen workspace: content that never changes again. Durable ones survive a crash of the machine. */
export type LayerId = string;

export interface SnapshotOptions {
  /** Processes still alive would write into the frozen layer: stop them, or refuse with `SandboxBusy`. Default `refuse`. */
  onBusy?: 'refuse' | 'stop';
  /** fsynced and kept until `dropLayer` or `prune`; volatile ones (the default) go with the driver. */
  durable?: boolean;
}

export interface ForkOptions {
  /** Ends all processes first, so that what is forked is the workspace as it is now. */
  stopProcesses?: boolean;
  /**
   * Room beyond the limit, for somebody who works on a workspace that may be full, such as a grader.
   * `CapabilityMissing` where the limit is built into what is forked.
   */
  moreDiskBytes?: number;
}

export interface SandboxUsage {
  cpuSeconds: number;
  peakMemoryBytes: number | null;
  diskBytes: number;
  /** Processes alive now, those of the sandbox itself left out; null where nothing outside counts them. */
  pids: number | null;
  wallSeconds: number;
  /** Times the kernel ended a process for memory, and refused one for the process limit. */
  oomKills: number;
  pidsRefused: number;
}

/** A live sandbox. Its workspace is `/workspace`. Every method throws `SandboxBroken` once it is gone. */
export interface Sandbox extends ToolSandbox {
  readonly id: string;
  readonly spec: SandboxSpec;
  /** Freezes the workspace as it is between commands. */
  snapshot(options?: SnapshotOptions): Promise<LayerId>;
  /** Puts the workspace back to a layer; what came after it is discarded, processes are ended. */
  rollback(layer: LayerId): Promise<void>;
  /**
   * New sandboxes from the workspace's last quiescent state: with a call in flight or processes alive,
   * that is the last layer. Processes do not survive a fork, but for `layers: 'machine'`.
   */
  fork(count: number, options?: ForkOptions): Promise<Sandbox[]>;
  /**
   * Stops every process where it is, to go on with `resume`. Calls meanwhile are refused with
   * `SandboxBusy`. `CapabilityMissing` where nothing can freeze a whole process tree.
   */
  pause(): Promise<void>;
  resume(): Promise<void>;
  /**
   * Files /run/secrets/NAME, readable inside. They are in no layer: a rollback, a fork or a restart of
   * the sandbox's processes leaves them behind.
   */
  putSecrets(secrets: Readonly<Record<string, string>>): Promise<void>;
  /** What the guest tried to reach, oldest first; at most the last 1,000. */
  networkAttempts(): readonly NetworkAttempt[];
  usage(): Promise<SandboxUsage>;
  /** Ends all processes and frees everything. Idempotent. */
  stop(): Promise<void>;
}

export interface PruneReport {
  removed: readonly LayerId[];
  bytesFreed: number;
  kept: number;
}

export interface SandboxDriver {
  readonly name: string;
  readonly capabilities: SandboxCapabilities;
  /**
   * A ready sandbox, from the warm pool where one waits. `from` starts it with the workspace of a layer.
   * `SandboxUnavailable` when the machine cannot give one, `CapabilityMissing` when the driver never can.
   */
  create(spec?: Partial<SandboxSpec>, from?: LayerId): Promise<Sandbox>;
  hasLayer(layer: LayerId): Promise<boolean>;
  dropLayer(layer: LayerId): Promise<void>;
  /**
   * The layer's whole workspace as a zstd-compressed tar (POSIX pax), to keep elsewhere and to import
   * on another machine or into another driver. `NotFound` for an unknown layer.
   */
  exportLayer(layer: LayerId): Promise<Readable>;
  /**
   * A durable layer of what `exportLayer` wrote. The archive is hostile: it is unpacked inside a
   * sandbox. `FileRefused` when it is no such archive, is cut short, or does not fit `spec`'s disk.
   */
  importLayer(archive: Readable, spec?: Partial<SandboxSpec>): Promise<LayerId>;
  /**
   * Removes durable layers that `named` does not have and no live sandbox of any process uses, unless
   * they are younger than an hour. `named` is asked after the candidates are fixed, so a layer that a log
   * names in the meantime stays.
   */
  prune(named: () => Promise<ReadonlySet<LayerId>>): Promise<PruneReport>;
  close(): Promise<void>;
}
