"""What owners that were killed left behind, found by their locks."""

import fcntl
import json
import os
import re
import signal
import time

from layercopy import remove_tree


def lock(path, wait=True):
    """An flock ends with its process, however that ends: no stale owner can be left."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


def clean_orphans(run_dir, layers_dir, own):
    """Removes what owners left whose lock is free: folders, control groups, unfinished layers. A live owner
    holds its lock. Returns how many were gone."""
    cleaned = 0
    for name in os.listdir(run_dir):
        path = os.path.join(run_dir, name)
        if path == own or not os.path.isdir(path):
            continue
        owner = read_owner(path)
        if not os.path.exists(os.path.join(path, "lock")) and starting(path, owner):
            continue
        try:
            fd = lock(os.path.join(path, "lock"), wait=False)
        except OSError:
            continue
        end_processes(name)
        gone = True
        for cgroup in owner.get("cgroups", []):
            # The record lies in a folder that others may write to: nothing but groups of ours.
            if cgroup == "/sys/fs/cgroup" + os.path.normpath(cgroup[14:]) and cgroup.endswith("/longhaul-" + name):
                gone = remove_cgroup(cgroup) and gone
        if gone:  # otherwise its record stays, for the next start
            remove_tree(path)
        os.close(fd)
        cleaned += 1
    live = set(os.listdir(run_dir))
    for name in os.listdir(layers_dir):
        # partial-OWNER-...: a copy or a removal that its owner did not live to finish
        if name.startswith("partial-") and name.split("-")[1] not in live:
            remove_tree(os.path.join(layers_dir, name))
    return cleaned


def end_processes(owner):
    """Kills what still stands among an owner's mounts. The kernel ends nearly all of it with the owner, but
    a bubblewrap that is killed before it has told its child to go on leaves that child waiting for ever."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if not among(pid, owner):
                continue
            process = os.pidfd_open(int(pid))
        except OSError:
            continue
        try:
            if among(pid, owner):  # the number is still the same process's
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError:
            pass  # ended meanwhile
        finally:
            os.close(process)


def among(pid, owner):
    """Whether a process has the owner's folder mounted: only its own private namespaces do."""
    with open("/proc/%s/mountinfo" % pid, encoding="utf-8", errors="surrogateescape") as file:
        return re.search("/run/%s(//deleted)? " % re.escape(owner), file.read()) is not None


def read_owner(path):
    try:
        with open(os.path.join(path, "owner.json")) as file:
            owner = json.load(file)
        return owner if isinstance(owner, dict) else {}
    except (OSError, ValueError):
        return {}


def starting(path, owner):
    """Whether the owner of a folder without a lock may be about to start its supervisor."""
    if time.time() - os.stat(path).st_mtime > 60:
        return False
    # Numbers of processes say something only to who sees the same ones.
    if owner.get("pids") != os.readlink("/proc/self/ns/pid"):
        return True
    return os.path.exists("/proc/%d" % owner["pid"])


def remove_cgroup(path):
    """Kills what is left in a cgroup and removes it with its children. Whether it is gone."""
    if not os.path.isdir(path):
        return True
    for name in os.listdir(path):
        if os.path.isdir(os.path.join(path, name)):
            remove_cgroup(os.path.join(path, name))
    end = time.monotonic() + 2
    while True:
        kill_group(path)
        try:
            os.rmdir(path)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            # A process that was killed is in it for a moment more.
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def kill_group(path):
    try:
        with open(os.path.join(path, "cgroup.procs")) as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass  # gone already
