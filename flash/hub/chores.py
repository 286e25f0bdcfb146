"""Chores: work on many groups or leases at once, done in slices, so that nobody waits for all of it. Pure state.

A slice is done when the work comes up: in runs of a few hundred samples that is all of it. The owner calls `work` for
the rest, and serves others in between; so each piece of work must leave a sound state behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice


class Chores:
    """Pieces of work, in order.

    Args:
        at_once: pieces in a slice.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left: deque[tuple[Callable[[int], None], Iterator[int]]] = deque()

    def add(self, do: Callable[[int], None], numbers: Iterable[int]) -> None:
        """Do this to each of these, after all that is left to do; a slice of it now."""
        # A copy: the work itself changes what there is.
        self._left.append((do, iter(list(numbers))))
        self.work()

    def work(self) -> bool:
        """Do a slice; tells whether more is left."""
        room = self._at_once
        while self._left and room > 0:
            do, numbers = self._left[0]
            done = 0
            for number in islice(numbers, room):
                done += 1
                do(number)
            if done < room:
                self._left.popleft()
            room -= done
        return bool(self._left)

    def __bool__(self) -> bool:
        return bool(self._left)
