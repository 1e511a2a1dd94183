import { existsSync, lstatSync, readlinkSync } from 'node:fs';

/** uid and gid inside: an ordinary user, mapped to the sandbox's own uid outside. */
export const INSIDE_ID = 1000;
/** Descriptors that the launcher prepares (launcher.py): the filter, and where process numbers are told. */
const FILTER_FD = '3';
const INFO_FD = '4';

/** Paths that task formats write to by name: links into the sandbox's own /tmp, which no fork inherits. */
const TASK_DIRECTORIES = ['tests', 'logs', 'solution'];

/** The host's system directories: bound read-only, or made a link where the host has one (merged /usr). */
function systemDirectories(): string[] {
  const result = ['--ro-bind', '/usr', '/usr'];
  for (const path of ['/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32']) {
    if (!existsSync(path)) continue;
    if (lstatSync(path).isSymbolicLink()) result.push('--symlink', readlinkSync(path), path);
    else result.push('--ro-bind', path, path);
  }
  return result;
}

/**
 * bubblewrap's command line for one sandbox. Paths below /tmp are those of the supervisor's mount
 * namespace. What runs in the sandbox is sent in later, by the zygote.
 */
export function bubblewrapCommand(sid: string): string[] {
  const own = `/tmp/s${sid}`;
  return [
    'bwrap',
    ...['--unshare-user', '--disable-userns', '--unshare-pid', '--unshare-net'],
    ...['--unshare-ipc', '--unshare-uts', '--unshare-cgroup-try'],
    ...['--uid', `${INSIDE_ID}`, '--gid', `${INSIDE_ID}`, '--hostname', 'sandbox'],
    ...['--cap-drop', 'ALL', '--new-session', '--die-with-parent', '--as-pid-1', '--clearenv'],
    ...systemDirectories(),
    ...['--ro-bind', '/tmp/etc', '/etc', '--ro-bind', '/tmp/init', '/.init'],
    ...['--proc', '/proc', '--dev', '/dev', '--bind', `${own}/shm`, '/dev/shm'],
    ...[
      '--remount-ro',
      '/dev',
      '--bind',
      `${own}/tmp`,
      '/tmp',
      '--bind',
      `${own}/ws`,
      '/workspace',
    ],
    ...TASK_DIRECTORIES.flatMap((name) => ['--symlink', `tmp/${name}`, `/${name}`]),
    ...['--perms', '0755', '--dir', '/run', '--symlink', '../tmp/.secrets', '/run/secrets'],
    ...['--dir', '/var/tmp'],
    ...['--remount-ro', '/', '--seccomp', FILTER_FD, '--info-fd', INFO_FD],
    ...['--', '/.init'],
  ];
}
