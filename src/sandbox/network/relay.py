"""Carries a guest's TCP connections to the filtering proxy, a unix socket outside.

Runs in a trusted process of its own that has joined the sandbox's network namespace: a path reaches a
unix socket from any network namespace. What the guest sends is copied and never read. Python 3.9 or
newer, standard library only.
"""

import errno
import os
import selectors
import socket

# Per connection and direction: enough for a fast copy, little enough for many connections.
BUFFER = 64 * 1024
# The wait before another try when the proxy's queue or this process's descriptors are full.
RETRY_SECONDS = 0.05


class Stream:
    """One direction of a connection."""

    def __init__(self, source, target, data=b""):
        self.source = source
        self.target = target
        self.data = bytearray(data)
        self.ended = False  # the source has no more
        self.closed = False  # and the target knows

    def wants_read(self):
        return not self.ended and len(self.data) < BUFFER

    def wants_write(self):
        return bool(self.data)

    def read(self):
        try:
            chunk = self.source.recv(BUFFER - len(self.data))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""  # broken off: what came before still arrives
        if chunk:
            self.data += chunk
        else:
            self.ended = True

    def write(self):
        try:
            if self.data:
                del self.data[: self.target.send(self.data)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # The target is gone: nothing more can be delivered, so nothing more is read.
            self.data.clear()
            self.ended = True

    def pump(self):
        """Passes the end on, once everything before it is written."""
        if self.ended and not self.data and not self.closed:
            self.closed = True
            try:
                self.target.shutdown(socket.SHUT_WR)
            except OSError:
                pass


class Connection:
    def __init__(self, guest, proxy, greeting):
        self.up = Stream(guest, proxy, greeting)
        self.down = Stream(proxy, guest)
        self.sides = ((guest, self.up, self.down), (proxy, self.down, self.up))

    def handle(self, side, events):
        _, reads, writes = self.sides[side]
        if events & selectors.EVENT_READ:
            reads.read()
            reads.write()  # most often there is room: saves a turn
        if events & selectors.EVENT_WRITE:
            writes.write()
        self.up.pump()
        self.down.pump()

    def done(self):
        return self.up.closed and self.down.closed


class Relay:
    def __init__(self, listener, name, sid, limit):
        self.listener = listener
        self.name = name
        self.greeting = sid.encode() + b"\n"
        self.limit = limit
        self.selector = selectors.DefaultSelector()
        self.connections = set()
        self.interest = {}
        listener.setblocking(False)

    def want(self, sock, events, data):
        """Registers a socket for just these events; for none, not at all: a hang-up would spin."""
        if self.interest.get(sock, 0) == events:
            return
        if not events:
            self.selector.unregister(sock)
        elif sock in self.interest:
            self.selector.modify(sock, events, data)
        else:
            self.selector.register(sock, events, data)
        if events:
            self.interest[sock] = events
        else:
            del self.interest[sock]

    def update(self, connection):
        if connection.done():
            self.connections.discard(connection)
            for sock, _, _ in connection.sides:
                self.want(sock, 0, None)
                sock.close()
            return
        for side, (sock, reads, writes) in enumerate(connection.sides):
            events = selectors.EVENT_READ if reads.wants_read() else 0
            if writes.wants_write():
                events |= selectors.EVENT_WRITE
            self.want(sock, events, (connection, side))

    def accept(self):
        """Takes one connection. False when there is no room for one now.

        The proxy comes first: while it cannot take one more, the guest waits in the listener's queue.
        """
        try:
            proxy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return False  # no descriptor left
        proxy.setblocking(False)
        refused = False
        try:
            proxy.connect(self.name)
        except BlockingIOError:
            proxy.close()
            return False  # its queue is full
        except OSError:
            refused = True  # it is gone: the guest learns by the end of its connection
        try:
            guest, _ = self.listener.accept()
        except OSError as error:
            proxy.close()
            # The guest may have given up meanwhile.
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        if refused:
            guest.close()
            proxy.close()
            return True
        guest.setblocking(False)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(guest, proxy, self.greeting)
        self.connections.add(connection)
        self.update(connection)
        return True

    def run(self):
        while True:
            room = len(self.connections) < self.limit
            self.want(self.listener, selectors.EVENT_READ if room else 0, None)
            for key, events in self.selector.select():
                if key.data is None:
                    if not self.accept():
                        self.want(self.listener, 0, None)
                        self.turn(self.selector.select(RETRY_SECONDS))
                else:
                    self.turn([(key, events)])

    def turn(self, ready):
        for key, events in ready:
            connection, side = key.data
            if connection in self.connections:
                connection.handle(side, events)
                self.update(connection)


def serve(listener, proxy_path, sid, limit=80):
    """Relays each connection of a listening TCP socket to the unix socket `proxy_path`; never returns.

    At most `limit` connections at a time; more wait in the listener's queue. More than the proxy takes
    from one sandbox, so that the guest hears its refusal. The process is this
    function's own: it changes to the socket's folder, since an address holds 108 bytes.
    """
    os.chdir(os.path.dirname(proxy_path) or ".")
    Relay(listener, os.path.basename(proxy_path), sid, limit).run()
