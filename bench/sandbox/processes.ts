import { existsSync, globSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { BubblewrapDriver } from '../../src/sandbox/index.ts';

const read = (path: string): string => {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
};

/** Every process below another one, by the kernel's parent links. */
export function descendants(root: number): Set<number> {
  const children = new Map<number, number[]>();
  for (const name of readdirSync('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    // The command is in parentheses and may hold any character: the parent is the second field after it.
    const stat = read(`/proc/${name}/stat`);
    const parent = Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]);
    children.set(parent, [...(children.get(parent) ?? []), Number(name)]);
  }
  const found = new Set<number>();
  const visit = (pid: number) => {
    for (const child of children.get(pid) ?? []) {
      if (found.has(child)) continue;
      found.add(child);
      visit(child);
    }
  };
  visit(root);
  return found;
}

/**
 * Control group directories that a driver made for its sandboxes, empty ones included. Where they lie is
 * read from its processes: other drivers of this machine have groups beside them.
 */
export function groupsOf(driver: BubblewrapDriver): string[] {
  const owners = [...descendants(driver.supervisorPid)].map(
    (pid) => /\/(longhaul-[^/\n]+)/.exec(read(`/proc/${pid}/cgroup`))?.[1],
  );
  const owner = owners.find((name) => name !== undefined);
  if (owner === undefined) return [];
  return basesOf(driver).flatMap((base) => globSync(join(base, owner, '*/')));
}

const basesOf = (driver: BubblewrapDriver): string[] => [
  ...new Set(Object.values(driver.cgroups?.bases ?? {})),
];

/** Processes in a sandbox's control groups; none where there are no groups. */
export function membersOf(driver: BubblewrapDriver, sandbox: string): Set<number> {
  const lines = basesOf(driver)
    .flatMap((base) => globSync(join(base, 'longhaul-*', sandbox, 'cgroup.procs')))
    .flatMap((file) => read(file).split('\n'));
  return new Set(lines.filter((line) => line !== '').map(Number));
}

/** Bytes that only this process has mapped, changed or not (proc(5), smaps_rollup); null where it cannot be read. */
export function privateBytes(pid: number): number | null {
  const text = read(`/proc/${pid}/smaps_rollup`);
  const kib = [...text.matchAll(/^Private_(?:Clean|Dirty):\s+(\d+) kB$/gm)].map((match) =>
    Number(match[1]),
  );
  return kib.length === 0 ? null : kib.reduce((sum, each) => sum + each, 0) * 1024;
}

/** Resident bytes of a process; 0 when it is gone. */
export function residentBytes(pid: number): number {
  return Number(/^VmRSS:\s+(\d+) kB$/m.exec(read(`/proc/${pid}/status`))?.[1] ?? 0) * 1024;
}

export function openDescriptors(pid: number): number {
  return existsSync(`/proc/${pid}/fd`) ? readdirSync(`/proc/${pid}/fd`).length : 0;
}

/** Mounts that a process sees. */
export const mountCount = (pid: number): number =>
  read(`/proc/${pid}/mounts`).split('\n').length - 1;

export const commandOf = (pid: number): string => read(`/proc/${pid}/comm`).trim();
