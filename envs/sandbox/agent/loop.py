"""The agent's event loop (one thread, epoll, timers on the monotonic clock), and the framed channel to its host.

Part of the program inside a sandbox: Python 3.6, standard library only. `envs.sandbox.engines.bundle` joins all modules
into one text, so top-level names must be unique. The *host* is the process of Flash that controls the sandbox.
`BoxAgent` makes one `Loop`, and one `HostChannel` for each host that connects.
"""

# Not `heapq`, whose import compiles more code: a sandbox starts faster without it.
import _heapq as heapq
import errno
import os
import select
import time

from envs.sandbox.agent.wire import FAILURE, Frames, frame

READ_BYTES = 1 << 16
"""Bytes read at once from a descriptor: the capacity of a pipe."""


class Loop:
    """Calls functions when descriptors are ready and when timers expire. Functions take no arguments."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        """Watcher of the descriptors in `readers` and `writers`."""
        self.readers = {}
        """Function to call when a descriptor can be read, by descriptor."""
        self.writers = {}
        """Function to call when a descriptor can be written, by descriptor."""
        self.timers = []
        """Heap of timers: [time on the monotonic clock, serial, function or None if cancelled]."""
        self.serial = 0
        """Number of timers so far. It orders timers of one moment, because functions cannot be compared."""

    def watch(self, fd: int, on_read: object = None, on_write: object = None) -> None:
        """Call `on_read` when the descriptor `fd` can be read, `on_write` when it can be written; None: not.

        They replace the earlier functions. Without functions, the descriptor is not watched any more; this is needed
        before it is closed. An error or the end of the stream counts as readable and as writable.
        """
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
        """Call a function once, `seconds` from now. Returns the timer, which `cancel` accepts."""
        self.serial += 1
        timer = [time.monotonic() + seconds, self.serial, function]
        heapq.heappush(self.timers, timer)
        return timer

    def cancel(self, timer: "list | None") -> None:
        """Cancel a timer. None, and a timer that has run, are accepted."""
        if timer is not None:
            timer[2] = None

    def run(self) -> None:
        """Wait for descriptors and timers, and call their functions, for ever. The agent ends by `os._exit`.

        Functions must return quickly, since everything of the agent runs in this one thread. They may add and remove
        descriptors and timers.
        """
        while True:
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
    """Frames to and from the host over two descriptors. Outgoing frames wait in memory while the host does not read.

    `envs.sandbox.agent.wire` describes a frame. The same descriptor may serve both directions.
    """

    def __init__(self, loop: Loop, source: int, sink: int, on_frame: object, on_lost: object) -> None:
        """Begin to read frames.

        Args:
            loop: the agent's loop, which calls `read` and `write`.
            source: descriptor that frames come from.
            sink: descriptor that frames are written to.
            on_frame: function called with the body of each frame (`BoxAgent.carry_out`).
            on_lost: function called once, when the channel is closed (`BoxAgent.lose_host`).
        """
        self.loop = loop
        self.source = source
        self.sink = sink
        self.on_frame = on_frame
        self.on_lost = on_lost
        self.frames = Frames()
        """Decoder of the bytes from the host."""
        self.outgoing = bytearray()
        """Bytes of frames that the host has not read yet."""
        self.open = True
        """True until `close`."""
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self.update_watching()

    def update_watching(self) -> None:
        """Watch the source for reading, and the sink for writing only while bytes wait.

        A sink is writable nearly always, so watching it without bytes would keep the loop busy.
        """
        on_write = self.write if self.outgoing else None
        if self.source == self.sink:
            self.loop.watch(self.source, self.read, on_write)
        else:
            self.loop.watch(self.source, self.read)
            self.loop.watch(self.sink, None, on_write)

    def send(self, call: int, kind: int, body: object) -> None:
        """Queue one frame, and write as much as possible at once. Does nothing if the channel is closed.

        `kind` is `RESULT`, `FAILURE`, `CHUNK` or `CREDIT`, and `call` the number of the host's call that it belongs to.
        """
        if not self.open:
            return
        idle = not self.outgoing
        self.outgoing += frame([call, kind, body])
        if idle:
            self.write()

    def write(self) -> None:
        """Write as much of the waiting bytes as the host takes. The loop calls this again when it takes more."""
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
            self.update_watching()

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
            # Invalid bytes, or a broken link, end this channel; the host opens another one.
            self.say_goodbye()
            return
        if not data:
            self.close()
            return
        for body in bodies:
            # An earlier frame may have closed the channel: it was invalid, or its answer could not be written. The
            # calls in progress are stopped then, so nobody would wait for the work of later frames.
            if self.open:
                self.on_frame(body)

    def say_goodbye(self) -> None:
        """Close the channel because of invalid bytes, and notify the host with a last frame.

        Without it the host would not notice: engines may keep the link open after we close our end.
        """
        # Not after a frame of which only a part was written: the host would take these bytes for the rest of it.
        if self.open and not self.outgoing:
            try:
                # Call 0 is no call of the host, so its channel takes the failure for the end of the channel.
                os.write(self.sink, frame([0, FAILURE, ["gone", "the agent ended this channel"]]))
            except OSError:
                pass
        self.close()

    def close(self) -> None:
        """Close the descriptors and call `on_lost`. Only the first call has an effect."""
        if not self.open:
            return
        self.open = False
        self.outgoing = bytearray()
        for fd in {self.source, self.sink}:
            self.loop.watch(fd)
            release(fd)
        self.on_lost()


def release(fd: int) -> None:
    """Close a descriptor. A standard one is kept open on /dev/null: no pipe of a command may get its number."""
    if fd > 2:
        os.close(fd)
        return
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd, False)
    os.close(null)
