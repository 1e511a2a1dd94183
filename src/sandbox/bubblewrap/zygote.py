"""A warm interpreter that moves forks of itself into sandboxes.

Loading an interpreter costs twenty times what a fork of one does, and its pages are shared by all forks.
What a fork inherits is this process's memory: it is executed anew for that, with an empty environment,
and knows nothing of other sandboxes. Reads requests on descriptor 0 (a SOCK_SEQPACKET socket): 
[connection to the owner, pidfd of process 1 inside, its standard input, its standard output, the request
as JSON].
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import agent  # noqa: E402
import process  # noqa: E402

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP = 0x02000000
SHARED_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_HEADER = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))  # version 3
NO_CAPABILITIES = ctypes.create_string_buffer(24)
INSIDE_ID = 1000
CONNECTION, INIT_IN, INIT_OUT, NURSERY = 3, 4, 5, 6
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
# These keep Python's lock: between clone and its hooks no other code may run.
PYTHON, PYTHON_LIBC = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)


# A guest that made a sibling of itself would have made a child of the agent, outside the process namespace:
# an orphan that is no child of process 1, and so is never seen. The nursery alone may. In struct
# sock_filter: load the number; is it clone? load its flags; is CLONE_PARENT among them? EPERM; else allow.
NO_SIBLINGS_CODE = b"".join(struct.pack("HBBI", *each) for each in [
    (0x20, 0, 0, 0), (0x15, 0, 3, SYS_CLONE), (0x20, 0, 0, 16), (0x45, 0, 1, CLONE_PARENT),
    (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)])


def check(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "%s: %s" % (what, os.strerror(code)))


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


NO_SIBLINGS_BUFFER = ctypes.create_string_buffer(NO_SIBLINGS_CODE, len(NO_SIBLINGS_CODE))
NO_SIBLINGS = Filter(len(NO_SIBLINGS_CODE) // 8, ctypes.addressof(NO_SIBLINGS_BUFFER))


def enter(request, connection, target, init_in, init_out, program, parent):
    """Two processes go in: the agent, and the nursery that makes all others and never hears what for.
    What runs in a sandbox is a fork of the nursery, so it finds in its memory no other request.

    Every step takes something away. Order matters: what needs rights outside comes before the user
    namespace, what needs rights inside before they are dropped."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for path in request["cgroups"]:
        fd = os.open(path + "/cgroup.procs", os.O_WRONLY)
        os.write(fd, b"0")
        os.close(fd)
    os.setsid()
    if request["root"]:
        os.setgroups([])
    agent.limit(request["limits"])
    agent.files.cwd = os.fsencode(request["agent"]["cwd"])
    os.umask(0o022)
    # A cgroup namespace of its own bubblewrap makes only where it may.
    if LIBC.setns(target, SHARED_NAMESPACES | CLONE_NEWCGROUP) < 0:
        check(LIBC.setns(target, SHARED_NAMESPACES), "setns")
    os.chdir("/")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.getpid()
    # As root the files in /proc of a process that cannot be traced are not the guest's.
    config = {**request["agent"], "exposed": not request["root"]}
    if os.fork() == 0:
        drop(target, own, program, [theirs.fileno()])
        tend(socket.socket(fileno=3), config)
    drop(target, parent, program, [connection, init_in, init_out, ours.fileno()])
    run(socket.socket(fileno=NURSERY))


def drop(target, parent, program, fds):
    """The rest of the way in, for each of the two. `fds` become 3, 4, … and nothing else is kept."""
    # Process namespaces hold for children only: this process stays where nothing inside can name it.
    check(LIBC.setns(target, CLONE_NEWUSER | CLONE_NEWPID), "setns")
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    check(LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    check(LIBC.capset(CAPABILITY_HEADER, NO_CAPABILITIES), "capset")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # The change of uid took both back.
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for index, fd in enumerate(fds):
        os.dup2(fd, 100 + index)
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for index in range(len(fds)):
        os.dup2(100 + index, 3 + index, inheritable=False)
    os.closerange(3 + len(fds), 65536)
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def tend(requests, config):
    """The nursery: makes a sibling of itself, a child of the agent, for each set of descriptors."""
    while True:
        text, fds, _, _ = socket.recv_fds(requests, 16, 5)
        if not text:
            os._exit(0)
        pid = clone_sibling()
        if pid == 0:
            try:
                check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(NO_SIBLINGS), 0, 0), "seccomp")
                process.become_process(fds, config)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        requests.send(struct.pack(">i", pid))


def clone_sibling():
    """fork() of a process whose parent is this one's (clone(2), CLONE_PARENT). Minus errno on failure."""
    PYTHON.PyOS_BeforeFork()
    pid = PYTHON_LIBC.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        PYTHON.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    PYTHON.PyOS_AfterFork_Parent()
    return pid if pid > 0 else -code


def run(nursery):
    """The agent. Its first act ends what an agent before it may have left."""
    tokens = 0

    def kill_all():
        """Process 1 ends everything else and repeats the token: see init.ts."""
        nonlocal tokens
        tokens += 1
        token = b"%d-%d\n" % (os.getpid(), tokens)
        heard = b""
        try:
            agent.write_all(INIT_IN, token)
            while not heard.endswith(token):
                chunk = os.read(INIT_OUT, 4096)
                if not chunk:
                    break
                heard += chunk
        except OSError:
            pass
        if not heard.endswith(token):
            raise agent.AgentFault("process 1 of the sandbox is gone")

    def fork(taken):
        try:
            socket.send_fds(nursery, [b"f"], taken)
            answer = nursery.recv(16)
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise agent.AgentFault("the process that makes others is gone")
        pid = struct.unpack(">i", answer)[0]
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    kill_all()
    agent.Agent(CONNECTION, CONNECTION, fork, 2, kill_all).serve()


def main():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Processes of a sandbox whose agent is gone come here: somebody has to collect them.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    control = socket.socket(fileno=0)
    with open("/tmp/owner/filter.bpf", "rb") as file:
        code = file.read()
    instructions = ctypes.create_string_buffer(code, len(code))
    program = Filter(len(code) // 8, ctypes.addressof(instructions))
    os.environ.clear()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getpid()
    # Everything is loaded. From inside, this folder would be the guest's own /tmp.
    sys.path[:] = process.SNIPPET_PATH
    agent.warm_up()
    while True:
        for fd in select.select([control, wake_read], [], [])[0]:
            if fd == wake_read:
                os.read(wake_read, 4096)
                reap()
                continue
            text, fds, _, _ = socket.recv_fds(control, 16, 5)
            if not text:
                return  # the supervisor is gone
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    *fds, text = fds
                    with open(text, "rb") as file:
                        file.seek(0)
                        request = json.loads(file.read())
                    if request["agent"]["python"]:
                        # This interpreter is the host's, what will lie on its path is the image's.
                        sys.path.clear()
                        sys.path_importer_cache.clear()
                    enter(request, *fds, program, parent)
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
