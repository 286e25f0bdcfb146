"""Lives: the trainer ranks from one restart to the next, and how far those of now are behind the run. Pure state.

A rank's connection belongs to the life in which it arrived. When one rank is lost, all of that life is over: what its
ranks still say counts no more, and whoever arrives then begins the next life. A life starts from a checkpoint, at a
version that the run may have left behind long ago, and trains the same batches again until it holds the run's version:
also the first one of a hub that has started again.

Laws: each step is booked once, by whichever life commits it first. Each life trains every step from its beginning on,
in order. To the engines goes the run's version alone, so that what they are given never goes back.
"""

from __future__ import annotations

from flash.errors import ContractError


class Lives:
    """See the module's docstring. `version`, wherever it is asked for, is the run's.

    Args:
        ranks: how many make a life.
        held: what the first life begins with.
        version: the run's.
    """

    def __init__(self, ranks: int, held: int, version: int) -> None:
        self._ranks = ranks
        self.number = 1
        """Of the newest life."""
        self.held = held
        """The version that its ranks hold."""
        self.repeated = 0
        """Steps that it has trained again."""
        self.begins_at(held, version)
        self.away = self.behind(version)
        """Whether a life was lost, be it with a former hub, and the next one has published nothing yet."""
        self._over = False
        """Whether the newest life is over, and nobody of the next one is here."""
        self.fetched: set[int] = set()
        """Ranks that have all of their shard."""
        self._present: set[int] = set()
        self._left: set[int] = set()

    # -- who is there ------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all ranks of this life have come."""
        return len(self._present) == self._ranks

    @property
    def finished(self) -> bool:
        """Whether all ranks have left in order."""
        return len(self._left) == self._ranks

    def counts(self, number: int) -> bool:
        """Whether the ranks of this life are still listened to."""
        return number == self.number and not self._over

    def arrives(self, rank: int) -> int:
        """A rank is there; the life that it belongs to."""
        if self._over:
            self._over = False
            self.number += 1
        self._present.add(rank)
        return self.number

    def leaves(self, rank: int) -> None:
        """A rank has said goodbye."""
        self._left.add(rank)

    def lost(self, rank: int) -> bool:
        """A rank of this life is gone; whether that ends the life.

        Not when any has said goodbye: by then all have saved what there was to save.
        """
        if self._left:
            self._left.add(rank)
            return False
        self.end()
        return True

    def end(self) -> None:
        """This life is over."""
        self._over = self.away = True
        self._present.clear()
        self.fetched.clear()

    # -- how far they are --------------------------------------------------------------------------------------------

    def begins_at(self, held: int, version: int) -> None:
        """All ranks of this life start from this version."""
        if held > version:
            raise ContractError(f"the trainers would start from version {held} of a run that is at {version}")
        self.held, self.repeated = held, 0

    def behind(self, version: int) -> bool:
        """Whether this life has steps to train again."""
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
