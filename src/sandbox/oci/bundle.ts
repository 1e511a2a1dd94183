import { existsSync, readdirSync, readlinkSync, realpathSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { LonghaulError } from '../../core/index.ts';
import { hostArchitecture } from '../bubblewrap/seccomp.ts';
import type { SandboxSpec } from '../contract.ts';
import { SANDBOX_ETC, SHARED_ETC, systemDirectories, TASK_DIRECTORIES } from '../host-system.ts';
import type { OciRuntime } from './runtimes.ts';
import { ociSeccomp } from './seccomp.ts';

/** Where a supervisor keeps bundles and workspaces, in its own mount namespace (supervisor.py). */
const BASE = '/dev/shm';
/** The agent, and beside an image's own files the host's interpreter that runs it. */
const AGENT = '/.longhaul/agent';
const HOST_USR = '/.longhaul/usr';
/** The uid that the agent keeps where the runtime's kernel lets a guest signal process 1 of its own. */
export const AGENT_UID = 65534;

/** The container's root before anything is mounted on it. */
export interface RootSkeleton {
  directories: string[];
  links: Record<string, string>;
  /** Mount points of files, and the sandbox's own /etc. */
  files: Record<string, string>;
}

interface Bind {
  /** On the host, or below the image where that is a directory. */
  source: string;
  ofImage?: true;
  destination: string;
}

/** A read-only root: what is made, what is bound, and how the agent is started in it. */
export interface RootLayout {
  skeleton: RootSkeleton;
  /** The image's directory, which the supervisor binds for `binds` to name below it; null: the host's own. */
  image: string | null;
  binds: Bind[];
  command: string[];
  /** The image's own interpreter for snippets; null: forks of the agent run them. */
  python: string | null;
}

const OWN_PLACES = ['proc', 'dev', 'sys', 'tmp', 'run', 'workspace', '.longhaul'];
const SKELETON = ['/proc', '/dev/shm', '/dev/pts', '/sys', '/tmp', '/workspace', '/run', AGENT];
const LOADERS = ['/usr/lib64/ld-linux-x86-64.so.2', '/usr/lib/ld-linux-aarch64.so.1'];
const LIBRARIES = ['x86_64-linux-gnu', 'aarch64-linux-gnu', '../lib64', '.'];

/** The root of an image: `host`, or `dir:PATH`. `ConfigInvalid` where there is no such directory. */
export function rootLayout(image: string, python: string): RootLayout {
  const skeleton: RootSkeleton = {
    directories: [...SKELETON],
    links: { '/run/secrets': '../tmp/.secrets' },
    files: {},
  };
  const binds: Bind[] = [];
  for (const name of TASK_DIRECTORIES) skeleton.links[`/${name}`] = `tmp/${name}`;
  const program = ['-I', '-B', `${AGENT}/agent.py`];
  if (image === 'host') {
    const system = systemDirectories();
    Object.assign(skeleton.links, system.links);
    skeleton.directories.push('/var/tmp', '/etc', ...system.binds);
    binds.push(...system.binds.map((path) => ({ source: path, destination: path })));
    for (const [name, text] of Object.entries(SANDBOX_ETC)) skeleton.files[`/etc/${name}`] = text;
    for (const name of SHARED_ETC) {
      const path = `/etc/${name}`;
      if (!existsSync(path)) continue;
      if (statSync(path).isDirectory()) skeleton.directories.push(path);
      else skeleton.files[path] = '';
      binds.push({ source: path, destination: path });
    }
    return { skeleton, image: null, binds, command: [python, ...program], python: null };
  }
  const directory = image.slice('dir:'.length);
  if (!directory.startsWith('/') || !existsSync(directory) || !statSync(directory).isDirectory())
    throw new LonghaulError('ConfigInvalid', `sandbox image ${image}: no such directory`, {
      next: 'Give the absolute path of a directory that holds a root file system: dir:/PATH.',
    });
  if (directory === BASE || directory.startsWith(`${BASE}/`))
    throw new LonghaulError('ConfigInvalid', `sandbox image ${image}: ${BASE} holds no images`, {
      next: 'Move the directory to another place.',
    });
  for (const entry of readdirSync(directory, { withFileTypes: true })) {
    const destination = `/${entry.name}`;
    const source = join(directory, entry.name);
    if (OWN_PLACES.includes(entry.name)) continue;
    if (TASK_DIRECTORIES.includes(entry.name)) delete skeleton.links[destination];
    if (entry.isSymbolicLink()) skeleton.links[destination] = readlinkSync(source);
    else if (entry.isDirectory()) skeleton.directories.push(destination);
    else if (entry.isFile()) skeleton.files[destination] = '';
    if (entry.isDirectory() || entry.isFile())
      binds.push({ source: entry.name, destination, ofImage: true });
  }
  const found = LOADERS.find((path) => existsSync(path));
  const loader = found && realpathSync(found); // a link would lead into the image
  if (!loader?.startsWith('/usr/'))
    throw new LonghaulError(
      'CapabilityMissing',
      'this host has no /usr that holds a dynamic loader',
      {
        next: 'Use image host, or a distribution with a merged /usr.',
      },
    );
  skeleton.directories.push(HOST_USR);
  binds.push({ source: '/usr', destination: HOST_USR });
  const libraries = LIBRARIES.map((name) => `${HOST_USR}/lib/${name}`).join(':');
  const inImage = ['/usr/bin/python3', '/usr/local/bin/python3'];
  return {
    skeleton,
    image: directory,
    binds,
    command: [
      loader.replace('/usr', HOST_USR),
      '--library-path',
      libraries,
      realpathSync(python).replace('/usr', HOST_USR),
      ...program,
    ],
    python: inImage.find((path) => existsSync(join(directory, path))) ?? null,
  };
}

/** Limits that the agent sets where no control group does: processes of the uid, and bytes a process. */
export interface AgentLimits {
  processes?: number;
  data?: number;
  address?: number;
}

export interface BundleOptions {
  sid: string;
  spec: SandboxSpec;
  runtime: OciRuntime;
  layout: RootLayout;
  /** Host uids of root inside and of the guest; null: the caller's own is root inside, and the guest. */
  ids: { root: number; guest: number } | null;
  limits: AgentLimits;
  /** Name of the group that a runtime with a manager of its own makes; limits are on the driver's. */
  cgroupsPath: string | null;
}

/** uid of the guest inside. A caller that is not root can map only one, and runtimes want root mapped. */
export const guestId = (ids: BundleOptions['ids']) => (ids ? 1000 : 0);

const MASKED = [
  ...['acpi', 'asound', 'kcore', 'keys', 'latency_stats', 'timer_list', 'timer_stats'],
  ...['sched_debug', 'scsi', 'kallsyms', 'kmsg', 'vmallocinfo'],
].map((name) => `/proc/${name}`);
const READ_ONLY = ['bus', 'fs', 'irq', 'sys', 'sysrq-trigger'].map((name) => `/proc/${name}`);

/** `config.json` of one sandbox (OCI runtime specification 1.0). */
export function bundleConfig(options: BundleOptions): Record<string, unknown> {
  const { runtime, layout, ids, spec } = options;
  const top = `${BASE}/${options.sid}`;
  const guest = guestId(ids);
  const bind = (source: string, destination: string, more: string[]) => ({
    destination,
    type: 'bind',
    source,
    options: ['bind', 'nosuid', 'nodev', ...more],
  });
  // A kernel that does not shield process 1 gets an agent with a uid that no guest has.
  const separate = runtime.isolation === 'gvisor';
  const capabilities = separate ? ['CAP_SETUID', 'CAP_SETGID', 'CAP_SETPCAP'] : [];
  const agent = {
    limits: options.limits,
    env: {},
    cwd: '/workspace',
    python: layout.python,
    ...(separate && { guest }),
  };
  const mapping = ids
    ? [
        { containerID: 0, hostID: ids.root, size: 1 },
        { containerID: guest, hostID: ids.guest, size: 1 },
      ]
    : [{ containerID: 0, hostID: 0, size: 1 }];
  const namespaces = [
    'pid',
    'network',
    'ipc',
    'uts',
    'mount',
    ...(runtime.hostKernel ? ['user', 'cgroup'] : []),
  ];
  const user = separate ? AGENT_UID : guest;
  return {
    ociVersion: '1.0.0',
    hostname: 'sandbox',
    root: { path: 'rootfs', readonly: true },
    process: {
      terminal: false,
      user: { uid: user, gid: user, umask: 0o022 },
      args: [...layout.command, JSON.stringify(agent)],
      env: ['PATH=/usr/bin:/bin'],
      cwd: '/',
      capabilities: Object.fromEntries(
        ['bounding', 'effective', 'inheritable', 'permitted', 'ambient'].map((set) => [
          set,
          set === 'inheritable' || set === 'ambient' ? [] : capabilities,
        ]),
      ),
      noNewPrivileges: true,
      rlimits: [
        { type: 'RLIMIT_CORE', soft: 1, hard: 1 },
        { type: 'RLIMIT_NOFILE', soft: 1024, hard: 4096 },
      ],
    },
    mounts: [
      {
        destination: '/proc',
        type: 'proc',
        source: 'proc',
        options: ['nosuid', 'noexec', 'nodev'],
      },
      {
        destination: '/dev',
        type: 'tmpfs',
        source: 'tmpfs',
        options: ['nosuid', 'strictatime', 'mode=755', 'size=64k', 'nr_inodes=64'],
      },
      {
        destination: '/dev/pts',
        type: 'devpts',
        source: 'devpts',
        options: ['nosuid', 'noexec', 'newinstance', 'ptmxmode=0666', 'mode=0620'],
      },
      ...layout.binds.map((each) =>
        bind(
          each.ofImage ? `${BASE}/image-${options.sid}/${each.source}` : each.source,
          each.destination,
          ['ro'],
        ),
      ),
      bind(`${BASE}/agent`, AGENT, ['ro']),
      bind(`${top}/d/shm`, '/dev/shm', []),
      bind(`${top}/d/tmp`, '/tmp', []),
      bind(`${top}/d/ws`, '/workspace', []),
    ],
    linux: {
      namespaces: namespaces.map((type) => ({ type })),
      ...(runtime.hostKernel && { uidMappings: mapping, gidMappings: mapping }),
      ...(options.cgroupsPath !== null && { cgroupsPath: options.cgroupsPath }),
      ...(runtime.isolation === 'vm' && {
        resources: {
          memory: { limit: spec.memoryBytes },
          cpu: { quota: Math.round(spec.cpus * 100_000), period: 100_000 },
          pids: { limit: spec.pids + 2 },
        },
      }),
      seccomp: ociSeccomp(hostArchitecture()!, runtime.isolation === 'gvisor' ? 'gvisor' : 'linux'),
      maskedPaths: MASKED,
      readonlyPaths: READ_ONLY,
    },
  };
}
