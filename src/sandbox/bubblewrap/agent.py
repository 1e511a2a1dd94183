"""The process with pid 1 inside a sandbox: runs commands and snippets for the owner outside.

Frames on standard input and output, both ways: u32 length, u32 header length (big endian), a JSON
header, then raw bytes that the header's lengths cut up. One request at a time, in order.

What the guest can do to it: nothing by signals (the kernel drops every signal that pid 1's own
namespace sends it, SIGKILL included), nothing by /proc (it is not dumpable), nothing by system calls that
name a process, as prlimit does (the filter lets a guest name itself only), and nothing by inherited
descriptors (children get three). A memory bomb may take it along; the owner sees that in the cgroup.

Snippets of Python run in a fork of this very interpreter, which is warm; a fork keeps nothing. One
fork is made ahead (the spare), so that the next snippet starts without waiting for it. The same holds
for the spare, but signals reach it: one that does not answer is replaced.
"""

import _signal
import collections
import ctypes
import datetime
import errno
import fcntl
import functools
import gc
import io
import itertools
import json
import linecache
import math
import os
import re
import resource
import select
import signal
import stat
import struct
import sys
import time
import traceback
import types

PR_SET_DUMPABLE = 4
PRCTL = ctypes.CDLL(None).prctl
WORKSPACE = "/workspace"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}
# More than this ends the command: nothing sensible prints it, and reading it costs the host time.
OUTPUT_LIMIT = 1 << 30
# After a process ended, at most this much is taken from a pipe that others still hold open.
DRAIN_LIMIT = 1 << 20
# A fork that has not taken its source after this is given up.
READY_SECONDS = 5


# Failures of a call that are about the process that makes it, not about the file it names.
EXHAUSTED = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class AgentFault(Exception):
    """The agent cannot do its own work any more: no fault of the request, and no answer to it."""


class Kept:
    """The head and the tail of a stream, within `limit` bytes."""

    def __init__(self, limit):
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, chunk):
        self.total += len(chunk)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self.tail += chunk
            if len(self.tail) > 2 * self.tail_limit + 65536:
                del self.tail[: len(self.tail) - self.tail_limit]

    def parts(self):
        tail = self.tail[len(self.tail) - self.tail_limit:] if len(self.tail) > self.tail_limit else self.tail
        return bytes(self.head), bytes(tail)


def kill_all():
    """Ends every process of the namespace but this one, atomically: a fork cannot outrun it."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    Spare.drop()


class Spare:
    """A fork made ahead: it waits for a snippet's source on a pipe."""

    current = None

    def __init__(self):
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        control = os.pipe()
        ready = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            for end in itertools.chain(control, ready, *pipes):
                os.close(end)
            raise
        if self.pid == 0:
            try:
                become_snippet(pipes, control[0], ready[1])
            finally:
                os._exit(1)
        for end in (pipes[0][0], pipes[1][1], pipes[2][1], control[0], ready[1]):
            os.close(end)
        self.control = control[1]
        self.ready = ready[0]
        self.pipes = [pipes[0][1], pipes[1][0], pipes[2][0]]

    @classmethod
    def prepare(cls):
        """Makes one ahead where none waits. Without room for it the next snippet makes its own."""
        if cls.current is None:
            try:
                cls.current = cls()
            except OSError:
                pass

    @classmethod
    def take(cls):
        spare, cls.current = cls.current or cls(), None
        return spare

    @classmethod
    def drop(cls):
        spare, cls.current = cls.current, None
        if spare:
            for end in [spare.control, spare.ready, *spare.pipes]:
                os.close(end)

    def start(self, source):
        """Hands the source over; False when a guest has killed the waiting process.

        A signal may still be on its way, or wait behind a stop until SIGCONT. The process answers once
        it has the source: whatever was sent to it before has taken effect by then, or never will.
        """
        poll = select.poll()
        poll.register(self.ready, select.POLLIN)
        try:
            os.kill(self.pid, signal.SIGCONT)
            data = memoryview(struct.pack(">I", len(source)) + source)
            while data:
                data = data[os.write(self.control, data):]
            if poll.poll(READY_SECONDS * 1000) and os.read(self.ready, 1):
                return True
            os.kill(self.pid, signal.SIGKILL)
            return False
        except (BrokenPipeError, ProcessLookupError):
            return False
        finally:
            os.close(self.control)
            os.close(self.ready)


def others():
    """Whether any process is alive but this one and the spare."""
    reap()
    spare = {Spare.current.pid} if Spare.current else set()
    try:
        # Whatever lives has an ancestor here: orphans become children of pid 1.
        with open("/proc/1/task/1/children") as file:
            return bool({int(pid) for pid in file.read().split()} - spare)
    except OSError:
        return bool(living() - spare)  # a kernel without CONFIG_PROC_CHILDREN


def reap():
    """Collects orphans. Returns their statuses by pid."""
    found = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found
            found[pid] = status
            if Spare.current and Spare.current.pid == pid:
                Spare.drop()
    except ChildProcessError:
        return found


def wait_gone(seconds):
    """After `kill_all`: waits until the killed are reaped. False when some stay in the kernel."""
    end = time.monotonic() + seconds
    while others():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def living():
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}


def set_oom_score(pid, score):
    try:
        fd = os.open("/proc/%d/oom_score_adj" % pid, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # gone already
    try:
        os.write(fd, b"%d" % score)
    except OSError:
        pass
    os.close(fd)


class Job:
    """A started process with its pipes."""

    def __init__(self, pid, stdin, stdout, stderr):
        self.pid = pid
        self.stdin = stdin
        self.outputs = {stdout: 0, stderr: 1}


def supervise(job, data, timeout, keep):
    """Feeds and drains a process until it ends or its time does. Returns (header, parts)."""
    started = time.monotonic()
    deadline = started + timeout
    kept = [Kept(keep), Kept(keep)]
    poll = select.poll()
    pidfd = os.pidfd_open(job.pid)
    poll.register(pidfd, select.POLLIN)
    for fd in job.outputs:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    pending = memoryview(data)
    if pending:
        os.set_blocking(job.stdin, False)
        poll.register(job.stdin, select.POLLOUT)
    else:
        os.close(job.stdin)
    opened = dict(job.outputs)
    status = None
    cause = None
    while status is None:
        left = deadline - time.monotonic()
        if left <= 0:
            cause = "timeout"
            break
        # Orphans are reaped at least this often, so that zombies do not fill the pid limit.
        events = poll.poll(min(left, 0.2) * 1000 + 1)
        for fd, _ in events:
            if fd in opened:
                try:
                    chunk = os.read(fd, 1 << 18)
                except BlockingIOError:
                    continue
                if chunk:
                    kept[opened[fd]].add(chunk)
                else:
                    poll.unregister(fd)
                    os.close(fd)
                    del opened[fd]
            elif fd == job.stdin:
                try:
                    pending = pending[os.write(fd, pending[:65536]):]
                except BlockingIOError:
                    pass
                except OSError:  # the reader closed it
                    pending = pending[:0]
                if not pending:
                    poll.unregister(fd)
                    os.close(fd)
                    job.stdin = -1
        if kept[0].total + kept[1].total > OUTPUT_LIMIT:
            cause = "output_limit"
            break
        if not events or any(fd == pidfd for fd, _ in events):
            status = reap().get(job.pid)
    if status is None:
        kill_all()
        while status is None:
            _, status = os.waitpid(job.pid, 0)
        wait_gone(5)
    os.close(pidfd)
    if pending and job.stdin >= 0:
        os.close(job.stdin)
    for fd, index in opened.items():
        taken = 0
        try:
            while taken < DRAIN_LIMIT and (chunk := os.read(fd, 65536)):
                kept[index].add(chunk)
                taken += len(chunk)
        except BlockingIOError:
            pass  # a process that outlived its parent holds it open
        os.close(fd)
    code = os.waitstatus_to_exitcode(status)
    parts = [*kept[0].parts(), *kept[1].parts()]
    header = {
        "cause": cause or ("exited" if code >= 0 else "signalled"),
        "code": code if code >= 0 else None,
        "signal": None if code >= 0 else -code,
        "totals": [kept[0].total, kept[1].total],
        "ms": (time.monotonic() - started) * 1000,
    }
    return header, parts


def refused(code, text):
    """A command that could not be started: what a shell would say."""
    message = text.encode("utf-8", "replace") + b"\n"
    header = {"cause": "exited", "code": code, "signal": None, "totals": [0, len(message)], "ms": 0}
    return header, [b"", b"", message, b""]


def run_command(request, stdin):
    argv = request["argv"]
    environment = {**ENVIRONMENT, **request.get("env", {})}
    cwd = os.path.join(WORKSPACE, request.get("cwd") or "")
    if not os.path.isdir(cwd):
        return refused(126, "cannot enter %s: not a directory" % cwd)
    program = find_program(argv[0], environment["PATH"], cwd)
    if program is None:
        return refused(127, "%s: command not found" % argv[0])
    pipes = [os.pipe(), os.pipe(), os.pipe()]
    inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
    try:
        os.chdir(cwd)
        # All descriptors of this process but the standard ones, which are replaced, close on exec.
        pid = os.posix_spawn(
            program,
            argv,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, index) for index, fd in enumerate(inner)],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except (OSError, ValueError) as error:
        for pipe in pipes:
            os.close(pipe[1] if pipe is pipes[0] else pipe[0])
        # Beside living processes of its own the guest has used up what there is; alone it cannot have.
        if getattr(error, "errno", None) in EXHAUSTED and not others():
            raise AgentFault(error) from error
        return refused(126, "%s: %s" % (argv[0], getattr(error, "strerror", None) or error))
    finally:
        os.chdir("/")
        for fd in inner:
            os.close(fd)
    set_oom_score(pid, 500)
    job = Job(pid, pipes[0][1], pipes[1][0], pipes[2][0])
    return supervise(job, stdin, request["timeout"], request["keep"])


def find_program(name, path, cwd):
    """What a shell would run: a path as it is, a bare name from PATH. None: not found."""
    if "/" in name:
        full = os.path.join(cwd, name)
        return full if os.path.lexists(full) else None
    for folder in path.split(":"):
        full = os.path.join(cwd, folder, name)
        if os.path.isfile(full) and os.access(full, os.X_OK):
            return full
    return None


def run_snippet(request, source, stdin, more):
    """`more`: another snippet follows, whose process is made while this one runs."""
    background = living() - ({Spare.current.pid} if Spare.current else set()) if others() else None
    try:
        spare = Spare.take()
        if not spare.start(source):
            for end in spare.pipes:
                os.close(end)
            reap()
            spare = Spare()
            if not spare.start(source):
                for end in spare.pipes:
                    os.close(end)
                raise OSError(errno.ECHILD, "a new process ended before it began")
    except OSError as error:
        if background is None:
            raise AgentFault(error) from error
        return refused(126, "cannot start a process: %s" % error.strerror)
    job = Job(spare.pid, *spare.pipes)
    if more:
        Spare.prepare()
    result = supervise(job, stdin, request["timeout"], request["keep"])
    if background is None:
        if others():
            kill_all()
            wait_gone(5)
    else:
        # Processes of earlier commands live on; what this snippet left behind does not.
        for _ in range(50):
            own = {Spare.current.pid} if Spare.current else set()
            extra = living() - background - own
            if not extra:
                break
            for leftover in extra:
                try:
                    os.kill(leftover, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            reap()
        else:
            kill_all()  # it forks faster than it can be picked out
            wait_gone(5)
    return result


def become_snippet(pipes, control, ready):
    """In the fork: a fresh `__main__` with standard streams of its own. Never returns."""
    os.setsid()
    for fd, pipe in enumerate(pipes):
        os.dup2(pipe[0 if fd == 0 else 1], fd)
    os.dup2(control, 3, inheritable=False)
    os.dup2(ready, 4, inheritable=False)
    os.closerange(5, 65536)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    size = os.read(3, 4)
    if len(size) < 4:
        os._exit(0)  # not needed any more
    source = bytearray()
    while len(source) < struct.unpack(">I", size)[0]:
        source += os.read(3, 1 << 20)
    os.write(4, b"1")
    os.close(3)
    os.close(4)
    # A handler of Python's would run some time after its signal; the default acts at once, as `start` needs.
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    # Only now: until it runs guest code, guest code must not look into it.
    PRCTL(PR_SET_DUMPABLE, 1, 0, 0, 0)
    set_oom_score(os.getpid(), 500)  # the file belongs to root as long as the process is not dumpable
    try:
        os.chdir(WORKSPACE)
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


# Files


def inside(path):
    return os.path.join(WORKSPACE, path)


def read_file(request):
    fd = os.open(inside(request["path"]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = bytearray()
        while len(data) < request["limit"]:
            chunk = os.read(fd, min(1 << 20, request["limit"] - len(data)))
            if not chunk:
                break
            data += chunk
        return bytes(data)
    finally:
        os.close(fd)


def write_file(request, data):
    path = inside(request["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        os.ftruncate(fd, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view):]
    finally:
        os.close(fd)


def list_files(request):
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    found = []
    with os.scandir(os.fsencode(inside(request["path"]))) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
            name = entry.name.decode("utf-8", "replace")
            found.append([name, kinds.get(stat.S_IFMT(info.st_mode), "other"), info.st_size])
    return sorted(found)


# Frames


def read_exactly(count):
    data = bytearray()
    while len(data) < count:
        chunk = os.read(0, min(1 << 20, count - len(data)))
        if not chunk:
            os._exit(0)  # the owner is gone: the kernel ends the namespace with its pid 1
        data += chunk
    return data


def read_frame():
    total, size = struct.unpack(">II", read_exactly(8))
    header = json.loads(read_exactly(size))
    return header, bytes(read_exactly(total - size))


def write_frame(header, parts):
    header["lengths"] = [len(part) for part in parts]
    text = json.dumps(header).encode()
    body = b"".join(parts)
    data = memoryview(struct.pack(">II", len(text) + len(body), len(text)) + text + body)
    while data:
        data = data[os.write(1, data):]


def disk_used():
    info = os.statvfs("/tmp")
    return (info.f_blocks - info.f_bfree) * info.f_frsize


# Calls whose failures are about the path that the caller gave.
FILE_CALLS = {"read", "write", "list"}


def handle(header, body):
    kind = header["op"]
    if kind == "exec":
        result, parts = run_command(header, body)
        return {"results": [result]}, parts
    if kind == "code":
        results, parts, position = [], [], 0
        for request in header["requests"]:
            source = body[position:position + request["source"]]
            position += request["source"]
            stdin = body[position:position + request["stdin"]]
            position += request["stdin"]
            more = request is not header["requests"][-1]
            result, pieces = run_snippet(request, source, stdin, more)
            results.append(result)
            parts += pieces
        return {"results": results}, parts
    if kind == "read":
        return {}, [read_file(header)]
    if kind == "write":
        write_file(header, body)
        return {}, []
    if kind == "list":
        return {"entries": list_files(header)}, []
    if kind == "quiesce":
        if header["stop"] and others():
            kill_all()
            return {"busy": not wait_gone(10)}, []
        return {"busy": others()}, []
    if kind == "usage":
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return {"cpuSeconds": sum(each.ru_utime + each.ru_stime for each in used)}, []
    if kind == "ping":
        return {}, []
    raise ValueError("unknown request %r" % kind)


def serve():
    Spare.prepare()
    while True:
        # Orphans are reaped between requests too.
        while not select.select([0], [], [], 1.0)[0]:
            reap()
        header, body = read_frame()
        try:
            answer, parts = handle(header, body)
        except AgentFault as error:
            answer, parts = {"broken": str(error)}, []
        except OSError as error:
            message = error.strerror or str(error)
            # EAGAIN is a file that a process of the guest holds a lease on.
            if header["op"] in FILE_CALLS and error.errno not in EXHAUSTED - {errno.EAGAIN}:
                answer, parts = {"errno": error.errno, "message": message}, []
            else:
                answer, parts = {"broken": message}, []
        except (MemoryError, ValueError) as error:
            answer, parts = {"errno": 0, "message": repr(error)}, []
        answer["disk"] = disk_used()
        write_frame(answer, parts)
        Spare.prepare()


def main():
    if os.getpid() != 1:
        # It signals every process it can see: anywhere else that would be the whole machine.
        sys.exit("the sandbox agent runs as pid 1 of a namespace of its own only")
    limits = json.loads(sys.argv[1])
    PRCTL(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)  # no handler: the kernel drops them for pid 1
    # A limit of one byte also keeps a core_pattern pipe on the host from being started.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    if "processes" in limits:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    if "data" in limits:
        resource.setrlimit(resource.RLIMIT_DATA, (limits["data"], limits["data"]))
    os.chdir("/")
    os.environ.clear()
    os.environ.update(ENVIRONMENT)  # snippets inherit it
    sys.argv = [""]
    sys.path.insert(0, "")
    sys.dont_write_bytecode = False
    # This process writes frames past these objects; only its forks use them.
    sys.stdin = open(0, "r", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    gc.collect()
    gc.freeze()  # forks then leave the shared pages alone
    write_frame({"hello": 1}, [])
    serve()


main()
