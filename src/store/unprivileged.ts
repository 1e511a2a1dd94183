import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { platform, userInfo } from 'node:os';
import { LonghaulError } from '../core/index.ts';

/** How to run a program that refuses root: a prefix of its command line, and who owns its files outside. */
export interface Launcher {
  prefix: readonly string[];
  ownerUid: number;
  ownerGid: number;
  /** The unprivileged uid that stands in for root, or -1. */
  guestUid: number;
}

/**
 * Postgres refuses to run as root, and initdb refuses a uid without a name. In both cases it runs in a
 * user namespace in which we have an ordinary uid: files stay ours, a home under a 0700 folder of root
 * stays reachable, and no user is created. Containers often forbid namespaces but let root change its
 * uid: then it runs as an existing unprivileged uid that keeps the one right to pass closed folders.
 * `StoreUnavailable` when neither works.
 */
export function unprivilegedLauncher(): Launcher {
  const uid = process.getuid?.() ?? 0;
  const gid = process.getgid?.() ?? 0;
  if (uid !== 0 && hasName()) return { prefix: [], ownerUid: uid, ownerGid: gid, guestUid: -1 };
  if (platform() === 'linux') {
    const named = namedUnprivilegedUser();
    if (named !== null) {
      const prefix = [
        'unshare',
        '--user',
        `--map-user=${named.uid}`,
        `--map-group=${named.gid}`,
        '--',
      ];
      if (works(prefix)) return { prefix, ownerUid: uid, ownerGid: gid, guestUid: named.uid };
    }
    if (named !== null && uid === 0) {
      const prefix = [
        'setpriv',
        `--reuid=${named.uid}`,
        `--regid=${named.gid}`,
        '--clear-groups',
        '--inh-caps=-all,+dac_override',
        '--ambient-caps=-all,+dac_override',
        '--no-new-privs',
        '--',
      ];
      if (works(prefix))
        return { prefix, ownerUid: named.uid, ownerGid: named.gid, guestUid: named.uid };
    }
  }
  throw new LonghaulError(
    'StoreUnavailable',
    uid === 0
      ? 'Postgres refuses to run as root, and this machine allows neither `unshare --user` nor `setpriv`'
      : `the user id ${uid} has no name on this machine, and \`unshare --user\` is not allowed`,
    {
      next: 'Run Longhaul as a normal user with an entry in /etc/passwd, install util-linux, or set DATABASE_URL to a Postgres of yours.',
    },
  );
}

function works(prefix: readonly string[]): boolean {
  const [command = '', ...args] = prefix;
  return spawnSync(command, [...args, 'true'], { stdio: 'ignore', timeout: 10_000 }).status === 0;
}

function hasName(): boolean {
  try {
    userInfo();
    return true;
  } catch {
    return false;
  }
}

/** `nobody` where it exists, else the first entry that is not root. */
function namedUnprivilegedUser(): { uid: number; gid: number } | null {
  let text: string;
  try {
    text = readFileSync('/etc/passwd', 'utf8');
  } catch {
    return null;
  }
  const users = text
    .split('\n')
    .map((line) => line.split(':'))
    .map(([name, , uid, gid]) => ({ name, uid: Number(uid), gid: Number(gid) }))
    .filter(({ uid, gid }) => uid > 0 && gid > 0);
  return users.find(({ name }) => name === 'nobody') ?? users[0] ?? null;
}
