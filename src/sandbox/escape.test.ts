import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createServer, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { ExecResult } from '../core/index.ts';
import {
  BubblewrapDriver,
  probeBubblewrap,
  type Sandbox,
  type SandboxCapabilities,
  type SandboxDriver,
  type SandboxSpec,
} from './index.ts';
import { OCI_RUNTIMES, OciDriver, probeOci } from './oci/index.ts';

/**
 * What code in a sandbox tries, by name. Each attempt runs as a guest would run it, in one sandbox
 * after the other attempts, so that what one breaks the next would notice.
 */

const home = mkdtempSync(join(tmpdir(), 'longhaul-escape-'));
const drivers: { name: string; skipped: string; open: () => Promise<SandboxDriver> }[] = [];
const bubblewrap = await probeBubblewrap({ dir: join(home, 'probe') });
drivers.push({
  name: 'bubblewrap',
  skipped: bubblewrap.ok ? '' : bubblewrap.reason,
  open: () => BubblewrapDriver.open({ dir: join(home, 'bubblewrap'), warm: 0 }),
});
for (const runtime of OCI_RUNTIMES) {
  const options = { dir: join(home, runtime), runtime, warm: 0 };
  const probe = await probeOci(options);
  const skipped = probe.ok ? '' : probe.reason;
  drivers.push({ name: runtime, skipped, open: () => OciDriver.open(options) });
}
const SECRET = 'host-secret-7f3a';
const SPEC: Partial<SandboxSpec> = {
  memoryBytes: 128 * 1024 * 1024,
  pids: 40,
  diskBytes: 32 * 1024 * 1024,
  inodes: 2000,
};

const LIBC = `
import ctypes, errno, os, struct, sys, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    return "worked" if result >= 0 else errno.errorcode[ctypes.get_errno()]
`;
/** System call numbers for x86-64 and AArch64. */
const NR = {
  add_key: [248, 217],
  bpf: [321, 280],
  fsopen: [430, 430],
  io_uring_setup: [425, 425],
  keyctl: [250, 219],
  kexec_load: [246, 104],
  mount: [165, 40],
  open_by_handle_at: [304, 265],
  perf_event_open: [298, 241],
  pidfd_getfd: [438, 438],
  pivot_root: [155, 41],
  process_vm_readv: [310, 270],
  ptrace: [101, 117],
  setns: [308, 268],
  unshare: [272, 97],
  userfaultfd: [323, 282],
  clone3: [435, 435],
} as const;
const nr = (name: keyof typeof NR) => NR[name][process.arch === 'arm64' ? 1 : 0];

/** Host uids of the processes that name the sandbox, or a word that a program inside was given. */
function hostUids(which: Sandbox, word: string): Set<number> {
  const uids = new Set<number>();
  for (const pid of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      const command = readFileSync(`/proc/${pid}/cmdline`, 'utf8');
      if (command.includes(which.id) || command.includes(word))
        uids.add(statSync(`/proc/${pid}`).uid);
    } catch {
      // ended meanwhile
    }
  }
  return uids;
}

interface Attempt {
  name: string;
  /** Python source, or a shell command. */
  python?: string;
  shell?: string;
  timeoutMs?: number;
  held(result: ExecResult): void;
  /** Where gVisor's own kernel answers otherwise. */
  gvisor?(result: ExecResult): void;
}

const prints = (pattern: RegExp) => (result: ExecResult) => {
  expect(result.stdout + result.stderr).toMatch(pattern);
};
const refuses =
  (...codes: string[]) =>
  (result: ExecResult) => {
    expect(codes).toContain(result.stdout.trim());
  };
/** Releases of gVisor up to 2023 refuse a flag that `ls PATH` gives: `find` lists as well. */
const LS_BY_FIND = `ls() {
  if [ "$1" = -d ]; then find "$2" -maxdepth 0; return; fi
  [ "$1" = -l ] && shift
  for place in "\${@:-.}"; do find "$place" -mindepth 1 -maxdepth 1 -printf '%f\\n'; done
}
`;
const syscall = (name: keyof typeof NR, args: string): Attempt => ({
  name: `system call ${name}`,
  python: `${LIBC}\nprint(call(${nr(name)}${args && `, ${args}`}))`,
  held: refuses('EPERM', 'ENOSYS'),
});
const python = (source: string) => LIBC + source;

let port = 0;
let memoryLimit = '';
const abstractName = `longhaul-escape-${process.pid}`;

const attempts = (): Attempt[] => [
  // Files of the host
  { name: 'host file by path', shell: `cat ${home}/secret`, held: prints(/No such file/) },
  { name: '/etc/shadow', shell: 'cat /etc/shadow', held: prints(/No such file/) },
  {
    name: 'host root by /proc/1/root',
    shell: 'ls /proc/1/root/; ls /proc/1/cwd/',
    held: prints(/Permission denied[\s\S]*Permission denied/),
  },
  {
    name: 'homes and variable data of the host',
    shell: 'ls /home /root /var/lib /run/systemd 2>&1 | grep -c "No such file"',
    held: prints(/^4$/m),
  },
  {
    name: 'host file through a symlink by the file calls’ path',
    shell: `ln -sf ${home}/secret out && cat out`,
    held: prints(/No such file/),
  },
  {
    name: 'hard link to a system file, then write',
    shell: 'ln /usr/bin/env mine; echo x > mine; ls -l mine',
    held: prints(/Invalid cross-device link|Operation not permitted/),
  },
  {
    name: 'write to system directories',
    shell:
      'for d in /usr /etc /bin / /dev /usr/bin /proc/sys/kernel; do touch $d/x && echo WROTE; done',
    held: (result) => expect(result.stdout).not.toContain('WROTE'),
  },
  {
    name: 'the agent’s own source',
    shell: 'echo x >> /.agent.py',
    held: prints(/Read-only|denied/),
  },
  {
    name: 'core pattern and other kernel settings',
    shell:
      'echo "|/workspace/x" > /proc/sys/kernel/core_pattern && echo WROTE; echo b > /proc/sysrq-trigger && echo WROTE',
    held: (result) => expect(result.stdout).not.toContain('WROTE'),
  },
  {
    name: 'device nodes of disks',
    shell: 'ls /dev; mknod sda b 8 0; mknod mem c 1 1',
    held: (result) => {
      expect(result.stdout).not.toMatch(/sd|vd|nvme|mem|kmsg/);
      expect(result.stderr).toMatch(/not permitted[\s\S]*not permitted/);
    },
  },
  {
    name: 'setuid programs',
    shell:
      'cp /bin/sh suid && chmod 4755 suid && ./suid -c "id -u"; su -c id; grep NoNewPrivs /proc/self/status',
    held: prints(/^1000\n[\s\S]*NoNewPrivs:\s+1/),
    // Its status has no such line.
    gvisor: (result) => expect(result.stdout).toBe('1000\n'),
  },
  // Environment and descriptors
  {
    name: 'environment of the owner',
    shell: 'env; cat /proc/*/environ | tr "\\0" "\\n"',
    held: (result) => expect(result.stdout).not.toMatch(new RegExp(`${SECRET}|NODE|VITEST`)),
  },
  {
    name: 'inherited descriptors',
    python: 'import os\nprint(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1])',
    held: prints(/^\[0, 1, 2\]$/m),
  },
  {
    name: 'descriptors and memory of the agent',
    shell: 'ls /proc/1/fd; cat /proc/1/maps; head -c 10 /proc/1/mem',
    held: prints(/denied[\s\S]*denied[\s\S]*denied/),
    // Numbers of descriptors and the layout of its memory are shown, at gVisor's own addresses; no content is.
    gvisor: prints(/mem' for reading: Permission denied/),
  },
  // Network
  {
    name: 'loopback of the host',
    python: `import socket\ntry:\n  socket.create_connection(("127.0.0.1", ${port}), 2); print("REACHED")\nexcept OSError as e: print(e)`,
    held: prints(/refused/),
  },
  {
    name: 'abstract unix socket of the host',
    python: `import socket\ntry:\n  socket.socket(socket.AF_UNIX).connect("\\0${abstractName}"); print("REACHED")\nexcept OSError as e: print(e)`,
    held: prints(/refused/),
  },
  {
    name: 'any address outside',
    python:
      'import socket\ntry:\n  socket.create_connection(("1.1.1.1", 53), 2); print("REACHED")\nexcept OSError as e: print(e)',
    held: prints(/unreachable/),
    gvisor: prints(/No route to host/),
  },
  ...(['AF_VSOCK', 'AF_NETLINK', 'AF_PACKET', 'AF_ALG'] as const).map((family) => ({
    name: `socket of family ${family}`,
    python: python(
      `try:\n  socket.socket(socket.${family}, socket.SOCK_RAW if "${family}" in ("AF_NETLINK", "AF_PACKET") else socket.SOCK_STREAM); print("OPENED")\nexcept OSError as e: print(errno.errorcode[e.errno])`,
    ),
    held: refuses('EAFNOSUPPORT'),
    gvisor: refuses('EPERM', 'EAFNOSUPPORT'),
  })),
  {
    name: 'raw socket',
    python: python(
      'try:\n  socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("OPENED")\nexcept OSError as e: print(errno.errorcode[e.errno])',
    ),
    held: refuses('EPERM'),
  },
  // Processes
  {
    name: 'processes of the host',
    python: `import os\npids=[int(p) for p in os.listdir("/proc") if p.isdigit()]\nprint(len(pids), max(pids) < 100000 and ${process.pid} not in pids or pids)`,
    held: (result) => expect(Number(result.stdout.split(' ')[0])).toBeLessThan(5),
  },
  {
    name: 'signals to the agent',
    shell:
      'for s in KILL STOP TERM INT SEGV ABRT USR1 BUS; do kill -$s 1; done; sleep 0.1; echo alive',
    held: prints(/alive/),
  },
  {
    name: 'killing the process that waits for the next snippet',
    shell: 'kill -KILL -1; echo done',
    held: prints(/done/),
  },
  { name: 'snippet after that', python: 'print("fresh")', held: refuses('fresh') },
  {
    name: 'stopping the process that waits for the next snippet',
    shell: 'kill -STOP -1; echo done',
    held: prints(/done/),
  },
  { name: 'snippet after that, too', python: 'print("fresh")', held: refuses('fresh') },
  {
    name: 'tracing a child',
    python: python(`print(call(${nr('ptrace')}, 0, 0, 0, 0))`),
    held: refuses('EPERM'),
  },
  // Kernel surfaces
  syscall('mount', '0, b"/workspace", b"tmpfs", 0, 0'),
  syscall('fsopen', 'b"tmpfs", 0'),
  syscall('pivot_root', 'b"/", b"/"'),
  syscall('unshare', '0x10000000'),
  syscall('setns', '0, 0'),
  syscall('clone3', '0, 0'),
  syscall('keyctl', '0, -3, 1'),
  syscall('add_key', 'b"user", b"a", b"b", 1, -3'),
  syscall('io_uring_setup', '4, ctypes.create_string_buffer(120)'),
  syscall('userfaultfd', '1'),
  syscall('bpf', '0, ctypes.create_string_buffer(128), 128'),
  syscall('perf_event_open', 'ctypes.create_string_buffer(128), 0, -1, -1, 0'),
  syscall('open_by_handle_at', '-100, ctypes.create_string_buffer(128), 0'),
  syscall('kexec_load', '0, 0, 0, 0'),
  syscall('process_vm_readv', '1, 0, 0, 0, 0, 0'),
  syscall('pidfd_getfd', '0, 0, 0'),
  {
    name: 'new user namespace by clone',
    python: python(
      `number = ${process.arch === 'arm64' ? 220 : 56}\nprint(call(number, 0x10000011, 0, 0, 0, 0))`,
    ),
    held: refuses('EPERM'),
  },
  { name: 'unshare program', shell: 'unshare -Ur id', held: prints(/not permitted/) },
  {
    name: 'nested bubblewrap',
    shell: 'bwrap --ro-bind / / id',
    held: (r) => expect(r.code).not.toBe(0),
  },
  {
    name: 'pushing characters into a terminal',
    python:
      'import fcntl\ntry:\n  fcntl.ioctl(0, 0x5412, b"x"); print("PUSHED")\nexcept OSError as e: print(e.strerror)',
    held: prints(/Operation not permitted/),
  },
  {
    name: 'switching address randomisation off',
    python: python('print("worked" if libc.personality(0x0040000) >= 0 else "refused")'),
    held: refuses('refused'),
  },
  {
    name: 'system calls in 32-bit numbering',
    python: python(`
import mmap, signal
if os.uname().machine != "x86_64":
    print("killed")
else:
    pid = os.fork()
    if pid == 0:
        # mov eax, 20 (getpid); int 0x80; ret
        code = b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3"
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        os._exit(0)
    print("killed" if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else "ran")
`),
    held: refuses('killed'),
    // Its own kernel answers, by the 64-bit number that its filter judged: the host's sees none of it.
    gvisor: refuses('killed', 'ran'),
  },
  {
    name: 'capabilities',
    shell: 'grep -E "^Cap(Inh|Prm|Eff|Bnd|Amb)" /proc/self/status; chroot / id; hostname x',
    held: (result) => {
      expect(result.stdout.match(/0000000000000000/g)).toHaveLength(5);
      expect(result.stdout).not.toContain('uid=');
    },
    // It has no ambient set.
    gvisor: (result) => {
      expect(result.stdout.match(/0000000000000000/g)).toHaveLength(4);
      expect(result.stdout).not.toContain('uid=');
    },
  },
  // Exhaustion
  {
    name: 'fork bomb',
    python:
      'import os, time\nmade = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      time.sleep(60)\n    made += 1\nexcept OSError as e: print(made, e.strerror)',
    timeoutMs: 5000,
    held: (result) => {
      const match = /^(\d+) Resource temporarily unavailable/.exec(result.stdout);
      expect(Number(match?.[1])).toBeLessThan(42);
    },
  },
  {
    name: 'memory bomb',
    python: 'blocks = []\nwhile True: blocks.append(bytearray(1 << 20))',
    held: (result) => {
      // By rlimit the kernel refuses the memory, and the program ends by its own error.
      if (memoryLimit === 'rlimit') expect(result.stderr).toMatch(/MemoryError/);
      else expect(result.cause).toBe('out_of_memory');
    },
  },
  {
    name: 'memory bomb by many processes',
    python:
      'import os, time\nfor i in range(20):\n  if os.fork() == 0:\n    open("/proc/self/oom_score_adj", "w").write("0")\n    b = bytearray(20 << 20); time.sleep(30)\nwhile True: os.wait()',
    timeoutMs: 5000,
    held: (result) => expect(['exited', 'timeout', 'out_of_memory']).toContain(result.cause),
  },
  {
    name: 'disk bomb',
    shell:
      'head -c 100M /dev/zero > big; head -c 100M /dev/zero > /tmp/big; head -c 100M /dev/zero > /dev/shm/big; du -cb big /tmp/big /dev/shm/big | tail -1; rm -f big /tmp/big /dev/shm/big',
    held: (result) => {
      expect(result.stderr).toMatch(/No space left/);
      expect(Number.parseInt(result.stdout, 10)).toBeLessThanOrEqual(SPEC.diskBytes!);
    },
  },
  {
    name: 'inode bomb',
    python:
      'import os, shutil\nos.mkdir("many")\nn = 0\ntry:\n  while n < 100000: open(f"many/{n}", "w").close(); n += 1\nexcept OSError as e: print(n, e.strerror)\nshutil.rmtree("many")',
    held: (result) => {
      expect(result.stdout).toMatch(/No space left/);
      expect(Number.parseInt(result.stdout, 10)).toBeLessThan(SPEC.inodes!);
    },
  },
  {
    name: 'output of 100 MB',
    shell: 'head -c 100M /dev/zero | tr "\\0" a; echo end',
    held: (result) => {
      expect(result.stdoutBytes).toBe(100 * 1024 * 1024 + 4);
      expect(result.stdout.length).toBeLessThan(300_000);
      expect(result.stdout).toMatch(/aaa\n\[\d+ bytes left out\]\naaa.*end\n$/);
    },
  },
  {
    name: 'endless program that ignores SIGTERM',
    shell: 'trap "" TERM INT HUP; while :; do :; done',
    timeoutMs: 300,
    held: (result) => expect(result.cause).toBe('timeout'),
  },
  {
    name: 'sleeping in a tree of processes past the deadline',
    shell: '(sleep 100 & sleep 100) & setsid sleep 100 & sleep 100',
    timeoutMs: 300,
    held: (result) => expect(result.cause).toBe('timeout'),
  },
  {
    name: 'process left by the one before',
    shell: 'ps -e -o comm= 2>/dev/null | grep -c sleep; ls /proc | grep -c "^[0-9]"',
    held: prints(/^0\n[1-6]\n$/),
  },
  {
    name: 'snippet that leaves a daemon behind',
    python:
      'import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    os.execvp("sleep", ["sleep", "100.25"])\n  os._exit(0)\nprint("parent done")',
    held: (result) => {
      expect(result.stdout).toBe('parent done\n');
      expect(result.cause).toBe('exited');
    },
  },
  {
    name: 'daemon of the snippet before',
    python:
      'import os\nfound = [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]\nprint("daemons", [c for c in found if "100.25" in c])',
    held: prints(/^daemons \[\]$/m),
  },
  {
    name: 'descriptors held open past exit',
    shell: 'sleep 3 & echo started',
    held: (result) => {
      expect(result.stdout).toBe('started\n');
      expect(result.durationMs).toBeLessThan(2900);
    },
  },
  // Confusion
  {
    name: 'invalid UTF-8 output',
    shell: 'printf "a\\xff\\xfe\\xc3b"',
    held: (result) => expect(result.stdout).toBe('a\ufffd\ufffd\ufffdb'),
  },
  {
    name: 'writing frames to standard output and error',
    python:
      'import os\nos.write(1, b"\\x00\\x00\\x00\\x02\\x00\\x00\\x00\\x02{}"); os.write(2, b"\\xff" * 9)',
    held: (result) => expect(result.stdoutBytes).toBe(10),
  },
  {
    name: 'residue in the interpreter',
    python:
      'import sys\nprint([n for n in ("leak", "sneaky") if n in globals() or n in sys.modules])',
    held: prints(/^\[\]$/m),
  },
  {
    name: 'taking the workspace’s own permissions away',
    shell: 'chmod 000 /workspace; ls /workspace; chmod 755 /workspace; ls -d /workspace',
    held: (result) => {
      expect(result.stderr).toMatch(/Permission denied/);
      expect(result.stdout).toBe('/workspace\n');
    },
  },
  {
    name: 'file names with newline, invalid UTF-8 and 255 bytes',
    python:
      'import os\nfor n in (b"a\\nb", b"\\xff\\xfe", b"x" * 255): open(n, "w").close()\nprint(len(os.listdir(b".")) >= 3)',
    held: prints(/True/),
  },
];

afterAll(() => rmSync(home, { recursive: true, force: true }));

for (const each of drivers.filter(({ skipped }) => skipped !== ''))
  test.skip(`escape attempts on ${each.name}: ${each.skipped}`);

describe.each(drivers.filter(({ skipped }) => skipped === ''))(
  'escape attempts on $name',
  ({ open }) => {
    let driver: SandboxDriver;
    let sandbox: Sandbox;
    let isolation: SandboxCapabilities['isolation'];
    const servers: Server[] = [];

    beforeAll(async () => {
      process.env.LONGHAUL_TEST_SECRET = SECRET;
      writeFileSync(join(home, 'secret'), SECRET, { mode: 0o644 });
      const listen = (where: string | number) =>
        new Promise<Server>((resolve) => {
          const server = createServer((socket) => socket.end('hello'));
          servers.push(server);
          if (typeof where === 'number') server.listen(where, '127.0.0.1', () => resolve(server));
          else server.listen(where, () => resolve(server));
        });
      port = ((await listen(0)).address() as { port: number }).port;
      await listen(`\0${abstractName}`);
      driver = await open();
      memoryLimit = driver.capabilities.memory;
      isolation = driver.capabilities.isolation;
      sandbox = await driver.create(SPEC);
    });

    afterAll(async () => {
      await driver?.close();
      for (const server of servers) server.close();
      delete process.env.LONGHAUL_TEST_SECRET;
    });

    const names = attempts().map((attempt) => attempt.name);
    test.each(names)('%s', async (name) => {
      const attempt = attempts().find((each) => each.name === name)!;
      const timeoutMs = attempt.timeoutMs ?? 20_000;
      const result = attempt.python
        ? (await sandbox.runCode([{ language: 'python', source: attempt.python, timeoutMs }]))[0]!
        : await sandbox.exec({
            argv: ['bash', '-c', (isolation === 'gvisor' ? LS_BY_FIND : '') + attempt.shell!],
            timeoutMs,
          });
      if (isolation === 'gvisor' && attempt.gvisor) attempt.gvisor(result);
      else attempt.held(result);
      const after = await sandbox.exec({ argv: ['echo', 'still here'] });
      expect(after.stdout).toBe('still here\n');
    });

    test('odd names come back from listFiles, links outside are listed and not followed', async () => {
      await sandbox.exec({ argv: ['ln', '-sf', `${home}/secret`, 'link'] });
      const listed = await sandbox.listFiles('/workspace');
      expect(listed).toContainEqual({ name: 'a\nb', kind: 'file', bytes: 0 });
      expect(listed.find(({ name }) => name === 'link')?.kind).toBe('symlink');
      await expect(sandbox.readFile('link')).rejects.toMatchObject({ code: 'NotFound' });
      await sandbox.exec({ argv: ['mkfifo', 'pipe'] });
      await expect(sandbox.readFile('pipe')).rejects.toMatchObject({ code: 'FileRefused' });
      await expect(sandbox.writeFile('pipe', 'x')).rejects.toMatchObject({ code: 'FileRefused' });
    });

    test('a memory bomb is seen from outside and counted', async () => {
      if (driver.capabilities.memory !== 'cgroup') return;
      expect((await sandbox.usage()).oomKills).toBeGreaterThan(0);
    });

    test('a live process keeps a snapshot away, or is stopped when asked', async () => {
      await sandbox.exec({
        argv: ['bash', '-c', 'exec 9>held; (sleep 100; echo late >&9) & echo'],
      });
      await expect(sandbox.snapshot()).rejects.toMatchObject({ code: 'SandboxBusy' });
      const layer = await sandbox.snapshot({ onBusy: 'stop' });
      const seen = await sandbox.exec({
        argv: ['bash', '-c', 'for f in /proc/[0-9]*/cmdline; do tr "\\0" " " < $f; echo; done'],
      });
      expect(seen.stdout).toContain('cmdline'); // itself
      expect(seen.stdout).not.toMatch(/^sleep 100/m);
      await driver.dropLayer(layer);
    });

    test('a fork while a process is alive starts from the last quiet state', async () => {
      const parent = await driver.create(SPEC);
      await parent.writeFile('a', 'quiet');
      await parent.snapshot();
      await parent.exec({ argv: ['bash', '-c', 'echo busy > a; sleep 100 &'] });
      const [child] = await parent.fork(1);
      expect(Buffer.from(await child!.readFile('a')).toString()).toBe('quiet');
      await Promise.all([parent.stop(), child!.stop()]);
    });

    test('each sandbox has a host uid of its own that is not root', async () => {
      if (!driver.capabilities.ownUid) return;
      const other = await driver.create(SPEC);
      const words = ['71717171.1', '71717171.2'];
      const both = [sandbox, other];
      for (const [i, one] of both.entries()) await one.start({ argv: ['sleep', words[i]!] });
      // A container's process is a fork first, then the program.
      while (both.some((one, i) => hostUids(one, words[i]!).size === 0)) await sleep(10);
      const [mine, theirs] = both.map((one, i) => hostUids(one, words[i]!));
      expect(mine!.size).toBe(1);
      expect(theirs!.size).toBe(1);
      for (const uid of [...mine!, ...theirs!]) expect(uid).toBeGreaterThan(200_000);
      expect([...mine!]).not.toEqual([...theirs!]);
      await other.stop();
    });
  },
);
