"""Processes of the guest: each is a fork of the agent, made ahead and waiting for what to run."""

# More than the code below needs: what snippets import most is loaded once, before the first fork.
import _signal
import collections
import ctypes
import datetime
import fcntl
import functools
import io
import itertools
import json
import linecache
import math
import os
import re
import select
import signal
import struct
import sys
import traceback
import types

import archive

# Where snippets import from: the agent's folder is not theirs.
SNIPPET_PATH = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
# A guest may have files of these names, or need what archive.py leaves out.
OWN_MODULES = ("agent", "archive", "files", "output", "process", "zygote", "shutil", "tarfile")
PR_SET_DUMPABLE = 4
PRCTL = ctypes.CDLL(None).prctl
WORKSPACE = "/workspace"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORKSPACE,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}
# The kernel takes guest processes before the agent, which has what it started with.
GUEST_OOM_SCORE = 500
try:
    with open("/proc/self/oom_score_adj") as own:
        OOM_SCORE = int(own.read())
except OSError:
    OOM_SCORE = 0
# A fork that has not taken its work after this is given up.
READY_SECONDS = 3


class Spare:
    """A fork made ahead: it waits on a pipe for what to run."""

    def __init__(self, fork):
        """`fork` makes a process that takes over five descriptors, and returns its number."""
        pipes = [os.pipe() for _ in range(5)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write), (work, control), (ready, answer) = pipes
        taken = [in_read, out_write, err_write, work, answer]
        try:
            self.pid = fork(taken)
        except OSError:
            for end in [in_write, out_read, err_read, control, ready]:
                os.close(end)
            raise
        finally:
            for end in taken:
                os.close(end)
        self.control = control
        self.ready = ready
        self.pipes = [in_write, out_read, err_read]

    def close(self):
        for end in [self.control, self.ready, *self.pipes]:
            os.close(end)

    def start(self, header, source):
        """Hands the work over; False when a guest has ended the waiting process.

        A signal may still be on its way, or wait behind a stop until SIGCONT. The process answers once
        it has the work: whatever was sent to it before has taken effect by then, or never will.
        """
        poll = select.poll()
        poll.register(self.ready, select.POLLIN)
        text = json.dumps(header).encode()
        try:
            os.kill(self.pid, signal.SIGCONT)
            write_all(self.control, struct.pack(">II", len(text), len(source)) + text + source)
            if poll.poll(READY_SECONDS * 1000) and os.read(self.ready, 1):
                return True
            os.kill(self.pid, signal.SIGKILL)
            return False
        except (BrokenPipeError, ProcessLookupError):
            return False
        finally:
            os.close(self.control)
            os.close(self.ready)


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def fork_here(config):
    """Forks of this very process. What it has read before, they could find in their memory."""

    def fork(taken):
        pid = os.fork()
        if pid == 0:
            try:
                become_process(taken, config)
            finally:
                os._exit(1)
        return pid

    return fork


def become_process(taken, config):
    """Waits for work and does it: a program, a snippet, or an archive. Never returns."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    if "guest" in config:
        os.setresuid(*[config["guest"]] * 3)
    os.setsid()
    # Out of the way first: the numbers they shall have may be taken by each other.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in taken]
    for to, fd in enumerate(moved):
        os.dup2(fd, to, inheritable=to < 3)
    os.closerange(5, 65536)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if not config["python"]:
        become_interpreter(config)
    sizes = os.read(3, 8)
    if len(sizes) < 8:
        os._exit(0)  # not needed any more
    text, source = (read_pipe(3, size) for size in struct.unpack(">II", sizes))
    if config["exposed"] and meddled():
        os._exit(0)  # without an answer: another takes its place
    os.write(4, b"1")
    os.close(3)
    os.close(4)
    # A handler of Python's would run some time after its signal; the default acts at once, as `start` needs.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        _signal.signal(name, _signal.SIG_DFL)
    # Only now: until it runs guest code, guest code must not look into it.
    PRCTL(PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        # The file belongs to root as long as the process is not dumpable.
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"%d" % GUEST_OOM_SCORE)
        os.close(fd)
    except OSError:
        pass
    header = json.loads(text)
    if header["kind"] == "exec":
        run_program(header, config)
    elif header["kind"] == "code":
        run_snippet(source, module, config)
    elif header["kind"] == "nothing":
        os._exit(0)
    else:
        run_archive(header)


def become_interpreter(config):
    """What a snippet finds, and a first round through what runs one: the pages that a fork writes to are
    copied now, while nobody waits for it."""
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    os.environ.clear()
    os.environ.update({**ENVIRONMENT, **config["env"]})
    sys.argv, sys.path = [""], ["", *SNIPPET_PATH]
    sys.dont_write_bytecode = False
    json.loads('{"kind": "nothing"}')
    exec(compile("0", "<nothing>", "exec", dont_inherit=True), {"__builtins__": __builtins__})
    sys.stdout.flush()
    sys.stderr.flush()


def meddled():
    """Whether a guest has changed what the waiting process would run with. Without root on the host, files
    in /proc of a process that cannot be traced still belong to the sandbox's user."""
    try:
        with open("/proc/self/oom_score_adj") as file:
            score = int(file.read())
        with open("/proc/self/autogroup") as file:
            nice = file.read().split()[-1]
    except OSError:  # a kernel without autogroups
        return False
    return score != OOM_SCORE or nice != "0"


def read_pipe(fd, size):
    data = bytearray()
    while len(data) < size:
        data += os.read(fd, min(1 << 20, size - len(data)))
    return bytes(data)


def fail(code, text):
    os.write(2, text.encode("utf-8", "surrogateescape") + b"\n")
    os._exit(code)


def run_program(header, config):
    """As a shell would: 127 for a program that is not there, 126 for one that cannot run."""
    argv = header["argv"]
    environment = {**ENVIRONMENT, **config["env"], **header["env"]}
    cwd = os.path.join(config["cwd"], header["cwd"])
    try:
        os.chdir(cwd)
    except OSError as error:
        fail(126, "cannot enter %s: %s" % (cwd, error.strerror))
    if "/" in argv[0]:
        found = argv[0] if os.path.lexists(argv[0]) else None
    else:
        places = [os.path.join(folder, argv[0]) for folder in environment["PATH"].split(":")]
        found = next((path for path in places if os.path.isfile(path) and os.access(path, os.X_OK)), None)
    if found is None:
        fail(127, "%s: command not found" % argv[0])
    try:
        os.execve(found, argv, environment)
    except (OSError, ValueError) as error:
        fail(126, "%s: %s" % (argv[0], getattr(error, "strerror", None) or error))


def run_snippet(source, module, config):
    """A fresh `__main__` with the standard streams and, at its end, what a program's end does."""
    if config["python"]:
        # This interpreter is the host's; the image's own libraries belong to the image's own.
        fd = os.memfd_create("snippet", 0)
        write_all(fd, source)
        header = {"argv": [config["python"], "/proc/self/fd/%d" % fd], "cwd": "", "env": {}}
        return run_program(header, config)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        os.chdir(config["cwd"])
    except OSError:
        pass  # the guest may have taken its own permission to enter
    code = 0
    try:
        text = source.decode("utf-8")
        name = "<snippet>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as request:
        code = exit_code(request.code)
    except BaseException as error:
        code = 1
        # The first frame is this file's.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)
    try:
        # As at the end of a program: threads are waited for, then the exit functions run.
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code & 0xFF)


def exit_code(value):
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    print(value, file=sys.stderr)
    return 1


def run_archive(header):
    """Writes a tree to standard output, unpacks one from standard input, or empties a folder."""
    try:
        os.chdir(header["path"])
        if header["kind"] == "pack":
            archive.pack(".", 1)
        elif header["kind"] == "clear":
            archive.clear(".")
        else:
            archive.unpack(0, header.get("whiteouts", False))
    except archive.Refused as error:
        fail(2, str(error))
    except (OSError, MemoryError, ValueError) as error:
        fail(1, "%s: %s" % (type(error).__name__, error))
    os._exit(0)


