"""Which complete groups a step trains: a pure decision over what is counted of the groups in flight.

Those whose tokens expire first go first. No straggler is waited for while enough groups are complete, with three
exceptions that the configuration asks for: a window in the order of issue (`fifo_window`), the bound on how far a
domain may be ahead (`flash.samples.domains`), and `on_expire = "wait"`, where a step is held back as long as taking it
would leave a group that is still on its way no step to be trained in. The last two hold while anything else can come.

The question comes up with every result, so that it looks at versions, of which there are few, and not at groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from heapq import merge

from flash.samples.rules import AgeContract


class Eligible:
    """The groups that a step may train: by the oldest version of their tokens, then in the order of issue."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, list[int]]] = {}
        """By version and kind."""
        self._places: dict[int, tuple[int, str]] = {}

    def put(self, group_id: int, oldest: int, kind: str = "") -> None:
        """A group may be trained, whose oldest token is of this version."""
        if self._places.get(group_id) == (oldest, kind):
            return
        self.remove(group_id)
        self._places[group_id] = oldest, kind
        insort(self._groups.setdefault(oldest, {}).setdefault(kind, []), group_id)

    def remove(self, group_id: int) -> None:
        """A group may not be trained, or not any more."""
        if (place := self._places.pop(group_id, None)) is None:
            return
        oldest, kind = place
        groups = self._groups[oldest][kind]
        del groups[bisect_left(groups, group_id)]
        if not groups:
            del self._groups[oldest][kind]
        if not self._groups[oldest]:
            del self._groups[oldest]

    def first(
        self, size: int, before: int | None, most: Mapping[str, int] | None = None
    ) -> dict[int, Sequence[int]] | None:
        """The first `size` groups by version, of those issued before one; None when there are not so many.

        `most`: of a kind that it names, no more than so many.
        """
        found: dict[int, Sequence[int]] = {}
        left = dict(most or {})
        for oldest in sorted(self._groups):
            kinds: list[Sequence[int]] = []
            for kind, groups in self._groups[oldest].items():
                end = len(groups) if before is None else bisect_left(groups, before)
                kinds.append(groups[: min(end, size, left.get(kind, size))])
            if chosen := list(merge(*kinds))[:size]:
                found[oldest] = chosen
                size -= len(chosen)
                for group_id in chosen if left else ():
                    if (kind := self._places[group_id][1]) in left:
                        left[kind] -= 1
            if size == 0:
                return found
        return None


def choose(
    contract: AgeContract,
    step: int,
    eligible: Eligible,
    begun: Mapping[int, Sequence[int]],
    *,
    before: int | None,
    wait: bool,
    most: Mapping[str, int] | None = None,
) -> list[int] | None:
    """The groups of a step, or None while it has to wait.

    Args:
        contract: the run's age contract.
        step: the version that is trained.
        eligible: the groups that may be trained.
        begun: by their oldest version, how many groups are in flight and how many of them are not complete.
        before: only groups issued before this one may be chosen. None: all.
        most: of a kind that it names, no more groups than so many.
        wait: whether groups on their way must keep a step in which all their tokens can be trained.
    """
    chosen = eligible.first(contract.groups_per_batch, before, most)
    if chosen is None or (wait and not _all_in_time(contract, step + 1, begun, chosen)):
        return None
    return [group_id for groups in chosen.values() for group_id in groups]


def _all_in_time(
    contract: AgeContract, step: int, begun: Mapping[int, Sequence[int]], chosen: Mapping[int, Sequence[int]]
) -> bool:
    """Whether all groups but the chosen can be trained from `step` on, each before its first token expires.

    Earliest deadline first: up to any step s there are s - step + 1 batches, so no more groups than they hold may be
    due by s. A step that is overbooked by complete groups alone does not count: waiting would not change it.
    """
    total, waiting = 0, False
    for oldest in sorted(begun):
        groups, on_their_way = begun[oldest]
        total += groups - len(chosen.get(oldest, ()))
        waiting = waiting or on_their_way > 0
        last = contract.last_step(oldest)
        if waiting and total > max(0, last - step + 1) * contract.groups_per_batch:
            return False
    return True
