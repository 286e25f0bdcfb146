"""Outliving: whether the trainer ranks that a former hub had go on with the next one. Pure state.

Each presents what it holds. The next hub knows of the run's version H, of the batch that was booked last and of the one
that was formed for step H. A rank fits that has trained, or trains, either of them as the last one: it goes on from
there, and its step is booked by the hub that has not booked it yet.

Law: all ranks of a life go on, or none of them; none that holds what the run has not.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence

import msgspec

from flash.hub import protocol as p
from flash.types import Shard

SAMPLES_AT_ONCE = 64
"""Samples whose checksum is made in one slice: each takes some microseconds, and a long one a millisecond."""


def checksum(parts: Sequence[Shard]) -> Generator[None, None, int]:
    """Tells a rank's shard, whole or in parts, from any other. Returned in the end; it yields after each slice."""
    encode = msgspec.msgpack.Encoder().encode
    found = zlib.crc32(encode(msgspec.structs.replace(parts[0], samples=[])))
    samples = (sample for part in parts for sample in part.samples)
    for number, sample in enumerate(samples, start=1):
        found = zlib.crc32(encode(sample), found)
        if number % SAMPLES_AT_ONCE == 0:
            yield
    return found


class Outliving:
    """See the module's docstring.

    Args:
        ranks: how many make a life.
        version: the run's, as the next hub found it.
        first: the first life that is the next hub's own.
    """

    def __init__(self, ranks: int, version: int, first: int) -> None:
        self._ranks = ranks
        self._version = version
        self._first = first
        self._presented: dict[int, p.OutliveRequest] = {}
        self.go_on: bool | None = None
        """Whether they do; None until that is decided."""

    def presents(self, request: p.OutliveRequest) -> str:
        """A rank presents itself; why its life cannot go on, empty if it may."""
        self._presented[request.rank] = request
        life = {each.life for each in self._presented.values()}
        if len(life) > 1 or request.life >= self._first:
            return f"rank {request.rank} is of another life than the hub before this one had"
        if request.booked > self._version:
            return f"rank {request.rank} knows of version {request.booked}, and the run is at {self._version}"
        if request.step not in (self._version, self._version + 1):
            return f"rank {request.rank} is at step {request.step}, and the run at {self._version}"
        return ""

    @property
    def complete(self) -> bool:
        """Whether all ranks have come."""
        return len(self._presented) == self._ranks

    @property
    def here(self) -> str:
        """How many have come, in words."""
        return f"{len(self._presented)} of {self._ranks} ranks"

    @property
    def in_step(self) -> list[int]:
        """The ranks that have their shard of the step that is to be booked next."""
        return [rank for rank, request in self._presented.items() if request.step > self._version]

    def compared(self, booked: Sequence[int], formed: Sequence[int]) -> str:
        """Compare with what the run has; why the life cannot go on, empty if all may.

        Args:
            booked: checksums of the shards of the step before the run's version; empty where nobody knows.
            formed: the same of the step after it.
        """
        for rank, request in sorted(self._presented.items()):
            shards = formed if request.step > self._version else booked
            fresh = request.checksum is None and request.step == self._version
            if not fresh and request.checksum not in shards[rank : rank + 1]:
                return f"what rank {rank} has of step {request.step - 1} is not what the run has of it"
        return ""

    def decide(self, *, go_on: bool) -> bool:
        """Once; whether it was this call that did, and some have presented themselves."""
        if self.go_on is not None:
            return False
        self.go_on = go_on
        return bool(self._presented)
