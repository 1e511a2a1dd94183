"""Starts bubblewrap for a workspace and has the zygote send an agent in."""

import fcntl
import json
import os
import selectors
import signal
import socket
import sys

from mounts import CLONE_NEWNET, LIBC, PR_SET_PDEATHSIG, check, die_with, drop_capabilities, fork_bound, fork_first

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "network"))
import relay  # noqa: E402

MAX_LINE = 16 * 1024 * 1024
# environment.ts tells the guest.
PROXY_PORT = 3128


class Launcher:
    """A sandbox is launched by connecting to the unix socket `s` in the owner's directory and sending one
    JSON line: that very connection becomes the agent's, so the owner talks to it without a relay."""

    def __init__(self, config, root, selector, tell, find):
        """`tell` sends an event to the owner, `find` gives a sandbox by its id."""
        self.config = config
        self.root = root
        self.selector = selector
        self.tell = tell
        self.find = find
        self.children = {}
        self.zygote = None
        self.start_zygote()
        self.listen()

    def start_zygote(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.zygote_pid = fork_bound()
        if self.zygote_pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                os.dup2(theirs.fileno(), 0)
                os.dup2(2, 1)
                os.closerange(3, 65536)
                os.chdir("/tmp/py")  # its command line shows inside, and no path of the host should
                argv = [os.path.basename(sys.executable), "-I", "-B", "zygote.py"]
                os.execve(sys.executable, argv, {})
            finally:
                os._exit(127)
        theirs.close()
        if self.zygote:
            self.zygote.close()
        self.zygote = ours

    def listen(self):
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        here = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
        os.chdir("owner")  # socket addresses are limited to 108 bytes
        self.server.bind("s")
        os.fchdir(here)
        os.close(here)
        self.server.listen(64)
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)

    def accept(self):
        connection, _ = self.server.accept()
        line = b""
        while not line.endswith(b"\n"):
            chunk = connection.recv(65536)
            if not chunk or len(line) > MAX_LINE:
                connection.close()
                return
            line += chunk
        try:
            request = json.loads(line)
            box = self.find(request["sid"])
            box.waiting = (connection, request["agent"])
            if box.ready:
                self.send_agent(box)
            elif not box.pid and not request["fresh"]:
                box.waiting = None
                connection.close()  # its tree is down, and its mounts are those of the old one
            elif not box.pid:
                box.network, box.cgroups = request["network"], request["agent"]["cgroups"]
                self.launch(box, request["argv"])
        except (ValueError, KeyError, AttributeError, OSError) as error:
            connection.close()
            self.tell({"event": "fault", "message": repr(error)})

    def launch(self, box, argv):
        pipes = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = pipes
        # Process 1 of a namespace of its own: however it ends, the kernel ends all that it has started, even
        # a child that bubblewrap has not yet bound to its own life.
        pid = fork_first()
        if pid == 0:
            try:
                become_bubblewrap(
                    self.config["bwrap"], argv, box.cgroups, box.uid if self.root else None,
                    [in_read, out_write, err_write, os.open("owner/filter.bpf", os.O_RDONLY)],
                )
            except BaseException as error:
                os.write(2, ("cannot start: %s" % error).encode())
            finally:
                os._exit(127)
        for fd in (in_read, out_write, err_write):
            os.close(fd)
        for fd in (out_read, err_read):
            os.set_blocking(fd, False)
        box.pid, box.init_in, box.init_out = pid, in_write, out_read
        box.err, box.heard = b"", b""
        box.err_fd = err_read
        self.children[pid] = box
        self.selector.register(err_read, selectors.EVENT_READ, lambda: self.read_errors(box))
        self.selector.register(out_read, selectors.EVENT_READ, lambda: self.hear(box))

    def hear(self, box):
        """Process 1 inside says that it runs: now its namespaces are complete."""
        try:
            chunk = os.read(box.init_out, 4096)
        except BlockingIOError:
            return
        if not chunk:
            self.selector.unregister(box.init_out)
            return  # its exit is told when it is collected
        box.heard += chunk
        if not box.heard.endswith(b"\n"):
            return
        self.selector.unregister(box.init_out)
        os.set_blocking(box.init_out, True)
        try:
            # bubblewrap has one child, and keeps it alive: the number cannot be another's.
            with open("/proc/%d/task/%d/children" % (box.pid, box.pid)) as file:
                box.process = os.pidfd_open(int(file.read().split()[0]))
        except (OSError, ValueError, IndexError):
            return  # ended meanwhile: its exit is told when it is collected
        if box.network:
            self.start_relay(box)
        box.ready = True
        self.send_agent(box)

    def start_relay(self, box):
        """A process that listens inside and carries what comes to the owner's filtering proxy."""
        supervisor = os.getpid()
        listening, say = os.pipe()
        pid = fork_bound()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                # Without root there is no way back from a network namespace: only this process goes.
                check(LIBC.setns(box.process, CLONE_NEWNET), "setns")
                listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", PROXY_PORT))
                listener.listen(64)
                os.write(say, b"1")
                for cgroup in box.cgroups:  # what it costs is the guest's
                    with open(cgroup + "/cgroup.procs", "w") as file:
                        file.write("0")
                os.dup2(listener.fileno(), 100)
                os.dup2(os.open("/dev/null", os.O_RDWR), 0)
                os.dup2(0, 1)
                os.dup2(100, 3)
                os.closerange(4, 65536)
                drop_capabilities()
                die_with(supervisor)
                relay.serve(socket.socket(fileno=3), "/tmp/owner/proxy", box.sid)
            except BaseException as error:
                os.write(2, ("sandbox relay: %r\n" % error).encode())
            finally:
                os._exit(1)
        os.close(say)
        os.read(listening, 1)  # its end, if it fails: the guest then finds nobody listening
        os.close(listening)
        box.relay = pid

    def send_agent(self, box):
        if not box.waiting:
            return
        (connection, request), box.waiting = box.waiting, None
        # In a file of its own: of any size, and never in the zygote's memory, which all forks inherit.
        text = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            with open(text, "wb", closefd=False) as file:
                file.write(json.dumps({**request, "root": self.root}).encode())
            fds = [connection.fileno(), box.process, box.init_in, box.init_out, text]
            try:
                socket.send_fds(self.zygote, [b"a"], fds)
            except (BrokenPipeError, ConnectionResetError):
                # It was ended from outside: its agents are gone too, new ones can come.
                self.start_zygote()
                socket.send_fds(self.zygote, [b"a"], fds)
        finally:
            os.close(text)
            connection.close()

    def read_errors(self, box):
        """Keeps the end of what bubblewrap says; guests never have this descriptor."""
        while box.err_fd >= 0:
            try:
                chunk = os.read(box.err_fd, 65536)
            except BlockingIOError:
                return
            box.err = (box.err + chunk)[-4096:]
            if not chunk:
                self.close_errors(box)

    def close_errors(self, box):
        if box.err_fd >= 0:
            self.selector.unregister(box.err_fd)
            os.close(box.err_fd)
            box.err_fd = -1

    def exited(self, pid, status):
        """Whether the process was one of these. Tells the end of a sandbox's process tree."""
        for box in self.children.values():
            if box.relay == pid:
                box.relay = 0
                return True
        if pid == self.zygote_pid:
            self.start_zygote()
            return True
        box = self.children.pop(pid, None)
        if not box:
            return False
        self.read_errors(box)
        self.close_errors(box)
        if box.waiting:
            box.waiting[0].close()
        if box.relay:
            os.kill(box.relay, signal.SIGKILL)
        for fd in (box.init_in, box.init_out, box.process):
            if fd >= 0:
                if fd in self.selector.get_map():
                    self.selector.unregister(fd)
                os.close(fd)
        if box.after:
            box.after()
            box.after = None
        box.down()
        self.tell({
            "event": "exit",
            "sid": box.sid,
            "status": os.waitstatus_to_exitcode(status),
            "stderr": box.err.decode("utf-8", "replace"),
        })
        return True


def become_bubblewrap(program, argv, cgroups, uid, fds):
    # Standard streams and the filter survive, nothing else does.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
    for to, fd in enumerate(moved):
        os.dup2(fd, to)
    os.closerange(len(fds), 65536)
    for cgroup in cgroups:
        with open(cgroup + "/cgroup.procs", "w") as file:
            file.write("0")
    for name in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    os.umask(0o022)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # Should the supervisor have ended already, the end of its standard input ends process 1 inside.
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # An empty environment: process 1's is readable inside as /proc/1/environ.
    os.execve(program, argv, {})

