import { mkdirSync, readFileSync, rmdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { LonghaulError } from '../../core/index.ts';

/**
 * Resource limits by control groups: version 2, version 1, or both mounted side by side ("hybrid").
 * A group per owner, in it one per sandbox, made below the group this process runs in, so that the
 * limits of a surrounding container or service keep holding.
 */

type Controller = 'memory' | 'cpu' | 'pids' | 'cpuacct' | 'freezer';

/** Where groups can be made on this machine. `bases` maps a controller to a writable directory. */
export interface CgroupHost {
  version: 'v1' | 'v2';
  bases: Partial<Record<Controller, string>>;
}

export interface CgroupLimits {
  memoryBytes: number;
  diskBytes: number;
  cpus: number;
  pids: number;
  network: unknown;
}

/** Read by `findCgroups`; replaceable so that layouts of other machines can be tested. */
export interface CgroupFiles {
  mountinfo: string;
  cgroup: string;
}

interface CgroupMount {
  version: 'v1' | 'v2';
  controllers: string[];
  /** Candidates, the best first: the group we run in, then the root of the mount. */
  directories: string[];
}

/** Pure: which hierarchies are mounted and where this process sits in each (proc(5), cgroups(7)). */
export function cgroupMounts(files: CgroupFiles): CgroupMount[] {
  const own = new Map<string, string>();
  for (const line of files.cgroup.split('\n')) {
    const match = /^\d+:([^:]*):(.*)$/.exec(line);
    if (match) for (const name of match[1]!.split(',')) own.set(name, match[2]!);
  }
  const mounts: CgroupMount[] = [];
  for (const line of files.mountinfo.split('\n')) {
    const [before, after] = line.split(' - ');
    if (!before || !after) continue;
    const fields = before.split(' ');
    const [kind, , options] = after.split(' ');
    if (kind !== 'cgroup' && kind !== 'cgroup2') continue;
    const root = fields[3]!;
    const point = fields[4]!;
    const controllers = kind === 'cgroup2' ? [''] : (options ?? '').split(',');
    const path = controllers.map((name) => own.get(name)).find((found) => found !== undefined);
    const relative =
      path === undefined || root === '/'
        ? path
        : path.startsWith(`${root}/`) || path === root
          ? path.slice(root.length)
          : undefined;
    const directories = relative === undefined ? [point] : [join(point, relative), point];
    mounts.push({ version: kind === 'cgroup2' ? 'v2' : 'v1', controllers, directories });
  }
  return mounts;
}

function writable(directory: string): boolean {
  const probe = join(directory, `longhaul-probe-${process.pid}`);
  try {
    mkdirSync(probe);
    rmdirSync(probe);
    return true;
  } catch {
    return false;
  }
}

function read(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}

/** Enables memory, cpu and pids for children of a v2 group. False where the kernel refuses. */
function delegate(directory: string): boolean {
  const wanted = ['memory', 'cpu', 'pids'];
  const available = read(join(directory, 'cgroup.controllers')).trim().split(/\s+/);
  if (!wanted.every((name) => available.includes(name))) return false;
  const enabled = () => read(join(directory, 'cgroup.subtree_control')).trim().split(/\s+/);
  const missing = wanted.filter((name) => !enabled().includes(name));
  try {
    if (missing.length > 0)
      writeFileSync(
        join(directory, 'cgroup.subtree_control'),
        missing.map((name) => `+${name}`).join(' '),
      );
  } catch {
    // EBUSY: a group that holds processes cannot have children with controllers.
    return false;
  }
  return wanted.every((name) => enabled().includes(name));
}

/** Tries what this process may do. Null when neither version lets it make a limited group. */
export function findCgroups(
  files: CgroupFiles = {
    mountinfo: read('/proc/self/mountinfo'),
    cgroup: read('/proc/self/cgroup'),
  },
): CgroupHost | null {
  const mounts = cgroupMounts(files);
  for (const mount of mounts.filter((each) => each.version === 'v2')) {
    const base = mount.directories.find((each) => writable(each) && delegate(each));
    if (base) return { version: 'v2', bases: { memory: base, cpu: base, pids: base } };
  }
  const bases: CgroupHost['bases'] = {};
  for (const mount of mounts.filter((each) => each.version === 'v1')) {
    for (const name of ['memory', 'cpu', 'pids', 'cpuacct', 'freezer'] as const) {
      if (!mount.controllers.includes(name)) continue;
      const base = mount.directories.find(writable);
      if (base) bases[name] = base;
    }
  }
  return bases.memory || bases.cpu || bases.pids ? { version: 'v1', bases } : null;
}

/** The group directories of one owner: recorded before they are made, so that a crash can be cleaned up. */
export function ownerGroups(host: CgroupHost, owner: string): string[] {
  return [...new Set(Object.values(host.bases))].map((base) => join(base, `longhaul-${owner}`));
}

export function makeOwnerGroups(host: CgroupHost, owner: string): void {
  for (const group of ownerGroups(host, owner)) {
    mkdirSync(group, { recursive: true });
    if (host.version === 'v2')
      writeFileSync(join(group, 'cgroup.subtree_control'), '+memory +cpu +pids');
  }
}

/** What the pid limit is raised by: bubblewrap's two processes, agent, nursery and a spare. */
const OWN_PROCESSES = 5;
const FREEZE_TIMEOUT_MS = 5000;
const CPU_PERIOD_US = 100_000;

/** One sandbox's control group in every hierarchy. */
export class Cgroup {
  readonly #version: CgroupHost['version'];
  readonly #paths: Partial<Record<Controller, string>> = {};

  constructor(host: CgroupHost, owner: string, id: string, limits: CgroupLimits) {
    this.#version = host.version;
    for (const [name, base] of Object.entries(host.bases) as [Controller, string][]) {
      const path = join(base, `longhaul-${owner}`, id);
      this.#paths[name] = path;
      // One more group costs every start; few sandboxes are ever paused.
      if (name !== 'freezer') mkdirSync(path, { recursive: true });
    }
    this.#limitMemory(limits.memoryBytes + limits.diskBytes);
    const quota = Math.max(1000, Math.round(limits.cpus * CPU_PERIOD_US));
    const own = limits.network === 'none' ? OWN_PROCESSES : OWN_PROCESSES + 1; // and a relay
    const pids = String(limits.pids + own);
    if (this.#version === 'v2') {
      this.#write('cpu', 'cpu.max', `${quota} ${CPU_PERIOD_US}`);
      this.#write('pids', 'pids.max', pids);
    } else {
      this.#write('cpu', 'cpu.cfs_period_us', String(CPU_PERIOD_US));
      this.#write('cpu', 'cpu.cfs_quota_us', String(quota));
      this.#write('pids', 'pids.max', pids);
    }
  }

  /** Directories whose `cgroup.procs` a process writes itself into. */
  get directories(): string[] {
    const { freezer: _, ...paths } = this.#paths;
    return [...new Set(Object.values(paths))];
  }

  #write(controller: Controller, file: string, text: string): void {
    const path = this.#paths[controller];
    if (path) writeFileSync(join(path, file), text);
  }

  #read(controller: Controller, file: string): string {
    const path = this.#paths[controller];
    return path ? read(join(path, file)) : '';
  }

  /**
   * Bytes for processes and files together: the sandbox's files are on tmpfs, and the kernel charges
   * their pages to the group of the process that writes them. So the limit is the memory asked for plus
   * the whole disk limit, from the start: the disk limit bites first (ENOSPC), and no command within it
   * is killed for its files. The trade: what files leave free of the disk limit processes can use, so
   * they have at least `memoryBytes` and at most `memoryBytes + diskBytes`. A limit that follows the
   * files between commands would be tighter, but kills any command that fills the disk by itself.
   */
  #limitMemory(bytes: number): void {
    if (this.#version === 'v2') {
      this.#write('memory', 'memory.max', String(bytes));
      this.#optional('memory.swap.max', '0');
      return;
    }
    this.#write('memory', 'memory.limit_in_bytes', String(bytes));
    this.#optional('memory.memsw.limit_in_bytes', String(bytes));
  }

  /** Swap accounting is absent on many kernels. */
  #optional(file: string, text: string): void {
    try {
      this.#write('memory', file, text);
    } catch {
      // no such file
    }
  }

  /** Processes that the kernel's out-of-memory killer ended in this group so far. */
  oomKills(): number {
    const text =
      this.#version === 'v2'
        ? this.#read('memory', 'memory.events')
        : this.#read('memory', 'memory.oom_control');
    return Number(/^oom_kill (\d+)$/m.exec(text)?.[1] ?? 0);
  }

  cpuSeconds(): number | null {
    if (this.#version === 'v2') {
      const found = /^usage_usec (\d+)$/m.exec(this.#read('cpu', 'cpu.stat'));
      return found ? Number(found[1]) / 1e6 : null;
    }
    const text = this.#read('cpuacct', 'cpuacct.usage').trim();
    return text ? Number(text) / 1e9 : null;
  }

  peakMemoryBytes(): number | null {
    const file = this.#version === 'v2' ? 'memory.peak' : 'memory.max_usage_in_bytes';
    const text = this.#read('memory', file).trim();
    return text ? Number(text) : null;
  }

  /** Processes in the group now, or null where nothing counts them. */
  pids(): number | null {
    const text = this.#read('pids', 'pids.current').trim();
    return text ? Number(text) : null;
  }

  /** Times that the kernel refused a new process for the limit. */
  pidsRefused(): number {
    return Number(/^max (\d+)$/m.exec(this.#read('pids', 'pids.events'))?.[1] ?? 0);
  }

  get canFreeze(): boolean {
    return this.#version === 'v2' || (this.#paths.freezer && this.#paths.pids) !== undefined;
  }

  /** Stops every process of the group where it is, or lets them go on. Returns when the kernel has done so. */
  async freeze(frozen: boolean): Promise<void> {
    if (frozen && this.#version === 'v1') this.#gather();
    const [controller, file, on, off] =
      this.#version === 'v2'
        ? (['pids', 'cgroup.freeze', '1', '0'] as const)
        : (['freezer', 'freezer.state', 'FROZEN', 'THAWED'] as const);
    this.#write(controller, file, frozen ? on : off);
    const done = () =>
      this.#version === 'v2'
        ? this.#read('pids', 'cgroup.events').includes(`frozen ${frozen ? 1 : 0}`)
        : this.#read('freezer', 'freezer.state').trim() === (frozen ? 'FROZEN' : 'THAWED');
    const end = Date.now() + FREEZE_TIMEOUT_MS;
    while (!done()) {
      if (Date.now() > end)
        throw new LonghaulError(
          'SandboxUnavailable',
          `the control group does not ${frozen ? 'freeze' : 'thaw'}`,
        );
      await sleep(2);
      // Version 1 may meet a task at a moment when it cannot be frozen, and does not try again by itself.
      this.#write(controller, file, frozen ? on : off);
    }
  }

  /** Moves every process into the freezer's group. What they fork meanwhile is found in the next round. */
  #gather(): void {
    const path = this.#paths.freezer!;
    mkdirSync(path, { recursive: true });
    const listed = () => this.#read('pids', 'cgroup.procs').trim().split('\n').filter(Boolean);
    const inside = () => new Set(this.#read('freezer', 'cgroup.procs').trim().split('\n'));
    for (let round = 0; round < 100; round++) {
      const there = inside();
      const outside = listed().filter((pid) => !there.has(pid));
      if (outside.length === 0) return;
      for (const pid of outside) {
        try {
          writeFileSync(join(path, 'cgroup.procs'), pid);
        } catch {
          // ended meanwhile
        }
      }
    }
    throw new LonghaulError('SandboxUnavailable', 'processes fork faster than they can be frozen');
  }

  /** Removes the groups. Waits for the kernel to let go of killed processes: false when some stay. */
  async remove(): Promise<boolean> {
    let gone = true;
    for (const path of new Set(Object.values(this.#paths))) {
      gone = (await this.#removeOne(path)) && gone;
    }
    return gone;
  }

  async #removeOne(path: string): Promise<boolean> {
    for (let attempt = 0; attempt < 200; attempt++) {
      try {
        rmdirSync(path);
        return true;
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === 'ENOENT') return true;
        await sleep(Math.min(10, 1 + attempt));
      }
    }
    return false;
  }
}
