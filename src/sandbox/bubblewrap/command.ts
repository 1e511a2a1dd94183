import { existsSync, lstatSync, readlinkSync } from 'node:fs';

/** uid and gid inside: an ordinary user, mapped to the sandbox's own uid outside. */
const INSIDE_ID = '1000';
/** Descriptor that the supervisor puts the filter on before it executes bubblewrap. */
const FILTER_FD = '3';

/** Paths that task formats write to by name: links into the sandbox's own /tmp, which no fork inherits. */
const TASK_DIRECTORIES = ['tests', 'logs', 'solution'];

/** Limits that the agent sets on itself and thereby on all processes inside, where no cgroup does it. */
export interface AgentLimits {
  processes?: number;
  data?: number;
}

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
 * namespace. The agent is pid 1 inside (`--as-pid-1`), so that no signal from inside can end it.
 */
export function bubblewrapCommand(sid: string, python: string, limits: AgentLimits): string[] {
  const own = `/tmp/s${sid}`;
  return [
    'bwrap',
    '--unshare-user',
    '--disable-userns',
    '--unshare-pid',
    '--unshare-net',
    '--unshare-ipc',
    '--unshare-uts',
    '--unshare-cgroup-try',
    ...['--uid', INSIDE_ID, '--gid', INSIDE_ID, '--hostname', 'sandbox'],
    ...['--cap-drop', 'ALL', '--new-session', '--die-with-parent', '--as-pid-1', '--clearenv'],
    ...systemDirectories(),
    ...['--ro-bind', '/tmp/etc', '/etc', '--ro-bind', '/tmp/agent.py', '/.agent.py'],
    ...['--proc', '/proc', '--dev', '/dev', '--bind', `${own}/d/shm`, '/dev/shm'],
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
    ...['--dir', '/run', '--dir', '/var/tmp', '--remount-ro', '/', '--seccomp', FILTER_FD],
    ...['--', python, '-I', '-B', '/.agent.py', JSON.stringify(limits)],
  ];
}
