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

/** The same, and a process of a session of its own that ignores requests to end. */
export const HAUNTING = `${LITTERING}
import signal, sys
sys.stdout.flush()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2): os.dup2(null, fd)
        os.execv("/usr/bin/sleep", ["${MARK}", "600"])
    os._exit(0)
`;

/** What can outlive a process by other ways than files in the usual places: kernel objects, odd directories. */
const THOROUGH = `
import ctypes, os, socket, sys
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
probe = socket.socket(socket.AF_UNIX)
try: probe.bind("\\0${MARK}")
except OSError: seen.append("abstract socket")
probe.close()
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
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2): os.dup2(null, fd)
        s = socket.socket(socket.AF_UNIX)
        s.bind("\\0${MARK}")
        s.listen()
        s.set_inheritable(True)
        os.execv("/usr/bin/sleep", ["${MARK}", "600"])
    os._exit(0)
`;

/** Two executions with a rollback between them: what the second sees of the first, or null when nothing. */
export async function residueAfterRollback(
  sandbox: Sandbox,
  base: LayerId,
): Promise<string | null> {
  for (const expected of ['the first execution', 'the execution after a rollback']) {
    const [result] = await sandbox.runCode([{ language: 'python', source: THOROUGH }]);
    await sandbox.rollback(base);
    const said = result!.stdout.trim();
    if (said !== 'clean') return `${expected} saw ${said || JSON.stringify(result)}`;
  }
  return null;
}
