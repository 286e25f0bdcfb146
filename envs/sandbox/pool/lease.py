"""A lease: one holder's right to a sandbox, from its order to its end, and the sandbox as the holder sees it.

`SandboxLease` is state without tasks; the pool moves it on. `LeasedSandbox` is what the holder uses: it keeps the lease
from idling while a call is in progress, and tells the holder of a loss exactly once. After a sandbox was made again,
the next call raises SandboxLostError, unless a call was in progress and has told already: nobody goes on in an empty
sandbox without knowing. A call that was cancelled has told nobody.

A broken link ends the calls in progress with the same error as a loss. Which of the two it was, the next call finds
out: a sandbox that answers again is used again.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import msgspec

from envs.sandbox.api import OnLost, Spec
from envs.sandbox.sandbox import Commands, Sandbox
from flash.errors import SandboxClosedError, SandboxError, SandboxLostError, SandboxTimeoutError

LeaseState = Literal["queued", "starting", "ready", "failed", "closed"]

REMADE_WAIT_S = 20.0
"""Seconds for which a call waits while its lost sandbox is made again: less than callers wait beyond their timeout."""
PROBE_S = 5.0
"""Seconds for a sandbox to answer whether it was lost, or only its link broke."""


class LeaseOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    spec: Spec
    owner: str
    token: str = ""
    """Name of the bearer token that may use it; "" inside one process."""
    priority: int = 0
    on_lost: OnLost = "fail"
    lease_s: float | None = None
    """Seconds that a renewal lasts; None: for ever."""
    key: str = ""
    """The request's idempotency key."""


class SandboxLease:
    """One right to one sandbox. Times are seconds on the loop's clock."""

    def __init__(self, id: str, order: LeaseOrder) -> None:
        self.id = id
        self.order = order
        self.spec = order.spec
        self.owner = order.owner
        self.token = order.token
        self.lease_s = math.inf if order.lease_s is None else order.lease_s
        self.state: LeaseState = "queued"
        self.reason = ""
        """Why it is in this state."""
        self.ending = "it was given back"
        """Why it is to end."""
        self.error: SandboxError | None = None
        """What ended it, if it failed."""
        self.sandbox: Sandbox | None = None
        self.host = ""
        self.generation = 0
        self.until = anyio.current_time() + self.lease_s
        self.hard_until = math.inf
        """Set when the sandbox is ready: its life begins then."""
        self.created_at = time.time()
        self.scope = anyio.CancelScope()
        """Around the task that serves it."""
        self.granted = anyio.Event()
        self.done = anyio.Event()
        """Nothing is left of it."""
        self.parent = ""
        """The lease that it is a fork of."""
        self.children: list[SandboxLease] = []
        """Forks: they end with it."""
        self.snapshots: list[tuple[str, str]] = []
        """Images that its forks began from, and their hosts: removed after them."""
        self.sandbox_id = ""
        """The sandbox's id in the journal, from before it is made."""
        self.cleared = False
        """Its snapshots are removed and its entry in the journal dropped: nothing may be added any more."""
        self.starts = 0
        """Failed ones in a row."""
        self.uses = 0
        """In progress."""
        self._last_use = anyio.current_time()
        self._changed = anyio.Event()
        self._untold: tuple[Sandbox | None, SandboxLostError] | None = None
        """A lost sandbox, and what its holder is to be told."""
        self._told: Sandbox | None = None
        """The sandbox of whose loss the holder knows."""

    def set(self, state: LeaseState, reason: str = "") -> None:
        """Move on, and wake everybody who waits for that."""
        self.state, self.reason = state, reason
        if state == "ready":
            self._last_use = anyio.current_time()
        self._changed.set()
        self._changed = anyio.Event()

    async def settled(self) -> None:
        """Return once it neither waits nor starts."""
        while self.state in ("queued", "starting"):
            await self._changed.wait()

    async def _remade(self) -> None:
        """Return once it neither waits nor starts, and has a sandbox of whose loss nobody knows."""
        while True:
            changed, sandbox = self._changed, self.sandbox
            if self.state in ("queued", "starting"):
                await changed.wait()
            elif self.state != "ready" or sandbox is None or sandbox is not self._told:
                return
            elif await _answers(sandbox):
                self._told = None if self._told is sandbox else self._told
            else:
                # A link that is mended changes no state: so it is asked again after a while.
                with anyio.move_on_after(PROBE_S):
                    await changed.wait()

    async def change(self) -> None:
        """Return at the next change of state."""
        await self._changed.wait()

    def renew(self) -> None:
        """The holder is still there."""
        self.until = anyio.current_time() + self.lease_s

    def end(self, reason: str, error: SandboxError | None = None) -> None:
        """Let the serving task end it. The first reason stays."""
        if not self.scope.cancel_called:
            self.ending, self.error = reason, error
            self.scope.cancel()

    def due(self) -> tuple[float, str]:
        """When it ends unless something happens, and why that would be."""
        idle = math.inf
        if self.spec.idle_s is not None and self.state == "ready":
            idle = (anyio.current_time() if self.uses else self._last_use) + self.spec.idle_s
        times = [
            (self.until, f"the lease was not renewed within {self.lease_s:g} s"),
            (self.hard_until, f"its life of {self.spec.deadline_s:g} s was over"),
            (idle, f"it had no call for {self.spec.idle_s or 0:g} s"),
        ]
        return min(times)

    def lost(self, sandbox: Sandbox | None, error: SandboxLostError) -> None:
        """The sandbox is gone. The next call says so, unless one that was in progress has, or still does."""
        self._untold = None if sandbox is not None and sandbox is self._told else (sandbox, error)

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[Sandbox]:
        """The sandbox for one call of its holder."""
        sandbox = await self._usable()
        self.uses += 1
        try:
            yield sandbox
        except SandboxLostError:
            self._told = sandbox
            if self._untold is not None and self._untold[0] is sandbox:
                self._untold = None
            raise
        finally:
            self.uses -= 1
            self._last_use = anyio.current_time()

    async def _usable(self) -> Sandbox:
        if self._untold is not None:
            (_, error), self._untold = self._untold, None
            raise error
        with anyio.move_on_after(REMADE_WAIT_S):
            await self._remade()
        if self.state == "ready" and self.sandbox is not None and self.sandbox is not self._told:
            return self.sandbox
        if self.error is not None:
            raise self.error
        if self.state in ("queued", "starting", "ready"):
            raise SandboxLostError(f"waited {REMADE_WAIT_S:g} s for sandbox {self.id} to be made again")
        raise SandboxClosedError(f"sandbox {self.id} is closed: {self.reason}")


async def _answers(sandbox: Commands) -> bool:
    """Whether a sandbox of which a call said that it is lost is there after all."""
    try:
        with anyio.move_on_after(PROBE_S):
            await sandbox.run(["true"], timeout=PROBE_S)
            return True
    except (SandboxLostError, SandboxClosedError, SandboxTimeoutError):
        pass
    except SandboxError:
        return True
    return False
