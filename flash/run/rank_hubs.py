"""A trainer rank's way from hub to hub: it keeps its process, weights, moments and process group when one is gone.

The main thread trains, and asks the hub of now; a call that the loss of a hub has ended is made again to the next one.
A thread of its own shows each hub that the process runs, looks for the next one, and presents there what the rank
holds, in the middle of a step too. The next hub lets all ranks go on, or none (`flash.hub.ranks.outliving`); then this
process ends, as it does when its life is over. So does one that was told to end while it has no hub.

Law: each hub hears of a step's end what it does not know yet, once: that it was trained, and what was published.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from flash.config import waits
from flash.config.tree import Config
from flash.errors import FlashError, LifeOverError, PeerLostError
from flash.hub import protocol as p
from flash.hub.ranks.outliving import checksum
from flash.hub.ranks.shards import BlockingCaller, fetch_blocking
from flash.samples.slices import at_once
from flash.transport.request import ReplyT, Request, answered
from flash.types import Activity

log = logging.getLogger("flash")

T = TypeVar("T")

Find = Callable[[p.OutliveRequest], tuple[BlockingCaller, p.OutliveReply]]
"""Waits for the next hub, and presents a rank there. Raises FlashError: none came, or it has to end."""


class RankHubs:
    """See the module's docstring.

    Args:
        config: the run.
        hub: the first one.
        held: what this rank begins with.
        find: the next one; None: the rank ends with its hub.
        end: ends this process at once.
    """

    def __init__(
        self, config: Config, hub: BlockingCaller, held: p.OutliveRequest, find: Find | None, end: Callable[[], None]
    ) -> None:
        self._config = config
        self._hub: BlockingCaller | None = hub
        self._held = held
        self._find = find
        self._end = end
        self._state = threading.Condition()
        self._asks = False
        """Whether the main thread uses the hub, and may change what we hold."""
        self._booked = 0
        """The version that the run was at when this hub let us go on."""
        self._published: p.PublishRequest | None = None
        """What was announced last."""
        self._leaves = self._told = self._over = False
        """Whether there are no more batches, a signal has come, and nothing is to be waited for any more."""

    # -- the main thread ---------------------------------------------------------------------------------------------

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """As of `BlockingClient.call`; a hub that is lost is no error where another one comes. A last word has one."""
        return self._ask(partial(self._call, request, timeout), last=isinstance(request, p.Fatal))

    def fetch(self, step: int, did: list[Activity], timeout: float) -> p.BatchReply:
        """A whole shard, of one hub. What we did is told once, as it may have been heard though nobody answered."""
        told = iter([did])
        return self._ask(lambda hub: self._fetch(hub, step, next(told, []), timeout))

    def told_to_end(self, *_: Any) -> None:
        """A signal has come. While there is a hub, that one tells us what to do."""
        self._told = True
        if self._hub is None:
            self._end()

    def close(self) -> None:
        """The main thread is done: what the watching thread meets from now on ends nothing."""
        self._over = True

    def _ask(self, what: Callable[[BlockingCaller], T], *, last: bool = False) -> T:
        while True:
            hub = self._come(wait=not last)
            try:
                return what(hub)
            except PeerLostError as error:
                if last or not self._outlives(error):
                    raise
                self._lose(hub)
            finally:
                with self._state:
                    self._asks = False
                    self._state.notify_all()

    def _come(self, *, wait: bool) -> BlockingCaller:
        """The hub of now, which is asked from here on, or the next one."""
        with self._state:
            self._state.wait_for(lambda: self._hub is not None or self._over or not wait)
            if self._hub is None:
                raise PeerLostError("the hub is gone")
            self._asks = True
            return self._hub

    def _call(self, request: Request[ReplyT], timeout: float, hub: BlockingCaller) -> ReplyT:
        if self._known(request):
            return answered(request, p.Ack())
        reply = hub.call(request, timeout)
        self._heard(request)
        return reply

    def _known(self, request: msgspec.Struct) -> bool:
        """Whether the hub before this one has booked it, and could not say so."""
        return isinstance(request, p.Commit) and request.step < self._booked

    def _heard(self, request: msgspec.Struct) -> None:
        """A hub has answered it."""
        if isinstance(request, p.Commit):
            self._held = msgspec.structs.replace(self._held, booked=request.step + 1)
        if isinstance(request, p.PublishRequest):
            self._published = request

    def _fetch(self, hub: BlockingCaller, step: int, did: list[Activity], timeout: float) -> p.BatchReply:
        reply = fetch_blocking(hub, self._held.rank, step, did, timeout)
        if reply.shard is None:
            self._leaves = True
        else:
            found = at_once(checksum([reply.shard]))
            self._held = msgspec.structs.replace(self._held, step=step + 1, checksum=found)
        return reply

    def _outlives(self, error: Exception) -> bool:
        """Whether this error is the loss of a hub after which we look for another one."""
        lost = isinstance(error, PeerLostError) and not isinstance(error, LifeOverError)
        return lost and self._find is not None and not self._leaves and not self._over

    def _lose(self, hub: BlockingCaller) -> None:
        with self._state:
            if self._hub is hub:
                self._hub = None

    # -- the thread beside it ----------------------------------------------------------------------------------------

    def watch(self) -> None:
        """End this process when its life is over, unless it ends itself.

        Consumes signs that the life goes on. Waits for the next one, and for hubs. Produces the hub of now, or the end
        of the process. Torch may hold the main thread meanwhile. A rank that shows no sign is killed by its agent.
        """
        hub = self._hub
        try:
            while hub is not None:
                hub = self._follow(hub)
        except Exception as error:  # whatever it is, and be it this process's own end
            if self._held.rank == 0 and not self._over and not isinstance(error, LifeOverError):
                log.debug("trainer rank 0 looked for the next hub: %s", error)
        ends = not self._over
        with self._state:
            self._hub, self._over = None, True
            self._state.notify_all()
        if ends:
            self._end()

    def _follow(self, hub: BlockingCaller) -> BlockingCaller | None:
        """Stay with a hub to its end; the next one, or None where we end with it."""
        try:
            while True:
                hub.call(p.LifeWatch(self._held.rank), timeout=math.inf)
        except FlashError as error:
            if not self._outlives(error):
                return None
        self._lose(hub)
        with self._state:
            self._state.wait_for(lambda: not self._asks)  # it may have its answer, and be about to take note of it
        return None if self._leaves or self._told else self._move()

    def _move(self) -> BlockingCaller:
        """Go to the next hub. Raises FlashError: there is none, or our life is over."""
        assert self._find is not None, "who ends with the hub does not move"
        while True:
            hub, reply = self._find(self._held)
            published = self._published
            try:
                if published is not None and published.published.version == reply.version:
                    hub.call(published, waits.taken_s(self._config))
            except PeerLostError as error:
                if isinstance(error, LifeOverError):
                    raise
                continue
            with self._state:
                self._booked, self._hub = reply.version, hub
                self._held = msgspec.structs.replace(self._held, booked=reply.version)
                self._state.notify_all()
            return hub
