"""Scheduler: turns leases into results, with as many episodes alive as the node has room for.

Every sample is an episode of its own: when one ends, its place is free at once, and it is scored while others still
decode. The node calls `run`; the scheduler takes leases from its `LeaseSource`, plays each with
`flash.rollout.episode.episode.EpisodePlayer.play`, and hands the results back.

Conservation: every lease gets exactly one result, even if its episode was cancelled, unless the source has forgotten
the lease.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from flash.hub.protocol import EndedLease
from flash.rollout.episode.episode import EpisodeProgress
from flash.types import Failure, Lease, Outcome, Trajectory

MAX_EPISODES = 16384
"""Most episodes alive on a node whose engines limit the number (`rollout.max_concurrent = "auto"`). Each episode has an
environment and some ten kilobytes."""

DELIVERY_BYTES = 1 << 20
"""Most bytes of results in one delivery. The hub reads a message in one go, and later messages wait behind it."""


class LeaseSource(Protocol):
    """Gives leases and takes their results. `HubClient` is one."""

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Return at most `capacity` leases; an empty list if there are none yet, None if there will be no more."""
        ...

    async def deliver(self, ended: list[EndedLease], capacity: int) -> None:
        """Hand over results, and how many leases could start now. Returns when the results are acknowledged."""
        ...

    def holds(self, lease_id: int) -> bool:
        """Return True if the hub still waits for the result of this lease."""
        ...


class Wakeup:
    """Wakes the scheduler when there may be more room.

    It is an object of its own because the proxy, which notifies it, is made before the scheduler.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake the scheduler if it waits."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for the next `notify`; earlier ones do not count."""
        self._event = anyio.Event()
        await self._event.wait()


class _LiveEpisode(EpisodeProgress):
    """The episode of one lease, from its grant to its result."""

    def __init__(self, silent: set[_LiveEpisode]) -> None:
        super().__init__()
        self.scope = anyio.CancelScope()
        self._silent = silent
        silent.add(self)

    def on_request(self) -> None:
        """Note that the episode has sent a request: the load of the engines shows it from now on."""
        self._silent.discard(self)


class Scheduler:
    """Keeps as many episodes alive as there is room for.

    Args:
        source: gives leases and takes results.
        run_episode: plays the episode of one lease; does not raise.
        wakeup: notified when `room` may have grown.
        room: returns how many more responses the engines could start now. An episode that has not sent its first
            request yet takes one of them. None: only `max_concurrent` counts.
        max_concurrent: most episodes alive at once.
    """

    def __init__(
        self,
        source: LeaseSource,
        run_episode: Callable[[Lease, EpisodeProgress], Awaitable[Trajectory | Failure]],
        wakeup: Wakeup,
        *,
        room: Callable[[], int] | None = None,
        max_concurrent: int = MAX_EPISODES,
    ) -> None:
        self._source = source
        self._run_episode = run_episode
        self._wakeup = wakeup
        self._room = room
        self._max_concurrent = max_concurrent
        self._alive: dict[int, _LiveEpisode] = {}
        self._silent: set[_LiveEpisode] = set()
        """Episodes that have not sent a request yet."""
        self._newest = -1
        """Largest lease id so far. Leases come in the order of their ids."""
        self._cancelled_early: set[int] = set()
        """Leases that were cancelled before they came."""
        self._ended: list[EndedLease] = []
        self._arrived = anyio.Event()
        self._closing = False
        self._filling = anyio.CancelScope()

    async def run(self) -> None:
        """Turn leases into results until the source has no more, or until `stop_leasing` or `end`.

        Waits for room, which the end of an episode or the wakeup may bring, and then for leases from the source. Each
        lease gets one result, and all results are delivered before `run` returns.
        """
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._deliver)
            async with anyio.create_task_group() as episodes:
                with self._filling:
                    await self._fill(episodes)
            self._closing = True
            self._arrived.set()

    def stop_leasing(self) -> None:
        """Ask for no more leases. `run` returns when all episodes have ended and their results are delivered."""
        self._filling.cancel()

    def hand_back(self) -> None:
        """Cancel all episodes at once; their leases are delivered as cancelled."""
        self.cancel(list(self._alive))

    def end(self) -> None:
        """Ask for no more leases and cancel all episodes: the source has no more work. `run` returns soon.

        A scheduler without room, for example while the only engine restarts, does not ask the source for leases. So it
        would never learn from the source that there is no more work.
        """
        self.stop_leasing()
        self.hand_back()

    def cancel(self, lease_ids: Iterable[int]) -> None:
        """Cancel the episodes of these leases, including leases that arrive later. Ignores episodes that have ended."""
        for lease_id in lease_ids:
            if lease_id in self._alive:
                self._alive[lease_id].scope.cancel()
            elif lease_id > self._newest:
                # The source sends a cancellation after its lease, but the shorter message may be read first.
                self._cancelled_early.add(lease_id)

    @property
    def alive(self) -> int:
        """Number of episodes alive."""
        return len(self._alive)

    def free(self) -> int:
        """Return how many more episodes could start usefully now."""
        free = self._max_concurrent - len(self._alive)
        if self._room is not None:
            free = min(free, self._room() - len(self._silent))
        return max(0, free)

    async def _fill(self, episodes: TaskGroup) -> None:
        """Start an episode for each lease, as room allows.

        While a request for leases waits at the source, there may come more room. Deliveries report the room to the
        source, and the next request asks for as many leases as are missing.
        """
        while True:
            while (free := self.free()) == 0:
                await self._wakeup.wait()
            leases = await self._source.lease(free)
            if leases is None:
                return
            for lease in leases:
                episode = self._alive[lease.lease_id] = _LiveEpisode(self._silent)
                self._newest = lease.lease_id
                if lease.lease_id in self._cancelled_early:
                    self._cancelled_early.discard(lease.lease_id)
                    episode.scope.cancel()
                episodes.start_soon(self._run_one, lease, episode)

    async def _run_one(self, lease: Lease, episode: _LiveEpisode) -> None:
        result: Trajectory | Failure | None = None
        with episode.scope:
            result = await self._run_episode(lease, episode)
        if result is None:
            message = "cancelled: the hub has no use for it any more"
            result = Failure(lease.task, Outcome.CANCELLED, message, episode.tokens + episode.lost)
        del self._alive[lease.lease_id]
        self._silent.discard(episode)
        # If the source has forgotten the lease, nobody waits for its result, and it is dropped.
        if self._source.holds(lease.lease_id):
            self._ended.append(EndedLease(lease.lease_id, result))
            self._arrived.set()
        self._wakeup.notify()

    async def _deliver(self) -> None:
        """Deliver results in batches: results that come during one delivery are in the next one.

        Waits for results. Ends when all episodes have ended and all results are delivered.
        """
        while self._ended or not self._closing:
            if not self._ended:
                self._arrived = anyio.Event()
                await self._arrived.wait()
                continue
            count = _delivery_count(self._ended)
            batch, self._ended = self._ended[:count], self._ended[count:]
            await self._source.deliver(batch, self.free())


def _delivery_count(ended: Sequence[EndedLease]) -> int:
    """Return how many of these results go into one delivery: at most `DELIVERY_BYTES`, but at least one result."""
    size = 0
    for number, each in enumerate(ended):
        if isinstance(each.result, Trajectory):
            size += each.result.size
        if size > DELIVERY_BYTES and number > 0:
            return number
    return len(ended)
