import type { ToolSandbox } from '../core/index.ts';

/** What a sandbox may use. All limits are hard; a driver that cannot enforce one refuses the spec. */
export interface SandboxSpec {
  /** `host`: the machine's own system directories, read-only. Further images come with later drivers. */
  image: 'host';
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
  /** Only `none` so far: no network at all, not even the host's loopback. */
  network: 'none';
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

/** How strong each limit is on this machine. `rlimit` is per process and weaker than `cgroup`. */
export interface SandboxCapabilities {
  isolation: 'namespaces' | 'process';
  languages: readonly ('python' | 'javascript')[];
  /** Whether arbitrary commands can be run, or only code in the listed languages. */
  exec: boolean;
  memory: 'cgroup' | 'rlimit' | 'runtime' | 'none';
  cpu: 'cgroup' | 'none';
  pids: 'cgroup' | 'rlimit' | 'runtime' | 'none';
  disk: 'filesystem' | 'runtime' | 'none';
  /** Overlay layers: snapshot, rollback and fork without copying. */
  layers: 'overlay' | 'copy';
  ownUid: boolean;
}

/** A frozen workspace: content that never changes again. Durable ones survive a crash of the machine. */
export type LayerId = string;

export interface SnapshotOptions {
  /** Processes still alive would write into the frozen layer: stop them, or refuse with `SandboxBusy`. Default `refuse`. */
  onBusy?: 'refuse' | 'stop';
  /** fsynced and kept until `dropLayer`; volatile ones (the default) go with the driver. */
  durable?: boolean;
}

export interface SandboxUsage {
  cpuSeconds: number;
  peakMemoryBytes: number | null;
  diskBytes: number;
  wallSeconds: number;
  oomKills: number;
}

/** A live sandbox. Its workspace is `/workspace`. Every method throws `SandboxBroken` once it is gone. */
export interface Sandbox extends ToolSandbox {
  readonly id: string;
  readonly spec: SandboxSpec;
  /** Freezes the workspace as it is between commands. */
  snapshot(options?: SnapshotOptions): Promise<LayerId>;
  /** Puts the workspace back to a layer; what came after it is discarded, processes are ended. */
  rollback(layer: LayerId): Promise<void>;
  /** New sandboxes from the workspace's last quiescent state. Processes do not survive a fork. */
  fork(count: number): Promise<Sandbox[]>;
  usage(): Promise<SandboxUsage>;
  /** Ends all processes and frees everything. Idempotent. */
  stop(): Promise<void>;
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
  close(): Promise<void>;
}
