import { spawnSync } from 'node:child_process';
import { readdirSync, readFileSync, statSync } from 'node:fs';
import { release } from 'node:os';
import { join } from 'node:path';
import type { SandboxCapabilities } from './contract.ts';

/** One fact about the machine that sandboxes stand on. */
export interface MachineFinding {
  part: string;
  ok: boolean;
  found: string;
  next?: string;
}

/** Host uids of sandboxes: the default range of the bubblewrap driver, in blocks of one supervisor each. */
const UID_BASE = 200_000;
const UID_BLOCK = 1024;
const UID_BLOCKS = 64;
const UID_LOCKS = '/run/longhaul-sandbox';

function read(path: string): string | null {
  try {
    return readFileSync(path, 'utf8').trim();
  } catch {
    return null;
  }
}

/** Settings that keep users other than root from making user namespaces, with what lifts each. */
const RESTRICTIONS: readonly { path: string; when: (text: string) => boolean; lift: string }[] = [
  {
    path: 'kernel/apparmor_restrict_unprivileged_userns',
    when: (text) => text === '1',
    lift: 'sysctl kernel.apparmor_restrict_unprivileged_userns=0',
  },
  {
    path: 'kernel/unprivileged_userns_clone',
    when: (text) => text === '0',
    lift: 'sysctl kernel.unprivileged_userns_clone=1',
  },
  {
    path: 'user/max_user_namespaces',
    when: (text) => text === '0',
    lift: 'sysctl user.max_user_namespaces=15000',
  },
];

function userNamespaces(): MachineFinding {
  const part = 'user namespaces';
  const tried = spawnSync('unshare', ['--user', '--map-root-user', 'true'], { encoding: 'utf8' });
  const restrictions = RESTRICTIONS.filter(({ path, when }) => {
    const text = read(join('/proc/sys', path));
    return text !== null && when(text);
  });
  const limited =
    restrictions.length === 0
      ? 'no restriction of unprivileged users found'
      : `restricted for unprivileged users by ${restrictions.map(({ path }) => path.replaceAll('/', '.')).join(', ')}`;
  if (tried.status === 0) return { part, ok: true, found: `one was made; ${limited}` };
  const complaint = tried.error ? tried.error.message : tried.stderr.trim();
  return {
    part,
    ok: false,
    found: `none can be made: ${complaint}; ${limited}`,
    next:
      restrictions.length > 0
        ? `As root: \`${restrictions.map(({ lift }) => lift).join('; ')}\`.`
        : 'In a container, run it with CAP_SYS_ADMIN and without its seccomp profile.',
  };
}

function overlay({ layers, ownUid }: SandboxCapabilities): MachineFinding[] {
  const overlaid = layers === 'overlay';
  const root = process.getuid?.() === 0;
  const findings: MachineFinding[] = [
    overlaid
      ? {
          part: 'overlay',
          ok: true,
          found: `snapshots, rollbacks and forks without copying (kernel ${release()})`,
        }
      : {
          part: 'overlay',
          ok: false,
          found: `layers are made by ${layers}`,
          next: 'Use the bubblewrap driver for overlay layers.',
        },
  ];
  if (root)
    findings.push(
      ownUid
        ? { part: 'id-mapped mounts', ok: true, found: 'layers are shared between uids' }
        : {
            part: 'id-mapped mounts',
            ok: false,
            found: 'not on the file systems used here',
            next: 'Use a kernel of 6.3 or later.',
          },
    );
  return findings;
}

/** Inodes of one file system on which somebody holds a lock (proc(5), `locks`). */
function lockedInodes(device: number): Set<number> {
  const major = (device >> 8) & 0xfff;
  const minor = (device & 0xff) | ((device >> 12) & 0xfff00);
  const hex = (value: number) => value.toString(16).padStart(2, '0');
  const lines = (read('/proc/locks') ?? '').matchAll(/ FLOCK .* (\w+:\w+):(\d+) /g);
  return new Set(
    [...lines]
      .filter(([, on]) => on === `${hex(major)}:${hex(minor)}`)
      .map((line) => Number(line[2])),
  );
}

/** Uids that live drivers hold, and accounts of this machine that lie among them. */
function uids(): MachineFinding {
  const part = 'uids';
  const last = UID_BASE + UID_BLOCK * UID_BLOCKS - 1;
  let taken = 0;
  try {
    const locked = lockedInodes(statSync(UID_LOCKS).dev);
    taken = readdirSync(UID_LOCKS).filter((name) =>
      locked.has(statSync(join(UID_LOCKS, name)).ino),
    ).length;
  } catch {
    // no driver has run as root since the machine started
  }
  const accounts = (read('/etc/passwd') ?? '')
    .split('\n')
    .map((line) => line.split(':'))
    .filter(([, , uid]) => Number(uid) >= UID_BASE && Number(uid) <= last)
    .map(([name]) => name);
  const free = `${(UID_BLOCKS - taken) * UID_BLOCK} of ${UID_BLOCKS * UID_BLOCK} free from ${UID_BASE} on`;
  if (accounts.length > 0)
    return {
      part,
      ok: false,
      found: `${free}, but accounts of this machine lie among them: ${accounts.join(', ')}`,
      next: 'Open the driver with another `uidBase`.',
    };
  return taken < UID_BLOCKS
    ? { part, ok: true, found: free }
    : { part, ok: false, found: free, next: 'End drivers that are no longer needed.' };
}

/** Durable layers of a sandbox folder: how many, and the bytes their files hold. */
export function durableLayers(dir: string): { count: number; bytes: number } {
  const folder = join(dir, 'layers');
  let names: string[] = [];
  try {
    names = readdirSync(folder);
  } catch {
    // none was ever made
  }
  const total = { count: 0, bytes: 0 };
  // Others are half written, or on their way out.
  for (const name of names.filter((each) => each.startsWith('d-') && !each.includes('.'))) {
    const text = read(join(folder, name, 'layer.json'));
    if (text === null) continue;
    total.count++;
    total.bytes += (JSON.parse(text) as { bytes: number }).bytes;
  }
  return total;
}

/** What the machine gives to a driver with these capabilities. */
export function examineMachine(capabilities: SandboxCapabilities): MachineFinding[] {
  return [
    userNamespaces(),
    ...overlay(capabilities),
    ...(process.getuid?.() === 0 ? [uids()] : []),
  ];
}
