"""The leases of a node: `HubClient` gets them from the hub and returns the results; `Scheduler` starts an episode for
each.

A *lease* assigns one task to this node. A task asks for one sample of a problem. The node calls `Scheduler.run`. The
scheduler asks for leases with `HubClient.lease`, plays each with `flash.rollout.episode.episode.EpisodePlayer.play`,
and returns the results with `HubClient.deliver`. Every lease has an episode of its own: when one ends, its place is
free at once, while other episodes go on. A request to the hub is a struct of `flash.hub.protocol`, which
`flash.transport.client.Client.call` sends.

A run may have several hubs, one after the other, because the hub is restarted when it is lost. A node may outlive its
hub: its episodes go on meanwhile, and calls that the loss of the hub has ended are repeated at the next one.

Invariant: a lease is held until a hub has acknowledged its result, or until the next hub does not know the lease
(`RolloutNode.move`). Every lease gets exactly one result, even if its episode was cancelled; only the result of a lease
that is not held any more is dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from flash.errors import TransportError
from flash.hub import protocol as p
from flash.rollout.episode.episode import EpisodeProgress
from flash.transport.frames import ReplyT, Request
from flash.types import Failure, Lease, Outcome, Trajectory

MAX_EPISODES = 16384
"""Largest number of episodes alive on a node where otherwise only the engines limit the number (`rollout.max_concurrent
= "auto"`). The limit bounds memory: each episode has an environment and about 10 kB."""

DELIVERY_BYTES = 1 << 20
"""Largest number of bytes of results in one delivery. The hub decodes a message in one call, and later messages have to
wait meanwhile."""


# -- the hub ---------------------------------------------------------------------------------------------------------


class HubLink(NamedTuple):
    """Connection to one hub, and the numbers that the node has there."""

    node: int
    """Number of the node."""
    first_engine: int
    """Number of the node's first engine among all engines of the run."""
    hub: p.HubCaller
    """Sends requests to the hub."""


class HubClient:
    """A node's connection to the hub of the run, and the leases that the node holds.

    Args:
        link: connection to the first hub.
        on_loss: called once for each hub that is lost. Within a deadline of its own it must connect to the next hub and
            call `connected`, or end the node. None: the loss of the hub ends all calls with an error.
        request_s: seconds that a hub has to answer a request.
    """

    def __init__(self, link: HubLink, on_loss: Callable[[TransportError], None] | None, request_s: float) -> None:
        self._link: HubLink | None = link
        """Connection to the hub; None from the loss of a hub until the connection to the next one."""
        self._on_loss = on_loss
        self._request_s = request_s
        self._reconnected = anyio.Event()
        """Set when the node is connected to the next hub. `call` waits for it while there is no link."""
        self._held: dict[int, Lease] = {}
        """Leases whose results no hub has acknowledged, by number."""
        self.node = link.node
        """Number of the node at the newest hub."""

    def connected(self, link: HubLink) -> None:
        """Use the next hub. Calls that wait for a hub are sent to it."""
        self._link, self.node = link, link.node
        self._reconnected.set()

    async def call(self, make_request: Callable[[int], Request[ReplyT]], seconds: float | None = None) -> ReplyT:
        """Send a request to the hub, or to the next one if this one is lost, and return the reply.

        All requests of the node's parts go through here, except the requests of `RolloutNode.move`, which are meant for
        one certain hub.

        Args:
            make_request: makes the request, given the node's number; called again for each hub.
            seconds: time that each hub has to answer; None: `request_s`.

        Raises:
            FlashError: the hub refuses the request, or is lost and this node cannot move to another hub. A node that
                can move waits for the next hub without a limit, until the node itself is ended.
        """
        seconds = self._request_s if seconds is None else seconds
        while True:
            link = self._link
            if link is None:
                await self._reconnected.wait()
                continue
            try:
                return await link.hub.call(make_request(link.node), seconds)
            except TransportError as error:
                # A fatal error, such as a message that the protocol does not allow, would be the same at the next hub.
                if self._on_loss is None or error.fatal:
                    raise
                # Several calls fail when one hub is lost, but only the first of them reports the loss.
                if self._link is link:
                    self._link, self._reconnected = None, anyio.Event()
                    self._on_loss(error)

    @property
    def held(self) -> list[Lease]:
        """Leases whose results no hub has acknowledged."""
        return list(self._held.values())

    def holds(self, lease_id: int) -> bool:
        """Return True if the hub waits for the result of this lease."""
        return lease_id in self._held

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Ask the hub for at most `capacity` leases, and hold them.

        Returns an empty list if there are no leases now, and None when there will be no more. The hub may keep the
        request open until it has work for the node.

        Raises:
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """
        reply = await self.call(lambda node: p.LeaseRequest(node, capacity))
        if reply.done:
            return None
        self._held |= {lease.lease_id: lease for lease in reply.leases}
        return reply.leases

    async def deliver(self, ended: list[p.EndedLease], capacity: int) -> None:
        """Send results to the hub, and the number of leases that the node could start now.

        Returns when the hub has acknowledged the results. From then on the node does not hold these leases any more.

        Raises:
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """

        def make_request(node: int) -> p.DeliverRequest:
            """Return the delivery for a hub, at which this node has the number `node`."""
            # Some of the leases may have been forgotten while the call waited for the next hub.
            return p.DeliverRequest(node, [each for each in ended if self.holds(each.lease_id)], capacity)

        await self.call(make_request)
        self.forget(each.lease_id for each in ended)

    def forget(self, lease_ids: Iterable[int]) -> None:
        """Stop holding these leases, because the hub has their results or does not know them."""
        for lease_id in lease_ids:
            self._held.pop(lease_id, None)


# -- the episodes ----------------------------------------------------------------------------------------------------


class Wakeup:
    """Wakes the scheduler when there may be more room for episodes.

    The scheduler notifies itself when an episode ends; the proxy notifies it when an engine has more room. This is an
    object of its own because the node makes the proxy before the scheduler.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake the scheduler if it waits."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for the next `notify`. Earlier calls do not count, because the scheduler has just looked for room."""
        self._event = anyio.Event()
        await self._event.wait()


class _LiveEpisode(EpisodeProgress):
    """The episode of one lease, from its start to its result.

    Args:
        not_requesting: the scheduler's set of episodes that have sent no request yet. The episode adds itself to it.
    """

    def __init__(self, not_requesting: set[_LiveEpisode]) -> None:
        super().__init__()
        self.scope = anyio.CancelScope()
        """Scope around the episode. The scheduler cancels the episode with it."""
        self._not_requesting = not_requesting
        not_requesting.add(self)

    def on_request(self) -> None:
        """Leave the set of episodes without a request. `EpisodePlayer` calls this for each request.

        From the first request on, the episode is part of the load that the engines report.
        """
        self._not_requesting.discard(self)


class Scheduler:
    """Keeps as many episodes alive as there is room for.

    Args:
        hub: gives leases and takes results.
        play_episode: plays the episode of one lease. The function must not raise, because an error would end the node.
        wakeup: notified when `room` may have grown.
        room: returns the number of further responses that the engines could start now. Each episode that has not sent
            its first request will need one of these places. None: only `max_concurrent` limits the number of episodes.
        max_concurrent: largest number of episodes alive at once.
    """

    def __init__(
        self,
        hub: HubClient,
        play_episode: Callable[[Lease, EpisodeProgress], Awaitable[Trajectory | Failure]],
        wakeup: Wakeup,
        *,
        room: Callable[[], int] | None = None,
        max_concurrent: int = MAX_EPISODES,
    ) -> None:
        self._hub = hub
        self._play_episode = play_episode
        self._wakeup = wakeup
        self._room = room
        self._max_concurrent = max_concurrent
        self._alive: dict[int, _LiveEpisode] = {}
        """Episodes that have no result yet, by the number of the lease."""
        self._not_requesting: set[_LiveEpisode] = set()
        """Episodes alive that have not sent a request yet."""
        self._newest = -1
        """Largest number of a lease so far. Leases arrive in the order of their numbers."""
        self._cancelled_early: set[int] = set()
        """Leases that were cancelled before they arrived."""
        self._ended: list[p.EndedLease] = []
        """Results that are not delivered yet."""
        self._has_news = anyio.Event()
        """Set when `_deliver` may find a result, or the end of the last episode."""
        self._all_ended = False
        """True when no episode is alive and none will start."""
        self._leasing = anyio.CancelScope()
        """Scope around `_fill`, with which leasing is stopped."""

    async def run(self) -> None:
        """Turn leases into results until the hub has no more, or until `stop_leasing` or `end`.

        Waits for room, which the end of an episode or the wakeup may bring, and then for leases from the hub. Each
        lease gets one result, and all results are delivered before `run` returns.

        Raises:
            ExceptionGroup: with a FlashError, if the hub refuses a request, or is lost and no other hub follows it. The
                episodes are then cancelled, and results that were not delivered are dropped.
        """
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._deliver)
            async with anyio.create_task_group() as episodes:
                with self._leasing:
                    await self._fill(episodes)
            # The inner block has waited for all episodes. `_deliver` may end when it has delivered their results.
            self._all_ended = True
            self._has_news.set()

    def stop_leasing(self) -> None:
        """Ask for no more leases. `run` returns when all episodes have ended and their results are delivered."""
        self._leasing.cancel()

    def hand_back(self) -> None:
        """Cancel all episodes at once. Their outcome is `cancelled`, so the hub can lease the tasks again."""
        self.cancel(list(self._alive))

    def end(self) -> None:
        """Ask for no more leases and cancel all episodes. The node calls this when the hub has no more work.

        `run` returns soon after. The scheduler cannot wait for `HubClient.lease` to return None instead: without room,
        for example while the only engine restarts, it does not ask for leases.
        """
        self.stop_leasing()
        self.hand_back()

    def cancel(self, lease_ids: Iterable[int]) -> None:
        """Cancel the episodes of these leases, which are delivered as cancelled.

        The hub withdraws leases when it does not need their samples any more. Episodes that have ended are ignored. A
        lease that has not arrived yet is cancelled when it arrives.
        """
        for lease_id in lease_ids:
            if lease_id in self._alive:
                self._alive[lease_id].scope.cancel()
            elif lease_id > self._newest:
                # The hub sends a cancellation after its lease, but the shorter message may be read first.
                self._cancelled_early.add(lease_id)

    @property
    def alive(self) -> int:
        """Number of episodes alive."""
        return len(self._alive)

    def free_places(self) -> int:
        """Return the number of further episodes that could start now without waiting for an engine."""
        free = self._max_concurrent - len(self._alive)
        if self._room is not None:
            free = min(free, self._room() - len(self._not_requesting))
        return max(0, free)

    async def _fill(self, episodes: TaskGroup) -> None:
        """Start an episode for each lease, as room allows, until the hub has no more leases.

        While a request for leases waits at the hub, more places may become free. Deliveries report the number of free
        places to the hub, and the next request asks for as many leases as are missing.

        Raises:
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """
        while True:
            while (free := self.free_places()) == 0:
                await self._wakeup.wait()
            leases = await self._hub.lease(free)
            if leases is None:
                return
            for lease in leases:
                episode = self._alive[lease.lease_id] = _LiveEpisode(self._not_requesting)
                self._newest = lease.lease_id
                if lease.lease_id in self._cancelled_early:
                    self._cancelled_early.discard(lease.lease_id)
                    episode.scope.cancel()
                episodes.start_soon(self._run_one, lease, episode)

    async def _run_one(self, lease: Lease, episode: _LiveEpisode) -> None:
        """Play the episode of one lease, and queue its result for delivery.

        If the episode is cancelled, its result is a `Failure` with the number of tokens that were sampled for it.
        """
        result: Trajectory | Failure | None = None
        with episode.scope:
            result = await self._play_episode(lease, episode)
        if result is None:
            message = "cancelled: the hub has no use for it any more"
            result = Failure(lease.task, Outcome.CANCELLED, message, episode.tokens + episode.lost)
        del self._alive[lease.lease_id]
        self._not_requesting.discard(episode)
        # A lease that is not held any more was unknown to the next hub, so no hub waits for its result.
        if self._hub.holds(lease.lease_id):
            self._ended.append(p.EndedLease(lease.lease_id, result))
            self._has_news.set()
        self._wakeup.notify()

    async def _deliver(self) -> None:
        """Deliver results in batches: results that come during one delivery are in the next one.

        Waits for results. Ends when all episodes have ended and all results are delivered.

        Raises:
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """
        while self._ended or not self._all_ended:
            if not self._ended:
                self._has_news = anyio.Event()
                await self._has_news.wait()
                continue
            count = _delivery_count(self._ended)
            batch, self._ended = self._ended[:count], self._ended[count:]
            await self._hub.deliver(batch, self.free_places())


def _delivery_count(ended: Sequence[p.EndedLease]) -> int:
    """Return how many of these results go into one delivery: at most `DELIVERY_BYTES`, but at least one result."""
    size = 0
    for number, each in enumerate(ended):
        if isinstance(each.result, Trajectory):
            size += each.result.size
        if size > DELIVERY_BYTES and number > 0:
            return number
    return len(ended)
