"""A warm interpreter that moves forks of itself into sandboxes.

Loading an interpreter costs twenty times what a fork of one does, and its pages are shared by all forks.
What a fork inherits is this process's memory: it is executed anew for that, with an empty environment,
and knows nothing of other sandboxes. Reads requests on descriptor 0 (a SOCK_SEQPACKET socket): JSON, with
[connection to the owner, pidfd of process 1 inside, its standard input, its standard output].
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "agent"))
import agent  # noqa: E402

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP = 0x02000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_VERSION_3 = 0x20080522
INSIDE_ID = 1000
CONNECTION = 3


def check(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "%s: %s" % (what, os.strerror(code)))


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def join(request, connection, process, init_in, init_out, program, parent):
    """From here on until the last line every step takes something away. Order matters: what needs rights
    outside comes before the user namespace, what needs rights inside before they are dropped."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for path in request["cgroups"]:
        with open(path + "/cgroup.procs", "w") as file:
            file.write("0")
    os.setsid()
    if os.getuid() == 0 and request["root"]:
        os.setgroups([])
    agent.limit(request["limits"])
    # Process namespaces hold for children only: this process stays where nothing inside can name it.
    # A cgroup namespace of its own bubblewrap makes only where it may.
    if LIBC.setns(process, NAMESPACES | CLONE_NEWCGROUP) < 0:
        check(LIBC.setns(process, NAMESPACES), "setns")
    os.chdir("/")
    os.umask(0o022)
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    check(LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION_3, 0))
    check(LIBC.capset(header, ctypes.create_string_buffer(24)), "capset")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # The change of uid took it back.
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(connection, 100)
    os.dup2(init_in, 101)
    os.dup2(init_out, 102)
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for fd in (0, 1, 2):
        os.dup2(100 + fd, CONNECTION + fd, inheritable=False)
    os.closerange(CONNECTION + 3, 65536)
    instructions = ctypes.create_string_buffer(program, len(program))
    filter = Filter(len(program) // 8, ctypes.addressof(instructions))
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter), 0, 0), "seccomp")


def run(request):
    """The agent of one sandbox. Its first act ends what an agent before it may have left."""
    tokens = 0

    def kill_all():
        """Process 1 ends everything else and repeats the token: see init.ts."""
        nonlocal tokens
        tokens += 1
        token = b"%d-%d\n" % (os.getpid(), tokens)
        heard = b""
        try:
            agent.write_all(CONNECTION + 1, token)
            while not heard.endswith(token):
                chunk = os.read(CONNECTION + 2, 4096)
                if not chunk:
                    break
                heard += chunk
        except OSError:
            pass
        if not heard.endswith(token):
            raise agent.AgentFault("process 1 of the sandbox is gone")

    if request["agent"]["python"]:
        # This interpreter is the host's, what lies on its path is the image's: it loads nothing more.
        sys.path.clear()
        sys.path_importer_cache.clear()
    kill_all()
    agent.Agent(CONNECTION, CONNECTION, request["agent"], kill_all).serve()


def main():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Processes of a sandbox whose agent is gone come here: somebody has to collect them.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    control = socket.socket(fileno=0)
    with open("/tmp/owner/filter.bpf", "rb") as file:
        program = file.read()
    os.environ.clear()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getpid()
    agent.warm_up()
    while True:
        for fd in select.select([control, wake_read], [], [])[0]:
            if fd == wake_read:
                os.read(wake_read, 4096)
                reap()
                continue
            text, fds, _, _ = socket.recv_fds(control, 1 << 16, 4)
            if not text:
                return  # the supervisor is gone
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    request = json.loads(text)
                    join(request, *fds, program, parent)
                    run(request)
                except BaseException as error:
                    # Before the filter: the supervisor's log; after it: nowhere.
                    os.write(2, ("sandbox agent: %r\n" % error).encode())
                finally:
                    os._exit(1)
            for each in fds:
                os.close(each)


def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


main()
