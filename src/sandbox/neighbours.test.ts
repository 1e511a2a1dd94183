import { execFileSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { CodeRequest } from '../core/index.ts';
import { BubblewrapDriver, probeBubblewrap, type Sandbox } from './index.ts';

/**
 * What a snippet tries against the agent (pid 1), against the process that waits for the next snippet,
 * and against the snippets that follow it. Each attempt runs in a batch, where that process is alive.
 */

const home = mkdtempSync(join(tmpdir(), 'longhaul-neighbours-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const reason = probe.ok ? '' : ` (skipped: ${probe.reason})`;

/** `tried(f)` prints how f fails, over the agent and every other process but this one. */
const PRELUDE = `
import ctypes, errno, os, resource, time
libc = ctypes.CDLL(None, use_errno=True)
others = []
while len(others) < 2: # the next one's process is made while this one runs
    time.sleep(0.001)
    others = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if p != os.getpid()]
def tried(f, targets=None):
    for target in others if targets is None else targets:
        try:
            f(target)
            print("WORKED", target)
        except OSError as error:
            print(errno.errorcode[error.errno])
def call(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "")
`;
const REFUSED = /^((EPERM|EACCES|ENOENT|ENOSYS|EIO|EINVAL)\n)+$/;
const EPERM = /^(EPERM\n)+$/;
const arm = process.arch === 'arm64';

const ATTEMPTS: [name: string, source: string, printed: RegExp][] = [
  ...['NOFILE', 'NPROC', 'AS', 'CPU', 'FSIZE', 'DATA'].map((limit): [string, string, RegExp] => [
    `prlimit ${limit} on the agent and the spare`,
    `tried(lambda p: resource.prlimit(p, resource.RLIMIT_${limit}, (0, 0)))`,
    EPERM,
  ]),
  [
    'setpriority by process, group and user',
    'tried(lambda p: os.setpriority(os.PRIO_PROCESS, p, 19)); tried(lambda p: os.setpriority(os.PRIO_PGRP, p, 19)); tried(lambda u: os.setpriority(os.PRIO_USER, u, 19), [0, 1000])',
    EPERM,
  ],
  ['sched_setaffinity', 'tried(lambda p: os.sched_setaffinity(p, {0}))', EPERM],
  [
    'sched_setscheduler and sched_setparam',
    'tried(lambda p: os.sched_setscheduler(p, os.SCHED_IDLE, os.sched_param(0))); tried(lambda p: os.sched_setparam(p, os.sched_param(0)))',
    EPERM,
  ],
  [
    'sched_setattr, ioprio_set and get_robust_list',
    `for number in ${JSON.stringify(arm ? [274, 100] : [314, 274])}: tried(lambda p: call(number, p, ctypes.create_string_buffer(64), 0))
tried(lambda p: call(${arm ? 30 : 251}, 1, p, 3 << 13)); tried(lambda u: call(${arm ? 30 : 251}, 3, u, 3 << 13), [0, 1000])`,
    EPERM,
  ],
  [
    'writing any file of theirs in /proc',
    `# Without root the waiting process's files are the guest's; 'next' below shows that it gains nothing.
EXPOSED = {"sched", "oom_adj", "oom_score_adj", "autogroup", "coredump_filter"} if ${process.getuid?.() !== 0 ? 'True' : 'False'} else set()
def write_all(p):
    for folder in ("/proc/%d/" % p, "/proc/%d/task/%d/" % (p, p)):
        for name in os.listdir(folder):
            if name in EXPOSED: continue
            for text in (b"0", b"1000", b"x"):
                try:
                    fd = os.open(folder + name, os.O_WRONLY)
                except OSError:
                    continue
                try:
                    os.write(fd, text)
                    print("WROTE", folder + name)
                except OSError as error:
                    print(errno.errorcode[error.errno])
                os.close(fd)
    raise OSError(errno.EPERM, "")
tried(write_all)`,
    REFUSED,
  ],
  [
    'reading their memory, descriptors and environment',
    `for name in ("mem", "maps", "environ", "fd/3", "fd/4", "fd/9"): tried(lambda p: open("/proc/%d/%s" % (p, name), "rb").read(1))`,
    REFUSED,
  ],
  [
    'System V shared memory, semaphores and queues',
    `for number in ${JSON.stringify(arm ? [194, 190, 186] : [29, 64, 68])}: tried(lambda _: call(number, 0, 1 << 20, 0o1600), [0])`,
    EPERM,
  ],
  [
    'a POSIX message queue',
    `tried(lambda _: call(${arm ? 180 : 240}, b"queue", 0o102, 0o600, 0), [0])`,
    EPERM,
  ],
  [
    'stopping the spare with a signal that waits behind the stop',
    `import signal
spare = max(others)
os.kill(spare, signal.SIGSTOP)
while open("/proc/%d/stat" % spare).read().split()[2] != "T": time.sleep(0.001)
os.kill(spare, signal.SIGTERM)
print("sent")`,
    /^sent\n$/,
  ],
  ['killing the spare as the last act', 'os.kill(max(others), 9); os._exit(0)', /^$/],
  ['interrupting the spare as the last act', 'os.kill(max(others), 2); os._exit(0)', /^$/],
];

describe.skipIf(!probe.ok)(`a snippet against its neighbours in bubblewrap${reason}`, () => {
  let driver: BubblewrapDriver;
  let sandbox: Sandbox;
  beforeAll(async () => {
    driver = await BubblewrapDriver.open({ dir: join(home, 'driver'), warm: 0 });
    sandbox = await driver.create({ memoryBytes: 256 << 20, pids: 40, diskBytes: 16 << 20 });
  });
  afterAll(async () => {
    await driver?.close();
    rmSync(home, { recursive: true, force: true });
  });
  const run = (...sources: string[]) =>
    sandbox.runCode(sources.map((source) => ({ language: 'python' as const, source })));
  /** Needs files, memory, a process and time: what the attempts would take away. */
  const NEIGHBOUR =
    'import os\nb = bytearray(1 << 24)\nos.close(os.dup(1))\nopen("f", "w").write("x" * 9999)\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint("solved", os.nice(0), len(os.sched_getaffinity(0)))';

  test.each(ATTEMPTS)('%s', async (_, source, printed) => {
    const [before] = await run(NEIGHBOUR);
    expect(before!.stdout).toMatch(/^solved 0 /);
    const results = await run(PRELUDE + source, NEIGHBOUR, PRELUDE + source, NEIGHBOUR, NEIGHBOUR);
    for (const i of [0, 2]) {
      expect(results[i]!.stderr).toBe('');
      expect(results[i]!.stdout).toMatch(printed);
    }
    for (const i of [1, 3, 4])
      expect(results[i]).toMatchObject({ cause: 'exited', stdout: before!.stdout });
    const [later] = await run(NEIGHBOUR);
    expect(later!.stdout).toBe(before!.stdout);
    const shell = await sandbox.exec({ argv: ['bash', '-c', 'ulimit -n; nice'] });
    expect(shell.stdout).toBe('1024\n0\n');
  });

  test('by the prlimit program from a shell', async () => {
    const argv = ['bash', '-c', 'prlimit --pid 1 --nofile=0; echo $?'];
    expect((await sandbox.exec({ argv })).stdout).toBe('1\n');
    expect(Buffer.from(await sandbox.readFile('f')).length).toBe(9999);
  });

  test('what a guest sets for the waiting process does not reach the next one', async () => {
    const set = `
import os
for p in (p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()):
    for name, text in (("oom_score_adj", "1000"), ("autogroup", "19")):
        try: open(f"/proc/{p}/{name}", "w").write(text)
        except OSError: pass
`;
    const show =
      'print(open("/proc/self/autogroup").read().split()[-1], open("/proc/self/oom_score_adj").read())';
    const results = await sandbox.runCode([
      { language: 'python', source: set },
      { language: 'python', source: show },
    ]);
    expect(results[1]!.stdout).toBe('0 500\n\n');
  });

  test('no process gets out of sight as a sibling of itself, nor outlives its snippet so', async () => {
    const sibling = `
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x8000 | 17, 0x8000 | 0x100 | 17, 0x8000):
    pid = libc.syscall(${process.arch === 'arm64' ? 220 : 56}, flags, 0, 0, 0, 0)
    if pid == 0:
        os.setsid(); time.sleep(100); os._exit(0)
    print(pid, ctypes.get_errno())
`;
    const results = await sandbox.runCode([
      { language: 'python', source: sibling },
      { language: 'python', source: 'import os\nprint(sum(os.fork() > 0 for _ in range(1)))' },
    ]);
    expect(results[0]!.stdout).toBe('-1 1\n-1 1\n-1 1\n');
    expect(results[1]!.stdout).toContain('1\n'); // an ordinary fork still works
    const [seen] = await run(
      'print([p for p in __import__("os").listdir("/proc") if p.isdigit()])',
    );
    expect(seen!.stdout.split(',').length).toBeLessThanOrEqual(3);
    if (driver.capabilities.pids === 'cgroup') expect((await sandbox.usage()).pids).toBe(0);
  });

  test('a process finds in its memory nothing of another request', async () => {
    const canary = 'C4nary'.repeat(4);
    const secret = (text: string) => `${text}-${'canary'.length}-${canary}`;
    const search = `
import re
found = set()
for line in open("/proc/self/maps"):
    if " rw" not in line or "[v" in line: continue
    start, end = (int(each, 16) for each in line.split()[0].split("-"))
    with open("/proc/self/mem", "rb") as memory:
        memory.seek(start)
        try: data = memory.read(end - start)
        except OSError: continue
    found.update(re.findall(rb"(source|stdin|output|argument|file|late)-6-" + b"C4nary" * 4, data))
print(sorted(found))
`;
    await sandbox.writeFile('secret', secret('file'));
    await sandbox.exec({ argv: ['echo', secret('argument')], stdin: secret('stdin') });
    const before: CodeRequest = {
      language: 'python',
      source: `# ${secret('source')}\nprint("${secret('output')}")`,
      stdin: secret('stdin'),
    };
    const after = { ...before, source: `# ${secret('late')}` };
    const results = await sandbox.runCode([before, { language: 'python', source: search }, after]);
    expect(results[1]).toMatchObject({ stdout: '[]\n', stderr: '' });
    expect((await run(search))[0]).toMatchObject({ stdout: '[]\n' });
    // The search itself finds what a process does hold.
    const [own] = await run(`x = "${'late'}" + "-6-" + "C4nary" * 4${search}`);
    expect(own!.stdout).toBe("[b'late']\n");
  });

  test('a lease on a file refuses the file, and breaks nothing', async () => {
    const lease =
      'import fcntl, signal, time; signal.signal(29, signal.SIG_IGN); f = open("/tmp/leased", "w"); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK); open("/tmp/held", "w"); time.sleep(20)';
    const script = `python3 -c '${lease}' & while ! test -e /tmp/held; do sleep 0.01; done`;
    await sandbox.exec({ argv: ['bash', '-c', script], timeoutMs: 5000 });
    await sandbox.exec({ argv: ['ln', '-s', '/tmp/leased', 'leased'] });
    await expect(sandbox.readFile('leased')).rejects.toMatchObject({ code: 'FileRefused' });
    expect((await sandbox.readFile('f')).length).toBe(9999);
    await sandbox.exec({ argv: ['bash', '-c', 'kill -KILL -1'] });
  });

  test('a program still limits, ranks and pins itself, and its semaphores work', async () => {
    const [result] = await run(`
import multiprocessing, os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
os.nice(5); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
context = multiprocessing.get_context("fork")
lock, queue = context.Lock(), context.Queue()
def work():
    with lock: queue.put(os.getppid())
child = context.Process(target=work)
child.start()
print(queue.get(timeout=5) == os.getpid(), os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE))
child.join()
`);
    expect(result!.stderr).toBe('');
    expect(result!.stdout).toBe('True 5 (64, 64)\n');
  });

  test('the kernel takes a snippet before the agent when memory runs out', async () => {
    const [result] = await run('print(open("/proc/self/oom_score_adj").read())');
    expect(result!.stdout.trim()).toBe('500');
  });

  /** The host's pid of a sandbox's agent: in its network namespace, but in the host's process namespace. */
  function agentOf({ id }: Sandbox): string {
    const look = (pid: string, how: (path: string) => string) => {
      try {
        return how(`/proc/${pid}`);
      } catch {
        return ''; // ended meanwhile
      }
    };
    const command = (pid: string) => look(pid, (path) => readFileSync(`${path}/cmdline`, 'utf8'));
    const network = (pid: string) => look(pid, (path) => readlinkSync(`${path}/ns/net`));
    const status = (pid: string) => look(pid, (path) => readFileSync(`${path}/status`, 'utf8'));
    const pids = readdirSync('/proc').filter((name) => /^\d+$/.test(name));
    const owner = pids.find((pid) => command(pid).includes(`/tmp/s${id}/ws`));
    const first = pids.find((pid) => status(pid).includes(`PPid:\t${owner}\n`));
    const agent = pids.find(
      (pid) =>
        command(pid).includes('zygote.py') &&
        network(pid) === network(first!) &&
        /^NSpid:\t\d+$/m.test(status(pid)),
    );
    if (agent === undefined) throw new Error(`no agent for ${owner}`);
    return agent;
  }

  test.each<[string, (own: Sandbox) => Promise<unknown>]>([
    ['a command', (own) => own.exec({ argv: ['true'] })],
    [
      'a batch of snippets',
      (own) => own.runCode([1, 2].map(() => ({ language: 'python', source: '1' }))),
    ],
    ['a file read', (own) => own.readFile('f')],
    ['a snapshot', (own) => own.snapshot()],
  ])('an agent without descriptors breaks its sandbox at %s, and blames nobody', async (_, use) => {
    const own = await driver.create();
    await own.writeFile('f', 'x');
    const agent = agentOf(own);
    // As the sandbox's own user: root may lack the capability to limit others.
    const status = readFileSync(`/proc/${agent}/status`, 'utf8');
    const [uid, gid] = ['Uid', 'Gid'].map((each) =>
      Number(new RegExp(`^${each}:\\s+(\\d+)`, 'm').exec(status)![1]),
    );
    execFileSync('prlimit', ['--pid', agent, '--nofile=6:6'], { uid, gid, stdio: 'pipe' });
    await expect(use(own)).rejects.toMatchObject({
      code: 'SandboxBroken',
      class: 'retryable',
      message: expect.stringContaining('Too many open files'),
    });
    await expect(own.exec({ argv: ['true'] })).rejects.toMatchObject({ code: 'SandboxBroken' });
    await own.stop();
  });
});
