"""Durable layers: folders of their own below `layers`, shared by every process that uses the folder.

    layers/d-SHA256/fs           the files, with whiteouts and overlay attributes
    layers/d-SHA256/layer.json   what it is; its last field is the hash of the text before it
    layers/d-SHA256/verified     the boot in which its content was last held against its name
    layers/d-SHA256/public       an internal one that somebody also saved as such
    layers/d-SHA256/dropped      not to be found any more; its files wait for the layers that stand on it

A layer appears whole by a rename and goes by another (`partial-OWNER-...`). Who uses one holds a shared
flock(2) on its folder, and who removes it an exclusive one; both end with their process. A lock on a layer
keeps those below it too, since nothing is removed that a remaining layer stands on. The folder's own time
of change says when it was last saved.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import time

from layercopy import digest_of, remove_tree
from mounts import LIBC, check

FRESH_SECONDS = 3600
# Layers looked at in one pass of the collector: each takes a descriptor.
BATCH = 256
ID = re.compile("d-(?:[0-9a-f]{24}|[0-9a-f]{64})")
SEALED = re.compile(r'(.*),"sum":"([0-9a-f]{64})"}\n?', re.DOTALL)


class LayerError(Exception):
    """With a code of core/errors.ts."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Meta:
    """A layer.json: its fields, and whether the text is what was written."""

    def __init__(self, text):
        self.fields = json.loads(text)
        self.id = self.fields["id"]
        self.parents = self.fields["parents"]
        sealed = SEALED.fullmatch(text)
        # Version 1 had no sum, and ids that say nothing of the content.
        self.sound = self.fields["version"] == 1 or bool(
            sealed and hashlib.sha256(sealed[1].encode()).hexdigest() == sealed[2])


def seal(fields):
    text = json.dumps(fields)[:-1]
    return '%s,"sum":"%s"}\n' % (text, hashlib.sha256(text.encode()).hexdigest())


class LayerStore:
    def __init__(self, folder, owner, prefix):
        self.folder = folder
        self.owner = owner
        self.prefix = prefix
        with open("/proc/sys/kernel/random/boot_id") as file:
            self.boot = file.read().strip()
        self.held = {}
        self.trusted = set()

    def path(self, layer, *inner):
        return "/".join((self.folder, layer, *inner))

    def aside(self, name):
        """A place whose content is never a layer, and is removed at the next start at the latest."""
        return self.path("partial-%s-%s" % (self.owner, name))

    def meta(self, layer):
        """None where there is no such layer. An error of the disk is one, not a missing layer."""
        try:
            with open(self.path(layer, "layer.json"), encoding="utf-8") as file:
                return Meta(file.read())
        except FileNotFoundError:
            if os.path.isdir(self.path(layer)):
                raise damaged(layer, "its description is missing")
            return None
        except (ValueError, KeyError, TypeError):
            raise damaged(layer, "its description cannot be read")

    def marked(self, layer, mark):
        return os.path.exists(self.path(layer, mark))

    # Use

    def lock(self, layer, mode):
        """A descriptor that holds a lock, or None where the layer is gone or (not waiting) in use."""
        try:
            fd = os.open(self.path(layer), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, mode)
            if os.stat(self.path(layer)).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        unlock(fd)
        return None

    def hold(self, layer):
        """Keeps a layer and all below it from being removed by anybody, until `release`."""
        if layer in self.held:
            return
        # Waits at most for a collector that looks whether it may go.
        fd = self.lock(layer, fcntl.LOCK_SH)
        if fd is None:
            raise LayerError("NotFound", "workspace layer %s was removed" % layer)
        self.held[layer] = fd

    def release(self, layer):
        fd = self.held.pop(layer, None)
        if fd is not None:
            unlock(fd)

    def unverified(self, layers):
        """Those whose content nobody has looked at since the machine started."""
        return [layer for layer in layers if layer not in self.trusted and not self.known(layer)]

    def known(self, layer):
        meta = self.meta(layer)
        if meta is None:
            raise LayerError("NotFound", "workspace layer %s was removed" % layer)
        if not meta.sound:
            raise damaged(layer, "its description was changed")
        if meta.fields["version"] > 1 and meta.fields.get("boot") != self.boot:
            try:
                with open(self.path(layer, "verified")) as file:
                    if file.read() != self.boot:
                        return False
            except FileNotFoundError:
                return False
        self.trusted.add(layer)
        return True

    def verify(self, layer):
        """Holds a layer's content against its name. False for one of version 1, whose name says nothing."""
        meta = self.meta(layer)
        if meta is None:
            raise LayerError("NotFound", "workspace layer %s does not exist" % layer)
        if not meta.sound:
            raise damaged(layer, "its description was changed")
        if meta.fields["version"] == 1:
            return False
        try:
            digest = digest_of(self.path(layer, "fs"), meta.parents, meta.fields["uid"], self.prefix)
        except FileNotFoundError:
            raise damaged(layer, "its files are missing")
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EUCLEAN, errno.EBADMSG):
                raise
            raise damaged(layer, "its files cannot be read (%s)" % error.strerror)
        if layer != "d-" + digest or meta.id != layer:
            raise damaged(layer, "its files are not those that were saved")
        try:
            with open(self.path(layer, "verified"), "w") as file:
                file.write(self.boot)
        except OSError:
            pass  # a full or read-only disk: it is only looked at again
        return True

    def inspect(self, layer):
        """`verify` of a layer that nobody may be using."""
        fd = self.lock(layer, fcntl.LOCK_SH)
        if fd is None:
            raise LayerError("NotFound", "workspace layer %s was removed" % layer)
        try:
            return self.verify(layer)
        finally:
            unlock(fd)

    def check(self, layers):
        for layer in layers:
            self.verify(layer)

    # Making

    def keep(self, partial, fields, hashes):
        """Gives a copied layer its name, or drops the copy where the same content is there already. It is
        on disk when this returns its id."""
        digest = digest_of(partial + "/fs", fields["parents"], fields["uid"], self.prefix, hashes)
        layer = "d-" + digest
        fields = {"version": 2, "id": layer, "digest": digest, "boot": self.boot, **fields}
        with open(partial + "/layer.json", "w", encoding="utf-8") as file:
            file.write(seal(fields))
        sync(partial)
        while True:
            try:
                os.rename(partial, self.path(layer))
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if self.adopt(layer, not fields["internal"]):
                remove_tree(partial)
                break
        flush(self.folder)
        return layer

    def adopt(self, layer, public):
        """Whether the layer that is there is whole; then it counts as saved just now. Otherwise there is
        none any more."""
        fd = self.lock(layer, fcntl.LOCK_SH)
        if fd is None:
            return False
        try:
            try:
                self.check(self.unverified([layer]))
            except LayerError:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise  # somebody stands on it
                aside = self.aside("damaged-" + layer)
                os.rename(self.path(layer), aside)
                remove_tree(aside)
                return False
            if public:
                with open(self.path(layer, "public"), "w"):
                    pass
            if self.marked(layer, "dropped"):
                os.unlink(self.path(layer, "dropped"))
            os.utime(self.path(layer))
            flush(self.path(layer))
            return True
        finally:
            unlock(fd)

    # Removal

    def all(self):
        """Layers by id. One whose description is beyond reading is left where it is: for a person."""
        found = {}
        for name in os.listdir(self.folder):
            if not ID.fullmatch(name):
                continue
            try:
                meta = self.meta(name)
            except LayerError:
                continue
            if meta is not None:
                found[name] = meta
        return found

    def unwanted(self, meta, drop, unnamed):
        layer = meta.id
        try:
            fresh = time.time() - os.stat(self.path(layer)).st_mtime < FRESH_SECONDS
        except FileNotFoundError:
            return False
        internal = meta.fields["internal"] and not self.marked(layer, "public")
        return layer in drop or self.marked(layer, "dropped") or (not fresh and (internal or layer in unnamed))

    def collect(self, drop, unnamed):
        """Removes layers that were dropped, are internal, or are in `unnamed`, where no process uses them
        and no remaining layer stands on them. Those that nobody asked to drop must be an hour old: a run
        saves its layer before the event that names it. Returns what was removed."""
        drop, unnamed = set(drop), set(unnamed)
        removed, freed = [], 0
        self.drop_beneath(drop)
        while True:
            going, more = self.collect_some(drop, unnamed)
            for layer, meta, aside in going:
                removed.append(layer)
                freed += meta.fields["bytes"]
                remove_tree(aside)
            if not going or not more:
                break
        for layer in drop - self.all().keys():
            self.remove_unreadable(layer)
        for layer in drop:
            # Still needed: gone for who asks, and collected when it can be.
            if os.path.isdir(self.path(layer)):
                with open(self.path(layer, "dropped"), "w"):
                    pass
                flush(self.path(layer))
        return {"removed": removed, "bytesFreed": freed, "kept": len(self.all())}

    def drop_beneath(self, drop):
        """Internal layers that a dropped one stood on have been named by it: they need not wait an hour."""
        for layer in drop:
            try:
                meta = self.meta(layer)
            except LayerError:
                continue
            for parent in meta.parents if meta else ():
                try:
                    below = self.meta(parent)
                    if below and below.fields["internal"] and not self.marked(parent, "public"):
                        with open(self.path(parent, "dropped"), "w"):
                            pass
                except (LayerError, FileNotFoundError):
                    continue

    def remove_unreadable(self, layer):
        """A layer that nothing can be made of any more, and so nothing of what stands on it."""
        fd = self.lock(layer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fd is None:
            return
        try:
            aside = self.aside(layer)
            os.rename(self.path(layer), aside)
        finally:
            unlock(fd)
        remove_tree(aside)

    def collect_some(self, drop, unnamed):
        metas = self.all()
        wanted = {m.id for m in metas.values() if not self.unwanted(m, drop, unnamed)}
        needed = below(metas, wanted)
        # Those on top first: what a process that is ended here leaves is complete.
        candidates = sorted(metas.keys() - needed, key=lambda each: -len(metas[each].parents))
        locks = {}
        try:
            for layer in candidates[:BATCH]:
                fd = self.lock(layer, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if fd is not None:
                    locks[layer] = fd
            # Nobody can begin to use these now; what was made of them until now is seen here.
            metas = self.all()
            staying = {
                m.id for m in metas.values() if m.id not in locks or not self.unwanted(m, drop, unnamed)}
            needed = below(metas, staying)
            going = []
            for layer in candidates[:BATCH]:
                if layer in metas and layer not in needed:
                    aside = self.aside(layer)
                    os.rename(self.path(layer), aside)
                    going.append((layer, metas[layer], aside))
            return going, len(candidates) > BATCH
        finally:
            for fd in locks.values():
                unlock(fd)


def below(metas, layers):
    return {each for layer in layers for each in (layer, *metas[layer].parents)}


def unlock(fd):
    # A child that was forked meanwhile may have the descriptor too: closing alone would not free it.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def flush(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(path):
    """Everything of the file system: cheaper than an fsync for each of many files."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        check(LIBC.syncfs(fd), "syncfs")
    finally:
        os.close(fd)


def damaged(layer, why):
    return LayerError("LayerDamaged", "workspace layer %s is damaged: %s" % (layer, why))
