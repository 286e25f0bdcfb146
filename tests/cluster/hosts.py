"""Hosts whose wire is also slow and lossy, and the faults that only tests cause."""

from __future__ import annotations

import ctypes
import math
import os
import random
import socket
import subprocess
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import msgspec
from anyio.abc import TaskGroup

from benchmarks.rig.hosts import Hosts, Wire, enter_network, in_space, targets

# Flags of Linux for namespaces and mounts, which Python's library does not name before version 3.12.
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
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
        if self._random.random() < way.loss:
            return None
        free_at = max(now, self._free_at.get((source, target), now))
        if free_at - now > LONGEST_QUEUE_S:
            return None
        self._free_at[source, target] = sent = free_at + size / way.bytes_per_s
        return sent + way.delay_s


class SlowWire(Wire):
    """Wire that delays, slows and loses frames."""

    def __init__(self, ports: Sequence[socket.socket]) -> None:
        super().__init__(ports)
        self.ways = Ways()
        """Properties of the ways between the hosts."""

    def pass_on(self, frame: bytes, source: int, tasks: TaskGroup) -> None:
        """Give a frame to its targets, at once or when it is due. Lost frames are dropped."""
        now = anyio.current_time()
        for target in targets(frame, source, len(self._ports)):
            if (source, target) in self.cuts:
                continue
            due = self.ways.arrival(source, target, len(frame), now)
            if due is not None and due <= now:
                self.give(frame, target)
            elif due is not None:
                tasks.start_soon(self._give_at, due, frame, target)

    async def _give_at(self, due: float, frame: bytes, target: int) -> None:
        """Wait until a frame is due, and give it to a host."""
        await anyio.sleep_until(due)
        self.give(frame, target)


class FaultyHosts(Hosts):
    """Hosts with a `SlowWire`, which a test can enter, and whose connections and power it can take away."""

    def make_wire(self, ports: Sequence[socket.socket]) -> Wire:
        """Make the wire between the hosts."""
        wire = SlowWire(ports)
        self._ways = wire.ways
        return wire

    def set_way(self, source: int, target: int, way: Way) -> None:
        """Set the delay, loss and rate of the frames that one host sends to another from now on."""
        self._wire.cuts.discard((source, target))
        self._ways.set(source, target, way)

    def entrance(self, host: int) -> Callable[[], None]:
        """Return a function that moves the process that calls it to a host. It can be pickled for a new process."""
        return partial(_enter, self.spaces[host], str(self.folder / "hosts"), self.names[host])

    def socket(self, host: int) -> socket.socket:
        """Make a TCP socket of this process that belongs to a host."""
        return in_space(self.spaces[host], socket.socket)

    def reset(self, host: int) -> None:
        """Reset all TCP connections of a host to others. New ones can be made."""
        # `ss --kill` ends the connections here, and the kernel sends a reset to the other ends.
        command = ("ss", "--kill", "--tcp", f"dst 10.77.0.0/24 and not dst {self.address(host)}")
        subprocess.run(["ip", "netns", "exec", self.spaces[host], *command], check=True, capture_output=True)

    def lose_power(self, host: int) -> None:
        """Cut the link of a host and kill its processes, which no other host notices; `heal` restores the link."""
        self.cut(host)
        self.kill_all(host)


def _enter(space: str, hosts_file: str, name: str) -> None:
    """Move this process to the host `name`: into its network, with its host name and its list of hosts."""
    enter_network(space)
    libc = ctypes.CDLL(None, use_errno=True)
    results = (
        libc.unshare(CLONE_NEWNS | CLONE_NEWUTS),
        # Otherwise the next mount would also appear outside of the new namespace.
        libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(os.fsencode(hosts_file), b"/etc/hosts", None, MS_BIND, None),
    )
    if any(results):  # each is 0 if it has succeeded
        raise OSError(ctypes.get_errno(), f"cannot move to the host {name}")
    socket.sethostname(name)
