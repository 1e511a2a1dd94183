"""What is kept of an output stream."""


class Kept:
    """The head and the tail of a stream, within `limit` bytes."""

    def __init__(self, limit):
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, chunk):
        self.total += len(chunk)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self.tail += chunk
            if len(self.tail) > 2 * self.tail_limit + 65536:
                del self.tail[: len(self.tail) - self.tail_limit]

    def parts(self):
        tail = self.tail[len(self.tail) - self.tail_limit:] if len(self.tail) > self.tail_limit else self.tail
        return bytes(self.head), bytes(tail)
