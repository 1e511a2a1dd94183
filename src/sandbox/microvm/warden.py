#!/usr/bin/python3 -IS
"""Process 1 of a virtual machine: makes the guest's surroundings, starts the agent, and tells the host what
the kernel counted.

The agent and every guest process live in a process namespace of their own, as an unprivileged user: they
can neither see nor signal this program, nor open its port to the host. Its end is a kernel panic, which
the host sees as a reset of the machine.

JSON lines on the second virtio-serial port: {"id", "op", ...} answered by {"id", ...}. Unasked it says
{"events"} when a limit was met and {"ended"} when the agent ended.
"""

import ctypes
import errno
import fcntl
import glob
import json
import os
import select
import signal
import socket
import stat
import struct
import time

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
SYS_FINIT_MODULE = 313  # x86-64
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 24, 22, 2
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

HOME = "/longhaul"
STATE = HOME + "/state"
GROUP = HOME + "/cgroup/guest"
USER = 1000
# In the order in which they depend on each other; what a kernel has built in is not there.
MODULES = ("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_mmio", "virtio_console")
SETTINGS = {
    "kernel/dmesg_restrict": "1",
    "kernel/kptr_restrict": "2",
    "kernel/unprivileged_bpf_disabled": "1",
    "user/max_user_namespaces": "0",
    "vm/overcommit_memory": "0",
    "vm/panic_on_oom": "0",
}
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}
LINE_LIMIT = 1 << 20


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (what, os.strerror(number)))
    return result


def mount(source, target, kind, flags=0, data=""):
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    check(LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode()), "mount " + target)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def read(path):
    with open(path) as file:
        return file.read()


def fields(path):
    return {name: int(value) for name, value in (line.split() for line in read(path).splitlines())}


def load_modules():
    for name in MODULES:
        try:
            fd = os.open("%s/modules/%s.ko" % (HOME, name), os.O_RDONLY)
        except FileNotFoundError:
            continue
        check(LIBC.syscall(SYS_FINIT_MODULE, fd, b"", 0), "module " + name)
        os.close(fd)


def open_port(number):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for path in glob.glob("%s/dev/vport*p%d" % (HOME, number)):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.005)
    raise OSError(errno.ENODEV, "no virtio-serial port %d" % number)


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(sock, SIOCGIFFLAGS, request)
        flags, = struct.unpack_from("h", request, 16)
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def surroundings():
    """Whatever the agent shall see besides its files; the root is read-only from here on."""
    mount("dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=64")
    os.umask(0)
    for name, (major, minor) in DEVICES.items():
        os.mknod("/dev/" + name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    for name, target in LINKS.items():
        os.symlink(target, "/dev/" + name)
    os.umask(0o022)
    for name in ("pts", "shm"):
        os.mkdir("/dev/" + name)
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for name, value in SETTINGS.items():
        try:
            write("/proc/sys/" + name, value)
        except FileNotFoundError:
            pass


def become_agent(port, config, seccomp):
    """In a child: never returns."""
    try:
        for source, target in ((port, 0), (port, 1)):
            os.dup2(source, target)
        os.dup2(os.open(HOME + "/dev/kmsg", os.O_WRONLY), 2)
        os.setsid()
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        for name in ("cgroup", "dev", "state"):
            check(LIBC.umount2(("%s/%s" % (HOME, name)).encode(), 2), "umount " + name)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        write("/proc/self/oom_score_adj", "-1000")
        os.closerange(3, 4096)
        for capability in range(64):
            LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        install(seccomp)
        os.execve("/usr/bin/python3", ["python3", "-IB", HOME + "/agent/agent.py", json.dumps(config)], {"LANG": "C.UTF-8"})
    except BaseException as error:
        try:
            os.write(2, b"<2>longhaul: the agent did not start: %r" % repr(error).encode())
        finally:
            os._exit(1)


def install(program):
    class Filter(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    code = ctypes.create_string_buffer(program, len(program))
    holder = Filter(len(program) // 8, ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(holder), 0, 0), "seccomp")


class Warden:
    def __init__(self):
        self.agent_port = open_port(1)
        self.port = open_port(2)
        self.pending = b""
        self.agent = None
        self.pidfd = None
        self.counted = None
        self.watched = []
        self.poll = select.poll()
        self.poll.register(self.port, select.POLLIN)

    def say(self, message):
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.port, data):]

    def serve(self):
        self.say({"hello": 1})
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.port:
                    self.receive()
                elif fd == self.pidfd:
                    self.agent_ended()
                else:
                    self.tell_events()

    def receive(self):
        chunk = os.read(self.port, 65536)
        if not chunk:
            time.sleep(0.05)  # the host is gone, or about to connect
            return
        self.pending += chunk
        if len(self.pending) > LINE_LIMIT:
            raise ValueError("the host sent a line that does not end")
        *lines, self.pending = self.pending.split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                answer = getattr(self, "op_" + request["op"])(request) or {}
            except OSError as error:
                answer = {"error": str(error)}
            self.say({"id": request["id"], **answer})

    # What happens by itself

    def events(self):
        return {
            "oomKills": fields(GROUP + "/memory.events")["oom_kill"],
            "pidsRefused": fields(GROUP + "/pids.events")["max"],
        }

    def tell_events(self):
        for file in self.watched:
            file.seek(0)
            file.read()
        now = self.events()
        if now != self.counted:
            self.counted = now
            self.say({"events": now})

    def agent_ended(self):
        _, status = os.waitpid(self.agent, 0)
        self.poll.unregister(self.pidfd)
        os.close(self.pidfd)
        self.agent = self.pidfd = None
        self.say({"ended": os.waitstatus_to_exitcode(status), "events": self.events()})

    # Requests

    def op_setup(self, request):
        """The file system of the workspace and /tmp, and the group that limits hold for."""
        mount("state", STATE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        for name, target, mode in (("workspace", "/workspace", 0o700), ("tmp", "/tmp", 0o1777), ("shm", "/dev/shm", 0o1777)):
            path = "%s/%s" % (STATE, name)
            os.mkdir(path)
            os.chmod(path, mode)
            os.chown(path, USER, USER)
            mount(path, target, None, MS_BIND)
        mount(None, "/dev", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64")
        mount(None, "/", None, MS_REMOUNT | MS_RDONLY)
        write(HOME + "/cgroup/cgroup.subtree_control", "+memory +pids +cpu")
        os.mkdir(GROUP)
        for name in ("memory.events", "pids.events"):
            file = open("%s/%s" % (GROUP, name))
            file.read()
            self.watched.append(file)
            self.poll.register(file.fileno(), select.POLLPRI)

    def op_limit(self, request):
        mount(None, STATE, None, MS_REMOUNT | MS_NOSUID | MS_NODEV, "size=%d,nr_inodes=%d" % (request["diskBytes"], request["inodes"]))
        write(GROUP + "/memory.max", str(request["memory"]))
        write(GROUP + "/pids.max", str(request["pids"]))
        write(GROUP + "/cpu.max", "%d 100000" % (request["cpus"] * 100000))

    def op_start(self, request):
        """A new agent. What the host sent to an earlier one is thrown away: all up to the marker."""
        marker, seen = bytes.fromhex(request["marker"]), b""
        while not seen.endswith(marker):
            seen = seen[-len(marker):] + os.read(self.agent_port, 65536)
        program = bytes.fromhex(request["seccomp"])
        # A child makes the namespaces; its own child is the first process in them.
        keeper = os.fork()
        if keeper == 0:
            try:
                write(GROUP + "/cgroup.procs", "0")
                check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS), "unshare")
                first = os.fork()
                if first == 0:
                    become_agent(self.agent_port, request["config"], program)
                # The group is the guest's: this process is none of it.
                write(HOME + "/cgroup/cgroup.procs", "0")
                os.close(self.agent_port)
                os.close(self.port)
                _, status = os.waitpid(first, 0)
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
            except BaseException:
                os._exit(2)
        self.agent = keeper
        self.pidfd = os.pidfd_open(keeper)
        self.poll.register(self.pidfd, select.POLLIN)

    def op_stop(self, request):
        """Ends the agent and with it everything in its namespace."""
        write(GROUP + "/cgroup.kill", "1")
        write(GROUP + "/cgroup.freeze", "0")
        if self.agent is not None:
            self.agent_ended()

    def op_count(self, request):
        used = fields(GROUP + "/cpu.stat")
        return {
            **self.events(),
            "cpuSeconds": used["usage_usec"] / 1e6,
            "peakMemoryBytes": int(read(GROUP + "/memory.peak")),
            "pids": int(read(GROUP + "/pids.current")),
        }

    def op_freeze(self, request):
        """Nothing of the guest runs from the answer on, until `thaw`."""
        write(GROUP + "/cgroup.freeze", "1")
        deadline = time.monotonic() + 10
        while not fields(GROUP + "/cgroup.events")["frozen"]:
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "the guest's processes cannot be frozen")
            time.sleep(0.0005)

    def op_thaw(self, request):
        write(GROUP + "/cgroup.freeze", "0")

    def op_refresh(self, request):
        """After the machine stood still, or became two: the time, and random numbers of its own."""
        time.clock_settime_ns(time.CLOCK_REALTIME, int(request["now"]))
        seed = bytes.fromhex(request["seed"])
        with open("/dev/urandom", "wb", buffering=0) as device:
            fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
            fcntl.ioctl(device, RNDRESEEDCRNG)


def main():
    os.environ.clear()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("devtmpfs", HOME + "/dev", "devtmpfs", MS_NOSUID | MS_NOEXEC, "mode=700")
    mount("cgroup", HOME + "/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chmod(HOME + "/cgroup", 0o700)
    write("/proc/self/oom_score_adj", "-1000")
    load_modules()
    loopback_up()
    surroundings()
    Warden().serve()


main()
