"""Starts QEMU without privileges, and holds the memory of a machine that others start from.

    launcher.py run JSON QEMU ARGUMENTS…   becomes QEMU
    launcher.py hold BYTES PARENT          a memory file on descriptor 3, sealed on the first line of input
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import sys

PRCTL = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 38, 24
FIRST_FD = 3


def end_with(parent):
    """Ends with the process that started it, even when that was killed already."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def place(fd, number):
    if fd != number:
        os.dup2(fd, number)
        os.close(fd)
    os.set_inheritable(number, True)


def hold(size, parent):
    end_with(parent)
    place(os.memfd_create("machine", os.MFD_ALLOW_SEALING), FIRST_FD)
    os.ftruncate(FIRST_FD, size)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    # From now on it can only be mapped privately: no machine can change what the others start from.
    fcntl.fcntl(FIRST_FD, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    print("sealed", flush=True)
    sys.stdin.read()


def run(options, command):
    end_with(options["parent"])
    for number, file in enumerate(options["files"], FIRST_FD):
        place(os.open(file["path"], os.O_RDWR if file["write"] else os.O_RDONLY), number)
    os.chdir(options["folder"])
    if options["uid"] is not None:
        for capability in range(64):
            PRCTL(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups(options["groups"])
        os.setresgid(options["gid"], options["gid"], options["gid"])
        os.setresuid(options["uid"], options["uid"], options["uid"])
        end_with(options["parent"])  # a change of user forgets it
    PRCTL(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it talks to sockets and writes no file
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    os.umask(0o077)
    os.execve(command[0], command, {})


if sys.argv[1] == "hold":
    hold(int(sys.argv[2]), int(sys.argv[3]))
else:
    run(json.loads(sys.argv[2]), sys.argv[3:])
