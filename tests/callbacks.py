"""What an event loop calls, seen from around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

Around = Callable[[Any, Callable[[], None]], None]
"""Is given a callback and what runs it, which it calls."""


@contextmanager
def around_callbacks(around: Around) -> Generator[None]:
    """Have `around` run each callback, of any event loop of this process; outside of the block nothing is different.

    A task is many callbacks, whose `__self__` is the task.
    """
    handle: Any = asyncio.Handle
    run = handle._run

    def run_within(self: Any) -> None:
        around(self._callback, partial(run, self))

    handle._run = run_within
    try:
        yield
    finally:
        handle._run = run
