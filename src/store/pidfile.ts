import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { platform } from 'node:os';
import { join } from 'node:path';

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

/** Whether any process has this pid. */
export function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (thrown) {
    return (thrown as NodeJS.ErrnoException).code === 'EPERM';
  }
}

/**
 * Whether this pid is a postmaster of this data directory. After a restart of the machine or container
 * a stale pid file often names a pid that another program has now.
 */
export function isPostmaster(pid: number, dataDir: string): boolean {
  if (!isAlive(pid)) return false;
  try {
    if (platform() === 'linux') {
      // A zombie's command line is empty: it holds nothing any more.
      const argv = readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
      return argv.includes(dataDir);
    }
    const command = execFileSync('ps', ['-ww', '-o', 'command=', '-p', String(pid)], {
      encoding: 'utf8',
    });
    return command.includes(dataDir);
  } catch {
    return false;
  }
}
