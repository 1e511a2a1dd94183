"""Copies frozen layers, several as one where asked, and says what a layer holds as one number.

The trees were written by a guest: nothing is followed, and nothing but files, directories, links, pipes and
whiteouts is taken.
"""

import errno
import hashlib
import os
import stat

BLOCK = 4096
CHUNK = 1 << 20
ZEROS = bytes(BLOCK)
FORMAT = b"longhaul layer 2\n"
TRUSTED, USER = "trusted.overlay.", "user.overlay."
# What an entry costs to copy, in bytes: opening, making and closing a file against writing it.
ENTRY_COST = 64 * 1024
# Layers below this cost are merged whatever stands above them.
SMALL = 64 * ENTRY_COST


def whiteout(info):
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


class Source:
    """A layer to copy from. `link`: its files may be linked into the copy, which is on its file system and
    has its owner; a layer never changes, so they may be shared."""

    def __init__(self, path, link):
        self.path = os.fsencode(path)
        self.link = link


class Merge:
    """Layers, topmost first, as the kernel's overlay shows them, in one directory that stands for them over
    the same layers below (fs/overlayfs/namei.c and Documentation/filesystems/overlayfs.rst: whiteouts,
    opaque directories, redirects of renamed ones).

    A directory is known by its parts, (source, path in it) topmost first, and by the path at which the
    layers below continue it, None where they do not."""

    def __init__(self, sources, target, uid, prefix, based, hashes):
        self.sources = sources
        self.target = os.fsencode(target)
        self.uid = uid
        self.prefix = prefix
        self.based = based
        self.hashes = hashes
        self.links = {}
        self.bytes = self.inodes = 0

    def run(self):
        """Returns (bytes, inodes) of the copy as the disk limit counts them."""
        self.directory(self.root(0), b"", b"/" if self.based else None)
        return self.bytes, self.inodes

    def root(self, first):
        return [(i, b"") for i in range(first, len(self.sources))], b"/" if self.based else None

    def real(self, part):
        return self.sources[part[0]].path + part[1]

    def attribute(self, path, name):
        try:
            return os.getxattr(path, self.prefix + name, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return None
            raise

    def child(self, node, name):
        """The directory `name` in another, as a look-up finds it."""
        parts, base = node
        found = []
        for part in parts:
            path = part[1] + b"/" + name
            try:
                info = os.lstat(self.sources[part[0]].path + path)
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(info.st_mode):
                return found, None
            found.append((part[0], path))
            real = self.real(found[-1])
            if self.attribute(real, "opaque") == b"y":
                return found, None
            redirect = self.attribute(real, "redirect")
            if redirect and redirect.startswith(b"/"):
                rest = self.root(part[0] + 1)
                for step in redirect.split(b"/"):
                    if step:
                        rest = self.child(rest, step)
                return found + rest[0], rest[1]
            if redirect:
                name = redirect
        return found, None if base is None else base.rstrip(b"/") + b"/" + name

    def directory(self, node, path, natural):
        """`natural`: where the layers below continue the copy of this directory if it does not say."""
        parts, base = node
        target = self.target + path
        os.mkdir(target, 0o700)
        self.inodes += 1
        seen = set()
        for part in parts:
            with os.scandir(self.real(part)) as entries:
                names = sorted(entry.name for entry in entries)
            for name in names:
                if name in seen:
                    continue
                seen.add(name)
                source = self.real(part) + b"/" + name
                info = os.lstat(source)
                to = path + b"/" + name
                if stat.S_ISDIR(info.st_mode):
                    below = None if base is None else base.rstrip(b"/") + b"/" + name
                    self.directory(self.child(node, name), to, below)
                elif not whiteout(info):
                    self.other(self.sources[part[0]], source, self.target + to, info)
                elif base is not None:
                    self.inodes += 1
                    os.mknod(self.target + to, stat.S_IFCHR, 0)
        if self.based and path:
            if base is None and natural is not None:
                os.setxattr(target, self.prefix + "opaque", b"y")
            elif base != natural:
                os.setxattr(target, self.prefix + "redirect", base)
        first = self.real(parts[0])
        self.finish(first, target, os.lstat(first))

    def other(self, source, path, target, info):
        """Anything but a directory."""
        if source.link:
            try:
                os.link(path, target, follow_symlinks=False)
                self.inodes += 1
                self.bytes += info.st_blocks * 512 if stat.S_ISREG(info.st_mode) else 0
                return
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EPERM, errno.EXDEV):
                    raise
        if stat.S_ISREG(info.st_mode):
            if info.st_nlink > 1:
                first = self.links.setdefault((info.st_dev, info.st_ino), target)
                if first != target:
                    os.link(first, target, follow_symlinks=False)
                    return
            self.bytes += info.st_blocks * 512
            digest = copy_file(path, target, info.st_size, self.hashes is not None)
            if self.hashes is not None:
                self.hashes[target] = digest
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(path), target)
        elif stat.S_ISFIFO(info.st_mode):
            os.mkfifo(target)
        else:
            return
        self.inodes += 1
        self.finish(path, target, info)

    def finish(self, source, target, info):
        os.lchown(target, self.uid, self.uid)
        if not stat.S_ISLNK(info.st_mode):
            self.attributes(source, target)
            os.chmod(target, stat.S_IMODE(info.st_mode))
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)

    def attributes(self, source, target):
        """The guest's own; those that the target's file system has no room for are left out."""
        for name in os.listxattr(source, follow_symlinks=False):
            # An overlay escapes a guest's attributes that look like its own.
            own = name.startswith(self.prefix) and not name.startswith(self.prefix + "overlay.")
            if not name.startswith("user.") or own:
                continue
            value = os.getxattr(source, name, follow_symlinks=False)
            try:
                os.setxattr(target, name, value, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EOPNOTSUPP):
                    raise


def copy_file(source, target, size, hashed):
    """Holes stay holes, so a sparse file cannot fill the disk it is copied to. Returns the content's hash."""
    src = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    dst = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        content = Content() if hashed else None
        for start, chunk in data_of(src, size):
            if content:
                content.take(start, chunk)
            view = memoryview(chunk)
            while view:
                written = os.pwrite(dst, view, start)
                start += written
                view = view[written:]
        os.ftruncate(dst, size)
        return content.digest(size) if content else None
    finally:
        os.close(src)
        os.close(dst)


def data_of(fd, size):
    """(offset, bytes) of what is not a hole, in order, at whole blocks."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        start = max(position, start - start % BLOCK)
        end = min(size, end + -end % BLOCK)
        while start < end:
            chunk = os.pread(fd, min(CHUNK, end - start), start)
            if not chunk:
                return
            yield start, chunk
            start += len(chunk)
        position = max(end, position + 1)


class Content:
    """The hash of a file's bytes that reads a hole and a block of zeros as the same, whatever the file
    system makes of either: the blocks that hold something, then where they belong, then the size."""

    def __init__(self):
        self.hash = hashlib.sha256()
        self.runs = []

    def take(self, start, chunk):
        if chunk.find(ZEROS) < 0 and len(chunk) % BLOCK == 0:
            return self.run(start, chunk)
        for at in range(0, len(chunk), BLOCK):
            block = chunk[at:at + BLOCK]
            if block.count(0) != len(block):
                self.run(start + at, block)

    def run(self, start, data):
        self.hash.update(data)
        if self.runs and sum(self.runs[-1]) == start:
            start, before = self.runs.pop()
            self.runs.append((start, before + len(data)))
        else:
            self.runs.append((start, len(data)))

    def digest(self, size):
        self.hash.update(repr((self.runs, len(self.runs), size)).encode())
        return self.hash.hexdigest()


def digest_of(root, parents, uid, prefix, hashes=None):
    """The sha256 of a stored layer, its owner and the ids of those below it. Every entry in the order of its bytes:
    kind, mode, time of change in ns, name, attributes, then a link's target or a file's content; of a file
    with several names the later ones name the first. `hashes`: contents already known, by path."""
    total = hashlib.sha256(FORMAT)
    links = {}

    def text(value):
        total.update(b"%d:" % len(value))
        total.update(value)

    def attributes(path):
        names = [n for n in os.listxattr(path, follow_symlinks=False) if n.startswith((prefix, "user."))]
        total.update(b"%d " % len(names))
        for name in sorted(names):
            text(os.fsencode(name))
            text(os.getxattr(path, name, follow_symlinks=False))

    def content(path, info):
        if hashes and path in hashes:
            return hashes[path]
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            content = Content()
            for start, chunk in data_of(fd, info.st_size):
                content.take(start, chunk)
            return content.digest(info.st_size)
        finally:
            os.close(fd)

    def entry(path, relative, name):
        info = os.lstat(path)
        if whiteout(info):
            total.update(b"w")
            return text(name)
        linked = stat.S_ISREG(info.st_mode) and info.st_nlink > 1
        first = links.setdefault(info.st_ino, relative) if linked else relative
        if first != relative:
            total.update(b"h")
            text(name)
            return text(first)
        total.update(b"%o %d " % (info.st_mode, info.st_mtime_ns))
        text(name)
        if stat.S_ISLNK(info.st_mode):
            return text(os.readlink(path))
        attributes(path)
        if stat.S_ISREG(info.st_mode):
            text(content(path, info).encode())
        if stat.S_ISDIR(info.st_mode):
            with os.scandir(path) as entries:
                names = sorted(each.name for each in entries)
            total.update(b"%d " % len(names))
            for each in names:
                entry(path + b"/" + each, relative + b"/" + each, each)

    for parent in parents:
        text(parent.encode())
    total.update(b"\n%d " % uid)
    entry(os.fsencode(root), b"", b"")
    return total.hexdigest()


def cost_of(source, most):
    """What copying a layer costs, in bytes; counting ends where that passes `most`."""
    cost = 0
    folders = [source.path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                cost += ENTRY_COST
                if not source.link:
                    cost += entry.stat(follow_symlinks=False).st_blocks * 512
                if cost > most:
                    return cost
    return cost


def tier(sources, least):
    """How many of the topmost layers to merge: on as long as the next is no larger than twice those above
    it, so that what was merged once is merged again only with as much that is new (as size-tiered
    compaction does for sorted files), and `least` in any case."""
    total, count = 0, 0
    for source in sources:
        most = max(2 * total, SMALL) if count >= least else 1 << 62
        cost = cost_of(source, most)
        if cost > most:
            break
        total += cost
        count += 1
    return count


def count_shown(path):
    """(bytes, inodes) of a tree, a file with several names once. Nothing is followed."""
    total, inodes, linked = 0, 1, set()
    folders = [os.fsencode(path)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    folders.append(entry.path)
                elif info.st_nlink > 1:
                    if (info.st_dev, info.st_ino) in linked:
                        continue
                    linked.add((info.st_dev, info.st_ino))
                inodes += 1
                if stat.S_ISREG(info.st_mode):
                    total += info.st_blocks * 512
    return total, inodes


def remove_tree(top):
    """Removes a tree of any depth that a guest may be changing meanwhile: only by descriptors of its own
    directories, which no link can lead out of. What lies deeper is first moved up into `top`, so that no
    descriptor and no stack frame is held for each level."""
    parent, name = os.path.split(os.fsencode(top))
    try:
        above = os.open(parent or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        try:
            root = os.open(name, FOLDER, dir_fd=above)
        except NotADirectoryError:
            os.unlink(name, dir_fd=above)
            return
        try:
            empty_folder(root)
        finally:
            os.close(root)
        os.rmdir(name, dir_fd=above)
    except OSError:
        pass  # what is left of it stays aside, under a name that is nobody's
    finally:
        os.close(above)


FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty_folder(root):
    moved = 0
    while True:
        left = 0
        for name in os.listdir(root):
            name = os.fsencode(name)
            try:
                os.unlink(name, dir_fd=root)
                continue
            except (IsADirectoryError, PermissionError):
                pass
            except OSError:
                left += 1
                continue
            try:
                inner = os.open(name, FOLDER, dir_fd=root)
            except OSError:
                continue  # another thing by now: next round
            try:
                for below in os.listdir(inner):
                    below = os.fsencode(below)
                    try:
                        os.unlink(below, dir_fd=inner)
                    except OSError:
                        moved += 1
                        try:
                            os.rename(below, b".gone-%d-%d" % (os.getpid(), moved), src_dir_fd=inner, dst_dir_fd=root)
                        except OSError:
                            left += 1
            except OSError:
                left += 1
            finally:
                os.close(inner)
            try:
                os.rmdir(name, dir_fd=root)
            except OSError:
                pass
        names = os.listdir(root)
        if not names or left >= len(names):
            return
