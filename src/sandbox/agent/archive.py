"""A workspace as a tar archive (POSIX pax), written and unpacked inside its sandbox.

Archives are hostile: no member may leave the folder it is unpacked into, by its name or through a link
that an earlier member made; devices are left out, owners and set-user-id bits are dropped.
"""

import os
import stat
import sys

# Not needed here, and every fork pays for each library that is loaded. Snippets load their own.
COMPRESSION = ("bz2", "lzma", "zlib")
sys.modules.update({name: None for name in COMPRESSION if name not in sys.modules})
import shutil  # noqa: E402
import tarfile  # noqa: E402

for name in COMPRESSION:
    if sys.modules[name] is None:
        del sys.modules[name]

# Entries of the archive, so that one that was cut short between members is noticed.
COUNT = "LONGHAUL.entries"
BLOCK = 1 << 20
MAX_LINKS = 40


class Refused(Exception):
    """The archive or the tree is at fault; the message is for people."""


def entries(root):
    """Paths below a folder in a fixed order, relative, as bytes; nothing is followed."""
    found = []

    def walk(folder, prefix):
        with os.scandir(folder) as listing:
            items = sorted(listing, key=lambda entry: entry.name)
        for entry in items:
            info = entry.stat(follow_symlinks=False)
            if stat.S_IFMT(info.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO):
                found.append((prefix + entry.name, info))
            if stat.S_ISDIR(info.st_mode):
                walk(entry.path, prefix + entry.name + b"/")

    walk(os.fsencode(root), b"")
    return found


def pack(root, fd):
    listed = entries(root)
    space = os.statvfs(root)
    apparent = sum(info.st_size for _, info in listed if stat.S_ISREG(info.st_mode))
    if apparent > 2 * space.f_blocks * space.f_frsize:
        raise Refused("the workspace holds sparse files of %d bytes in all, more than an archive should" % apparent)
    linked = {}
    with os.fdopen(fd, "wb", closefd=False) as out:
        archive = tarfile.open(
            fileobj=out, mode="w|", bufsize=BLOCK, format=tarfile.PAX_FORMAT, encoding="utf-8",
            errors="surrogateescape",
            # Of an archive that holds nothing else, tarfile takes this header for damage.
            pax_headers={COUNT: str(len(listed))} if listed else {},
        )
        for name, info in listed:
            member = tarfile.TarInfo(os.fsdecode(name))
            member.mode = stat.S_IMODE(info.st_mode) & 0o1777
            member.mtime = info.st_mtime_ns // 1_000_000_000
            path = os.path.join(os.fsencode(root), name)
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(info.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(path))
            elif stat.S_ISFIFO(info.st_mode):
                member.type = tarfile.FIFOTYPE
            elif info.st_nlink > 1 and (info.st_dev, info.st_ino) in linked:
                # Layers on different file systems have numbers in common.
                member.type, member.linkname = tarfile.LNKTYPE, linked[info.st_dev, info.st_ino]
            else:
                linked[info.st_dev, info.st_ino] = member.name
                member.size = info.st_size
                with open(path, "rb") as file:
                    archive.addfile(member, file)
                continue
            archive.addfile(member)
        archive.close()


def clear(root):
    """Empties a folder, whatever its folders permit: they are the caller's own. Nested ones are moved up
    first, so that no depth is too deep."""
    root = os.fsencode(root)
    queue = [os.path.join(root, name) for name in os.listdir(root)]
    moved = 0
    while queue:
        path = queue.pop()
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            below = os.path.join(path, name)
            if not stat.S_ISDIR(os.lstat(below).st_mode):
                os.unlink(below)
                continue
            os.chmod(below, 0o700)
            while os.path.lexists(aside := os.path.join(root, b".clear-%d" % moved)):
                moved += 1
            os.rename(below, aside)
            queue.append(aside)
        os.rmdir(path)


def unpack(fd, whiteouts):
    """Into the current folder. `whiteouts`: members `.wh.NAME` delete, as in layers of OCI images."""
    count = 0
    try:
        with os.fdopen(fd, "rb", closefd=False) as source:
            with tarfile.open(
                fileobj=source, mode="r|", bufsize=BLOCK, encoding="utf-8", errors="surrogateescape"
            ) as archive:
                folders = []
                for member in archive:
                    place(archive, member, whiteouts, folders)
                    count += 1
                expected = archive.pax_headers.get(COUNT)
            while source.read(BLOCK):
                pass  # the writer must not meet a closed pipe
    except (tarfile.TarError, EOFError) as error:
        raise Refused("not a readable tar archive: %s" % error)
    if expected is not None and int(expected) != count:
        raise Refused("the archive is cut short: %d of %s entries" % (count, expected))
    for path, mode, modified in reversed(folders):
        os.chmod(path, mode)
        os.utime(path, (modified, modified))


def place(archive, member, whiteouts, folders):
    parts = [part for part in os.fsencode(member.name).split(b"/") if part not in (b"", b".")]
    if member.name.startswith("/") or b".." in parts or b"\0" in os.fsencode(member.name):
        raise Refused("member %r leaves the archive" % member.name[:200])
    if not parts:
        return
    parent = folder_of(parts[:-1], whiteouts)
    name = parts[-1]
    if whiteouts and name.startswith(b".wh."):
        return hide(parent, name)
    path = os.path.join(parent, name)
    mode = member.mode & 0o1777
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        there = None
    if member.isdir():
        if there is None:
            os.mkdir(path)
        elif not stat.S_ISDIR(there.st_mode):
            if whiteouts and stat.S_ISLNK(there.st_mode) and os.path.isdir(folder_of(parts, True)):
                return  # as tar does: a folder that an earlier layer made a link
            os.unlink(path)
            os.mkdir(path)
        # Members below it are still to come: until then it must be writable.
        os.chmod(path, mode | 0o700)
        folders.append((path, mode | 0o700 if whiteouts else mode, member.mtime))
        return
    if there is not None:
        if stat.S_ISDIR(there.st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    if member.issym():
        os.symlink(os.fsencode(member.linkname), path)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)
        return
    if member.islnk():
        target = [part for part in os.fsencode(member.linkname).split(b"/") if part not in (b"", b".")]
        if not target or b".." in target or (member.linkname.startswith("/") and not whiteouts):
            raise Refused("hard link %r leaves the archive" % member.name[:200])
        source = os.path.join(folder_of(target[:-1], whiteouts), target[-1])
        try:
            os.link(source, path, follow_symlinks=False)
        except FileNotFoundError:
            raise Refused("hard link %r names no earlier member" % member.name[:200])
        return
    if member.isfifo():
        os.mkfifo(path, mode)
        os.utime(path, (member.mtime, member.mtime))
        return
    if not member.isfile():
        return  # devices
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(out, "wb") as file:
        data = archive.extractfile(member)
        written = 0
        while chunk := data.read(BLOCK):
            file.write(chunk)
            written += len(chunk)
    if written != member.size:
        raise Refused("member %r is cut short" % member.name[:200])
    os.chmod(path, mode)
    os.utime(path, (member.mtime, member.mtime))


def folder_of(parts, follow):
    """The folder that `parts` lead to, made where it is missing. Links are followed below the root only
    where `follow` says so, and never out of it."""
    resolved, rest, links = [], list(reversed(parts)), 0
    while rest:
        part = rest.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            del resolved[-1:]
            continue
        path = b"/".join([b".", *resolved, part])
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            os.mkdir(path)
            info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode) and follow:
            links += 1
            if links > MAX_LINKS:
                raise Refused("too many links on the way to a member")
            target = os.readlink(path)
            if target.startswith(b"/"):
                resolved = []
            rest.extend(reversed(target.split(b"/")))
            continue
        if not stat.S_ISDIR(info.st_mode):
            raise Refused("a member lies below %r, which is no folder" % os.fsdecode(path)[:200])
        resolved.append(part)
    return b"/".join([b".", *resolved])


def hide(parent, name):
    if name == b".wh..wh..opq":
        for entry in os.listdir(parent):
            remove(os.path.join(parent, entry))
        return
    remove(os.path.join(parent, name[len(b".wh."):]))


def remove(path):
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass
