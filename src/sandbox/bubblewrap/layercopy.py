"""Copies a frozen layer from a sandbox's tmpfs to where it lasts."""

import errno
import os
import stat


def copy_layer(source, target, uid):
    """Copies a frozen layer with its whiteouts and overlay attributes. Returns (bytes, inodes).

    The tree was written by a guest: nothing is followed, and nothing but files, directories, links,
    pipes and whiteouts is taken."""
    links = {}
    total = inodes = 0

    def attributes(src, dst):
        for name in os.listxattr(src, follow_symlinks=False):
            if name.startswith(("trusted.overlay.", "user.")):
                # origin names an inode of the old file system
                if not name.endswith("overlay.origin"):
                    value = os.getxattr(src, name, follow_symlinks=False)
                    os.setxattr(dst, name, value, follow_symlinks=False)

    def finish(src, dst, info):
        os.lchown(dst, uid, uid)
        if not stat.S_ISLNK(info.st_mode):
            attributes(src, dst)
            os.chmod(dst, stat.S_IMODE(info.st_mode))
        os.utime(dst, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)

    def walk(src, dst):
        nonlocal total, inodes
        os.mkdir(dst, 0o700)
        inodes += 1
        with os.scandir(src) as entries:
            for entry in entries:
                a, b = src + b"/" + entry.name, dst + b"/" + entry.name
                info = entry.stat(follow_symlinks=False)
                kind = stat.S_IFMT(info.st_mode)
                if kind == stat.S_IFDIR:
                    walk(a, b)
                    continue
                if info.st_nlink > 1 and kind == stat.S_IFREG:
                    first = links.setdefault(info.st_ino, b)
                    if first != b:
                        os.link(first, b, follow_symlinks=False)
                        continue
                inodes += 1
                if kind == stat.S_IFREG:
                    total += info.st_blocks * 512
                    copy_file(a, b, info.st_size)
                elif kind == stat.S_IFLNK:
                    os.symlink(os.readlink(a), b)
                elif kind == stat.S_IFIFO:
                    os.mkfifo(b)
                elif kind == stat.S_IFCHR and info.st_rdev == 0:
                    os.mknod(b, stat.S_IFCHR | 0o000, 0)
                else:
                    continue
                finish(a, b, info)
        finish(src, dst, os.lstat(src))

    walk(os.fsencode(source), os.fsencode(target))
    return total, inodes


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


def copy_file(source, target, size):
    """Holes stay holes, so a sparse file cannot fill the disk it is copied to."""
    src = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    dst = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        position = 0
        while position < size:
            try:
                start = os.lseek(src, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            end = os.lseek(src, start, os.SEEK_HOLE)
            os.lseek(src, start, os.SEEK_SET)
            os.lseek(dst, start, os.SEEK_SET)
            while start < end:
                chunk = os.read(src, min(1 << 20, end - start))
                if not chunk:
                    break
                view = memoryview(chunk)
                while view:
                    view = view[os.write(dst, view):]
                start += len(chunk)
            position = max(end, position + 1)
        os.ftruncate(dst, size)
    finally:
        os.close(src)
        os.close(dst)
