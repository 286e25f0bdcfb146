"""The agent's event loop (one thread, epoll, timers on the monotonic clock), and the framed channel to its host."""

import _heapq as heapq
import errno
import os
import select
import time

from envs.sandbox.agent.wire import Frames, frame

READ_BYTES = 1 << 16
"""Bytes read at once from a descriptor: the capacity of a pipe."""


class Loop:
    """Calls functions when descriptors are ready and when timers expire."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.readers = {}
        self.writers = {}
        self.timers = []
        self.serial = 0
        self.stopped = False

    def watch(self, fd: int, on_read: object = None, on_write: object = None) -> None:
        """Set the functions to call for a descriptor. Without functions, it is not watched any more."""
        known = fd in self.readers or fd in self.writers
        for table, function in ((self.readers, on_read), (self.writers, on_write)):
            if function is None:
                table.pop(fd, None)
            else:
                table[fd] = function
        mask = (select.EPOLLIN if on_read else 0) | (select.EPOLLOUT if on_write else 0)
        if not mask:
            if known:
                self.poll.unregister(fd)
        elif known:
            self.poll.modify(fd, mask)
        else:
            self.poll.register(fd, mask)

    def later(self, seconds: float, function: object) -> list:
        """Call a function once, `seconds` from now. Returns the timer for `cancel`."""
        self.serial += 1
        timer = [time.monotonic() + seconds, self.serial, function]
        heapq.heappush(self.timers, timer)
        return timer

    def cancel(self, timer: "list | None") -> None:
        """Cancel a timer. None, and a timer that has run, are accepted."""
        if timer is not None:
            timer[2] = None

    def run(self) -> None:
        """Wait for descriptors and timers, and call their functions, until `stopped` is set.

        Functions must return quickly, since everything of the agent runs in this one thread. They may add and remove
        descriptors and timers.
        """
        while not self.stopped:
            now = time.monotonic()
            while self.timers and (self.timers[0][2] is None or self.timers[0][0] <= now):
                function = heapq.heappop(self.timers)[2]
                if function is not None:
                    function()
            wait = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else -1
            try:
                ready = self.poll.poll(wait)
            except OSError as error:
                if error.errno != errno.EINTR:
                    raise
                continue
            for fd, events in ready:
                # Reading or writing finds errors and hang-ups. An earlier function may have removed this one.
                if events & ~select.EPOLLOUT and fd in self.readers:
                    self.readers[fd]()
                if events & ~select.EPOLLIN and fd in self.writers:
                    self.writers[fd]()


class HostChannel:
    """Frames to and from the host over two descriptors. Outgoing frames wait in memory while the host does not read."""

    def __init__(self, loop: Loop, source: int, sink: int, on_frame: object, on_lost: object) -> None:
        self.loop = loop
        self.source = source
        self.sink = sink
        self.on_frame = on_frame
        self.on_lost = on_lost
        self.frames = Frames()
        self.outgoing = bytearray()
        self.open = True
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self.update()

    def update(self) -> None:
        """Watch for writing only while bytes wait."""
        on_write = self.write if self.outgoing else None
        if self.source == self.sink:
            self.loop.watch(self.source, self.read, on_write)
        else:
            self.loop.watch(self.source, self.read)
            self.loop.watch(self.sink, None, on_write)

    def send(self, call: int, kind: int, body: object) -> None:
        """Queue one frame, and write as much as possible at once."""
        if not self.open:
            return
        idle = not self.outgoing
        self.outgoing += frame([call, kind, body])
        if idle:
            self.write()

    def write(self) -> None:
        """Write as much as the host takes."""
        before = bool(self.outgoing)
        try:
            while self.outgoing:
                count = os.write(self.sink, memoryview(self.outgoing)[:READ_BYTES])
                del self.outgoing[:count]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if before:
            self.update()

    def read(self) -> None:
        """Read frames from the host and process them. The end of the stream closes the channel.

        Invalid frames end it too, with a last frame that says so.
        """
        try:
            data = os.read(self.source, READ_BYTES)
            bodies = self.frames.feed(data)
        except BlockingIOError:
            return
        except Exception:
            # Invalid bytes end this channel; the host opens another one.
            self.say_goodbye()
            return
        if not data:
            self.close()
            return
        for body in bodies:
            self.on_frame(body)

    def say_goodbye(self) -> None:
        """Close the channel and notify the host: engines may keep the link open after we close our end."""
        if self.open and not self.outgoing:
            try:
                os.write(self.sink, frame([0, 1, ["gone", "the agent ended this channel"]]))
            except OSError:
                pass
        self.close()

    def close(self) -> None:
        """Close the descriptors and report the loss of the host."""
        if not self.open:
            return
        self.open = False
        self.outgoing = bytearray()
        for fd in {self.source, self.sink}:
            self.loop.watch(fd)
            release(fd)
        self.on_lost(self)


def release(fd: int) -> None:
    """Close a descriptor. A standard one is kept open on /dev/null: no pipe of a command may get its number."""
    if fd > 2:
        os.close(fd)
        return
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd, False)
    os.close(null)
