"""Root file systems that are not the host's: the layers of an image, or a directory.

Over them lies a skeleton: the mount points and the few files of /etc that every sandbox has. It is a lower
layer of its own, so it hides links that a hostile image has in those places, and never ends up in a layer.
"""

import ctypes
import errno
import glob
import os
import shutil
import stat
import struct

from mounts import LIBC, MS_BIND, MS_NODEV, MS_NOSUID, MS_REC, mount, unmount

SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
ACCOUNTS_BYTES = 1 << 20
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Paths that task formats write to by name: links into the sandbox's own /tmp, which no fork inherits.
TASK_DIRECTORIES = ("tests", "logs", "solution")


def open_inside(root, path, flags):
    """Opens a path as a process with that root would: links in it never lead out."""
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, RESOLVE_NO_MAGICLINKS | RESOLVE_IN_ROOT)
        fd = LIBC.syscall(SYS_OPENAT2, folder, path.encode(), how, len(how))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, "%s: %s" % (path, os.strerror(code)))
        return fd
    finally:
        os.close(folder)


def read_inside(root, path):
    """A small regular file's text; empty where there is none."""
    try:
        fd = open_inside(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return file.read(ACCOUNTS_BYTES).decode("utf-8", "surrogateescape")


def with_account(text, line):
    """An accounts file with the agent's line, unless it has its number already."""
    number = line.split(":")[2]
    if any(len(fields := each.split(":")) > 2 and fields[2] == number for each in text.splitlines()):
        return text
    return text + ("" if text.endswith("\n") or not text else "\n") + line + "\n"


def mount_lower(supervisor, lower, target):
    """An overlay of lower layers only, which nobody can write. It takes two at least."""
    options = "lowerdir=" + ":".join(lower if len(lower) > 1 else [*lower, "empty"])
    options += ",metacopy=off,redirect_dir=follow" if supervisor.root else ",userxattr"
    mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options)


def chown_tree(path, uid):
    for folder, folders, names in os.walk(path):
        for name in [*folders, *names]:
            os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)
    os.chown(path, uid, uid)


def base_of(supervisor, box):
    """What lies below everything where /usr is the host's: one tree for all, seen as the sandbox's own."""
    if not os.path.exists("base"):
        make_base("base", supervisor.disk_id)
    return supervisor.view(box, "base", "vbase", supervisor.disk_id)


def make_base(place, uid):
    """Settings of the host's programs, and the usual directories."""
    os.mkdir(place, 0o755)
    shutil.copytree("etc", place + "/etc", symlinks=True)
    for name in ("home", "mnt", "opt", "root", "srv", "var", "var/cache", "var/lib", "var/log", "var/tmp"):
        os.mkdir("%s/%s" % (place, name), 0o755)
    os.chmod(place + "/var/tmp", 0o1777)
    chown_tree(place, uid)


def keep_programs(place):
    """What the host's programs load by themselves: a layer that has it too would change them, though they are
    read-only. A verifier runs over such layers."""
    open(place + "/etc/ld.so.preload", "w").close()
    if os.path.isfile("etc/ld.so.cache"):
        shutil.copyfile("etc/ld.so.cache", place + "/etc/ld.so.cache")
    if os.path.isdir("etc/alternatives"):
        shutil.copytree("etc/alternatives", place + "/etc/alternatives", symlinks=True)
    for link in glob.glob("/usr/lib/python3*/sitecustomize.py"):
        target = os.readlink(link) if os.path.islink(link) else ""
        if target.startswith("/etc/"):
            os.makedirs(os.path.dirname(place + target), exist_ok=True)
            open(place + target, "w").close()


def make_skeleton(place, below, box, etc):
    """Mount points and files over what is mounted at `below`."""
    os.mkdir(place, 0o755)
    for name in ("proc", "dev", "tmp", "run", "etc", "workspace"):
        os.mkdir("%s/%s" % (place, name), 0o755)
    os.chmod(place + "/tmp", 0o1777)
    os.symlink("../tmp/.secrets", place + "/run/secrets")
    files = {name: etc[name] for name in ("hosts", "hostname")}
    files["resolv.conf"] = "# No name server: names are resolved by the sandbox's proxy, where it has one.\n"
    agent = {"passwd": "agent:x:1000:1000:agent:/workspace:/bin/sh", "group": "agent:x:1000:"}
    for name, line in agent.items():
        files[name] = with_account(read_inside(below, "etc/" + name) or etc[name], line)
    for name, text in files.items():
        with open("%s/etc/%s" % (place, name), "w", errors="surrogateescape") as file:
            file.write(text)
    if box.root["host"]:
        keep_programs(place)
        for name in SYSTEM:
            if os.path.islink("/" + name):
                os.symlink(os.readlink("/" + name), "%s/%s" % (place, name))
            elif os.path.isdir("/" + name):
                os.mkdir("%s/%s" % (place, name), 0o755)
    if not box.root["writable"]:
        for name in TASK_DIRECTORIES:
            if not os.path.lexists("%s/%s" % (below, name)):
                os.symlink("tmp/" + name, "%s/%s" % (place, name))
    chown_tree(place, box.uid)


def lowers(supervisor, box, layers):
    """The lower directories of a root, topmost first. The skeleton of an earlier call goes."""
    top = "s" + box.sid
    if box.root["host"]:
        layers = [*layers, base_of(supervisor, box)]
    skeleton, below = top + "/skeleton", top + "/below"
    shutil.rmtree(skeleton, ignore_errors=True)
    os.makedirs(below, exist_ok=True)
    if layers:
        mount_lower(supervisor, layers, below)
    try:
        make_skeleton(skeleton, below, box, supervisor.config["etc"])
    finally:
        unmount(below)
    return [skeleton, *layers]


def bind_directory(supervisor, box, path):
    """A directory of the host, also where this namespace has covered it."""
    target = "s%s/dir" % box.sid
    os.mkdir(target)
    if path == "/tmp" or path.startswith("/tmp/"):
        path = "/proc/self/fd/%d%s" % (supervisor.host_tmp, path[len("/tmp"):])
    if not os.path.isdir(path):
        raise OSError(errno.ENOTDIR, "%s is no directory" % box.root["dir"])
    # In a user namespace a part of a tree cannot be bound without what is mounted in it.
    mount(path, target, None, MS_BIND | (0 if supervisor.root else MS_REC))
    return target


def open_root(supervisor, box):
    """Mounts the read-only root of a sandbox, where it is not its workspace."""
    if box.root["writable"]:
        return
    top = "s" + box.sid
    layers = [supervisor.layer_path(box, layer) for layer in box.root["lower"]]
    if box.root["dir"]:
        layers = [bind_directory(supervisor, box, box.root["dir"])]
    os.mkdir(top + "/root")
    mount_lower(supervisor, lowers(supervisor, box, layers), top + "/root")


def close_root(box):
    top = "s" + box.sid
    for name in ("root", "dir"):
        if os.path.isdir("%s/%s" % (top, name)):
            unmount("%s/%s" % (top, name))
            os.rmdir("%s/%s" % (top, name))
    for name in ("skeleton", "below"):
        shutil.rmtree("%s/%s" % (top, name), ignore_errors=True)
