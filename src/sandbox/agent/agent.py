"""Runs commands, snippets and file calls for the owner of a sandbox. The same program in two places:

- forked from a warm zygote and moved into the namespaces of a sandbox that bubblewrap made, but not into
  its process namespace: nothing inside can name it, so nothing inside can signal or trace it. A small
  program (init.ts) is process 1 there, collects orphans and ends everything on demand.
- executed as process 1 of a container or a virtual machine, where the kernel drops every signal that
  the guest sends it.

Frames on a descriptor each way: u32 length, u32 header length (big endian), a JSON header, raw bytes.
Requests carry an `id` that their answer repeats; what a process prints or how it ends comes by itself.

Every process is a fork of a warm interpreter, which keeps nothing of a fork. One is made ahead (the
spare). Guests may signal it or stop it: one that does not answer is replaced.
"""

import collections
import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import files  # noqa: E402
from output import Kept  # noqa: E402
from process import PR_SET_DUMPABLE, PRCTL, READY_SECONDS, Spare, fork_here, write_all  # noqa: E402

# More than this ends the process: nothing sensible prints it, and reading it costs the host time.
OUTPUT_LIMIT = 1 << 30
# After a process ended, at most this much is taken from a pipe that others still hold open.
DRAIN_LIMIT = 1 << 20
# A child that nobody waits for is collected at least this often.
REAP_SECONDS = 0.2
# Left alone for so long, the agent makes ready for the next call.
IDLE_SECONDS = 0.05
# Failures of a call that are about the process that makes it, not about the file it names.
EXHAUSTED = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class AgentFault(Exception):
    """The agent cannot do its own work any more: no fault of the request, and no answer to it."""


class Job:
    """A started process: its pipes, its deadline, and whom to tell of its end."""

    def __init__(self, spare, request, stdin, background, done):
        self.pid = spare.pid
        self.pidfd = open_pidfd(self.pid)
        self.stdin, stdout, stderr = spare.pipes
        self.outputs = {stdout: 0, stderr: 1}
        self.opened = dict(self.outputs)
        self.kept = [Kept(request["keep"]), Kept(request["keep"])]
        self.started = time.monotonic()
        timeout = request.get("timeout")
        self.deadline = self.started + timeout if timeout is not None else None
        self.tag = request.get("tag")  # whose output is told as it comes
        self.pending = collections.deque()  # of [memoryview, id to answer or None]
        self.closing = False  # standard input ends after what is pending
        self.background = background  # orphans that were there before
        self.cause = None
        self.done = done
        self.output_limit = None if request["kind"] == "pack" else OUTPUT_LIMIT
        if stdin:
            self.pending.append([memoryview(stdin), None])
        for fd in [self.stdin, *self.outputs]:
            os.set_blocking(fd, False)


class Agent:
    def __init__(self, control_in, control_out, fork, own, kill_all):
        """`fork` makes a process (see Spare); `own`: processes that are not the guest's, beside a spare."""
        self.control_in = control_in
        self.control_out = control_out
        self.fork = fork
        self.own = own
        self.kill_everything = kill_all
        self.first = os.getpid() == 1
        self.poll = select.poll()
        self.handlers = {}
        self.jobs = {}
        self.processes = {}  # by the id of the request that started them
        self.spare = None
        self.used = False
        self.rehearsed = False
        self.rehearsal = None
        self.watch(control_in, select.POLLIN, lambda: self.receive())
        if self.first and not has_pidfds():
            self.watch_children()

    # Loop

    def watch(self, fd, events, handler):
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def watch_children(self):
        """Hears of a child's end where no pidfd tells it (gVisor of 2022)."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        def woken():
            try:
                os.read(wake_read, 4096)
            except BlockingIOError:
                pass  # a guest that can open the agent's pipes has read it first
            self.reap()

        self.watch(wake_read, select.POLLIN, woken)

    def unwatch(self, fd):
        del self.handlers[fd]
        self.poll.unregister(fd)

    def serve(self):
        self.write({"hello": 1}, [])
        try:
            while True:
                self.turn()
        except (AgentFault, OSError, MemoryError) as error:
            self.write({"fault": str(error) or repr(error)}, [])
            os._exit(1)

    def turn(self):
        now = time.monotonic()
        for job in [job for job in self.jobs.values() if job.deadline and job.deadline <= now]:
            if job.pid in self.jobs:
                self.end_job(job, "timeout")
        waits = [job.deadline - now for job in self.jobs.values() if job.deadline]
        if self.jobs or self.first:
            waits.append(REAP_SECONDS if self.jobs else 1.0)
        idle = not self.jobs and (not self.rehearsed or self.spare is None)
        if idle:
            waits.append(IDLE_SECONDS)
        events = self.poll.poll(max(0, min(waits)) * 1000 + 1 if waits else None)
        for fd, _ in events:
            handler = self.handlers.get(fd)
            if handler:
                handler()
        if not events:
            self.reap()
            if idle and not self.rehearsed:
                self.rehearse()
            elif idle:
                self.prepare()

    def rehearse(self):
        """Whatever a first process costs more than the next is paid while nobody waits."""

        def done(result, parts):
            self.rehearsal = None

        self.rehearsed = True
        request = {"kind": "nothing", "keep": 0, "timeout": READY_SECONDS}
        self.rehearsal, _ = self.begin(request, b"", b"", done)

    def read_exactly(self, count):
        data = bytearray()
        while len(data) < count:
            chunk = os.read(self.control_in, min(1 << 20, count - len(data)))
            if not chunk:
                os._exit(0)  # the owner is gone
            data += chunk
        return data

    def receive(self):
        total, size = struct.unpack(">II", self.read_exactly(8))
        header = json.loads(self.read_exactly(size))
        body = bytes(self.read_exactly(total - size))
        identity = header["id"]
        try:
            answer = getattr(self, "op_" + header["op"])(header, body)
        except AgentFault as error:
            answer = {"broken": str(error)}, []
        except OSError as error:
            message = error.strerror or str(error)
            # EAGAIN is a file that a process of the guest holds a lease on.
            if header["op"] in FILE_CALLS and error.errno not in EXHAUSTED - {errno.EAGAIN}:
                answer = {"errno": error.errno, "message": message}, []
            else:
                answer = {"broken": message}, []
        except (MemoryError, ValueError) as error:
            answer = {"errno": 0, "message": repr(error)}, []
        if answer is not None:  # None: answered when it is done
            self.answer(identity, *answer)

    def answer(self, identity, header, parts):
        header["id"] = identity
        info = os.statvfs("/tmp")
        header["disk"] = (info.f_blocks - info.f_bfree) * info.f_frsize
        self.write(header, parts)

    def write(self, header, parts):
        header["lengths"] = [len(part) for part in parts]
        text = json.dumps(header).encode()
        body = b"".join(parts)
        write_all(self.control_out, struct.pack(">II", len(text) + len(body), len(text)) + text + body)

    # Processes

    def prepare(self):
        """Makes a spare where none waits. Without room for it the next process makes its own."""
        if self.spare is None:
            try:
                self.spare = Spare(self.fork)
            except OSError:
                pass

    def reap(self):
        """Collects children: those of jobs end them, others are orphans or a spare that a guest ended."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self.spare and self.spare.pid == pid:
                    self.spare.close()
                    self.spare = None
                job = self.jobs.get(pid)
                if job:
                    self.finish(job, status)
        except ChildProcessError:
            pass

    def orphans(self):
        """Processes whose parent is process 1: numbers of the inner namespace."""
        try:
            with open("/proc/1/task/1/children") as file:
                found = {int(pid) for pid in file.read().split()}
        except OSError:  # a kernel without CONFIG_PROC_CHILDREN
            found = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == 1}
        if self.first:
            found -= set(self.jobs)
            if self.spare:
                found.discard(self.spare.pid)
        return found

    def others(self, job=None):
        """Whether any process lives but the spare and `job`: whatever lives has an ancestor seen here."""
        return bool(self.orphans()) or any(
            each not in (job, self.rehearsal) for each in self.jobs.values())

    def kill_all(self):
        """Ends every process but process 1, atomically: a fork cannot outrun it."""
        if self.spare:
            self.spare.close()
            self.spare = None
        self.kill_everything()

    def settle(self, gone, seconds):
        """Waits until `gone()` holds, reaping. False when something stays in the kernel."""
        end = time.monotonic() + seconds
        while True:
            self.reap()
            if gone():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.001)

    def kill_orphans(self, keep):
        """Ends orphans that were not there before. What they leave becomes an orphan in turn."""
        for _ in range(100):
            extra = self.orphans() - keep
            if not extra:
                return
            for pid in extra:
                self.kill_orphan(pid)
            self.reap()
            time.sleep(0.0005)
        self.kill_all()  # it forks faster than it can be picked out
        self.settle(lambda: not self.orphans(), 5)

    def kill_orphan(self, pid):
        try:
            if self.first:  # its parent is this process, so it keeps its number until it is collected
                return os.kill(pid, signal.SIGKILL)
            # The number may be another namespace's; the folder of /proc is not ambiguous.
            fd = os.open("/proc/%d" % pid, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            pass
        os.close(fd)

    def begin(self, request, source, stdin, done):
        """Starts a process: (job, None), or (None, result) where the guest has left no room for one.
        `done(header, parts)` is called at its end."""
        background = self.orphans()
        header = {key: request[key] for key in ("kind", "argv", "cwd", "env", "path", "whiteouts") if key in request}
        try:
            for _ in range(2):
                spare, self.spare = self.spare or Spare(self.fork), None
                if spare.start(header, source):
                    break
                for end in spare.pipes:
                    os.close(end)
                self.reap()
            else:
                raise OSError(errno.ECHILD, "a new process ended before it began")
        except OSError as error:
            if not background and not self.jobs:
                raise AgentFault("cannot start a process: %s" % error.strerror) from error
            message = ("cannot start a process: %s\n" % error.strerror).encode()
            result = {"cause": "exited", "code": 126, "signal": None, "totals": [0, len(message)], "ms": 0}
            return None, (result, [b"", b"", message, b""])
        job = Job(spare, request, stdin, background, done)
        self.jobs[job.pid] = job
        if job.pidfd is not None:
            self.watch(job.pidfd, select.POLLIN, self.reap)
        for fd in job.outputs:
            self.watch(fd, select.POLLIN, lambda fd=fd: self.read_output(job, fd))
        if not request.get("open"):
            job.closing = True
        self.feed(job)
        # While this one runs; but many a sandbox is used once.
        if self.used:
            self.prepare()
        self.used = self.used or request["kind"] != "nothing"
        return job, None

    def feed(self, job):
        """Writes what is pending to standard input, as far as the process takes it."""
        while job.pending:
            data, identity = job.pending[0]
            try:
                job.pending[0][0] = data = data[os.write(job.stdin, data[:65536]):]
            except BlockingIOError:
                if job.stdin not in self.handlers:
                    self.watch(job.stdin, select.POLLOUT, lambda: self.feed(job))
                return
            except OSError:  # the reader closed it
                self.drop_input(job)
                return
            if not data:
                job.pending.popleft()
                if identity is not None:
                    self.answer(identity, {}, [])
        if job.stdin in self.handlers:
            self.unwatch(job.stdin)
        if job.closing:
            self.drop_input(job)

    def drop_input(self, job):
        if job.stdin < 0:
            return
        if job.stdin in self.handlers:
            self.unwatch(job.stdin)
        os.close(job.stdin)
        job.stdin = -1
        for _, identity in job.pending:
            if identity is not None:
                self.answer(identity, {"errno": errno.EPIPE, "message": "the process no longer reads"}, [])
        job.pending.clear()

    def read_output(self, job, fd):
        try:
            chunk = os.read(fd, 1 << 18)
        except BlockingIOError:
            return
        if not chunk:
            self.unwatch(fd)
            os.close(fd)
            del job.opened[fd]
            return
        self.take(job, fd, chunk)
        if job.output_limit and sum(kept.total for kept in job.kept) > job.output_limit:
            self.end_job(job, "output_limit")

    def take(self, job, fd, chunk):
        index = job.outputs[fd]
        job.kept[index].add(chunk)
        if job.tag is not None:
            self.write({"tag": job.tag, "stream": index}, [chunk])

    def end_job(self, job, cause):
        """Ends a process and what came of it."""
        job.cause = job.cause or cause
        job.deadline = None
        if len(self.jobs) == 1 and not job.background:
            self.kill_all()
        else:
            try:
                os.kill(job.pid, signal.SIGKILL)  # ours, and not yet collected
                os.killpg(job.pid, signal.SIGKILL)
            except OSError:
                pass
        self.settle(lambda: job.pid not in self.jobs, 5)

    def finish(self, job, status):
        """After its process ended: takes what the pipes still hold and tells the end."""
        del self.jobs[job.pid]
        if job.pidfd is not None:
            self.unwatch(job.pidfd)
            os.close(job.pidfd)
        self.drop_input(job)
        for fd in list(job.opened):
            taken = 0
            try:
                while taken < DRAIN_LIMIT and (chunk := os.read(fd, 65536)):
                    self.take(job, fd, chunk)
                    taken += len(chunk)
            except BlockingIOError:
                pass  # a process that outlived its parent holds it open
            self.unwatch(fd)
            os.close(fd)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and not job.cause and not first_process_lives():
            raise AgentFault("process 1 of the sandbox is gone")
        header = {
            "cause": job.cause or ("exited" if code >= 0 else "signalled"),
            "code": code if code >= 0 else None,
            "signal": None if code >= 0 else -code,
            "totals": [kept.total for kept in job.kept],
            "ms": (time.monotonic() - job.started) * 1000,
        }
        if job.cause:
            self.kill_orphans(job.background)
        job.done(header, [*job.kept[0].parts(), *job.kept[1].parts()])

    # Requests

    def op_ping(self, header, body):
        """The owner is about to use this sandbox: answered first, then made ready."""
        if not first_process_lives():
            raise AgentFault("process 1 of the sandbox is gone")
        self.answer(header["id"], {}, [])
        self.prepare()
        return None

    def op_exec(self, header, body):
        identity = header["id"]

        def done(result, parts):
            self.processes.pop(identity, None)
            self.answer(identity, {"results": [result]}, parts)

        job, refused = self.begin({**header, "kind": "exec"}, b"", body, done)
        if refused:
            done(*refused)
        else:
            self.processes[identity] = job
        return None

    def op_code(self, header, body):
        """Snippets one after the other; what one leaves behind is ended before the next begins."""
        queue = collections.deque()
        position = 0
        for request in header["requests"]:
            source = body[position:position + request["source"]]
            position += request["source"]
            queue.append((request, source, body[position:position + request["stdin"]]))
            position += request["stdin"]
        results, pieces = [], []
        current = None

        def ended(result, parts):
            results.append(result)
            pieces.extend(parts)
            self.kill_orphans(current.background)
            advance()

        def advance():
            nonlocal current
            while queue:
                request, source, stdin = queue.popleft()
                current, refused = self.begin({**request, "kind": "code"}, source, stdin, ended)
                if not refused:
                    return
                results.append(refused[0])
                pieces.extend(refused[1])
            self.answer(header["id"], {"results": results}, pieces)

        advance()
        return None

    def op_start(self, header, body):
        """A process that goes on: its end is told by itself, under its tag."""
        identity = header["id"]

        def done(result, parts):
            self.processes.pop(identity, None)
            self.write({"tag": header["tag"], "exit": result}, parts)

        job, refused = self.begin({**header, "open": True}, b"", body, done)
        if refused:
            done(*refused)
        else:
            self.processes[identity] = job
        return {}, []

    def op_input(self, header, body):
        job = self.processes.get(header["process"])
        if job is None or job.stdin < 0:
            raise OSError(errno.EPIPE, "the process no longer reads")
        if body:
            job.pending.append([memoryview(body), header["id"]])
        job.closing = job.closing or header["end"]
        self.feed(job)
        return None if body else ({}, [])

    def op_kill(self, header, body):
        """Signals a process and its group; SIGKILL reaches everything that came of it."""
        job = self.processes.get(header["process"])
        if job is None or job.pid not in self.jobs:
            return {}, []
        if header["signal"] == signal.SIGKILL:
            self.end_job(job, "killed")
        else:
            try:
                os.killpg(job.pid, header["signal"])
            except ProcessLookupError:
                pass
        return {}, []

    def op_quiesce(self, header, body):
        if header["stop"] and self.others():
            for job in self.jobs.values():
                job.cause = job.cause or "killed"
            self.kill_all()
            return {"busy": not self.settle(lambda: not self.others(), 10)}, []
        return {"busy": self.others()}, []

    def op_read(self, header, body):
        return files.read(header, body)

    def op_write(self, header, body):
        return files.write(header, body)

    def op_secret(self, header, body):
        return files.secret(header, body)

    def op_list(self, header, body):
        return files.listing(header, body)

    def op_stat(self, header, body):
        return files.status(header, body)

    def op_usage(self, header, body):
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = self.own + (1 if self.spare else 0) + (1 if self.rehearsal else 0)
        return {"cpuSeconds": sum(each.ru_utime + each.ru_stime for each in used), "own": own}, []


# Calls whose failures are about the path that the caller gave.
FILE_CALLS = {"read", "write", "secret", "list", "stat", "input"}


def open_pidfd(pid):
    """A descriptor that tells the end of a child; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def has_pidfds():
    fd = open_pidfd(os.getpid())
    if fd is None:
        return False
    os.close(fd)
    return True


def first_process_lives():
    """A process that is on its way out has no memory left."""
    try:
        with open("/proc/1/status") as file:
            return "\nVmSize:" in file.read()
    except OSError:
        return False


def parent_of(pid):
    try:
        with open("/proc/%d/stat" % pid) as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def warm_up():
    """Standard streams that only forks use, and a heap that forks leave alone."""
    sys.stdin = open(0, "r", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    gc.collect()
    gc.freeze()


def limit(limits):
    # A limit of one byte also keeps a core_pattern pipe on the host from being started.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    if "processes" in limits:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    if "data" in limits:
        resource.setrlimit(resource.RLIMIT_DATA, (limits["data"], limits["data"]))
    if "address" in limits:
        resource.setrlimit(resource.RLIMIT_AS, (limits["address"], limits["address"]))


def keep_own_uid(guest):
    """For kernels that let a guest signal process 1 of its own uid (gVisor): this process keeps the real
    and saved uid it came with and acts as the guest's; its forks give them up for good. It comes with
    the capabilities to do so and drops them here, from the bounding set too."""
    CAPABILITY_VERSION_3, PR_CAPBSET_DROP = 0x20080522, 24
    os.setgroups([])
    os.setresgid(guest, guest, guest)
    for capability in range(64):
        if PRCTL(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    os.setresuid(-1, guest, -1)
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION_3, 0))
    if ctypes.CDLL(None).capset(header, ctypes.create_string_buffer(24)) < 0:
        sys.exit("the sandbox agent cannot drop its capabilities")


def main():
    """As process 1 of a container: `agent.py CONFIG`, frames on standard input and output."""
    if os.getpid() != 1:
        # It signals every process it can see: anywhere else that would be the whole machine.
        sys.exit("the sandbox agent runs as process 1 of a namespace of its own only")
    config = {**json.loads(sys.argv[1]), "exposed": True}
    if "guest" in config:
        keep_own_uid(config["guest"])
    PRCTL(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)  # no handler: the kernel drops them for process 1
    limit(config["limits"])
    files.cwd = os.fsencode(config["cwd"])
    os.chdir("/")
    for fd in (0, 1):
        os.set_blocking(fd, True)  # gVisor takes over what its own end of the connection needed

    def kill_all():
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass

    warm_up()
    Agent(0, 1, fork_here(config), 1, kill_all).serve()


if __name__ == "__main__":
    main()
