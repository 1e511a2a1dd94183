import { expect, test } from 'vitest';
import { cgroupMounts } from './cgroup.ts';

test('version 2: the own group first, then the root of the mount', () => {
  const mounts = cgroupMounts({
    mountinfo: '31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate',
    cgroup: '0::/user.slice/user-1000.slice/session-2.scope\n',
  });
  expect(mounts).toEqual([
    {
      version: 'v2',
      controllers: [''],
      directories: ['/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope', '/sys/fs/cgroup'],
    },
  ]);
});

test('version 1 in a container: the mount’s root is cut off the path', () => {
  const mounts = cgroupMounts({
    mountinfo: [
      '40 30 0:33 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory',
      '41 30 0:34 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct',
      '42 30 0:35 / /proc rw - proc proc rw',
    ].join('\n'),
    cgroup: '9:memory:/docker/abc/inner\n4:cpu,cpuacct:/docker/abc\n',
  });
  expect(mounts.map(({ directories }) => directories)).toEqual([
    ['/sys/fs/cgroup/memory/inner', '/sys/fs/cgroup/memory'],
    ['/sys/fs/cgroup/cpu,cpuacct', '/sys/fs/cgroup/cpu,cpuacct'],
  ]);
});

test('hybrid: both versions are seen; a path outside the mount leaves its root', () => {
  const mounts = cgroupMounts({
    mountinfo: [
      '50 30 0:40 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids',
      '51 30 0:41 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw',
      '52 30 0:42 /a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory',
    ].join('\n'),
    cgroup: '8:pids:/\n4:memory:/b\n0::/\n',
  });
  expect(mounts.map(({ version }) => version)).toEqual(['v1', 'v2', 'v1']);
  expect(mounts[2]!.directories).toEqual(['/sys/fs/cgroup/memory']);
});
