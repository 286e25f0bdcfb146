"""Network: connections in memory between the machines of a simulated run, with delays, losses and cuts.

A `Stream` is one end of a connection, as a socket is. `flash.transport` runs over it unchanged: the real client and
server, their frames, and the proof of the token. Bytes of one stream arrive in order. Streams are independent, so
messages of two connections may overtake each other.

While the way between two machines is cut, bytes wait, as TCP would send them again. After `LOST_S` both ends lose the
connection. If a process ends, its connections end after the bytes that it has sent, as its kernel sends them. If its
machine vanishes, the other ends notice it after `LOST_S`.

A *process* is a simulated one (`flash.simulate.faults.loop`). A killed process sends nothing any more, although its
`finally` blocks still run. All times are seconds of the virtual clock. One event loop runs everything, so no lock is
needed.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any, cast

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from flash.errors import PeerLostError, TransportError
from flash.simulate.faults.loop import Process, until
from flash.transport.auth import prove_to_server
from flash.transport.client import Client
from flash.transport.frames import IDLE_SECONDS, PROBE_SECONDS, PROBES, FrameConnection, set_socket_options
from flash.waiting import deadline, unwrapped_group

LOST_S = float(IDLE_SECONDS + PROBES * PROBE_SECONDS)
"""Seconds after which the kernel gives up a connection whose other end does not answer."""
TOKEN = b"simulated token."
"""Token of the simulated run, which all of its processes hold."""
DELAY_S = (0.0005, 0.02)
"""Range of the seconds that bytes take from one machine to another."""
STEP_S = 1e-6
"""Seconds between two arrivals of one stream at least, so that they keep their order."""

Route = tuple[str, str]
"""Machine that sends, and machine that receives."""


class _Socket:
    """Stand-in for the operating system's socket of a stream, on which the server and the client set options."""

    def setsockopt(self, *_: object) -> None:
        """Accept any option without an effect."""


class Stream(ByteStream):
    """One end of a connection, with the methods of anyio's streams.

    Args:
        network: carries the bytes.
        process: process that holds this end.
        address: host and port of the other end, for messages.
    """

    def __init__(self, network: Network, process: Process, address: tuple[str, int]) -> None:
        self._network = network
        self._arrived: deque[bytes] = deque()
        """Bytes that have arrived and were not received, in order."""
        self._over = False
        """True once this end knows that the connection has ended."""
        self._news = anyio.Event()
        """Set when bytes or the end arrive. `receive` replaces it before each wait."""
        self._address = address
        self.process = process
        self.peer: Stream
        """Other end. The network sets it (`Network.join`)."""
        self.stuck: list[bytes | None] = []
        """Bytes of this end that wait for the end of a cut. None stands for the end of the stream."""
        self.last = 0.0
        """Time at which the last bytes that this end has sent arrive at the other end."""

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Functions that return attributes, by anyio's names: the socket, and the address of the other end."""
        return {SocketAttribute.raw_socket: _Socket, SocketAttribute.remote_address: lambda: self._address}

    def arrive(self, item: bytes | None) -> None:
        """Take bytes of the other end; None: the connection has ended. The network calls this.

        Bytes that arrive after the end are dropped. Bytes from before it can still be received.
        """
        if item is None:
            self._over = True
        elif not self._over:
            self._arrived.append(item)
        self._news.set()

    @property
    def open(self) -> bool:
        """True until this end knows that the connection has ended."""
        return not self._over

    async def send(self, item: bytes) -> None:
        """Send bytes. Raises BrokenResourceError if this end knows that the connection has ended.

        Returns before the bytes have arrived, as with a socket: they may be lost with the connection.
        """
        await anyio.lowlevel.checkpoint()
        if self._over:
            raise anyio.BrokenResourceError
        self._network.transmit(self, item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for bytes, and return at most `max_bytes` of them. The rest waits for the next call.

        Raises EndOfStream if the connection has ended and all bytes from before its end were received.
        """
        while not self._arrived:
            if self._over:
                raise anyio.EndOfStream
            self._news = anyio.Event()
            await self._news.wait()
        piece = self._arrived.popleft()
        if len(piece) > max_bytes:
            self._arrived.appendleft(piece[max_bytes:])
        return piece[:max_bytes]

    async def send_eof(self) -> None:
        """Close the whole connection. The transport never closes one direction only."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection, like `end`."""
        self.end()
        await anyio.lowlevel.checkpoint()

    def end(self) -> None:
        """Close this end at once, and let the other end learn of it after a delay. A closed end stays as it is."""
        if not self._over:
            self._network.transmit(self, None)
            self.arrive(None)


class Listener:
    """Port of the hub. `ConnectionServer.accept_all` calls `accept`.

    Args:
        process: process of the hub.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self._waiting: deque[Stream] = deque()
        """The hub's ends of new connections, which the server has not accepted yet."""
        self._news = anyio.Event()
        """Set when there is a new connection. `accept` replaces it before each wait."""

    def connect(self, stream: Stream) -> None:
        """Add the hub's end of a connection that a client has opened. The network calls this."""
        self._waiting.append(stream)
        self._news.set()

    async def accept(self) -> SocketStream:
        """Wait for the next connection, and return the hub's end of it."""
        while not self._waiting:
            self._news = anyio.Event()
            await self._news.wait()
        return cast("SocketStream", self._waiting.popleft())


class Network:
    """All connections of a run, and the cuts between its machines. The cluster makes one for each simulation.

    Args:
        dice: draws the delays.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._streams: list[Stream] = []
        """Both ends of the connections, in the order in which they were opened. Ends that are over are removed when a
        process ends."""
        self._cuts: dict[Route, int] = {}
        """Number of cuts of each route that are in force now; several may overlap."""
        self.slow: dict[str, float] = {}
        """Seconds by which the messages from and to a slow machine are later, by machine."""
        self.hub: Listener | None = None
        """Port that the newest hub has announced, also if the hub was killed; None if it has ended by itself."""

    def transmit(self, stream: Stream, item: bytes | None) -> None:
        """Carry bytes from `stream` to the other end; None: the end of the connection. `Stream` calls this."""
        if stream.process.alive:  # else a `finally` block of a killed process sends, which must have no effect
            self._send(stream, item)

    def _send(self, stream: Stream, item: bytes | None) -> None:
        """Let bytes of `stream` (None: its end) arrive at the other end. While the way is cut, they wait in `stuck`."""
        route = stream.process.machine, stream.peer.process.machine
        if self._cuts.get(route):
            stream.stuck.append(item)
        else:
            self._deliver(stream, item, self._seconds(route))

    def _deliver(self, stream: Stream, item: bytes | None, seconds: float) -> None:
        """Let bytes (None: the end) arrive at the other end of `stream` after `seconds`, and after those before them.

        They arrive in the context of the other process, so a frozen process gets them when it goes on.
        """
        loop, peer = asyncio.get_running_loop(), stream.peer
        stream.last = max(loop.time() + seconds, stream.last + STEP_S)
        loop.call_at(stream.last, peer.arrive, item, context=peer.process.context)

    def _seconds(self, route: Route) -> float:
        """Draw the seconds that bytes take on a route. Inside a machine they take STEP_S."""
        here, there = route
        if here == there:
            return STEP_S
        return self._dice.uniform(*DELAY_S) + self.slow.get(here, 0.0) + self.slow.get(there, 0.0)

    # -- connections ---------------------------------------------------------------------------------------------------

    def add(self, process: Process) -> None:
        """Let the network notice the end of a process, which must run on a simulated machine. Called at its start."""
        process.on_end.append(lambda: self._process_over(process))

    def _process_over(self, process: Process) -> None:
        """End the connections of a process that has ended, as the kernel of its machine does. Also drop old streams."""
        for stream in self._streams:
            if stream.process is process and stream.open:
                self._send(stream, None)
        # A stream of a dead process is still needed while some of its bytes wait for the end of a cut.
        self._streams = [each for each in self._streams if each.stuck or (each.open and each.process.alive)]

    def vanish(self, machine: str) -> None:
        """Let a machine vanish: the other ends of its connections notice it only after `LOST_S`.

        The caller kills the processes of the machine after this call, which then have no connections to end.
        """
        for stream in self._streams:
            if stream.process.machine == machine and (stream.open or stream.stuck):
                self._deliver(stream, None, LOST_S)
        self._streams = [each for each in self._streams if each.process.machine != machine]

    @asynccontextmanager
    async def connect(self, process: Process, name: str, seconds: float) -> AsyncGenerator[Client]:
        """Connect a process to the hub for the time of the block, like `flash.transport.client.connect`.

        Args:
            process: process that connects.
            name: name by which the hub knows the process, such as `node-0`.
            seconds: seconds in which the hub must accept the connection.

        Raises:
            PeerLostError: no hub listens.
            TransportError: the hub refuses the connection.
            DeadlineError: the hub did not answer in time.
        """
        hub, where = self.hub, "hub at simulated:1"
        async with unwrapped_group() as tasks:
            with ExitStack() as opened:
                with deadline(seconds, f"{where} to accept us", "the network"):  # both texts are for the error message
                    stream = await self._open(process, hub, name)
                    opened.callback(stream.end)  # Also if the hub does not accept us, as the real client does.
                    set_socket_options(cast("SocketStream", stream))
                    try:
                        await prove_to_server(stream, TOKEN, name)
                    except TransportError as error:
                        raise type(error)(f"no connection to {where}: {error}") from error
                client = Client(FrameConnection(cast("SocketStream", stream), where), where)
                tasks.start_soon(client.run)
                try:
                    yield client
                finally:
                    client.close()
                    opened.close()
                    tasks.cancel_scope.cancel()

    async def _open(self, process: Process, hub: Listener | None, name: str) -> Stream:
        """Return this end of a new connection to a hub, as soon as no cut separates the two machines.

        `hub` is the port that was announced when the process began to connect; None: there was none. A hub that starts
        meanwhile has another port, so the process has to connect again. `name` is the name of the process in messages
        of the server.

        Raises:
            PeerLostError: no hub was there, or it has ended meanwhile.
        """
        await anyio.sleep(self._dice.uniform(*DELAY_S))
        await until(lambda: hub is None or self.reaches(process.machine, hub.process.machine))  # TCP sends SYN again
        if hub is None or not hub.process.alive:
            raise PeerLostError("cannot connect to the hub: nothing listens there")
        here, there = self.join(process, hub.process, name)
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + STEP_S, hub.connect, there, context=hub.process.context)
        return here

    def join(self, client: Process, server: Process, name: str) -> tuple[Stream, Stream]:
        """Return the client's and the server's end of a new connection. Messages of the server call the client
        `name`."""
        here, there = Stream(self, client, ("hub", 1)), Stream(self, server, (name, 1))
        here.peer, there.peer = there, here
        self._streams += [here, there]
        return here, there

    def reaches(self, here: str, there: str) -> bool:
        """Return True if the way between the machines `here` and `there` is cut in no direction."""
        return not any(map(self._cuts.get, _both(here, there)))

    # -- faults --------------------------------------------------------------------------------------------------------

    def lose(self, machine: str, number: int) -> None:
        """Break one connection of a machine, at both ends. Without an open connection, do nothing.

        `number` chooses the connection, by its remainder. Bytes that wait for the end of a cut are lost.
        """
        streams = [each for each in self._streams if each.process.machine == machine and each.open]
        if streams:
            stream = streams[number % len(streams)]
            for end in (stream, stream.peer):
                end.stuck.clear()
                self._deliver(end, None, self._dice.uniform(*DELAY_S))

    async def cut(self, routes: list[Route], seconds: float) -> None:
        """Cut the way between machines for some seconds, and return afterwards.

        Bytes of these routes wait meanwhile. If the cut takes longer than LOST_S, all connections of these machines to
        each other are lost. Other cuts of the same routes may begin and end meanwhile.
        """
        for route in routes:
            self._cuts[route] = self._cuts.get(route, 0) + 1
        await anyio.sleep(min(seconds, LOST_S))
        if seconds > LOST_S:
            machines = [{*route} for route in routes]  # a connection has two machines, in either order
            for stream in self._streams:
                # The end of each connection gives up: either its bytes or their acknowledgements do not arrive.
                if {stream.process.machine, stream.peer.process.machine} in machines:
                    stream.stuck.clear()
                    stream.arrive(None)
            await anyio.sleep(seconds - LOST_S)
        for route in routes:
            self._cuts[route] -= 1
        for stream in self._streams:
            if not self._cuts.get((stream.process.machine, stream.peer.process.machine)):
                stuck, stream.stuck = stream.stuck, []
                for item in stuck:
                    self._send(stream, item)


def _both(one: str, other: str) -> tuple[Route, Route]:
    """Return both directions between two machines."""
    return (one, other), (other, one)
