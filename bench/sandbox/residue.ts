import type { LayerId, Sandbox } from '../../src/sandbox/index.ts';

/** Name of everything that one execution leaves for the next to find. */
const MARK = 'longhaul-residue';

/** Looks for what others left, then leaves a file in the workspace and one in /tmp; prints `clean` or what it saw. */
export const LITTERING = `
import os
seen = ["%s/%s" % (d, n) for d in ("/workspace", "/tmp") for n in os.listdir(d)]
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            if b"${MARK}" in open("/proc/%s/cmdline" % pid, "rb").read(): seen.append("process " + pid)
        except OSError: pass
for d in ("/workspace", "/tmp"):
    with open("%s/${MARK}" % d, "w") as file: file.write("left")
print(", ".join(seen) or "clean")
`;

/**
 * A command that leaves a process behind, in a session of its own and deaf to requests to end. Processes
 * of a snippet end with it, those of a command go on until something ends them.
 */
const HAUNTING = [
  ...['sh', '-c'],
  `setsid sh -c 'trap "" TERM HUP; while :; do sleep 600; done; : ${MARK}' < /dev/null > /dev/null 2>&1 &`,
];

export async function haunt(sandbox: Sandbox): Promise<void> {
  const result = await sandbox.exec({ argv: HAUNTING });
  if (result.code !== 0) throw new Error(`cannot leave a process: ${JSON.stringify(result)}`);
}

/** What can outlive a process by other ways than files in the usual places: kernel objects, odd directories. */
const THOROUGH = `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
KEY = 0x10c4a01
def listed(place):
    try: return os.listdir(place)
    except OSError: return []
seen = ["%s/%s" % (d, n) for d in ("/workspace", "/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp", "/run", "/run/secrets") for n in listed(d) if not (d == "/run" and n == "secrets")]
for kind in ("shm", "msg", "sem"):
    try:
        lines = open("/proc/sysvipc/" + kind).read().splitlines()[1:]
        if lines: seen.append("System V %s: %d" % (kind, len(lines)))
    except OSError: pass
for pid in listed("/proc"):
    if pid.isdigit():
        try:
            if b"${MARK}" in open("/proc/%s/cmdline" % pid, "rb").read(): seen.append("process " + pid)
        except OSError: pass
print(", ".join(seen) or "clean")
sys.stdout.flush()
os.umask(0)
for d in ("/workspace", "/tmp", "/dev/shm", "/var/tmp", "/run"):
    try:
        os.makedirs("%s/${MARK}/in" % d)
        open("%s/${MARK}/in/file" % d, "w").write("left")
        os.chmod("%s/${MARK}" % d, 0)
    except OSError: pass
libc.shmget(KEY, 4096, 0o1666)
libc.msgget(KEY, 0o1666)
libc.semget(KEY, 1, 0o1666)
`;

/** Two executions, each of a snippet and a command, with a rollback between them: what the second sees of the first, or null when nothing. */
export async function residueAfterRollback(
  sandbox: Sandbox,
  base: LayerId,
): Promise<string | null> {
  for (const expected of ['the first execution', 'the execution after a rollback']) {
    const [result] = await sandbox.runCode([{ language: 'python', source: THOROUGH }]);
    await haunt(sandbox);
    await sandbox.rollback(base);
    const said = result!.stdout.trim();
    if (said !== 'clean') return `${expected} saw ${said || JSON.stringify(result)}`;
  }
  return null;
}
