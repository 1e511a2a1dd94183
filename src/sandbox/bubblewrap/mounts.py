"""System calls that Python has no binding for: mounts, namespaces, capabilities."""

import ctypes
import errno
import os
import signal
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWPID = 0x20000000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
# These keep Python's lock: between clone and its hooks no other code may run.
PYTHON, PYTHON_LIBC = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 2, 4, 32, 4096, 16384
MS_PRIVATE, MS_SHARED = 1 << 18, 1 << 20
MNT_DETACH = 2
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_IDMAP = 0x00100000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAPABILITY_HEADER = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))  # version 3
NO_CAPABILITIES = ctypes.create_string_buffer(24)


def check(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "%s: %s" % (what, os.strerror(code)))
    return result


def mount(source, target, kind, flags, data=None):
    encode = lambda text: None if text is None else text.encode()
    check(
        LIBC.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)),
        "mount %s" % target,
    )


def unmount(target):
    """Detaches: a process that still holds a file there cannot keep the mount in the tree."""
    if LIBC.umount2(target.encode(), MNT_DETACH) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOENT):
            raise OSError(code, "umount %s" % target)


def die_with(parent):
    """Ends this process when `parent` does, or at once if that has happened already."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def fork_bound():
    """fork() of a child that cannot outlive this process: it would hold its locks."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with(parent)
    return pid


def fork_first():
    """fork() of a child that is process 1 of a new process namespace (clone(2), CLONE_NEWPID)."""
    PYTHON.PyOS_BeforeFork()
    pid = PYTHON_LIBC.syscall(SYS_CLONE, CLONE_NEWPID | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        PYTHON.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    PYTHON.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, "clone: %s" % os.strerror(code))
    return pid


def drop_capabilities():
    """Every capability, for good."""
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    check(LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    check(LIBC.capset(CAPABILITY_HEADER, NO_CAPABILITIES), "capset")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def user_namespace(pairs):
    """A descriptor of a user namespace that maps one id to another for each pair, for id-mapped mounts."""
    ready, go = os.pipe(), os.pipe()
    pid = fork_bound()
    if pid == 0:
        os.write(ready[1], b"1" if LIBC.unshare(CLONE_NEWUSER) == 0 else b"0")
        os.read(go[0], 1)
        os._exit(0)
    try:
        if os.read(ready[0], 1) != b"1":
            raise OSError(errno.EPERM, "unshare of a user namespace")
        for name in ("uid_map", "gid_map"):
            with open("/proc/%d/%s" % (pid, name), "w") as file:
                file.write("".join("%d %d 1\n" % pair for pair in pairs))
        return os.open("/proc/%d/ns/user" % pid, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.write(go[1], b"1")
        for end in ready + go:
            os.close(end)
        os.waitpid(pid, 0)


def mount_mapped(source, target, namespace):
    """Binds `source` at `target` with the id mapping of a user namespace's descriptor."""
    tree = check(
        LIBC.syscall(SYS_OPEN_TREE, AT_FDCWD, source.encode(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC),
        "open_tree",
    )
    try:
        attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
        check(
            LIBC.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes)),
            "mount_setattr",
        )
        check(
            LIBC.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH),
            "move_mount",
        )
    finally:
        os.close(tree)
