"""Membership: which engine workers are sent a version together, and when. Pure state.

A worker asks for a version when its engine has paused for it. A round sends one version to all who ask for that: it
begins as soon as everybody asks who is known and lacks the version, or `gather_s` after the first of them has. Who has
not come by then is gone or busy, and is not waited for again before it has got a version. A round with the members of
the one before it is of the same epoch, whose process group goes on; any other round begins an epoch, and so does the
one after a round that a member has left.

Laws: an epoch's members never change; whoever asks is in a round, or has left; nobody waits for another one longer than
`gather_s` and the round that is running.
"""

from __future__ import annotations

import math

import msgspec


class Round(msgspec.Struct, frozen=True):
    """One version, sent to some workers at once."""

    epoch: int
    version: int
    members: tuple[str, ...]
    """Their ranks are 1 and so on."""
    first: int
    """The piece that it begins with: one of them lacks it, all have those before."""


class _Ask(msgspec.Struct, frozen=True):
    """A worker waits for a version."""

    version: int
    held: int
    """Pieces of it that it has already."""
    since: float


class Membership:
    """See the module's docstring. Times are seconds on the caller's clock."""

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._asks: dict[str, _Ask] = {}
        """Those that wait, in the order in which they have come."""
        self._known: dict[str, int] = {}
        """The newest version of each worker that is expected to ask for the next."""
        self._group: tuple[str, ...] = ()
        """The members of the epoch; empty once one of them has left a round."""
        self._epoch = 0
        self._version = -1
        self.owing: set[str] = set()
        """Members of the round that have not said yet how it went for them; empty: none is running."""
        self.broken = False
        """Whether the round cannot end well for all: those that owe an answer have to leave it."""

    def asks(self, member: str, version: int, held: int, now: float) -> None:
        """A worker waits for a version; of the round that it was in, if any, it has got no more than this."""
        self._breaks(member)
        self._asks[member] = _Ask(version, held, now)

    def got(self, member: str) -> None:
        """A worker has all that the round has sent, or wants nothing."""
        self._asks.pop(member, None)
        if member in self.owing:
            self.owing.discard(member)
            self._known[member] = self._version

    def left(self, member: str) -> None:
        """A worker is gone, or is not to be waited for any more."""
        self._breaks(member)
        self._asks.pop(member, None)
        self._known.pop(member, None)

    def breaks(self) -> None:
        """The round cannot go on."""
        self.broken = True
        self._group = ()

    def wait_s(self, now: float) -> float:
        """Seconds until a round may begin, unless something else is told before; infinite: somebody has to ask."""
        if self.owing or not self._asks:
            return math.inf
        first = next(iter(self._asks.values()))
        lack = (member for member, version in self._known.items() if version < first.version)
        if all(self._waits(member, first.version) for member in lack):
            return 0.0
        return max(0.0, first.since + self._gather_s - now)

    def begin(self) -> Round:
        """Begin the round of who has waited longest, and of all others that ask for the same."""
        version = self._version = next(iter(self._asks.values())).version
        members = tuple(sorted(member for member in self._asks if self._waits(member, version)))
        first = min(self._asks.pop(member).held for member in members)
        self._known = {one: has for one, has in self._known.items() if has >= version or one in members}
        if members != self._group:
            self._epoch += 1
        self._group, self.owing, self.broken = members, set(members), False
        return Round(self._epoch, version, members, first)

    def _waits(self, member: str, version: int) -> bool:
        return member in self._asks and self._asks[member].version == version

    def _breaks(self, member: str) -> None:
        if member in self.owing:
            self.owing.discard(member)
            self.breaks()
