"""Domains: which of several kinds of problems comes next, and how much of a step each may be. Pure state.

Each domain has a weight. A group that leaves without being trained is made up for in its own domain. Otherwise the
next group is of the domain that lacks most, counting what was trained and what is on its way. Once `PASSES` batches'
worth of a domain's groups were filtered out in a row, they count as turns and are not made up for, until a group is
trained: a domain that is solved, or much too hard, does not hold the others back.

Law: while groups of one step end, and no domain goes into quarantine, the groups that are issued instead are the same
problems in whatever order they end. So a synchronous run can be repeated.

A step takes what is complete, whichever domain is slow; but no domain gets further ahead of its share of all trained
groups than by `drift` batches and a group, and from there on a step waits for the others, as long as any can come.
DomainShares in quarantine have no share, and what is left of them may always be trained.

Conservation: a group is counted once, from its issue until it leaves untrained, or for good.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from flash.ages import SLACK
from flash.samples.rules import DomainSettings

PASSES = 4
"""Batches' worth of a domain's own groups, filtered out in a row, after which those that follow count as its turns."""
FEWEST = 16
"""Groups that these are at least."""


class Shared(msgspec.Struct):
    """What a checkpoint keeps: the weights, and what came of the groups under them."""

    weights: dict[str, float]
    trained: dict[str, int]
    filtered: dict[str, int] = {}
    """Groups filtered out in a row."""
    passed: dict[str, int] = {}
    """Groups filtered out that counted as turns."""


class DomainShares:
    """See the module's docstring.

    Args:
        rules: of each domain. Empty: there are none, and nothing is decided here.
        batch: groups of a step.
        drift: batches by which a domain may be ahead.
        state: what there was before; of other weights it is forgotten.
        alive: the domains of the groups that are on their way.
    """

    def __init__(
        self,
        rules: Mapping[str, DomainSettings],
        batch: int,
        drift: float,
        state: Shared | None = None,
        alive: Iterable[str] = (),
    ) -> None:
        self._weights = {name: each.weight for name, each in rules.items()}
        self._batch = batch
        self._ahead = drift * batch + 1
        nothing = dict.fromkeys(self._weights, 0)
        self.shared = Shared(self._weights, dict(nothing), dict(nothing), dict(nothing))
        if state is not None and state.weights == self._weights:
            self.shared.trained |= state.trained
            self.shared.filtered |= state.filtered
            self.shared.passed |= state.passed
        self._owed = dict(nothing)
        """Groups that left and are to be made up for."""
        self._alive = nothing
        for name in alive:
            self._add(self._alive, name, 1)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def next(self, quarantined: Collection[str]) -> str | None:
        """Return the domain of the next group; None where there is no choice."""
        shares = self._shares(quarantined)
        if not shares:
            return None
        # Not the one that lacks most: that would depend on which of several groups left first.
        if (owed := next((name for name in shares if self._owed[name]), None)) is not None:
            return owed
        had = {name: self._turns(name) + self._alive[name] for name in shares}
        total = 1 + sum(had.values())
        return max(shares, key=lambda name: shares[name] * total - had[name])

    def most(self, quarantined: Collection[str]) -> dict[str, int] | None:
        """How many groups of each domain the next step may take; of those that are not named, any number."""
        if not self._weights:
            return None
        shares = self._shares(quarantined)
        total = self._batch + sum(map(self._turns, shares))
        return {
            name: max(0, math.floor(share * total + self._ahead + SLACK) - self._turns(name))
            for name, share in shares.items()
        }

    # -- events ------------------------------------------------------------------------------------------------------

    def issued(self, name: str) -> None:
        """Count a group that is on its way."""
        self._add(self._alive, name, 1)
        if self._owed.get(name):
            self._owed[name] -= 1

    def left(self, name: str) -> None:
        """Count a group that leaves, and of which no member was trained."""
        self._add(self._alive, name, -1)
        self._add(self._owed, name, 1)

    def filtered(self, name: str, quarantined: Collection[str]) -> int:
        """Count a complete group that was filtered out, and has left.

        Returns the number of them in a row where from here on they count as turns; else 0.
        """
        if (share := self._shares(quarantined).get(name)) is None:
            return 0
        in_a_row = self.shared.filtered[name] = self.shared.filtered.get(name, 0) + 1
        limit = max(FEWEST, math.ceil(PASSES * self._batch * share))
        if in_a_row > limit:
            self._add(self.shared.passed, name, 1)
            self._add(self._owed, name, -1)
        return in_a_row if in_a_row == limit else 0

    def trains(self, name: str) -> None:
        """Count a group that is trained, or a part of it for the first time."""
        self._add(self._alive, name, -1)
        self._add(self.shared.trained, name, 1)
        # Not when it is complete: within a step that would depend on the order in which groups end.
        self.shared.filtered.pop(name, None)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def row(self, quarantined: Collection[str]) -> dict[str, float]:
        """For the metrics: each domain's share of the trained groups, and how far the furthest is off, in batches."""
        total = sum(self.shared.trained.values())
        if not total:
            return {}
        row = {f"domain/{name}/share": trained / total for name, trained in self.shared.trained.items()}
        shares = self._shares(quarantined)
        counted = sum(self.shared.trained[name] for name in shares)
        off = [abs(self.shared.trained[name] - share * counted) for name, share in shares.items()]
        return {**row, "share_drift": max(off, default=0.0) / self._batch}

    def _turns(self, name: str) -> int:
        """What a domain has had: groups that were trained, or came to nothing in its turn."""
        return self.shared.trained[name] + self.shared.passed[name]

    def _shares(self, quarantined: Collection[str]) -> dict[str, float]:
        """What each domain is to have of all that is trained."""
        weights = {name: weight for name, weight in self._weights.items() if name not in quarantined}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def _add(self, counts: dict[str, int], name: str, count: int) -> None:
        if name in counts:  # another one is of a run that went on with other domains
            counts[name] += count
