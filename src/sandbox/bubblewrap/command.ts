import { existsSync, lstatSync, readlinkSync } from 'node:fs';

/** uid and gid inside: an ordinary user, mapped to the sandbox's own uid outside. */
export const INSIDE_ID = 1000;
/** Descriptor that the launcher puts the filter on (launcher.py). */
const FILTER_FD = '3';

/** Paths that task formats write to by name: links into the sandbox's own /tmp, which no fork inherits. */
const TASK_DIRECTORIES = ['tests', 'logs', 'solution'];

/** How the root file system is put together where it is not the host's; roots.py mounts it. */
export interface RootShape {
  /** The workspace's overlay is the root, instead of lying in /workspace of a read-only one. */
  writable: boolean;
  /** The host's system directories lie over it, read-only. */
  host: boolean;
  /** /tmp is a folder of the root and so part of its layers, as builds of images need it. */
  sharedTmp: boolean;
}

/** The host's system directories: bound read-only, or made a link where the host has one (merged /usr). */
function systemDirectories(links: boolean): string[] {
  const result = ['--ro-bind', '/usr', '/usr'];
  for (const path of ['/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32']) {
    if (!existsSync(path)) continue;
    if (!lstatSync(path).isSymbolicLink()) result.push('--ro-bind', path, path);
    else if (links) result.push('--symlink', readlinkSync(path), path);
  }
  return result;
}

/** A root that bubblewrap builds itself, on an empty file system. */
function hostRoot(own: string): string[] {
  return [
    ...systemDirectories(true),
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
    ...['--remount-ro', '/'],
  ];
}

/** A root that is mounted already. Its mount points are there, and none of them is a link. */
function mountedRoot(own: string, shape: RootShape): string[] {
  return [
    ...(shape.writable ? ['--bind', `${own}/ws`, '/'] : ['--ro-bind', `${own}/root`, '/']),
    ...(shape.host ? systemDirectories(false) : []),
    // Below /dev, which is bubblewrap's own: nothing is left in the image.
    ...['--proc', '/proc', '--dev', '/dev', '--ro-bind', '/tmp/init', '/dev/.init'],
    ...['--bind', `${own}/shm`, '/dev/shm', '--remount-ro', '/dev'],
    ...(shape.sharedTmp ? [] : ['--bind', `${own}/tmp`, '/tmp']),
    ...(shape.writable ? [] : ['--bind', `${own}/ws`, '/workspace', '--remount-ro', '/']),
  ];
}

/**
 * bubblewrap's command line for one sandbox. Paths below /tmp are those of the supervisor's mount
 * namespace. What runs in the sandbox is sent in later, by the zygote.
 */
export function bubblewrapCommand(sid: string, shape: RootShape | null = null): string[] {
  const own = `/tmp/s${sid}`;
  return [
    'bwrap',
    ...['--unshare-user', '--disable-userns', '--unshare-pid', '--unshare-net'],
    ...['--unshare-ipc', '--unshare-uts', '--unshare-cgroup-try'],
    ...['--uid', `${INSIDE_ID}`, '--gid', `${INSIDE_ID}`, '--hostname', 'sandbox'],
    ...['--cap-drop', 'ALL', '--new-session', '--die-with-parent', '--as-pid-1', '--clearenv'],
    ...(shape ? mountedRoot(own, shape) : hostRoot(own)),
    ...['--seccomp', FILTER_FD],
    ...['--', shape ? '/dev/.init' : '/.init'],
  ];
}
