import { once } from 'node:events';
import { createServer } from 'node:net';
import type { ExecResult } from '../core/index.ts';
import type { Sandbox, SandboxCapabilities, SandboxSpec } from './contract.ts';
import type { ProbedDriver } from './probes.ts';

/** One thing that must hold in a sandbox, with how it is held here and what trying it showed. */
export interface LimitFinding {
  part: string;
  /** Whether it held when tried, and is held for the sandbox as a whole. */
  ok: boolean;
  /** The mechanism: `cgroup v1`, `rlimit`, `none`. */
  how: string;
  found: string;
  next?: string;
}

const MIB = 2 ** 20;
const SPEC: SandboxSpec = {
  image: 'host',
  memoryBytes: 64 * MIB,
  cpus: 0.5,
  pids: 16,
  diskBytes: 8 * MIB,
  inodes: 200,
  network: 'none',
};
const TIME_OUT_MS = 300;
/** Half a core, and what a period of the scheduler may add. */
const MOST_CPU_SHARE = 0.75;

const MEMORY =
  'held = []\nfor _ in range(1024): held.append(bytearray(b"x" * (1 << 20)))\nprint("unbounded")';
const PROCESSES = `
import os, time
made = 0
try:
    for _ in range(64):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        made += 1
except OSError: pass
print(made)
`;
const DISK = `
written = 0
try:
    with open("big", "wb", buffering=0) as file:
        for _ in range(64): written += file.write(b"x" * (1 << 20))
except OSError: pass
print(written)
`;
const INODES = `
made = 0
try:
    for i in range(1000):
        open("n%d" % i, "w").close()
        made += 1
except OSError: pass
print(made)
`;
const CPU = `
import time
start = time.monotonic()
while time.monotonic() < start + 0.6: pass
print(time.process_time() / (time.monotonic() - start))
`;
const STATUS = 'print(open("/proc/self/status").read())';
const connect = (port: number) => `
import socket
try:
    socket.create_connection(("127.0.0.1", ${port}), 2)
    print("reached")
except OSError as error: print(error)
`;

const PRIVILEGED =
  'Run as root, or in a delegated control group: `systemd-run --user --scope -p Delegate=yes npx longhaul …` (cgroup v2).';

/**
 * Tries every limit in sandboxes of a driver and says how each is held; about three seconds. A driver
 * that runs no commands is a weaker boundary: what it states is told, and nothing of it counts as held.
 */
export async function examineLimits(probed: ProbedDriver): Promise<LimitFinding[]> {
  const { driver } = probed;
  const { capabilities } = driver;
  if (!capabilities.exec) return statedLimits(driver.name, capabilities);
  const how = (kind: string) =>
    kind === 'cgroup' ? `cgroup ${probed.cgroups ?? ''}`.trim() : kind;
  const sandbox = await driver.create(capabilities.cpu === 'none' ? withoutCpu(SPEC) : SPEC);
  const snippet = async (source: string, timeoutMs = 20_000): Promise<ExecResult> =>
    (await sandbox.runCode([{ language: 'python', source, timeoutMs }]))[0]!;
  try {
    return [
      memoryFinding(capabilities, how(capabilities.memory), await snippet(MEMORY)),
      cpuFinding(capabilities, how(capabilities.cpu), await snippet(CPU)),
      countFinding(
        'processes',
        capabilities.pids,
        how(capabilities.pids),
        await snippet(PROCESSES),
        SPEC.pids,
        'processes',
      ),
      countFinding(
        'disk',
        capabilities.disk,
        how(capabilities.disk),
        await snippet(DISK),
        SPEC.diskBytes,
        'bytes',
      ),
      await inodesFinding(driver.create.bind(driver), capabilities),
      timeFinding(await snippet('while True: pass', TIME_OUT_MS)),
      await networkFinding(snippet),
      ...statusFindings(await snippet(STATUS)),
      uidFinding(capabilities),
    ];
  } finally {
    await sandbox.stop();
  }
}

function statedLimits(name: string, capabilities: SandboxCapabilities): LimitFinding[] {
  const { memory, cpu, pids, disk } = capabilities;
  const stated = { memory, cpu, processes: pids, disk };
  return Object.entries(stated).map(([part, how]) => ({
    part,
    ok: false,
    how,
    found: how === 'none' ? 'not limited' : `kept by the ${name} process itself, not by the kernel`,
    next: 'Get bubblewrap to run; the list of drivers says what it lacks.',
  }));
}

const withoutCpu = ({ cpus: _, ...rest }: SandboxSpec): Partial<SandboxSpec> => rest;

const ended = ({ cause, code, signal }: ExecResult): string => `${cause}, ${code ?? signal}`;

function memoryFinding(
  { memory }: SandboxCapabilities,
  how: string,
  result: ExecResult,
): LimitFinding {
  const bounded = !result.stdout.includes('unbounded');
  const whole = memory !== 'rlimit' && memory !== 'none';
  const killed = result.cause === 'out_of_memory';
  const found = !bounded
    ? '1 GiB was allocated in a sandbox of 64 MiB'
    : killed
      ? 'a snippet that took too much was killed, and the kernel counted it'
      : `an allocation beyond the limit failed (${ended(result)})`;
  return bounded && whole
    ? { part: 'memory', ok: true, how, found }
    : {
        part: 'memory',
        ok: false,
        how,
        found: bounded ? `${found}; for each process, not for all together` : found,
        next: PRIVILEGED,
      };
}

function cpuFinding({ cpu }: SandboxCapabilities, how: string, result: ExecResult): LimitFinding {
  const share = Number(result.stdout);
  if (cpu === 'none')
    return {
      part: 'cpu',
      ok: false,
      how,
      found: 'a busy sandbox takes whole cores',
      next: PRIVILEGED,
    };
  const ok = share <= MOST_CPU_SHARE;
  const found = `a busy loop in a sandbox of 0.5 cpus had ${share.toFixed(2)}`;
  return ok ? { part: 'cpu', ok, how, found } : { part: 'cpu', ok, how, found, next: PRIVILEGED };
}

/** A limit that the guest runs into by making more and more of something. */
function countFinding(
  part: string,
  kind: string,
  how: string,
  result: ExecResult,
  limit: number,
  unit: string,
): LimitFinding {
  const made = Number(result.stdout.trim() || Number.NaN);
  const held = made <= limit;
  const whole = kind !== 'none' && kind !== 'rlimit';
  const found = Number.isNaN(made)
    ? `trying it ended with ${ended(result)}`
    : `${made} of ${limit} ${unit}, then refused`;
  if (held && whole) return { part, ok: true, how, found };
  if (!held)
    return {
      part,
      ok: false,
      how,
      found: `${made} ${unit} in a sandbox of ${limit}`,
      next: PRIVILEGED,
    };
  return {
    part,
    ok: false,
    how,
    found: `${found}; counted over all processes of the uid`,
    next: PRIVILEGED,
  };
}

async function inodesFinding(
  create: (spec: Partial<SandboxSpec>) => Promise<Sandbox>,
  { disk }: SandboxCapabilities,
): Promise<LimitFinding> {
  // The disk of the other sandbox is full.
  const { inodes } = SPEC;
  const sandbox = await create({ inodes });
  try {
    const [result] = await sandbox.runCode([{ language: 'python', source: INODES }]);
    return countFinding('inodes', disk, disk, result!, inodes, 'files');
  } finally {
    await sandbox.stop();
  }
}

function timeFinding(result: ExecResult): LimitFinding {
  const ok = result.cause === 'timeout';
  return {
    part: 'time',
    ok,
    how: 'kill of the tree',
    found: ok
      ? `an endless loop ended after ${Math.round(result.durationMs)} ms of ${TIME_OUT_MS}`
      : `an endless loop ended with ${ended(result)}`,
    ...(!ok && { next: 'This is a fault of Longhaul; please report it.' }),
  };
}

/** A listener on the host's loopback that the guest must not reach. */
async function networkFinding(
  snippet: (source: string) => Promise<ExecResult>,
): Promise<LimitFinding> {
  const server = createServer((socket) => socket.destroy());
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  try {
    const { port } = server.address() as { port: number };
    const result = await snippet(connect(port));
    const ok = result.stdout.trim() !== '' && !result.stdout.includes('reached');
    return {
      part: 'network',
      ok,
      how: 'namespace',
      found: ok
        ? `a port of the host's loopback: ${result.stdout.trim()}`
        : `a port of the host's loopback: ${result.stdout.trim() || ended(result)}`,
      ...(!ok && { next: 'This is a fault of Longhaul; please report it.' }),
    };
  } finally {
    server.close();
  }
}

/** What the kernel says of a process inside (proc(5), `status`). */
function statusFindings(result: ExecResult): LimitFinding[] {
  const field = (name: string) => new RegExp(`^${name}:\\s+(\\w+)$`, 'm').exec(result.stdout)?.[1];
  const filter = field('Seccomp') === '2';
  const bounding = field('CapBnd');
  const bare = /^0+$/.test(bounding ?? '') && field('NoNewPrivs') === '1';
  const fault = { next: 'This is a fault of Longhaul; please report it.' };
  return [
    {
      part: 'seccomp',
      ok: filter,
      how: filter ? 'filter' : 'none',
      found: filter ? 'a system call filter is on inside' : 'no system call filter inside',
      ...(!filter && fault),
    },
    {
      part: 'privileges',
      ok: bare,
      how: bare ? 'none left' : 'some left',
      found: bare
        ? 'no capabilities, and none can be gained'
        : `capabilities ${bounding}, no_new_privs ${field('NoNewPrivs')}`,
      ...(!bare && fault),
    },
  ];
}

function uidFinding({ ownUid }: SandboxCapabilities): LimitFinding {
  if (ownUid)
    return {
      part: 'own uid',
      ok: true,
      how: 'uid',
      found: 'each sandbox has a host uid of its own',
    };
  const root = process.getuid?.() === 0;
  return {
    part: 'own uid',
    ok: false,
    how: root ? 'one for all' : 'user namespace',
    found: root
      ? 'all sandboxes share one uid: file systems here cannot be id-mapped'
      : 'sandboxes run as the user who started them, in a user namespace',
    next: root
      ? 'Use a kernel of 6.3 or later, with the temporary files on tmpfs.'
      : 'Run as root, so that each sandbox can have a uid of its own.',
  };
}
