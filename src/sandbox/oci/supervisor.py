"""Mounts workspaces and runs an OCI runtime, in a mount namespace of its own.

One per driver. Speaks JSON lines on stdin/stdout ({id, op, ...} -> {id, ok} or {id, error, errno}); the end
of input means that the owner is gone: every container is then deleted. A container is launched by
connecting to the unix socket `s` in the owner's folder and sending one JSON line: that very connection
becomes its standard input and output, so no relay stands between the owner and the agent inside.

A container's files are one tmpfs, mounted here with the sandbox's limits, so that the kernel holds them
whatever the runtime is. As root each sandbox has two host uids of its own: one for root inside, which
nothing runs as once it has started, and one for the guest.
"""

import errno
import fcntl
import glob
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "bubblewrap"))
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
    check,
    die_with,
    mount,
    unmount,
)

PR_SET_CHILD_SUBREAPER = 36
MS_RDONLY = 1
UID_BLOCK = 1024
LOCKS = "/run/longhaul-sandbox"
# In the private namespace this folder is covered by a tmpfs that holds bundles, state and workspaces: a path
# that each uid can walk, whatever folder the driver was given.
BASE = "/dev/shm"
# What a runtime gets to see of the host's environment.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "XDG_RUNTIME_DIR": BASE}
DELETE_SECONDS = 20


def lock(path, wait=True):
    """An flock ends with its process, however that ends: no stale owner can be left."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


def delete_container(command, container):
    """Ends and forgets a container, whatever state it is in."""
    try:
        subprocess.run(
            [*command, "delete", "--force", container], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=ENVIRONMENT, timeout=DELETE_SECONDS, check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        pass


def kill_group(path):
    try:
        with open(os.path.join(path, "cgroup.procs")) as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass  # gone already


def thaw(path):
    """Frozen processes of a version 1 group do not even die."""
    for name, text in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        try:
            with open(os.path.join(path, name), "w") as file:
                file.write(text)
        except OSError:
            pass  # another version, or another hierarchy


def remove_groups(paths):
    """Ends what is left in control groups and removes them. All are thawed first: a process is in a group
    of each hierarchy, and dies only when none of them holds it."""
    for top in paths:
        for path, _, _ in os.walk(top):
            thaw(path)
    for path in paths:
        remove_group(path)


def remove_group(path):
    if not os.path.isdir(path):
        return
    for name in os.listdir(path):
        if os.path.isdir(os.path.join(path, name)):
            remove_group(os.path.join(path, name))
    kill_group(path)
    for _ in range(100):
        try:
            return os.rmdir(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
        time.sleep(0.01)


def own_groups(owner):
    """The groups of an owner that a runtime made: above the sandboxes' own, which its record names."""
    return glob.glob("/sys/fs/cgroup/longhaul-" + owner) + glob.glob("/sys/fs/cgroup/*/longhaul-" + owner)


class Box:
    """A sandbox: its folder and, where it runs, its container."""

    def __init__(self, sid, command):
        self.sid = sid
        self.top = os.path.join(BASE, sid)
        self.image = os.path.join(BASE, "image-" + sid)
        self.command = [*command, "--root", self.top + "/state"]
        self.container = None
        self.pid = 0  # the process whose end is the container's
        self.starting = 0
        self.err_fd = -1
        self.err = b""

    def kill(self):
        """Both are children of this process that it has not collected, so the numbers are theirs."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        if self.starting:
            try:
                os.killpg(self.starting, signal.SIGKILL)  # with the runtime's command
            except ProcessLookupError:
                pass  # not yet a group: it reads that its parent is gone, or is deleted by name


class Supervisor:
    def __init__(self, config):
        self.config = config
        self.root = os.getuid() == 0
        self.owner_dir = config["ownerDir"]
        self.selector = selectors.DefaultSelector()
        self.boxes = {}
        self.workers = {}
        self.early = {}  # ends of processes that may be a container's, before its `start` has returned
        self.input = b""
        gate = lock(os.path.join(config["runDir"], "gate"))
        self.locks = [lock(os.path.join(self.owner_dir, "lock"))]
        cleaned = self.clean_orphans()
        os.close(gate)
        first_uid = self.claim_uids() if self.root else 0
        os.chdir(self.owner_dir)
        self.enter_namespaces()
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.server.bind("s")  # socket addresses are limited to 108 bytes
        self.server.listen(64)
        self.ready = {
            "root": self.root,
            "firstUid": first_uid,
            "uids": UID_BLOCK if self.root else 0,
            "cleaned": cleaned,
            "pid": os.getpid(),
        }

    # Start

    def clean_orphans(self):
        """Removes what owners left whose lock is free: containers, control groups, folders."""
        cleaned = 0
        for name in os.listdir(self.config["runDir"]):
            path = os.path.join(self.config["runDir"], name)
            if path == self.owner_dir or not os.path.isdir(path):
                continue
            try:
                fd = lock(os.path.join(path, "lock"), wait=False)
            except OSError:
                continue
            try:
                with open(os.path.join(path, "owner.json")) as file:
                    owner = json.load(file)
            except (OSError, ValueError):
                owner = {"cgroups": []}
            # The record lies in a folder that others may write to: nothing but groups of ours.
            named = [
                group for group in owner["cgroups"]
                if group == "/sys/fs/cgroup" + os.path.normpath(group[14:]) and group.endswith("/longhaul-" + name)
            ]
            remove_groups([*named, *own_groups(name)])
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
            cleaned += 1
        live = set(os.listdir(self.config["runDir"]))
        for name in os.listdir(self.config["layersDir"]):
            # partial-OWNER-ID: an archive that its owner did not live to finish
            if name.startswith("partial-") and name.split("-")[1] not in live:
                shutil.rmtree(os.path.join(self.config["layersDir"], name), ignore_errors=True)
        return cleaned

    def claim_uids(self):
        """A block of uids that no other live supervisor on this machine has, of bubblewrap's or this kind."""
        os.makedirs(LOCKS, 0o700, exist_ok=True)
        first = self.config["uidBase"]
        for block in range(self.config["uidBlocks"]):
            try:
                self.locks.append(lock("%s/uids-%d" % (LOCKS, first + block * UID_BLOCK), False))
            except BlockingIOError:
                continue
            return first + block * UID_BLOCK + 1
        raise OSError(errno.EAGAIN, "every block of sandbox uids is taken by a live process")

    def enter_namespaces(self):
        uid, gid = os.getuid(), os.getgid()
        check(LIBC.unshare(CLONE_NEWNS if self.root else CLONE_NEWNS | CLONE_NEWUSER), "new namespaces")
        if not self.root:
            for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % uid), ("gid_map", "0 %d 1" % gid)):
                with open("/proc/self/" + name, "w") as file:
                    file.write(text)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        # No flags: a runtime in a user namespace could not take them off for the read-only root it makes of it.
        mount("tmpfs", BASE, "tmpfs", 0, "mode=755,size=256m,nr_inodes=200k")
        for name, text in self.config["agent"].items():
            path = os.path.join(BASE, "agent", name)
            os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        if self.config["hideUnified"]:
            # crun 1.8 refuses to run where version 2 is mounted beside version 1.
            mount("tmpfs", "/sys/fs/cgroup/unified", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=4k")

    # Operations

    def op_open(self, request):
        """The sandbox's tmpfs, in folders that the bundle binds."""
        command = [self.config["runtime"], *self.config["flags"]]
        box = self.boxes[request["sid"]] = Box(request["sid"], command)
        for name in ("", "/d", "/bundle", "/bundle/rootfs", "/state"):
            os.mkdir(box.top + name, 0o755)
        if request["runtimeUid"]:
            os.chown(box.top + "/state", request["runtimeUid"], request["runtimeUid"])
        root = box.top + "/bundle/rootfs"
        for path in request["root"]["directories"]:
            os.makedirs(root + path, 0o755, exist_ok=True)
        for path, text in request["root"]["files"].items():
            os.makedirs(os.path.dirname(root + path), 0o755, exist_ok=True)
            with open(root + path, "w") as file:
                file.write(text)
        for path, target in request["root"]["links"].items():
            os.symlink(target, root + path)
        if request["image"]:
            self.bind_image(box, request["image"])
        mount("tmpfs", box.top + "/d", "tmpfs", MS_NOSUID | MS_NODEV,
              "mode=755,size=%d,nr_inodes=%d" % (request["bytes"], request["inodes"]))
        for name, mode in (("ws", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
            path = "%s/d/%s" % (box.top, name)
            os.mkdir(path)
            os.chown(path, request["uid"], request["uid"])
            os.chmod(path, mode)

    def bind_image(self, box, directory):
        """By a path that each uid can walk, and beside the sandbox's own folder, which is deleted with it."""
        os.mkdir(box.image)
        mount(directory, box.image, None, MS_BIND)
        try:
            mount(None, box.image, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
        except OSError as error:
            # In a user namespace flags of the mount below may be locked; the container's own bind is read-only.
            if error.errno != errno.EPERM:
                raise

    def op_fresh(self, request):
        """Before a relaunch: what was in /tmp and /dev/shm is gone. Nothing of the guest runs."""
        for name in ("tmp", "shm"):
            place = "%s/d/%s" % (self.boxes[request["sid"]].top, name)
            for entry in os.scandir(place):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)

    def op_kill(self, request):
        box = self.boxes.get(request["sid"])
        if box:
            box.kill()
        for group in request["cgroups"]:
            thaw(group)
            kill_group(group)

    def op_delete(self, request):
        """Has the runtime forget a container that has ended, or ends it."""
        box = self.boxes[request["sid"]]
        return self.work(request, lambda: self.forget(box))

    def op_runtime(self, request):
        """A command of the runtime about a container: pause or resume."""
        command = self.boxes[request["sid"]].command

        def job():
            done = subprocess.run(
                [*command, request["command"], request["container"]], stdin=subprocess.DEVNULL,
                capture_output=True, env=ENVIRONMENT, timeout=DELETE_SECONDS, check=False,
            )
            if done.returncode:
                raise OSError(0, done.stderr.decode("utf-8", "replace").strip()[-400:])

        return self.work(request, job)

    def op_close(self, request):
        box = self.boxes.pop(request["sid"], None)
        if box is None:
            return None
        box.kill()

        def job():
            self.forget(box)
            unmount(box.top + "/d")
            if os.path.isdir(box.image):
                unmount(box.image)
                os.rmdir(box.image)
            shutil.rmtree(box.top, ignore_errors=True)

        return self.work(request, job)

    def forget(self, box):
        """Has the runtime delete a container. What its own process starts and keeps needs no deletion: all of
        it ends with that process, and its state with the sandbox's folder."""
        if box.container and self.config["deletes"]:
            delete_container(box.command, box.container)

    def work(self, request, job):
        """Runs something slow in a child and answers at its end."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            result = {"ok": True}
            try:
                job()
            except OSError as error:
                result = {"error": str(error.strerror or error), "errno": error.errno}
            except BaseException as error:
                result = {"error": repr(error), "errno": 0}
            os.write(write, json.dumps(result).encode())
            os._exit(0)
        os.close(write)
        self.workers[pid] = (read, lambda result: self.tell({**result, "id": request["id"]}))
        return NotImplemented

    # Launch

    def accept(self):
        connection, _ = self.server.accept()
        line = b""
        connection.settimeout(5)
        try:
            while not line.endswith(b"\n"):
                chunk = connection.recv(65536)
                if not chunk:
                    return connection.close()
                line += chunk
            connection.settimeout(None)
            self.launch(connection, json.loads(line))
        except (OSError, ValueError, KeyError) as error:
            self.tell({"event": "log", "message": "launch: %s" % error})
        finally:
            connection.close()

    def launch(self, connection, request):
        box = self.boxes[request["sid"]]
        box.container = request["container"]
        with open(box.top + "/bundle/config.json", "w") as file:
            json.dump(request["config"], file)
        err_read, err_write = os.pipe()
        os.set_blocking(err_read, False)
        ready = os.pipe() if request["map"] else (-1, -1)
        go = os.pipe() if request["map"] else (-1, -1)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                fds = [connection.fileno(), connection.fileno(), err_write]
                self.start(box, request, fds, ready[1], go[0], parent)
            except BaseException as error:
                os.write(err_write, ("cannot start: %s" % error).encode())
            finally:
                os._exit(127)
        os.close(err_write)
        if request["map"]:
            self.map_ids(pid, request["map"], ready, go)
        self.close_errors(box)
        box.err_fd, box.err = err_read, b""
        self.selector.register(err_read, selectors.EVENT_READ, lambda: self.read_errors(box))
        box.starting = pid
        if not request["detached"]:
            box.pid = pid

    def map_ids(self, pid, ids, ready, go):
        """The user namespace that a child has made: its root and its guest are host uids of their own."""
        os.close(ready[1])
        os.close(go[0])
        try:
            if os.read(ready[0], 1):
                text = "".join("%d %d 1\n" % pair for pair in map(tuple, ids))
                for name in ("uid_map", "gid_map"):
                    with open("/proc/%d/%s" % (pid, name), "w") as file:
                        file.write(text)
                os.write(go[1], b"1")
        except OSError as error:
            self.tell({"event": "log", "message": "user namespace: %s" % error})
        finally:
            os.close(ready[0])
            os.close(go[1])

    def start(self, box, request, fds, ready, go, parent):
        """In a child: the runtime, with the connection as the container's standard streams."""
        os.setsid()
        for to, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]):
            os.dup2(fd, to)
        kept = [fd for fd in (ready, go) if fd >= 0]
        for to, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in kept]):
            os.dup2(fd, 3 + to)
        os.closerange(3 + len(kept), 65536)
        container, bundle = request["container"], box.top + "/bundle"
        os.chdir("/")
        if not request["detached"]:
            for group in request["cgroups"]:
                join(group, 0)
            if request["map"]:
                check(LIBC.unshare(CLONE_NEWUSER), "user namespace")
                os.write(3, b"1")
                if not os.read(4, 1):
                    sys.exit("the user namespace was not mapped")
                os.closerange(3, 5)
                os.setgroups([])
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
            die_with(parent)
            argv = [*box.command, "run", "--bundle", bundle, container]
            os.execve(argv[0], argv, ENVIRONMENT)
        pid_file = box.top + "/pid"
        command = [*box.command, "create", "--bundle", bundle, "--pid-file", pid_file, container]
        code = subprocess.call(command, env=ENVIRONMENT)
        if code:
            os._exit(code)
        with open(pid_file) as file:
            pid = int(file.read())
        for group in request["cgroups"]:
            join(group, pid)
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        os._exit(subprocess.call([*box.command, "start", container], env=ENVIRONMENT, **quiet))

    def read_errors(self, box):
        """Keeps the end of what the runtime and the agent say; guests never have this descriptor."""
        while box.err_fd >= 0:
            try:
                chunk = os.read(box.err_fd, 65536)
            except BlockingIOError:
                return
            box.err = (box.err + chunk)[-4096:]
            if not chunk:
                self.close_errors(box)

    def close_errors(self, box):
        if box.err_fd >= 0:
            self.selector.unregister(box.err_fd)
            os.close(box.err_fd)
            box.err_fd = -1

    def started(self, box, status):
        """The runtime's `create` and `start` have returned: the container's first process is our child now."""
        box.starting = 0
        if status == 0:
            with open(box.top + "/pid") as file:
                pid = int(file.read())
            if self.early.pop(pid, None) is None:
                box.pid = pid
                return
        self.exited(box, status)

    def exited(self, box, status):
        box.pid = box.starting = 0
        self.read_errors(box)
        self.close_errors(box)
        text = box.err.decode("utf-8", "replace")
        self.tell({"event": "exit", "sid": box.sid, "container": box.container, "status": status, "stderr": text})

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self.workers:
                read, done = self.workers.pop(pid)
                text = b""
                while chunk := os.read(read, 65536):
                    text += chunk
                os.close(read)
                done(json.loads(text) if text else {"error": "the worker was killed", "errno": 0})
                continue
            box = next((each for each in self.boxes.values() if pid in (each.pid, each.starting)), None)
            if box is None:
                if any(each.starting for each in self.boxes.values()):
                    self.early[pid] = code  # perhaps a container that ended before `start` returned
            elif pid == box.pid:
                self.exited(box, code)
            else:
                self.started(box, code)

    # Loop

    def tell(self, message):
        view = memoryview(json.dumps(message).encode() + b"\n")
        while view:
            view = view[os.write(1, view):]

    def handle(self, request):
        try:
            if getattr(self, "op_" + request["op"])(request) is not NotImplemented:
                self.tell({"id": request["id"], "ok": True})
        except OSError as error:
            self.tell({"id": request["id"], "error": str(error), "errno": error.errno})
        except Exception as error:
            self.tell({"id": request["id"], "error": repr(error), "errno": 0})

    def run(self):
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)
        self.tell({"event": "ready", **self.ready})
        while not ended:
            for key, _ in self.selector.select():
                if key.fd not in self.selector.get_map():
                    continue  # closed by the one before
                try:
                    key.data()
                except BrokenPipeError:
                    raise  # the owner is gone
                except (OSError, ValueError, KeyError) as error:
                    # One container's trouble is not the others'.
                    self.tell({"event": "log", "message": repr(error)})
                    time.sleep(0.01)

    def end(self):
        """The owner is gone: nothing that it started stays, nor what this process made for it."""
        groups = [*self.config["cgroups"], *own_groups(os.path.basename(self.owner_dir))]
        for group in groups:
            for path, _, _ in os.walk(group):
                thaw(path)
                kill_group(path)
        for box in self.boxes.values():
            box.kill()
        for box in self.boxes.values():
            self.forget(box)
        remove_groups(groups)
        shutil.rmtree(self.owner_dir, ignore_errors=True)


def join(group, pid):
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(pid))


def main():
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    try:
        supervisor = Supervisor(json.loads(line))
    except OSError as error:
        print(json.dumps({"event": "failed", "message": str(error), "errno": error.errno}), flush=True)
        sys.exit(1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        supervisor.run()
    except BrokenPipeError:
        pass
    finally:
        supervisor.end()


main()
