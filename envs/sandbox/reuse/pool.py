"""A pool of sandboxes for short uses: at most so many at once, each used again only while it is proven clean.

A sandbox is started in a fifth of a second, and wiped in a hundredth (`envs.sandbox.reuse.wipe`). One that cannot be
shown to be as it was when it was new is given back, and the next use gets another. What nobody has wanted for a while
is given back too.

Law: in use and ready together are never more than `most`; after the block there are none.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup

from envs.sandbox.api import Spec
from envs.sandbox.reuse.wipe import Look, look, wipe
from envs.sandbox.sandbox import Sandbox, SandboxProvider
from flash.errors import SandboxBusyError, SandboxClosedError, SandboxError
from flash.types import Stock
from flash.waiting import unwrapped_group

IDLE_S = 60.0
"""Seconds that a sandbox stays ready without being used."""
AGE_SHARE = 0.5
"""Share of its life after which a sandbox is not used again, so that none ends in the middle of a use."""


class _Held:
    """One sandbox of ours, from its order to its end."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.scope = anyio.CancelScope()
        """Of the task that holds it: to cancel it is to give the sandbox back."""
        self.settled = anyio.Event()
        self.sandbox: Sandbox | None = None
        self.new: Look | None = None
        """What it was like before its first use."""
        self.until = math.inf
        self.error: SandboxError | None = None


class ReusePool:
    """Lends sandboxes that are clean. Made by `open_reuse_pool`."""

    def __init__(self, provider: SandboxProvider, tasks: TaskGroup, owner: str, most: int, reuse: bool) -> None:
        self._provider = provider
        self._tasks = tasks
        self._owner = owner
        self._most = most
        self._reuse = reuse
        self._places = anyio.Semaphore(most)
        self._ready: list[_Held] = []
        """Clean and in nobody's use, the longest unused first."""
        self._held: set[_Held] = set()
        self.made = 0
        self.used_again = 0

    @asynccontextmanager
    async def borrow(self, spec: Spec, deadline: float) -> AsyncGenerator[Sandbox]:
        """A sandbox that is new or as good as new, for the time of the block.

        Raises:
            SandboxBusyError: there was none within `deadline` seconds.
            SandboxError: it cannot be made.
        """
        begin = anyio.current_time()
        with anyio.move_on_after(deadline) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            raise SandboxBusyError(f"waited {deadline:g} s while all {self._most} sandboxes of this node were in use")
        try:
            held = self._take(spec) or await self._new(spec, max(1.0, begin + deadline - anyio.current_time()))
            try:
                assert held.sandbox is not None
                yield held.sandbox
                await self._put_back(held)
            except BaseException:
                held.scope.cancel()
                raise
        finally:
            self._places.release()

    def stock(self) -> Stock:
        """How many there are."""
        waiting = self._places.statistics().tasks_waiting
        in_use = len(self._held) - len(self._ready)
        return Stock("sandboxes", in_use, len(self._ready), waiting, self._most, self.made)

    def _take(self, spec: Spec) -> _Held | None:
        """A ready one, the one used last first."""
        for held in reversed(self._ready):
            if held.spec == spec and held.sandbox is not None and held.sandbox.state == "ready":
                self._ready.remove(held)
                held.scope.deadline = math.inf
                self.used_again += 1
                return held
        return None

    async def _new(self, spec: Spec, deadline: float) -> _Held:
        if len(self._held) >= self._most and self._ready:
            self._ready.pop(0).scope.cancel()
        held = _Held(spec)
        self._held.add(held)
        self._tasks.start_soon(self._hold, held, deadline)
        try:
            await held.settled.wait()
        except BaseException:
            held.scope.cancel()
            raise
        if held.error is not None:
            raise held.error
        self.made += 1
        return held

    async def _hold(self, held: _Held, deadline: float) -> None:
        """One sandbox: produces it, waits until its scope ends."""
        try:
            with held.scope:
                async with self._provider.acquire(held.spec, owner=self._owner, deadline=deadline) as sandbox:
                    held.new = await look(sandbox) if self._reuse else None
                    held.until = anyio.current_time() + AGE_SHARE * held.spec.deadline_s
                    held.sandbox = sandbox
                    held.settled.set()
                    await anyio.sleep_forever()
        except SandboxError as error:
            held.error = error
        finally:
            if held in self._ready:
                self._ready.remove(held)
            self._held.discard(held)
            held.error = held.error or SandboxClosedError("the sandbox was given back before it was ready")
            held.settled.set()

    async def _put_back(self, held: _Held) -> None:
        """Make it ready for the next use, if it is clean."""
        clean = False
        if held.sandbox is not None and held.new is not None and anyio.current_time() < held.until:
            # Its use has ended well; if it fails now it is only not used again.
            with suppress(SandboxError):
                clean = await wipe(held.sandbox, held.new)
        if not clean or held.scope.cancel_called:
            held.scope.cancel()
            return
        held.scope.deadline = anyio.current_time() + IDLE_S
        self._ready.append(held)


@asynccontextmanager
async def open_reuse_pool(
    provider: SandboxProvider, *, owner: str, most: int, reuse: bool = True
) -> AsyncGenerator[ReusePool]:
    """A pool for the time of the block.

    Args:
        provider: where sandboxes come from.
        owner: on whose behalf.
        most: sandboxes at once.
        reuse: use them again when they are clean; otherwise each use gets a new one.
    """
    async with unwrapped_group() as tasks:
        yield ReusePool(provider, tasks, owner, most, reuse)
        tasks.cancel_scope.cancel()
