"""Resources that the environments of one node share: a pool of sandboxes, a connection, a loaded model.

A node is the process that plays episodes on one machine. The node enters `sharing` around its episodes. In it,
`shared(key, open)` returns the resource of a key; asynchronous verifiers (functions that check answers) use it in the
same way. The first call opens the resource, and the end of `sharing` closes it. Both happen in a task of the resource's
own, so that a cancelled episode neither closes it nor leaves it half open.

Invariant: at most one resource is open for each key. If opening it fails, all callers that wait for it get the error,
and the next call tries again.
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
"""Seconds in which a resource must open. Without this limit, all episodes would wait for a resource that hangs."""


@runtime_checkable
class Stocked(Protocol):
    """A shared resource that reports how much of it is in use, such as a pool of sandboxes."""

    def stock(self) -> Stock:
        """Return how much of the resource is in use now. The node sends it with its status, for people."""
        ...


class _Resource:
    """Shared resource that is being opened, is open, or has failed to open. `Sharing` has one for each key."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope(shield=True)
        """Scope of the task that holds the resource. It is shielded, so that only its deadline or `Sharing.end` ends
        it."""
        self.opening_over = anyio.Event()
        """Set when the resource is open, or has failed to open with `error`."""
        self.value: Any = None
        """The resource, once it is open."""
        self.error: Exception | None = None
        """The error because of which the resource did not open; None if it is open."""


class Sharing:
    """The shared resources of one node; `sharing` makes it.

    Args:
        run: the run's name, which shared services may show.
        tasks: runs the tasks of the resources.
        close_s: seconds in which each resource must close; then its closing is cancelled.
    """

    def __init__(self, run: str, tasks: TaskGroup, close_s: float) -> None:
        self.run = run
        self._tasks = tasks
        self._close_s = close_s
        self._closing = anyio.Event()
        """Set when the node ends; the tasks of the resources then close them."""
        self._resources: dict[Hashable, _Resource] = {}
        """Resources that are open or being opened, by key."""

    async def get(self, key: Hashable, open: Callable[[], AbstractAsyncContextManager[_T]]) -> _T:
        """Return the resource of a key. The first call opens it with `open`; later ones wait until it is open.

        `shared` calls this. If the caller is cancelled while it waits, the resource goes on opening for the others.

        Raises:
            Exception: any error that `open` raises.
            EnvError: the resource did not open in time, or the node is ending.
        """
        if self._closing.is_set():
            raise EnvError(f"{key!r} cannot be opened: the node is ending")
        resource = self._resources.get(key)
        if resource is None:
            resource = self._resources[key] = _Resource()
            self._tasks.start_soon(self._keep_open, key, resource, open)
        await resource.opening_over.wait()
        if resource.error is not None:
            raise resource.error
        return resource.value

    async def _keep_open(
        self, key: Hashable, resource: _Resource, open: Callable[[], AbstractAsyncContextManager[object]]
    ) -> None:
        """Open a resource and keep it open until the block of `sharing` ends. This is the body of the resource's task.

        An error while the resource opens is kept for the callers of `get`. An error while it closes is raised, and ends
        the node. Closing that takes longer than `close_s` is cancelled.
        """
        resource.scope.deadline = anyio.current_time() + OPEN_S
        with resource.scope:
            try:
                async with open() as resource.value:
                    resource.scope.deadline = math.inf  # it may stay open as long as the node
                    resource.opening_over.set()
                    await self._closing.wait()
                    resource.scope.deadline = anyio.current_time() + self._close_s
            except Exception as error:
                if resource.opening_over.is_set():
                    raise
                resource.error = error
        # The resource has failed to open: with an error, at its deadline, or because `end` has cancelled its scope.
        if not resource.opening_over.is_set():
            why = "the node is ending" if self._closing.is_set() else f"it took longer than {OPEN_S:g} s"
            resource.error = resource.error or EnvError(f"{key!r} cannot be opened: {why}")
            # Forget the resource, so that the next call of `get` opens it again.
            del self._resources[key]
            resource.opening_over.set()

    def stocks(self) -> list[Stock]:
        """Return the stock of each open resource that reports one."""
        values = (resource.value for resource in self._resources.values() if resource.opening_over.is_set())
        return [value.stock() for value in values if isinstance(value, Stocked)]

    def end(self) -> None:
        """Let all resources close, and refuse to open others. Returns at once; the tasks of the resources do the
        closing. `sharing` calls this at its end."""
        self._closing.set()
        for resource in self._resources.values():
            if not resource.opening_over.is_set():  # nobody will use it, so opening it is not waited for
                resource.scope.cancel()


_current: ContextVar[Sharing] = ContextVar("sharing")
"""Shared resources of the node, set inside the block of `sharing`."""


@asynccontextmanager
async def sharing(run: str, *, close_s: float = 60.0) -> AsyncGenerator[Sharing]:
    """Let all code of the block share resources. At the end of the block all resources are closed, also after a
    cancellation.

    Node loops, commands that play episodes, and tests of environments enter this around all of their episodes.

    Args:
        run: the run's name, for `run_name`.
        close_s: seconds in which each resource must close; then its closing is cancelled.

    Raises:
        Exception: any error that a resource raises when it closes.
    """
    async with unwrapped_group() as tasks:
        resources = Sharing(run, tasks, close_s)
        token = _current.set(resources)
        try:
            yield resources
        finally:
            _current.reset(token)
            resources.end()


async def shared(key: Hashable, open: Callable[[], AbstractAsyncContextManager[_T]]) -> _T:
    """Return the resource of a key on this node. The first call enters `open()`; later ones share the result.

    Raises:
        Exception: any error that `open` raises.
        EnvError: the resource did not open in time, the node is ending, or this runs outside of `sharing`.
    """
    return await _sharing().get(key, open)


def run_name() -> str:
    """Return the name of the run that this node works for, under which shared services may list it.

    Raises:
        EnvError: this runs outside of `sharing`.
    """
    return _sharing().run


def stocks() -> list[Stock]:
    """Return the stock of each open resource of this node; empty outside of `sharing`. The node reports them to the
    hub, for people."""
    resources = _current.get(None)
    return [] if resources is None else resources.stocks()


def _sharing() -> Sharing:
    """Return the resources of the node on which this code runs. Raises EnvError outside of a block of `sharing`."""
    try:
        return _current.get()
    except LookupError:
        raise EnvError("nothing is shared here: call this on a node, or within `flash.environment.sharing`") from None
