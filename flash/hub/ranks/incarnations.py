"""Incarnations: the trainer ranks from one restart to the next, and how far they are behind the run. Pure state.

A rank's connection belongs to the incarnation in which it arrived. When one rank is lost, or hangs, all of it is over:
what its ranks still say counts no more, and whoever arrives then begins the next one. An incarnation starts
from a checkpoint, at a version that the run may have left behind long ago, and trains the same batches again until it
holds the run's version: also the first one of a hub that has started again.

Laws: each step is booked once, by whichever incarnation commits it first. Each one trains every step from its beginning
on, in order. To the engines goes the run's version alone, so that what they are given never goes back.
"""

from __future__ import annotations

from flash.errors import ContractError


class Incarnations:
    """See the module's docstring. `version`, wherever it is asked for, is the run's.

    Args:
        ranks: how many make an incarnation.
        held: what the first incarnation begins with.
        version: the run's.
        number: of the first incarnation.
    """

    def __init__(self, ranks: int, held: int, version: int, number: int = 1) -> None:
        self._ranks = ranks
        self._first = self.number = number
        """Of the newest incarnation."""
        self.held = held
        """The version that its ranks hold."""
        self.repeated = 0
        """Steps that it has trained again."""
        self.begins_at(held, version)
        self.away = self.behind(version)
        """Whether an incarnation was lost, be it with a former hub, and the next one has published nothing yet."""
        self._over = False
        """Whether the newest incarnation is over, and nobody of the next one is here."""
        self.fetched: set[int] = set()
        """Ranks that have all of their shard."""
        self.processes: dict[int, int] = {}
        """The process ids of the ranks of this incarnation, each on its own node."""
        self.ended: dict[int, int] = {}
        """The same of the last process of each rank whose incarnation is over; it may hang."""
        self._beats: dict[int, float] = {}
        """When each rank of this incarnation has shown last that its process runs."""
        self._present: set[int] = set()
        self._left: set[int] = set()

    @property
    def lost_before(self) -> bool:
        """Whether an incarnation was lost under this hub."""
        return self.number > self._first

    @property
    def followed(self) -> int:
        """Incarnations that were lost under this hub, and followed by another one."""
        return max(0, self.number - self._first)

    # -- who is there ------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all ranks of this incarnation have come."""
        return len(self._present) == self._ranks

    @property
    def finished(self) -> bool:
        """Whether all ranks have left in order."""
        return len(self._left) == self._ranks

    def counts(self, number: int) -> bool:
        """Whether the ranks of this incarnation are still listened to."""
        return number == self.number and not self._over

    def arrives(self, rank: int) -> int:
        """A rank is there; the incarnation that it belongs to."""
        if self._over:
            self._over = False
            self.number += 1
        self._present.add(rank)
        return self.number

    @property
    def present(self) -> list[int]:
        """The ranks of this incarnation that have come."""
        return sorted(self._present)

    def begins(self, rank: int, process: int) -> None:
        """A rank has said which process it is."""
        self.processes[rank] = process

    def beats(self, rank: int, now: float) -> None:
        """A rank has shown that its process runs, whatever it waits for."""
        self._beats[rank] = now

    def silent(self, seconds: float, now: float) -> dict[int, float]:
        """The ranks of this incarnation whose last beat is so long ago, each with the seconds."""
        quiet = {rank: now - last for rank, last in sorted(self._beats.items())}
        return {rank: since for rank, since in quiet.items() if since > seconds}

    def leaves(self, rank: int) -> None:
        """A rank has said goodbye."""
        self._left.add(rank)
        self.processes.pop(rank, None)
        self._beats.pop(rank, None)

    def lost(self, rank: int) -> bool:
        """A rank of this incarnation is gone; whether that ends the incarnation.

        Not when any has said goodbye: by then all have saved what there was to save.
        """
        if self._left:
            self._left.add(rank)
            return False
        self.end()
        return True

    def given_up(self) -> bool:
        """The ranks of this incarnation hang; whether that ends it. Not when any has said goodbye, as above."""
        if self._left:
            self._left.update(range(self._ranks))
            return False
        self.end()
        return True

    def end(self) -> None:
        """This incarnation is over."""
        self._over = self.away = True
        self.ended |= self.processes
        self._present.clear()
        self.fetched.clear()
        self.processes.clear()
        self._beats.clear()

    # -- how far they are --------------------------------------------------------------------------------------------

    def begins_at(self, held: int, version: int) -> None:
        """All ranks of this incarnation start from this version."""
        if held > version:
            raise ContractError(f"the trainers would start from version {held} of a run that is at {version}")
        self.held, self.repeated = held, 0

    def behind(self, version: int) -> bool:
        """Whether this incarnation has steps to train again."""
        return self.held < version

    def publishes(self, version: int) -> bool:
        """The ranks have a version ready; whether it is the one that the engines are to have."""
        self.away = False
        return self.held == version

    def commits(self, version: int) -> bool:
        """The ranks have trained a step; whether that is news, and to be booked."""
        self.held += 1
        self.fetched.clear()
        news = self.held > version
        self.repeated += not news
        return news
