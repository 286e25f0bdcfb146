"""Scheduler: leases in, results out, as many episodes alive as the node is given room for.

Each sample is its own task: a finished one frees its place at once and is scored while others still decode.
Conservation: every lease has one result, also when its episode was cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from flash.hub.protocol import EndedLease
from flash.rollout.episode import EpisodeProgress
from flash.types import Failure, Lease, Outcome, Trajectory

MOST_EPISODES = 16384
"""Episodes alive on a node at most, where engines set the number: each holds an environment, and some ten kilobytes."""


class LeaseSource(Protocol):
    """Where leases come from and results go."""

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Up to `capacity` leases, possibly none yet; None when there will be no more."""
        ...

    async def deliver(self, ended: list[EndedLease]) -> None:
        """Hand them over; returns when they are acknowledged."""
        ...


class _LiveEpisode(EpisodeProgress):
    """One lease from its grant to its result."""

    def __init__(self, silent: set[_LiveEpisode]) -> None:
        super().__init__()
        self.scope = anyio.CancelScope()
        self._silent = silent
        silent.add(self)

    def asks(self) -> None:
        """It takes part in the engines' load from now on."""
        self._silent.discard(self)


class Scheduler:
    """Keeps as many episodes alive as there is room for.

    Args:
        source: gives leases, takes results.
        run_episode: lives through one lease; does not raise.
        room: how many more responses the engines could start now. An episode that has not asked for its first one
            takes one of them. None: `max_concurrent` alone counts.
        max_concurrent: most episodes alive at once.
    """

    def __init__(
        self,
        source: LeaseSource,
        run_episode: Callable[[Lease, EpisodeProgress], Awaitable[Trajectory | Failure]],
        *,
        room: Callable[[], int] | None = None,
        max_concurrent: int = MOST_EPISODES,
    ) -> None:
        self._source = source
        self._run_episode = run_episode
        self._room = room
        self._max_concurrent = max_concurrent
        self._alive: dict[int, _LiveEpisode] = {}
        self._silent: set[_LiveEpisode] = set()
        """Episodes that have not asked for a response yet."""
        self._woken = anyio.Event()
        self._ended: list[EndedLease] = []
        self._arrived = anyio.Event()
        self._closing = False

    async def run(self) -> None:
        """Turn leases into results until the source has no more.

        Consumes leases. Waits for room, then for the source. Unblocked by an episode ending and by `wake`. Produces one
        result per lease, delivered before `run` returns.
        """
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._deliver)
            async with anyio.create_task_group() as episodes:
                await self._fill(episodes)
            self._closing = True
            self._arrived.set()

    def wake(self) -> None:
        """There may be more room than before."""
        self._woken.set()

    def cancel(self, lease_ids: Iterable[int]) -> None:
        """End these episodes at once, wherever they are. Leases that are not alive here are ignored."""
        for lease_id in lease_ids:
            if lease_id in self._alive:
                self._alive[lease_id].scope.cancel()

    def free(self) -> int:
        """Episodes that could start usefully now."""
        free = self._max_concurrent - len(self._alive)
        if self._room is not None:
            free = min(free, self._room() - len(self._silent))
        return max(0, free)

    async def _fill(self, episodes: TaskGroup) -> None:
        """A request for leases that the source holds back may have become too small: what it did not ask for is asked
        for as soon as it is answered."""
        while True:
            while (free := self.free()) == 0:
                self._woken = anyio.Event()
                await self._woken.wait()
            leases = await self._source.lease(free)
            if leases is None:
                return
            for lease in leases:
                alive = self._alive[lease.lease_id] = _LiveEpisode(self._silent)
                episodes.start_soon(self._run_one, lease, alive)

    async def _run_one(self, lease: Lease, alive: _LiveEpisode) -> None:
        result: Trajectory | Failure | None = None
        with alive.scope:
            result = await self._run_episode(lease, alive)
        if result is None:
            message = "cancelled: the hub has no use for it any more"
            result = Failure(lease.task, Outcome.CANCELLED, message, alive.tokens)
        del self._alive[lease.lease_id]
        self._silent.discard(alive)
        self._ended.append(EndedLease(lease.lease_id, result))
        self._arrived.set()
        self.wake()

    async def _deliver(self) -> None:
        """Send what has ended, all at once: while one delivery is on its way the next one gathers."""
        while self._ended or not self._closing:
            if not self._ended:
                self._arrived = anyio.Event()
                await self._arrived.wait()
                continue
            batch, self._ended = self._ended, []
            await self._source.deliver(batch)
