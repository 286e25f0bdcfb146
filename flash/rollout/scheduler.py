"""Scheduler: leases in, results out, at most `max_concurrent` episodes alive.

Each sample is its own task: a finished one frees its slot at once and is scored while others still decode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from flash.hub.protocol import Result
from flash.types import Failure, Lease, Trajectory


class LeaseSource(Protocol):
    """Where leases come from and results go."""

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Up to `capacity` leases, possibly none yet; None when there will be no more."""
        ...

    async def deliver(self, results: list[Result]) -> None:
        """Hand results over; returns when they are acknowledged."""
        ...


class Scheduler:
    """Keeps as many episodes alive as the node may have."""

    def __init__(
        self,
        source: LeaseSource,
        run_episode: Callable[[Lease], Awaitable[Trajectory | Failure]],
        max_concurrent: int,
    ) -> None:
        self._source = source
        self._run_episode = run_episode
        self._free = max_concurrent
        self._freed = anyio.Event()
        self._results: list[Result] = []
        self._arrived = anyio.Event()
        self._closing = False

    async def run(self) -> None:
        """Turn leases into results until the source has no more.

        Consumes leases. Waits for a free slot, then for the source. Unblocked by an episode ending. Produces one result
        per lease, delivered before `run` returns.
        """
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._deliver)
            async with anyio.create_task_group() as episodes:
                await self._fill(episodes)
            self._closing = True
            self._arrived.set()

    async def _fill(self, episodes: TaskGroup) -> None:
        while True:
            while self._free == 0:
                self._freed = anyio.Event()
                await self._freed.wait()
            leases = await self._source.lease(self._free)
            if leases is None:
                return
            self._free -= len(leases)
            for lease in leases:
                episodes.start_soon(self._run_one, lease)

    async def _run_one(self, lease: Lease) -> None:
        outcome = await self._run_episode(lease)
        self._results.append(Result(lease.lease_id, outcome))
        self._arrived.set()
        self._free += 1
        self._freed.set()

    async def _deliver(self) -> None:
        """Send what has ended, all at once: while one delivery is on its way the next one gathers."""
        while self._results or not self._closing:
            if not self._results:
                self._arrived = anyio.Event()
                await self._arrived.wait()
                continue
            batch, self._results = self._results, []
            await self._source.deliver(batch)
