"""Incarnations: the trainer ranks from one restart to the next, and how far they are behind the run. Pure state.

A rank's connection belongs to the incarnation in which it arrived. When one rank is lost, or hangs, all of it is over:
what its ranks still say counts no more, and whoever arrives then begins the next one. An incarnation starts
from a checkpoint, at a version that the run may have left behind long ago, and trains the same batches again until it
holds the run's version: also the first one of a hub that has started again.

Laws: each step is booked once, by whichever incarnation commits it first. Each one trains every step from its beginning
on, in order. To the engines goes the run's version alone, so that what they are given never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flash.errors import ContractError
from flash.hub.progress import RunProgress


class Rank(msgspec.Struct):
    """A trainer rank, as it was last heard of. Times are the caller's."""

    here: bool = False
    """Whether it is of the newest incarnation, and has come."""
    process: int | None = None
    """Its process id on its own node, while its incarnation lasts."""
    ended: int | None = None
    """That of its last process whose incarnation is over; it may hang."""
    host: str = ""
    """Of its node; empty before it has first come."""
    since: float | None = None
    """When it came."""
    beat: float | None = None
    """When it has last shown that its process runs, whatever it waits for."""
    fetched: bool = False
    """Whether it has all of its shard."""
    saved: bool = False
    """True if it has done all of its work, and waits for the end of the run."""
    left: bool = False
    """Whether it has left in order, or after one that has."""


class Incarnations:
    """See the module's docstring.

    Args:
        ranks: how many make an incarnation.
        progress: the versions of the run.
        held: what the first incarnation begins with.
        number: of the first incarnation.
    """

    def __init__(self, ranks: int, progress: RunProgress, held: int, number: int = 1) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self._progress = progress
        self._first = self.number = number
        """Of the newest incarnation."""
        self.repeated = 0
        """Steps that it has trained again."""
        self.begins_at(held)
        self.away = progress.behind
        """Whether an incarnation was lost, be it with a former hub, and the next one has published nothing yet."""
        self._over = False
        """Whether the newest incarnation is over, and nobody of the next one is here."""

    # -- who is there ------------------------------------------------------------------------------------------------

    @property
    def followed(self) -> int:
        """Incarnations that were lost under this hub, and followed by another one."""
        return self.number - self._first

    @property
    def present(self) -> list[int]:
        """The ranks of this incarnation that have come."""
        return [number for number, rank in enumerate(self.ranks) if rank.here]

    @property
    def saved(self) -> bool:
        """True if all ranks have done all of their work."""
        return all(rank.saved for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether all ranks have left in order."""
        return all(rank.left for rank in self.ranks)

    def counts(self, number: int) -> bool:
        """Whether the ranks of this incarnation are still listened to."""
        return number == self.number and not self._over

    def arrives(self, rank: int) -> int:
        """A rank is there; the incarnation that it belongs to."""
        if self._over:
            self._over = False
            self.number += 1
        self.ranks[rank].here = True
        return self.number

    def silent(self, seconds: float, now: float) -> dict[int, float]:
        """The ranks of this incarnation whose last beat is so long ago, each with the seconds."""
        quiet = {number: now - rank.beat for number, rank in enumerate(self.ranks) if rank.beat is not None}
        return {number: since for number, since in quiet.items() if since >= seconds}

    def leaves(self, rank: int) -> None:
        """A rank has said goodbye."""
        self.ranks[rank].left = True
        self.ranks[rank].process = self.ranks[rank].beat = None

    def ends_by(self, ranks: Iterable[int]) -> bool:
        """These ranks of this incarnation are gone, or hang; whether that ends the incarnation.

        Not when any has said goodbye: by then all have saved what there was to save.
        """
        if any(rank.left for rank in self.ranks):
            for number in ranks:
                self.leaves(number)
            return False
        self.end()
        return True

    def end(self) -> None:
        """This incarnation is over."""
        self._over = self.away = True
        for rank in self.ranks:
            rank.ended = rank.ended if rank.process is None else rank.process
            rank.here, rank.process, rank.beat, rank.fetched, rank.saved = False, None, None, False, False

    # -- how far they are --------------------------------------------------------------------------------------------

    def begins_at(self, held: int) -> None:
        """All ranks of this incarnation start from this version. Raises ContractError: the run has not reached it."""
        if held > self._progress.version:
            raise ContractError(
                f"the trainers would start from version {held} of a run that is at {self._progress.version}"
            )
        self._progress.held, self.repeated = held, 0

    def publishes(self) -> bool:
        """The ranks have a version ready; whether it is the one that the engines are to have."""
        self.away = False
        return not self._progress.behind

    def commits(self) -> bool:
        """The ranks have trained a step; whether that is news, and to be booked."""
        news = not self._progress.behind
        self._progress.held += 1
        for rank in self.ranks:
            rank.fetched = False
        self.repeated += not news
        return news
