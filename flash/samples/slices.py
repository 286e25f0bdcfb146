"""Long work in slices, so that nobody waits for all of it: a coroutine's own, and what a state has put off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import anyio.lowlevel

T = TypeVar("T")

ITEMS_AT_ONCE = 4096
"""Items freed in one slice."""


async def in_slices(work: Generator[None, None, T]) -> T:
    """Do all of it; whoever else is ready runs after each slice."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        await anyio.lowlevel.checkpoint()


def at_once(work: Generator[None, None, T]) -> T:
    """Do all of it without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def forgotten(items: list[T]) -> Generator[None]:
    """Free the items, some at a time."""
    while items:
        del items[-ITEMS_AT_ONCE:]
        yield


class Backlog:
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
