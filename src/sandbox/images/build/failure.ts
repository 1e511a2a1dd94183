import { type ExecResult, LonghaulError } from '../../../core/index.ts';
import type { NetworkAttempt } from '../../contract.ts';

interface Known {
  /** In what the step printed, or the command itself. */
  pattern: RegExp;
  reason: string;
  next: string;
}

const ALTERNATIVES =
  'Build it with docker or podman and add the archive (`docker save IMAGE -o image.tar`, `ImageStore.add`), start FROM an image that has it already, or install without owners: `pip install --target DIR`, `npm install --prefix DIR`, an unpacked release below /opt.';

/** What a build under a single uid, with no network and (FROM host) the host's own /usr cannot do. */
const KNOWN: readonly Known[] = [
  {
    pattern:
      /Could not resolve|Temporary failure (in name resolution|resolving)|Name or service not known|Network is (unreachable|down)|NameResolutionError|getaddrinfo|bad address '/i,
    reason: 'a build has no network unless it is given one',
    next: 'Pass `network` with the hosts that the step needs, or copy the files into the context.',
  },
  {
    pattern: /\b(apt|apt-get|dpkg|aptitude)\b|^E: |requested operation requires superuser/m,
    reason:
      'packages of the system install files of many owners and run as root, and a sandbox has one uid, which is not root',
    next: ALTERNATIVES,
  },
  {
    pattern: /\b(apk|dnf|yum|rpm|pacman|zypper)\b/,
    reason:
      'packages of the system install files of many owners and run as root, and a sandbox has one uid, which is not root',
    next: ALTERNATIVES,
  },
  {
    pattern: /\b(useradd|adduser|groupadd|addgroup|usermod|passwd|su|sudo)\b/,
    reason: 'a sandbox has one uid, and other users cannot own or run anything in it',
    next: 'Leave users out: everything runs as the one user that each sandbox has.',
  },
  {
    pattern: /\b(chown|chgrp)\b/,
    reason: 'a sandbox has one uid, and no file can belong to another',
    next: 'Leave the owner out: every file belongs to the one user that each sandbox has.',
  },
  {
    pattern: /\b(mount|umount|mknod|losetup|modprobe|setcap|iptables|sysctl|unshare)\b/,
    reason: 'a build has no capabilities',
    next: ALTERNATIVES,
  },
];

const DENIED =
  /Operation not permitted|Permission denied|Invalid argument|are you root|must be root|superuser|setgroups|seteuid|setegid|cannot lock|EPERM|EACCES/i;
const READ_ONLY = /Read-only file system|EROFS/i;

/** Why a RUN step failed, with the way out where the reason is one of a sandbox's own. `attempts`: what it tried to reach. */
export function runFailure(
  where: string,
  command: string,
  result: ExecResult,
  host: boolean,
  attempts: readonly NetworkAttempt[],
): LonghaulError {
  const said = `${result.stdout}\n${result.stderr}`;
  const tail = (result.stderr.trim() || result.stdout.trim()).split('\n').slice(-8).join('\n');
  const how =
    result.cause === 'exited' ? `exit code ${result.code}` : `${result.cause} (${result.signal})`;
  const text = (reason: string) => `${where}: RUN failed, ${how}${reason}\n${tail}`.trimEnd();
  if (result.cause === 'out_of_memory' || result.cause === 'timeout')
    return new LonghaulError('ConfigInvalid', text(''), {
      next: 'Raise `spec.memoryBytes` or `runTimeoutMs` of the build, or make the step smaller.',
    });
  if (host && READ_ONLY.test(said))
    return new LonghaulError(
      'CapabilityMissing',
      text(": FROM host shows the machine's own /usr, which is read-only"),
      {
        next: 'Install below /opt or /usr/local of an image instead, or start FROM another image.',
      },
    );
  const refused = attempts.filter((attempt) => attempt.outcome === 'refused');
  if (refused.length > 0) {
    const names = [...new Set(refused.map(({ host, port }) => `${host}:${port}`))].slice(0, 10);
    return new LonghaulError(
      'CapabilityMissing',
      text(`: the network policy of the build refused ${names.join(', ')}`),
      { next: 'Allow them in `network`, or copy the files into the context.' },
    );
  }
  const denied = DENIED.test(said);
  const known = KNOWN.find((each, index) =>
    index === 0 ? each.pattern.test(said) : denied && each.pattern.test(`${command}\n${said}`),
  );
  if (known)
    return new LonghaulError('CapabilityMissing', text(`: ${known.reason}`), { next: known.next });
  return new LonghaulError('ConfigInvalid', text(''), {
    next: 'Mend the command; it runs as one unprivileged user and without a network unless given one.',
  });
}

/** Why files could not be put into an image. */
export function copyFailure(where: string, error: unknown, host: boolean): unknown {
  if (!(error instanceof LonghaulError) || error.code !== 'FileRefused') return error;
  if (host && READ_ONLY.test(error.message))
    return new LonghaulError(
      'CapabilityMissing',
      `${where}: FROM host shows the machine's own system directories, which are read-only: ${error.message}`,
      { next: 'Copy to /opt, /etc, /app or another place, or start FROM an image.' },
    );
  return new LonghaulError('ConfigInvalid', `${where}: ${error.message}`, {
    next: /No space/.test(error.message)
      ? 'Raise `spec.diskBytes` and `spec.inodes` of the build.'
      : 'Choose another target.',
  });
}
