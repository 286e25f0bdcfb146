"""Scheduler: leases in, results out, as many episodes alive as the node is given room for.

Each sample is its own task: a finished one frees its place at once and is scored while others still decode.
Conservation: every lease has one result, also when its episode was cancelled, unless the source has forgotten it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from flash.hub.protocol import EndedLease
from flash.rollout.episode.episode import EpisodeProgress
from flash.types import Failure, Lease, Outcome, Trajectory

MOST_EPISODES = 16384
"""Episodes alive on a node at most, where engines set the number: each holds an environment, and some ten kilobytes."""

DELIVERY_BYTES = 1 << 20
"""Results of one delivery: the hub reads a message in one go, and what is behind a long one on the wire comes late."""


class LeaseSource(Protocol):
    """Where leases come from and results go."""

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Leases for as many as can start now, possibly none yet; None when there will be no more."""
        ...

    async def deliver(self, ended: list[EndedLease], capacity: int) -> None:
        """Hand them over, and tell how many leases can start now; returns when those are acknowledged that are still
        held then."""
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
        self._held: dict[int, Lease] = {}
        self._alive: dict[int, _LiveEpisode] = {}
        self._silent: set[_LiveEpisode] = set()
        """Episodes that have not asked for a response yet."""
        self._newest = -1
        """The newest lease that has come; they come in the order of their numbers."""
        self._cancelled_ahead: set[int] = set()
        """Leases that are still to come, and were cancelled already."""
        self._woken = anyio.Event()
        self._ended: list[EndedLease] = []
        self._arrived = anyio.Event()
        self._closing = False
        self._filling = anyio.CancelScope()

    async def run(self) -> None:
        """Turn leases into results until the source has no more, or until `drain` or `end`.

        Consumes leases. Waits for room, then for the source. Unblocked by an episode ending and by `wake`. Produces one
        result per lease, delivered before `run` returns.
        """
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._deliver)
            async with anyio.create_task_group() as episodes:
                with self._filling:
                    await self._fill(episodes)
            self._closing = True
            self._arrived.set()

    async def drain(self, seconds: float) -> None:
        """Ask for no more leases; what has not ended after so many seconds is cancelled. `run` returns then."""
        self._filling.cancel()
        await anyio.sleep(seconds)
        self.hand_back()

    def end(self) -> None:
        """Ask for no more leases, and end at once what runs: the source has no more work. `run` returns then.

        Without room, as while the only engine is on its way back, nothing is asked that would be answered so.
        """
        self._filling.cancel()
        self.hand_back()

    def hand_back(self) -> None:
        """End at once what runs; its leases end as cancelled."""
        self.cancel(list(self._alive))

    def wake(self) -> None:
        """There may be more room than before."""
        self._woken.set()

    def cancel(self, lease_ids: Iterable[int]) -> None:
        """End these episodes at once, wherever they are, or when they come; those that have ended are ignored."""
        for lease_id in lease_ids:
            if lease_id in self._alive:
                self._alive[lease_id].scope.cancel()
            elif lease_id > self._newest:
                # Sent after the reply with this lease, which is longer, and read before it.
                self._cancelled_ahead.add(lease_id)

    @property
    def held(self) -> list[Lease]:
        """All leases whose results are not acknowledged."""
        return list(self._held.values())

    def holds(self, lease_id: int) -> bool:
        """Whether the source waits for the result of this lease."""
        return lease_id in self._held

    def drop(self, lease_ids: Iterable[int]) -> None:
        """The source knows nothing of these: their episodes end, and nobody is told what became of them."""
        for lease_id in lease_ids:
            del self._held[lease_id]
            if lease_id in self._alive:
                self._alive[lease_id].scope.cancel()

    @property
    def alive(self) -> int:
        """Episodes that go on."""
        return len(self._alive)

    def free(self) -> int:
        """Episodes that could start usefully now."""
        free = self._max_concurrent - len(self._alive)
        if self._room is not None:
            free = min(free, self._room() - len(self._silent))
        return max(0, free)

    async def _fill(self, episodes: TaskGroup) -> None:
        """A request for leases that the source holds back may have become too small: deliveries tell it, and what it
        did not know of is asked for as soon as it is answered."""
        while True:
            while (free := self.free()) == 0:
                self._woken = anyio.Event()
                await self._woken.wait()
            leases = await self._source.lease(free)
            if leases is None:
                return
            for lease in leases:
                self._held[lease.lease_id] = lease
                alive = self._alive[lease.lease_id] = _LiveEpisode(self._silent)
                self._newest = lease.lease_id
                if lease.lease_id in self._cancelled_ahead:
                    self._cancelled_ahead.discard(lease.lease_id)
                    alive.scope.cancel()
                episodes.start_soon(self._run_one, lease, alive)

    async def _run_one(self, lease: Lease, alive: _LiveEpisode) -> None:
        result: Trajectory | Failure | None = None
        with alive.scope:
            result = await self._run_episode(lease, alive)
        if result is None:
            message = "cancelled: the hub has no use for it any more"
            result = Failure(lease.task, Outcome.CANCELLED, message, alive.tokens + alive.lost)
        del self._alive[lease.lease_id]
        self._silent.discard(alive)
        if lease.lease_id not in self._held:
            self.wake()
            return
        self._ended.append(EndedLease(lease.lease_id, result))
        self._arrived.set()
        self.wake()

    async def _deliver(self) -> None:
        """Send what has ended: while one delivery is on its way the next one gathers."""
        while self._ended or not self._closing:
            if not self._ended:
                self._arrived = anyio.Event()
                await self._arrived.wait()
                continue
            count = _fitting(self._ended)
            batch, self._ended = self._ended[:count], self._ended[count:]
            await self._source.deliver(batch, self.free())
            for each in batch:
                self._held.pop(each.lease_id, None)


def _fitting(ended: Sequence[EndedLease]) -> int:
    """How many of these go into one delivery; at least one."""
    size = 0
    for number, each in enumerate(ended):
        if isinstance(each.result, Trajectory):
            size += each.result.size
        if size > DELIVERY_BYTES and number > 0:
            return number
    return len(ended)
