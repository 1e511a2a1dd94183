import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ALLOWED, CONDITIONAL } from '../../src/sandbox/bubblewrap/syscalls.ts';

/** What a bare bubblewrap needs to run a program of the host, with namespaces of every kind. */
const BARE = [
  ...['--unshare-all', '--die-with-parent', '--ro-bind', '/usr', '/usr'],
  ...['--symlink', 'usr/bin', '/bin', '--symlink', 'usr/lib', '/lib'],
  ...['--symlink', 'usr/lib64', '/lib64', '--proc', '/proc', '--dev', '/dev', '--tmpfs', '/tmp'],
  '--',
];

export function bareBubblewrap(argv: readonly string[]): ChildProcess {
  return spawn('bwrap', [...BARE, ...argv], { stdio: ['ignore', 'pipe', 'inherit'] });
}

/** Standard output of a process that must succeed. */
async function outputOf(child: ChildProcess, what: string): Promise<string> {
  let text = '';
  child.stdout!.on('data', (chunk) => {
    text += chunk;
  });
  const [code] = await once(child, 'close');
  if (code !== 0) throw new Error(`${what} ended with ${code}`);
  return text;
}

/** What an execution costs without a warm sandbox: a bare bubblewrap with a new interpreter. */
export async function coldPython(source: string, expected: string): Promise<void> {
  const text = await outputOf(bareBubblewrap(['/usr/bin/python3', '-c', source]), 'cold bwrap');
  if (text !== expected) throw new Error(`cold bwrap printed ${JSON.stringify(text)}`);
}

/** First host id of the bundle's user namespace, away from those of the sandboxes. */
const RUNC_UID_BASE = 400_000;

/**
 * An OCI bundle that gives runc what a sandbox of ours has: a read-only host /usr, a user namespace of
 * its own, no network, no capabilities, the same allow-list of system calls, limits of memory, processor and processes,
 * a workspace and /tmp of limited size. It runs the snippet and ends.
 */
export class RuncBundle {
  readonly #folder: string;
  #runs = 0;

  constructor(source: string) {
    // Not below the home: a bundle must be reachable for the mapped user.
    this.#folder = mkdtempSync(join(tmpdir(), 'longhaul-runc-'));
    chmodSync(this.#folder, 0o755);
    const root = join(this.#folder, 'rootfs');
    mkdirSync(root);
    for (const name of ['usr', 'proc', 'dev', 'tmp', 'workspace']) {
      mkdirSync(join(root, name));
      chmodSync(join(root, name), 0o1777);
    }
    for (const name of ['bin', 'lib', 'lib64']) symlinkSync(`usr/${name}`, join(root, name));
    writeFileSync(join(this.#folder, 'config.json'), JSON.stringify(ociConfig(source)));
  }

  /** One execution from nothing to its output. Throws where runc is absent or cannot run it. */
  async run(expected: string): Promise<void> {
    const id = `longhaul-bench-${process.pid}-${++this.#runs}`;
    const child = spawn(
      'runc',
      ['--root', join(this.#folder, 'state'), 'run', '--bundle', this.#folder, id],
      { stdio: ['ignore', 'pipe', 'pipe'] },
    );
    let complaint = '';
    child.stderr.on('data', (chunk) => {
      complaint += chunk;
    });
    const text = await outputOf(child, 'runc').catch((error: Error) => {
      throw new Error(`${error.message}: ${complaint.trim()}`);
    });
    if (text !== expected) throw new Error(`runc printed ${JSON.stringify(text)}`);
  }

  remove(): void {
    rmSync(this.#folder, { recursive: true, force: true });
  }
}

function ociConfig(source: string): unknown {
  const root = process.getuid?.() === 0;
  const map = root
    ? { containerID: 0, hostID: RUNC_UID_BASE, size: 65_536 }
    : { containerID: 0, hostID: process.getuid?.(), size: 1 };
  const none: string[] = [];
  return {
    ociVersion: '1.0.2',
    root: { path: 'rootfs', readonly: true },
    hostname: 'sandbox',
    process: {
      terminal: false,
      user: root ? { uid: 1000, gid: 1000 } : { uid: 0, gid: 0 },
      args: ['/usr/bin/python3', '-c', source],
      env: ['PATH=/usr/bin:/bin', 'HOME=/workspace'],
      cwd: '/workspace',
      noNewPrivileges: true,
      capabilities: {
        bounding: none,
        effective: none,
        inheritable: none,
        permitted: none,
        ambient: none,
      },
    },
    mounts: [
      {
        destination: '/usr',
        type: 'bind',
        source: '/usr',
        options: ['rbind', 'ro', 'nosuid', 'nodev'],
      },
      { destination: '/proc', type: 'proc', source: 'proc' },
      {
        destination: '/dev',
        type: 'tmpfs',
        source: 'tmpfs',
        options: ['nosuid', 'mode=755', 'size=64k'],
      },
      ...['/tmp', '/workspace'].map((destination) => ({
        destination,
        type: 'tmpfs',
        source: 'tmpfs',
        options: ['nosuid', 'nodev', 'mode=1777', 'size=256m', 'nr_inodes=25k'],
      })),
    ],
    linux: {
      namespaces: ['user', 'pid', 'network', 'ipc', 'uts', 'mount'].map((type) => ({ type })),
      uidMappings: [map],
      gidMappings: [root ? map : { ...map, hostID: process.getgid?.() }],
      ...(root && {
        resources: {
          memory: { limit: 512 * 2 ** 20 },
          cpu: { quota: 100_000, period: 100_000 },
          pids: { limit: 128 },
        },
      }),
      seccomp: {
        defaultAction: 'SCMP_ACT_ERRNO',
        architectures: [process.arch === 'arm64' ? 'SCMP_ARCH_AARCH64' : 'SCMP_ARCH_X86_64'],
        // Those that the sandboxes decide by argument are let through whole: fewer rules to compile.
        syscalls: [
          { names: Object.keys({ ...ALLOWED, ...CONDITIONAL }), action: 'SCMP_ACT_ALLOW' },
          // runc itself executes the program after the filter is on.
          {
            names: ['execve', 'capset', 'setuid', 'setgid', 'setgroups'],
            action: 'SCMP_ACT_ALLOW',
          },
        ],
      },
    },
  };
}
