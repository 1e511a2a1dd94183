"""File calls: they run inside the sandbox, so no path or link leads out of it."""

import errno
import os
import stat

from process import write_all

SECRETS = "/tmp/.secrets"
# More would hold up the owner, which gets them all at once.
MOST_ENTRIES = 20_000
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


# Where relative paths begin: where commands start too.
cwd = b"/"


def path_of(header):
    raw = bytes.fromhex(header["raw"]) if "raw" in header else os.fsencode(header["path"])
    return os.path.join(cwd, raw)


def shown(name):
    """[text, hexadecimal bytes or None where the text says it all]"""
    try:
        return [name.decode("utf-8"), None]
    except UnicodeDecodeError:
        return [name.decode("utf-8", "replace"), name.hex()]


def read(header, body):
    fd = os.open(path_of(header), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        os.lseek(fd, header["offset"], os.SEEK_SET)
        data = bytearray()
        while len(data) < header["limit"]:
            chunk = os.read(fd, min(1 << 20, header["limit"] - len(data)))
            if not chunk:
                break
            data += chunk
        return {}, [bytes(data)]
    finally:
        os.close(fd)


def write(header, body):
    path = path_of(header)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, header["mode"])
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        os.ftruncate(fd, 0)
        write_all(fd, body)
    finally:
        os.close(fd)
    return {}, []


def secret(header, body):
    """A file below SECRETS, which a guest may have put a link in the place of: nothing is followed."""
    try:
        os.mkdir(SECRETS, 0o700)
    except FileExistsError:
        pass
    folder = os.open(SECRETS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            os.unlink(header["path"], dir_fd=folder)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(header["path"], flags, 0o600, dir_fd=folder)
        try:
            write_all(fd, body)
        finally:
            os.close(fd)
    finally:
        os.close(folder)
    return {}, []


def listing(header, body):
    found = []
    with os.scandir(path_of(header)) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
            if len(found) == MOST_ENTRIES:
                raise OSError(errno.E2BIG, "more than %d entries" % MOST_ENTRIES)
            found.append([entry.name, KINDS.get(stat.S_IFMT(info.st_mode), "other"), info.st_size])
    return {"entries": [[*shown(name), kind, size] for name, kind, size in sorted(found)]}, []


def status(header, body):
    path = path_of(header)
    info = os.lstat(path)
    kind = KINDS.get(stat.S_IFMT(info.st_mode), "other")
    answer = {"kind": kind, "bytes": info.st_size, "mode": stat.S_IMODE(info.st_mode), "modifiedMs": info.st_mtime_ns / 1e6}
    if kind == "symlink":
        answer["target"] = shown(os.readlink(path))[0]
    return answer, []
