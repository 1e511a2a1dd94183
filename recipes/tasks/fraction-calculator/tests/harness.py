"""Runs the work under test so that it cannot touch the verdict.

It runs as the same user as this verifier, so:
- expected answers live in the memory of this process only: `take_over` deletes /tests, and makes the
  memory unreadable to other processes;
- whatever a program leaves running is killed before the next step, and before the reward is written;
- a program that takes away the disk, the memory or the directories that the verifier needs is at fault
  itself. The verifier then ends by a signal, which is graded as such. Exiting would leave it ungraded.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
OUTPUT_BYTES = 1 << 20
REWARD = "/logs/verifier/reward.json"


def take_over():
    """Call once, after everything needed from /tests was loaded."""
    sys.excepthook = blame
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    for name in os.listdir("/tests"):
        path = os.path.join("/tests", name)
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def blame(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    if issubclass(kind, (OSError, MemoryError)):
        os.kill(os.getpid(), signal.SIGKILL)


def run(argv, stdin="", timeout=10, cwd="/workspace"):
    """(exit code, stdout), with None for the code of a program that ran too long or cannot be run."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
        given.write(stdin.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                argv,
                stdin=given,
                stdout=out,
                stderr=subprocess.DEVNULL,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES,) * 2),
            )
        except OSError:
            return None, ""
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        kill_descendants()
        out.seek(0)
        return code, out.read(OUTPUT_BYTES).decode("utf-8", "replace")


def kill_descendants():
    """Orphans become children of this process (a subreaper), however deep they were started."""
    me = os.getpid()
    deadline = time.monotonic() + 10
    while True:
        if time.monotonic() > deadline:
            raise OSError("processes are started faster than they can be killed")
        with open(f"/proc/{me}/task/{me}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def finish(**scores):
    """Writes the reward. A new file takes the place of anything that was put there before."""
    kill_descendants()
    print(json.dumps(scores))
    with open(REWARD + ".new", "w") as file:
        json.dump(scores, file)
    os.replace(REWARD + ".new", REWARD)
