"""What the environments of one node share: a pool of sandboxes, a connection, a loaded model.

Within `sharing`, which the node enters around its episodes, `shared(key, open)` gives the one thing of this key. It is
opened by the first who asks and closed with the block, in a task of its own, so that an episode that is cancelled
neither closes it nor leaves it half open. Asynchronous verifiers find it in the same way.

Law: of one key at most one thing is open. A failed opening is answered to all who wait for it; the next one who asks
tries again.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, runtime_checkable

import anyio
from anyio.abc import TaskGroup

from flash.errors import EnvError
from flash.types import Stock
from flash.waiting import unwrapped_group

_T = TypeVar("_T")

OPEN_S = 120.0
"""Seconds for one thing to open."""


@runtime_checkable
class Stocked(Protocol):
    """A shared thing of which people may see how much is in use, as a pool of sandboxes."""

    def stock(self) -> Stock:
        """How it is now."""
        ...


class _Thing:
    def __init__(self) -> None:
        self.scope = anyio.CancelScope(shield=True)
        self.settled = anyio.Event()
        """Open, or failed with `error`."""
        self.value: Any = None
        self.error: Exception | None = None


class Sharing:
    """The things of one node. Made by `sharing`.

    Args:
        run: the run's name, which shared services may show.
        tasks: where the things live.
        close_s: seconds for each to close.
    """

    def __init__(self, run: str, tasks: TaskGroup, close_s: float) -> None:
        self.run = run
        self._tasks = tasks
        self._close_s = close_s
        self._closing = anyio.Event()
        self._things: dict[Hashable, _Thing] = {}

    async def get(self, key: Hashable, open: Callable[[], AbstractAsyncContextManager[_T]]) -> _T:
        """The thing of this key, opened if nobody has.

        Raises:
            Exception: what its opening raised.
            EnvError: it did not open in time, or the node is ending.
        """
        if self._closing.is_set():
            raise EnvError(f"{key!r} cannot be opened: the node is ending")
        thing = self._things.get(key)
        if thing is None:
            thing = self._things[key] = _Thing()
            self._tasks.start_soon(self._hold, key, thing, open)
        await thing.settled.wait()
        if thing.error is not None:
            raise thing.error
        return thing.value

    async def _hold(
        self, key: Hashable, thing: _Thing, open: Callable[[], AbstractAsyncContextManager[object]]
    ) -> None:
        """Keep one thing open until the block ends; what fails then is an error of the node."""
        thing.scope.deadline = anyio.current_time() + OPEN_S
        with thing.scope:
            try:
                async with open() as thing.value:
                    thing.scope.deadline = math.inf
                    thing.settled.set()
                    await self._closing.wait()
                    thing.scope.deadline = anyio.current_time() + self._close_s
            except Exception as error:
                if thing.settled.is_set():
                    raise
                thing.error = error
        if not thing.settled.is_set():
            why = "the node is ending" if self._closing.is_set() else f"it took longer than {OPEN_S:g} s"
            thing.error = thing.error or EnvError(f"{key!r} cannot be opened: {why}")
            del self._things[key]
            thing.settled.set()

    def stocks(self) -> list[Stock]:
        """What of the open things is lent to environments."""
        values = (thing.value for thing in self._things.values() if thing.settled.is_set())
        return [value.stock() for value in values if isinstance(value, Stocked)]

    def end(self) -> None:
        """Close everything, also what is only being opened."""
        self._closing.set()
        for thing in self._things.values():
            if not thing.settled.is_set():
                thing.scope.cancel()


_here: ContextVar[Sharing] = ContextVar("sharing")


@asynccontextmanager
async def sharing(run: str, *, close_s: float = 60.0) -> AsyncGenerator[Sharing]:
    """Let everything that is started in the block share; at its end all of it is closed, also after a cancellation."""
    async with unwrapped_group() as tasks:
        things = Sharing(run, tasks, close_s)
        token = _here.set(things)
        try:
            yield things
        finally:
            _here.reset(token)
            things.end()


async def shared(key: Hashable, open: Callable[[], AbstractAsyncContextManager[_T]]) -> _T:
    """The thing of this key on this node: `open()` is entered once, by the first who asks.

    Raises:
        Exception: what its opening raised.
        EnvError: this runs on no node: enter `sharing` first.
    """
    return await _sharing().get(key, open)


def run_name() -> str:
    """The run on whose behalf this node works.

    Raises:
        EnvError: this runs on no node.
    """
    return _sharing().run


def stocks() -> list[Stock]:
    """What environments of this node borrow, as far as it is open; nothing where nothing is shared."""
    sharing = _here.get(None)
    return [] if sharing is None else sharing.stocks()


def _sharing() -> Sharing:
    try:
        return _here.get()
    except LookupError:
        raise EnvError("nothing is shared here: run it on a node, or within `flash.environment.sharing`") from None
