"""Mounts workspaces and starts sandboxes, in a mount namespace of its own.

One per driver. Everything it mounts lives in that private namespace, so the kernel removes all of it
when the last process in it ends: a crash leaves no mount behind. Speaks JSON lines on stdin/stdout
({id, op, ...} -> {id, ok} or {id, error, errno}); end of input means that the owner is gone. Sandboxes are
started through a socket of their own: see launcher.py.

As root it runs in the initial user namespace and gives each sandbox a uid of its own; otherwise it
maps the caller to root of a new user namespace, and overlays use `userxattr`.
"""

import errno
import glob
import json
import os
import selectors
import shutil
import signal
import stat
import sys
import time

# Isolated mode (-I) leaves this folder out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from launcher import Launcher  # noqa: E402
from layercopy import TRUSTED, USER, Merge, Source, count_shown, remove_tree, tier  # noqa: E402
from layerstore import LayerError, LayerStore  # noqa: E402
from mounts import (  # noqa: E402
    CLONE_NEWNS,
    CLONE_NEWUSER,
    LIBC,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    MS_REMOUNT,
    MS_SHARED,
    PR_SET_PDEATHSIG,
    check,
    fork_bound,
    mount,
    mount_mapped,
    unmount,
    user_namespace,
)
from orphans import clean_orphans, kill_group, lock  # noqa: E402
from roots import close_root, lowers, open_root  # noqa: E402

# In the private namespace /tmp is covered by a tmpfs that holds everything: a path each uid can walk.
BASE = "/tmp"
UID_BLOCK = 1024
# Of the guest, as command.ts says; files of layers are stored under it.
INSIDE_ID = 1000
MAX_NAMESPACES = 256
# Room beyond a sandbox's limit while its workspace is mounted: a full one gets a fresh layer too.
HEADROOM_BYTES, HEADROOM_INODES = 1024 * 1024, 64


class Box:
    """A sandbox as the supervisor knows it: file systems, and the process tree where it is up."""

    def __init__(self, sid, uid):
        self.sid = sid
        self.uid = uid
        self.limit = self.set = (0, 0)
        self.blank = None
        self.views = set()  # id-mapped mounts
        self.tmp = self.shm = None
        self.root = None
        self.network = False
        self.cgroups = []
        self.waiting = self.after = None
        self.err = b""
        self.err_fd = -1
        self.down()

    def down(self):
        self.pid = self.relay = 0
        self.ready = False
        self.init_in = self.init_out = self.process = -1


class Supervisor:
    def __init__(self, config):
        self.root = os.getuid() == 0
        self.config = config
        self.selector = selectors.DefaultSelector()
        self.sandboxes = {}
        self.workers = set()
        self.input = b""
        self.owner_dir = config["ownerDir"]
        # One supervisor at a time here: nobody sees a folder between its making and its locking.
        gate = lock(os.path.join(config["runDir"], "gate"))
        self.locks = [lock(os.path.join(self.owner_dir, "lock"))]
        cleaned = clean_orphans(config["runDir"], config["layersDir"], self.owner_dir)
        os.close(gate)
        self.first_uid = self.claim_uids() if self.root else 0
        self.enter_namespaces()
        self.prefix = TRUSTED if self.root else USER
        self.namespaces = {}
        self.store = LayerStore("layers", os.path.basename(self.owner_dir), self.prefix)
        self.idmap = self.root and self.probe_idmap("empty") and self.probe_idmap("layers")
        self.stackable = self.probe_layers()
        self.probe_overlay()
        self.disk_id = INSIDE_ID if self.idmap else config["uidBase"] if self.root else 0
        self.discarded = 0
        self.janitor = self.start_janitor()
        self.launcher = Launcher(config, self.root, self.selector, self.answer, self.sandboxes.get)
        self.ready = {
            "root": self.root,
            "firstUid": self.first_uid,
            "uids": UID_BLOCK if self.root else 0,
            "idmap": self.idmap,
            "stackable": self.stackable,
            "cleaned": cleaned,
            "pid": os.getpid(),
        }

    # Start

    def claim_uids(self):
        """A block of uids that no other live supervisor on this machine has."""
        directory = "/run/longhaul-sandbox"
        os.makedirs(directory, 0o700, exist_ok=True)
        first = self.config["uidBase"]
        for block in range(self.config["uidBlocks"]):
            try:
                self.locks.append(lock("%s/uids-%d" % (directory, first + block * UID_BLOCK), False))
            except BlockingIOError:
                continue
            # The first uid of the whole range is the owner of durable layers and never a sandbox's.
            return first + block * UID_BLOCK + 1
        raise OSError(errno.EAGAIN, "every block of sandbox uids is taken by a live process")

    def enter_namespaces(self):
        uid, gid = os.getuid(), os.getgid()
        flags = CLONE_NEWNS if self.root else CLONE_NEWNS | CLONE_NEWUSER
        check(LIBC.unshare(flags), "new namespaces")
        if not self.root:
            for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % uid), ("gid_map", "0 %d 1" % gid)):
                with open("/proc/self/" + name, "w") as file:
                    file.write(text)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        stage = os.path.join(self.owner_dir, "stage")
        os.mkdir(stage, 0o700)
        mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64m,nr_inodes=100k")
        for name in ("layers", "owner", "empty", "etc"):
            os.mkdir(os.path.join(stage, name), 0o755)
        mount(self.config["layersDir"], os.path.join(stage, "layers"), None, MS_BIND)
        mount(self.owner_dir, os.path.join(stage, "owner"), None, MS_BIND)
        # The programs may lie below /tmp, which is covered from here on.
        here = os.path.dirname(os.path.abspath(__file__))
        os.mkdir(os.path.join(stage, "py"), 0o755)
        for source in [here + "/zygote.py", *glob.glob(os.path.join(os.path.dirname(here), "agent", "*.py"))]:
            shutil.copyfile(source, os.path.join(stage, "py", os.path.basename(source)))
        # Nobody may read it: then the kernel lets nobody look into the process that runs it (ptrace(2)).
        shutil.copyfile(os.path.join(self.owner_dir, "init"), os.path.join(stage, "init"))
        os.chmod(os.path.join(stage, "init"), 0o111)
        for name, text in self.config["etc"].items():
            with open(os.path.join(stage, "etc", name), "w") as file:
                file.write(text)
        # For programs that reach the network through the proxy and check certificates themselves.
        for name in ("ssl/certs/ca-certificates.crt", "ssl/openssl.cnf", "pki/tls/certs/ca-bundle.crt"):
            if os.path.isfile("/etc/" + name):
                os.makedirs(os.path.dirname(os.path.join(stage, "etc", name)), exist_ok=True)
                shutil.copyfile("/etc/" + name, os.path.join(stage, "etc", name))
        for name in ("ld.so.cache", "localtime"):
            if os.path.isfile("/etc/" + name):
                shutil.copyfile("/etc/" + name, os.path.join(stage, "etc", name))
        if os.path.isdir("/etc/alternatives"):
            shutil.copytree("/etc/alternatives", os.path.join(stage, "etc/alternatives"), symlinks=True)
        # What a directory of the host that lies below it is reached by.
        self.host_tmp = os.open("/tmp", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        mount(stage, BASE, None, MS_BIND | MS_REC)
        # A mount made here later shows up in every sandbox that bound the directory below it.
        mount(None, BASE, None, MS_SHARED)
        os.chdir(BASE)

    def probe_idmap(self, source):
        """Whether the file system can be id-mapped (tmpfs: kernel 6.3; not overlayfs, so not in many
        containers), so that forks can have uids of their own."""
        os.mkdir("probe-idmap")
        try:
            mount_mapped(source, "probe-idmap", self.namespace(INSIDE_ID, self.first_uid))
            unmount("probe-idmap")
            return True
        except OSError:
            return False
        finally:
            os.rmdir("probe-idmap")

    def probe_layers(self):
        """Whether the layer folder's file system holds whiteouts and overlay attributes. Where it does
        not (overlayfs in a container), a durable layer holds the whole workspace."""
        path = "layers/partial-%s-probe" % os.path.basename(self.owner_dir)
        os.mkdir(path, 0o700)
        try:
            os.mknod(path + "/w", stat.S_IFCHR, 0)
            os.setxattr(path, self.prefix + "opaque", b"y")
            return True
        except OSError:
            return False
        finally:
            shutil.rmtree(path)

    def overlay(self, lower, upper, work, target):
        options = "lowerdir=%s,upperdir=%s,workdir=%s,volatile,index=off,metacopy=off" % (
            ":".join(lower), upper, work)
        options += ",redirect_dir=on" if self.root else ",userxattr"
        mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options)

    def probe_overlay(self):
        """A directory of a lower layer removed and made again needs whiteouts and opaque marks."""
        os.mkdir("probe")
        mount("tmpfs", "probe", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
        try:
            for name in ("l", "l/d", "u", "w", "m"):
                os.mkdir("probe/" + name)
            open("probe/l/d/f", "w").close()
            self.overlay(["probe/l"], "probe/u", "probe/w", "probe/m")
            os.unlink("probe/m/d/f")
            os.rmdir("probe/m/d")
            os.mkdir("probe/m/d")
            if os.listdir("probe/m/d"):
                raise OSError(errno.EIO, "a removed file shows again")
        except OSError as error:
            raise OSError(error.errno, "overlay layers do not work here: %s" % error)
        finally:
            unmount("probe/m")
            unmount("probe")
            os.rmdir("probe")

    # Workspaces

    def namespace(self, stored, uid):
        """Of a mapping that shows what is stored under one id as another's; root stays root, for overlayfs."""
        if (stored, uid) not in self.namespaces:
            if len(self.namespaces) >= MAX_NAMESPACES:
                os.close(self.namespaces.pop(next(iter(self.namespaces))))
            self.namespaces[stored, uid] = user_namespace([(0, 0), (stored, uid)])
        return self.namespaces[stored, uid]

    def view(self, sandbox, source, name, stored):
        """A directory as it looks to a sandbox's uid. Where mounts cannot be id-mapped: as it is."""
        if not self.idmap:
            return source
        target = "s%s/%s" % (sandbox.sid, name)
        if target not in sandbox.views:
            os.mkdir(target)
            mount_mapped(source, target, self.namespace(stored, sandbox.uid))
            sandbox.views.add(target)
        return target

    def forget_views(self, sandbox, names):
        """Overlayfs has taken what it needs of them."""
        for name in names:
            target = "s%s/%s" % (sandbox.sid, name)
            if target in sandbox.views:
                unmount(target)
                os.rmdir(target)
                sandbox.views.discard(target)

    def layer_path(self, sandbox, layer):
        if "durable" in layer:
            view = self.view(sandbox, "layers", "v%d" % layer["uid"], layer["uid"])
            return "%s/%s/fs" % (view, layer["durable"])
        return "%s/%s" % (self.view(sandbox, "s%s/d" % layer["home"], "v" + layer["home"], layer["uid"]), layer["name"])

    def op_open(self, request):
        sid, uid = request["sid"], request["uid"]
        top = "s%s" % sid
        os.mkdir(top, 0o755)
        for name in ("ws", "tmp", "shm", "d"):
            os.mkdir("%s/%s" % (top, name), 0o755)
        sandbox = self.sandboxes[sid] = Box(sid, uid)
        sandbox.limit = sandbox.set = (request["bytes"], request["inodes"])
        mount("tmpfs", top + "/d", "tmpfs", MS_NOSUID | MS_NODEV,
              "mode=755,size=%d,nr_inodes=%d" % (request["bytes"], request["inodes"]))

    def op_root(self, request):
        """Says what the sandbox's root is made of, and mounts it where it is not the workspace."""
        sandbox = self.sandboxes[request["sid"]]
        sandbox.root = request["root"]
        return self.verified(request, sandbox.root["lower"], lambda _: open_root(self, sandbox))

    def op_workspace(self, request):
        """Mounts a fresh upper layer over `lower` (topmost first) as the sandbox's workspace. Durable layers
        are kept from removal from here on, and looked at where nobody has since the machine started.
        Answers with what the sandbox's own file system held before."""
        return self.verified(request, request["lower"], self.mount_workspace)

    def verified(self, request, layers, operation):
        """Does what stands on layers once they are kept from removal and their content has been seen."""
        durable = [layer["durable"] for layer in layers if "durable" in layer]
        if durable:
            self.store.hold(durable[0])
        unverified = self.store.unverified(durable)
        if not unverified:
            return operation(request)

        def done(result):
            if "error" in result:
                return self.answer(dict(result, id=request["id"]))
            self.store.trusted.update(unverified)
            self.handle(request, operation)

        self.work(lambda: self.store.check(unverified), done)
        return NotImplemented

    def mount_workspace(self, request):
        sandbox = self.sandboxes[request["sid"]]
        top = "s%s" % request["sid"]
        lower = [self.layer_path(sandbox, layer) for layer in request["lower"]] or ["empty"]
        used = self.make_room(sandbox)
        upper, work = "%s/d/%s" % (top, request["upper"]), "%s/d/work-%s" % (top, request["upper"])
        os.mkdir(upper, 0o755)
        os.chown(upper, self.disk_id, self.disk_id)
        os.mkdir(work, 0o700)
        unmount(top + "/ws")
        below = os.stat(lower[0])
        if request["lower"]:
            # Its owner must be able to go in, whatever the guest made of the directory.
            os.chmod(upper, stat.S_IMODE(below.st_mode) | 0o700)
            os.utime(upper, ns=(below.st_atime_ns, below.st_mtime_ns))
        if sandbox.root and sandbox.root["writable"]:
            lower = lowers(self, sandbox, lower if request["lower"] else [])
        own = self.view(sandbox, top + "/d", "v" + sandbox.sid, self.disk_id)
        self.overlay(lower, *("%s/%s" % (own, os.path.basename(path)) for path in (upper, work)), top + "/ws")
        homes = {"v" + layer["home"] for layer in request["lower"] if "home" in layer}
        self.forget_views(sandbox, homes - {"v" + sandbox.sid})
        sandbox.blank = self.look(upper)
        if request.get("freshTmp") or not sandbox.tmp:
            sandbox.tmp = self.renew(sandbox, "tmp", sandbox.tmp, request["upper"])
            sandbox.shm = self.renew(sandbox, "shm", sandbox.shm, request["upper"])
        if request.get("discard"):
            self.discard("%s/d/%s" % (top, request["discard"]))
            self.discard("%s/d/work-%s" % (top, request["discard"]))
        if request.get("retired"):
            self.discard("%s/d/work-%s" % (top, request["retired"]))
        sandbox.limit = (request["bytes"], request["inodes"])
        if self.limit(sandbox) or not self.going(top):
            return used

        def job():
            # What is on its way out would be room beyond the limit once it is gone. Only the janitor
            # deletes: a folder that it leaves has given its room back, one emptied by two may not have.
            end = time.monotonic() + 30
            while self.going(top) and time.monotonic() < end:
                time.sleep(0.002)
            self.limit(sandbox)
            return used

        self.work(job, lambda result: self.answer(dict(result, id=request["id"])))
        return NotImplemented

    def renew(self, sandbox, name, old, tag):
        """An empty directory in place of what /tmp or /dev/shm held. Neither is ever in a layer."""
        place = "s%s/%s" % (sandbox.sid, name)
        fresh = "s%s/d/%s-%s" % (sandbox.sid, name, tag)
        os.mkdir(fresh)
        os.chown(fresh, sandbox.uid, sandbox.uid)
        os.chmod(fresh, 0o1777)
        unmount(place)
        mount(fresh, place, None, MS_BIND)
        if old:
            self.discard(old)
        return fresh

    def limit(self, sandbox, more_bytes=0, more_inodes=0):
        """Sets the limit of a sandbox's files. What is in use already stays and is the limit then: False."""
        used = self.used(sandbox)
        size, inodes = (max(pair) for pair in zip(sandbox.limit, (used["bytes"], used["inodes"])))
        wanted = (size + more_bytes, inodes + more_inodes)
        if wanted != sandbox.set:
            mount("tmpfs", "s%s/d" % sandbox.sid, "tmpfs", MS_NOSUID | MS_NODEV | MS_REMOUNT,
                  "size=%d,nr_inodes=%d" % wanted)
            sandbox.set = wanted
        return (size, inodes) == sandbox.limit

    def make_room(self, sandbox):
        """For a fresh layer, where the guest has left none."""
        used = self.used(sandbox)
        if used["bytes"] + HEADROOM_BYTES > sandbox.set[0] or used["inodes"] + HEADROOM_INODES > sandbox.set[1]:
            self.limit(sandbox, HEADROOM_BYTES, HEADROOM_INODES)
        return used

    def used(self, sandbox):
        info = os.statvfs("s%s/d" % sandbox.sid)
        return {
            "bytes": (info.f_blocks - info.f_bfree) * info.f_frsize,
            "inodes": info.f_files - info.f_ffree,
        }

    def op_resize(self, request):
        """Another limit of a sandbox's files."""
        sandbox = self.sandboxes[request["sid"]]
        sandbox.limit = (request["bytes"], request["inodes"])
        self.limit(sandbox)

    def look(self, upper):
        """What changes when anything in a fresh upper layer does."""
        info = os.stat(upper)
        names = [n for n in os.listxattr(upper) if n.startswith("user.") and not n.startswith(self.prefix)]
        return os.listdir(upper), info.st_mode, info.st_mtime_ns, names

    def op_unchanged(self, request):
        """Whether the workspace is still what the layers below its upper one show."""
        sandbox = self.sandboxes[request["sid"]]
        return self.look("s%s/d/%s" % (request["sid"], request["upper"])) == sandbox.blank

    def going(self, top):
        """Trees of a sandbox that the janitor has yet to delete."""
        return [name for name in os.listdir(top + "/d") if ".gone" in name]

    def start_janitor(self):
        """A child that deletes trees, so that a large one holds up no request."""
        read, write = os.pipe()
        if fork_bound() == 0:
            os.close(write)
            rest = b""
            while chunk := os.read(read, 65536):
                *paths, rest = (rest + chunk).split(b"\0")
                for path in paths:
                    remove_tree(os.fsdecode(path))
            os._exit(0)
        os.close(read)
        return write

    def discard(self, path):
        """Moves a tree aside, out of the way of its successor, and has it deleted."""
        for empty in (path + "/work", path):  # as overlayfs leaves a work directory
            try:
                os.rmdir(empty)
            except OSError:
                pass
        if not os.path.lexists(path):
            return
        self.discarded += 1
        aside = "%s.gone%d" % (path, self.discarded)
        os.rename(path, aside)
        try:
            os.write(self.janitor, aside.encode() + b"\0")
        except BrokenPipeError:
            os.close(self.janitor)
            self.janitor = self.start_janitor()
            os.write(self.janitor, aside.encode() + b"\0")

    def op_discard(self, request):
        self.discard("s%s/d/%s" % (request["sid"], request["name"]))

    def work(self, job, done):
        """Runs a slow file job in a child; `done` gets {ok} or {error, ...} as it is answered."""
        read, write = os.pipe()
        pid = fork_bound()
        if pid == 0:
            sys.setrecursionlimit(20_000)  # a level of directories each, and no path is longer
            try:
                result = {"ok": job()}
            except BaseException as error:
                result = failure(error)
            view = memoryview(json.dumps(result).encode())
            while view:
                view = view[os.write(write, view):]
            os._exit(0)
        os.close(write)
        text = bytearray()
        self.workers.add(pid)

        def hear():
            chunk = os.read(read, 65536)
            text.extend(chunk)
            if chunk:
                return
            self.selector.unregister(read)
            os.close(read)
            done(json.loads(text) if text else {"error": "the copying process was killed", "errno": 0})

        self.selector.register(read, selectors.EVENT_READ, hear)

    def later(self, request, job):
        """Answers with the result of a slow file job."""
        self.work(job, lambda result: self.answer(dict(result, id=request["id"])))
        return NotImplemented

    def source(self, layer, home=None):
        """A layer to copy from; `home`: to the tmpfs of this sandbox, not to the layer folder."""
        if "durable" in layer:
            return Source(self.store.path(layer["durable"], "fs"), home is None)
        return Source("s%s/d/%s" % (layer["home"], layer["name"]), layer["home"] == home)

    def op_copy(self, request):
        """Makes a durable layer of `sources` (topmost first), as they are over the layers in its meta's
        `parents`. Answers with its id; it is kept from removal until `unhold`."""
        partial = self.store.aside("copy%d" % request["id"])
        meta = request["meta"]

        def job():
            hashes = {}
            try:
                os.mkdir(partial, 0o700)
                sources = [self.source(layer) for layer in request["sources"]]
                merge = Merge(
                    sources, partial + "/fs", meta["uid"], self.prefix, bool(meta["parents"]), hashes)
                meta["bytes"], meta["inodes"] = merge.run()
                return self.store.keep(partial, meta, hashes)
            except BaseException:
                remove_tree(partial)
                raise

        def done(result):
            try:
                if "ok" in result:
                    self.store.hold(result["ok"])
                    self.store.trusted.add(result["ok"])
            except LayerError as error:
                result = failure(error)
            self.answer(dict(result, id=request["id"]))

        self.work(job, done)
        return NotImplemented

    def op_tier(self, request):
        """How many of `sources` (topmost first) to merge into the next durable layer."""
        sources = [self.source(layer) for layer in request["sources"]]
        return self.later(request, lambda: tier(sources, request["least"]))

    def op_squash(self, request):
        """One layer that stands for the topmost of `sources`, beside them. Answers with how many."""
        sandbox = self.sandboxes[request["sid"]]
        target = "s%s/d/%s" % (request["sid"], request["name"])
        sources = [self.source(layer, request["sid"]) for layer in request["sources"]]
        sandbox.set = (0, 0)  # the job sets another, in a process of its own

        def job():
            count = tier(sources, request["least"])
            based = request["based"] or count < len(sources)
            merge = Merge(sources[:count], target, self.disk_id, self.prefix, based, None)
            # Nothing of the guest runs meanwhile. The next mount sets the limit again.
            self.limit(sandbox, 1 << 50, 1 << 30)
            try:
                merge.run()
            except BaseException:
                remove_tree(target)
                self.limit(sandbox)
                raise
            return count

        return self.later(request, job)

    def op_renew(self, request):
        """Saves a durable layer again that is in use: it counts as new, and as not dropped."""
        return self.later(request, lambda: self.store.adopt(request["layer"], True))

    def op_unhold(self, request):
        self.store.release(request["layer"])

    def op_collect(self, request):
        return self.later(request, lambda: self.store.collect(request["drop"], request["unnamed"]))

    def op_verify(self, request):
        return self.later(request, lambda: self.store.inspect(request["layer"]))

    def op_count(self, request):
        """Answers with the bytes and inodes that the workspace shows, through all its layers."""
        place = "s%s/ws" % request["sid"]
        return self.later(request, lambda: dict(zip(("bytes", "inodes"), count_shown(place))))

    def op_close(self, request):
        """Ends the processes and unmounts; with `keep` the tmpfs stays for the layers on it."""
        sid = request["sid"]
        sandbox = self.sandboxes.get(sid)
        if not sandbox:
            return
        if sandbox.pid:
            os.kill(sandbox.pid, signal.SIGKILL)
        top = "s%s" % sid
        for name in ("ws", "tmp", "shm"):
            unmount("%s/%s" % (top, name))
        close_root(sandbox)
        self.forget_views(sandbox, [os.path.basename(target) for target in sandbox.views])
        if request.get("keep"):
            def discard_rest():
                for name in os.listdir(top + "/d"):
                    if name not in request["keep"] and ".gone" not in name:
                        self.discard("%s/d/%s" % (top, name))

            if sandbox.pid:
                sandbox.after = discard_rest  # nothing of the guest should run meanwhile
            else:
                discard_rest()
            return
        unmount(top + "/d")
        del self.sandboxes[sid]
        for name in os.listdir(top):
            os.rmdir("%s/%s" % (top, name))
        os.rmdir(top)

    def op_bare(self, request):
        """Before a relaunch: bubblewrap must bind the bare directories that mounts propagate to."""
        top = "s%s" % request["sid"]
        for name in ("ws", "tmp", "shm"):
            unmount("%s/%s" % (top, name))
        sandbox = self.sandboxes[request["sid"]]
        for old in (sandbox.tmp, sandbox.shm):
            if old:
                self.discard(old)
        sandbox.tmp = sandbox.shm = None

    def op_kill(self, request):
        sandbox = self.sandboxes.get(request["sid"])
        if sandbox and sandbox.pid:
            os.kill(sandbox.pid, signal.SIGKILL)
        # The agent is no child of bubblewrap; without a group the end of its connection ends it.
        for cgroup in request["cgroups"]:
            kill_group(cgroup)

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.workers:
                self.workers.remove(pid)
                continue
            self.launcher.exited(pid, status)

    # Loop

    def answer(self, message):
        line = json.dumps(message).encode() + b"\n"
        view = memoryview(line)
        while view:
            view = view[os.write(1, view):]

    def handle(self, request, operation=None):
        try:
            result = (operation or getattr(self, "op_" + request["op"]))(request)
            if result is NotImplemented:
                return  # answered by the operation itself, or later by a worker
            self.answer({"id": request["id"], "ok": result})
        except Exception as error:
            self.answer(dict(failure(error), id=request["id"]))

    def run(self):
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ended = False

        def control():
            nonlocal ended
            chunk = os.read(0, 65536)
            ended = not chunk
            self.input += chunk
            while b"\n" in self.input:
                line, self.input = self.input.split(b"\n", 1)
                self.handle(json.loads(line))

        def children():
            try:
                os.read(wake_read, 4096)
            except BlockingIOError:
                pass
            self.reap()

        self.selector.register(0, selectors.EVENT_READ, control)
        self.selector.register(wake_read, selectors.EVENT_READ, children)
        self.answer({"event": "ready", **self.ready})
        while not ended:
            for key, _ in self.selector.select():
                if key.fd not in self.selector.get_map():
                    continue  # closed by the one before
                try:
                    key.data()
                except (OSError, ValueError, KeyError) as error:
                    # One sandbox's trouble is not the others'.
                    self.answer({"event": "fault", "message": repr(error)})
                    time.sleep(0.01)

    def end(self):
        """Every sandbox's pid 1 dies with its bwrap; the namespace's mounts go with the last process."""
        for pid in [*self.launcher.children, self.launcher.zygote_pid, *self.workers]:
            os.kill(pid, signal.SIGKILL)
        os.close(self.janitor)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass


def failure(error):
    """An answer that says what went wrong."""
    if isinstance(error, LayerError):
        return {"error": str(error), "code": error.code}
    if isinstance(error, OSError):
        if error.errno == errno.ENAMETOOLONG:  # only a guest makes such paths
            return {"error": "directories are nested too deep to be saved", "code": "FileRefused"}
        return {"error": str(error), "errno": error.errno}
    return {"error": repr(error), "errno": 0}


def main():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    config = json.loads(line)
    if os.getppid() != config["pid"]:
        return  # the owner died before it could take this process with it
    try:
        supervisor = Supervisor(config)
    except OSError as error:
        print(json.dumps({"event": "failed", "message": str(error), "errno": error.errno}), flush=True)
        sys.exit(1)
    try:
        supervisor.run()
    finally:
        supervisor.end()


main()
