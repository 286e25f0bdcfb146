"""Wire between hosts: a switch that delays, slows, loses or stops the frames from one host to another.

`benchmarks.rig.hosts` runs it in a thread. It carries whole Ethernet frames from one end of a virtual link to another,
in the form in which the kernel delivers them: up to 64 KiB long, without checksums, behind a header that says which
work the kernel has left undone. The header is passed on with the frame. TCP sends lost frames again. The hosts need no
change for it.
"""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec
from anyio.abc import TaskGroup

# Python's `socket` does not have the next five names.
SOL_PACKET, PACKET_VNET_HDR = 263, 15
"""Level and option of a socket that puts a header before each frame."""
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
"""Options that set the sizes of a socket's buffers beyond the usual limits."""
EVERY_PROTOCOL = 3
"""Protocol number ETH_P_ALL: a socket that receives every frame."""
HEADER_BYTES = 10
"""Bytes of the header before each frame (virtio_net_hdr): checksums and splitting that the kernel has left undone."""
ADDRESS_BYTES = 6
"""Bytes of an Ethernet address. A frame begins with the address of its destination."""
FRAME_BYTES = 1 << 17
"""Bytes of a buffer that holds any frame."""
WAITING_BYTES = 1 << 25
"""Bytes of the buffer of a port's socket, in each direction."""
FRAMES_AT_ONCE = 64
"""Frames that are taken from one host before the others get their turn."""
LONGEST_QUEUE_S = 2.0
"""Seconds of queueing on a slow way beyond which a frame is lost, as in any switch."""


class Way(msgspec.Struct, frozen=True):
    """Properties of the way from one host to another; the way back has its own."""

    delay_s: float = 0.0
    """Seconds from the end of sending to the arrival."""
    loss: float = 0.0
    """Share of the frames that are lost."""
    bytes_per_s: float = math.inf
    """Bytes per second that the way carries."""
    cut: bool = False
    """True if no frame arrives."""


class Ways:
    """Properties of all ways between hosts, from which it computes when each frame arrives.

    It does no input or output. `now` is in seconds, on any clock. `seed` decides which frames are lost.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._ways: dict[tuple[int, int], Way] = {}
        """Ways that were set, by the numbers of the source and the target. Others have no delay and lose nothing."""
        self._free_at: dict[tuple[int, int], float] = {}
        """Time at which the last frame of each way will have left its source, by source and target."""

    def set(self, source: int, target: int, way: Way) -> None:
        """Set the properties of a way for later frames; frames that were sent before still arrive."""
        self._ways[source, target] = way

    def arrival(self, source: int, target: int, size: int, now: float) -> float | None:
        """Return the arrival time of a frame of `size` bytes that is sent now; None if it is lost."""
        way = self._ways.get((source, target), Way())
        if way.cut or self._random.random() < way.loss:
            return None
        free_at = max(now, self._free_at.get((source, target), now))
        if free_at - now > LONGEST_QUEUE_S:
            return None
        self._free_at[source, target] = sent = free_at + size / way.bytes_per_s
        return sent + way.delay_s


def mac(host: int) -> str:
    """Return the Ethernet address by which the wire knows a host."""
    return f"02:00:00:00:00:{host + 1:02x}"


def targets(frame: bytes, source: int, hosts: int) -> list[int]:
    """Return the hosts that a frame is for, except its sender. `hosts` is the number of all hosts.

    The last byte of the destination address names one host (`mac`). A broadcast or multicast address, whose first byte
    is odd, is for all hosts.
    """
    address = frame[HEADER_BYTES : HEADER_BYTES + ADDRESS_BYTES]
    if len(address) < ADDRESS_BYTES:
        return []
    if address[0] & 1:
        return [host for host in range(hosts) if host != source]
    host = address[-1] - 1
    return [host] if 0 <= host < hosts and host != source else []


def open_port(device: str) -> socket.socket:
    """Return a socket that receives and sends the frames of a device of this thread's network namespace."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    try:
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            port.setsockopt(socket.SOL_SOCKET, option, WAITING_BYTES)
        port.bind((device, EVERY_PROTOCOL))
    except BaseException:
        port.close()
        raise
    return port


class Wire:
    """Carries frames between ports, one per host, in the order of the hosts. `Hosts` runs it in a thread."""

    def __init__(self, ports: Sequence[socket.socket], ways: Ways) -> None:
        self._ports = ports
        self._ways = ways

    async def run(self) -> None:
        """Carry frames until cancelled.

        It consumes frames. It waits for the next frame of any port; a host that sends one unblocks it. It produces the
        same frames at other ports, each when it is due.
        """
        async with anyio.create_task_group() as tasks:
            for source in range(len(self._ports)):
                tasks.start_soon(self._carry, source, tasks)

    async def _carry(self, source: int, tasks: TaskGroup) -> None:
        """Pass on the frames of one host. Each frame of a slow way waits in a task of `tasks`."""
        port = self._ports[source]
        while True:
            await anyio.wait_readable(port)
            with suppress(BlockingIOError):
                for _ in range(FRAMES_AT_ONCE):
                    frame, address = port.recvfrom(FRAME_BYTES)
                    # The port also receives the frames that this program has sent through it.
                    if address[2] != socket.PACKET_OUTGOING:
                        self._pass_on(frame, source, tasks)

    def _pass_on(self, frame: bytes, source: int, tasks: TaskGroup) -> None:
        """Give a frame to its targets, at once or when it is due. Lost frames are dropped."""
        now = anyio.current_time()
        for target in targets(frame, source, len(self._ports)):
            due = self._ways.arrival(source, target, len(frame), now)
            if due is not None and due <= now:
                self._give(frame, target)
            elif due is not None:
                tasks.start_soon(self._give_at, due, frame, target)

    async def _give_at(self, due: float, frame: bytes, target: int) -> None:
        """Wait until a frame is due, and give it to a host."""
        await anyio.sleep_until(due)
        self._give(frame, target)

    def _give(self, frame: bytes, target: int) -> None:
        """Give a frame to a host."""
        with suppress(OSError):  # a host that takes no more loses it, as on any network
            self._ports[target].send(frame)
