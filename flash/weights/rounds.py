"""Rounds: which engine workers a version is broadcast to together, and when. Pure state of the broadcast backends.

`flash.weights.broadcast.BroadcastServer` owns the planner, in the trainer's rank 0. A worker is a process of an engine,
and a version is the weights after a training step. A worker requests a version when its engine has paused to load it. A
*round* sends one version to all workers that have requested it, in pieces. A round begins as soon as every known worker
that lacks the version has requested it, or `gather_s` seconds after the first request. A known worker that has not
requested the version by then is gone or busy: no round waits for that worker again before it has received a version.

An *epoch* is one process group of torch. Consecutive rounds with the same members share an epoch. A round with other
members begins a new epoch, and so does the round after a failed round.

Invariants: the members of an epoch never change. A worker that requests a version becomes a member of a round, or is
removed. No worker waits for another worker longer than `gather_s` and the round that is running.
"""

from __future__ import annotations

import math

import msgspec


class Round(msgspec.Struct, frozen=True):
    """Broadcast of one version to some workers together."""

    epoch: int
    """Number of the process group. A round with the members of the round before keeps the group and its number."""
    version: int
    members: tuple[str, ...]
    """Names of the workers, which have the ranks 1, 2, … in the process group; the trainer is rank 0."""
    first: int
    """Number of the first piece that is sent: some member lacks it, and all members have the pieces before it."""


class _WaitingRequest(msgspec.Struct, frozen=True):
    """The request of a worker that is not yet a member of a round."""

    version: int
    held: int
    """Number of pieces of the version that the worker has already."""
    since: float
    """Time of the request, in seconds on the caller's clock."""


class RoundPlanner:
    """Plans the rounds by the rules of the module's docstring. Times are seconds on the caller's clock.

    Only one round runs at a time.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._requests: dict[str, _WaitingRequest] = {}
        """Requests of the waiting workers, oldest first."""
        self._known: dict[str, int] = {}
        """Newest version of each worker that is expected to request the next one."""
        self._group: tuple[str, ...] = ()
        """Members of the current epoch; empty after a round that failed."""
        self._epoch = 0
        self._version = -1
        """Version of the running or last round; −1 before the first round."""
        self.unfinished: set[str] = set()
        """Members of the running round that have not yet reported whether they have the version; empty if no round
        runs."""
        self.failed = False
        """True if the running round cannot succeed for all members. The unfinished members have to leave the group."""

    def request(self, member: str, version: int, held: int, now: float) -> None:
        """Note that a worker waits for `version` and has `held` of its pieces.

        A member of the running round that requests again has left the round, which therefore failed.
        """
        self._leave_round(member)
        self._requests[member] = _WaitingRequest(version, held, now)

    def finish(self, member: str) -> None:
        """Note that a worker has received the whole version. Later rounds then expect it to request the next version.

        A worker whose round has failed meanwhile is not expected in later rounds; only its request is forgotten.
        """
        self._requests.pop(member, None)
        if member in self.unfinished:
            self.unfinished.discard(member)
            self._known[member] = self._version

    def remove(self, member: str) -> None:
        """Forget a worker whose connection ended, or that did not leave a failed group in time. Its round fails."""
        self._leave_round(member)
        self._requests.pop(member, None)
        self._known.pop(member, None)

    def fail(self) -> None:
        """Note that the running round cannot go on. The next round gets a new group and a new epoch.

        The members stay `unfinished` until each of them requests again (`request`) or is removed.
        """
        self.failed = True
        self._group = ()

    def wait_s(self, now: float) -> float:
        """Return the seconds until `begin` may be called if nothing else happens.

        Infinity means that another event is needed first: a request, or the end of the running round.
        """
        if self.unfinished or not self._requests:
            return math.inf
        first = next(iter(self._requests.values()))
        lacking = (member for member, version in self._known.items() if version < first.version)
        if all(self._requested(member, first.version) for member in lacking):
            return 0.0
        return max(0.0, first.since + self._gather_s - now)

    def begin(self) -> Round:
        """Begin the round of the oldest request, with all workers that have requested the same version.

        The caller must have found that `wait_s` is 0. The members are then no longer waiting, but `unfinished`.
        """
        version = self._version = next(iter(self._requests.values())).version
        members = tuple(sorted(member for member in self._requests if self._requested(member, version)))
        first = min(self._requests.pop(member).held for member in members)
        # A known worker that lacks the version and did not come in time is forgotten: no later round waits for it.
        self._known = {name: has for name, has in self._known.items() if has >= version or name in members}
        if members != self._group:
            self._epoch += 1
        self._group, self.unfinished, self.failed = members, set(members), False
        return Round(self._epoch, version, members, first)

    def _requested(self, member: str, version: int) -> bool:
        """Return True if the worker waits for this version."""
        return member in self._requests and self._requests[member].version == version

    def _leave_round(self, member: str) -> None:
        """Mark the running round as failed if `member` has not finished it."""
        if member in self.unfinished:
            self.unfinished.discard(member)
            self.fail()
