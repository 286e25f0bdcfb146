"""Wire between hosts: a switch that passes on the frames from one host to another, or stops them.

`benchmarks.rig.hosts` runs it in a thread. It carries whole Ethernet frames from one end of a virtual link to another,
in the form in which the kernel delivers them: up to 64 KiB long, without checksums, behind a header that says which
work the kernel has left undone. The header is passed on with the frame. TCP sends lost frames again. The hosts need no
change for it. Tests have a wire that is also slow and lossy.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

import anyio
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

    def __init__(self, ports: Sequence[socket.socket]) -> None:
        self._ports = ports
        self.cuts: set[tuple[int, int]] = set()
        """Numbers of a source and a target between which no frame arrives. The way back has an entry of its own."""

    async def run(self) -> None:
        """Carry frames until cancelled.

        It consumes frames. It waits for the next frame of any port; a host that sends one unblocks it. It produces the
        same frames at other ports.
        """
        async with anyio.create_task_group() as tasks:
            for source in range(len(self._ports)):
                tasks.start_soon(self._carry, source, tasks)

    async def _carry(self, source: int, tasks: TaskGroup) -> None:
        """Pass on the frames of one host."""
        port = self._ports[source]
        while True:
            await anyio.wait_readable(port)
            with suppress(BlockingIOError):
                for _ in range(FRAMES_AT_ONCE):
                    frame, address = port.recvfrom(FRAME_BYTES)
                    # The port also receives the frames that this program has sent through it.
                    if address[2] != socket.PACKET_OUTGOING:
                        self.pass_on(frame, source, tasks)

    def pass_on(self, frame: bytes, source: int, tasks: TaskGroup) -> None:
        """Give a frame to its targets, except where the way is cut. Subclasses may use `tasks` to give it later."""
        for target in targets(frame, source, len(self._ports)):
            if (source, target) not in self.cuts:
                self.give(frame, target)

    def give(self, frame: bytes, target: int) -> None:
        """Give a frame to a host."""
        with suppress(OSError):  # a host that takes no more loses it, as on any network
            self._ports[target].send(frame)
