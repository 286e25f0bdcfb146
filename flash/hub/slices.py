"""Long work in slices: a generator yields where others may be served, and returns what it made."""

from __future__ import annotations

from collections.abc import Generator, Iterator
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


def drained(items: list[T]) -> Iterator[T]:
    """The items from the last to the first, each forgotten when the next one is asked for."""
    while items:
        yield items.pop()


def forgotten(items: list[T]) -> Generator[None]:
    """Free the items, some at a time."""
    while items:
        del items[-ITEMS_AT_ONCE:]
        yield
