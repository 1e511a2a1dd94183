import { execFileSync } from 'node:child_process';
import { readFileSync, readlinkSync } from 'node:fs';
import { platform } from 'node:os';
import { join } from 'node:path';
import { codeOf } from './failures.ts';

/** What a running postmaster writes into `postmaster.pid` of its data directory. */
export interface PidFile {
  pid: number;
  dataDir: string;
  /** Seconds since the epoch. */
  startedAt: number;
  socketDir: string;
  status: 'starting' | 'stopping' | 'ready' | 'standby' | 'unknown';
}

/** Null when there is no pid file, or one that is only half written. */
export function readPidFile(dataDir: string): PidFile | null {
  let lines: string[];
  try {
    lines = readFileSync(join(dataDir, 'postmaster.pid'), 'utf8').split('\n');
  } catch {
    return null;
  }
  const pid = Number(lines[0]);
  if (!Number.isInteger(pid) || pid <= 0 || lines[1] === undefined) return null;
  const status = lines[7]?.trim();
  return {
    pid,
    dataDir: lines[1].trim(),
    startedAt: Number(lines[2]),
    socketDir: lines[4]?.trim() ?? '',
    status:
      status === 'starting' || status === 'stopping' || status === 'ready' || status === 'standby'
        ? status
        : 'unknown',
  };
}

/** Whether a process with this pid runs; one that ended and was not waited for does not. */
export function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
  } catch (thrown) {
    if (codeOf(thrown) !== 'EPERM') return false;
  }
  if (platform() !== 'linux') return true;
  try {
    // "pid (name) state …"; the name may hold anything, parentheses too.
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return !/^[ZX]/.test(stat.slice(stat.lastIndexOf(')') + 2));
  } catch {
    return false;
  }
}

/**
 * Whether this pid is a postmaster of this data directory. After a restart of the machine or container
 * a stale pid file often names a pid that another program has now.
 */
export function isPostmaster(pid: number, dataDir: string): boolean {
  if (!isAlive(pid)) return false;
  try {
    if (platform() !== 'linux') {
      const args = ['-ww', '-o', 'command=', '-p', String(pid)];
      return execFileSync('ps', args, { encoding: 'utf8' }).includes(dataDir);
    }
    try {
      // A server works in its data directory, also after that was moved.
      return readlinkSync(`/proc/${pid}/cwd`) === dataDir;
    } catch (thrown) {
      if (codeOf(thrown) !== 'EACCES') return false;
      return readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0').includes(dataDir);
    }
  } catch {
    return false;
  }
}
