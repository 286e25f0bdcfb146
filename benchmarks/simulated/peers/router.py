"""Router of the peers, between their rules and the simulated engines.

It limits the requests of each engine and serves them in the order of arrival. Before a swap of weights, `Router.pause`
aborts the running requests. `benchmarks.simulated.peers.world.World` makes one router for each run.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from flash.rollout.engine import ResponseRequest
from flash.simulate.engine import SimEngine
from flash.types import Completion


class Response(msgspec.Struct):
    """Number of tokens of a response, over all the engine requests that it took."""

    tokens: int = 0
    """Tokens that belong to the response."""
    discarded: int = 0
    """Tokens that were sampled and thrown away, because the turn started again."""
    oldest_version: int | None = None
    """Oldest version that sampled one of the tokens; None before the first token."""

    def add(self, tokens: int, oldest_version: int) -> None:
        """Count the tokens of a piece that was sampled, and the oldest version among them."""
        self.tokens += tokens
        if self.oldest_version is None or oldest_version < self.oldest_version:
            self.oldest_version = oldest_version


class PeerEngine(SimEngine):
    """A simulated engine that also reports how many tokens its requests have sampled, as an abort does."""

    def sampled(self) -> dict[int, tuple[int, int]]:
        """Return the number of tokens sampled so far and their oldest version, for each live request by its key.

        Only requests that have sampled a token are in the result. `Router.pause` calls this before it aborts them.
        """
        now = self._done_steps + self._steps_over()  # decoding steps so far, also those since the last event
        so_far: dict[int, tuple[int, int]] = {}
        for sequence in (*self._running, *self._waiting):
            if tokens := sequence.tokens(now):
                if sequence.joined >= 0:
                    sequence.note_versions(self._done_steps, self._version_starts)
                oldest = sequence.runs[0].version if sequence.runs else self.version
                so_far[sequence.request.key] = tokens, oldest
        return so_far


class _Waiter:
    """A request that waits for a place."""

    def __init__(self, assigned: int | None) -> None:
        self.assigned = assigned
        """Number of the only engine that may serve the request; None: any."""
        self.engine = -1
        """Number of the engine on which it has a place; −1 while it waits."""
        self.placed = anyio.Event()
        """Set when the request gets its place."""


class Router:
    """Sends requests to engines: to the least loaded one, or to an assigned one.

    Args:
        engines: all engines of the run.
        limit: most requests at once on each engine; None: no limit.
        keep_partial: True if a response that a pause aborts goes on from its tokens; False if it starts again.
    """

    def __init__(self, engines: Sequence[PeerEngine], limit: int | None, *, keep_partial: bool = True) -> None:
        self._engines = engines
        self._limit = limit
        self._keep_partial = keep_partial
        self._load = [0] * len(engines)
        """Number of requests that have a place on each engine."""
        self._waiting: list[_Waiter] = []
        """Requests without a place, in the order of arrival."""
        self._running: dict[anyio.CancelScope, tuple[int, int]] = {}
        """Scopes of the requests that have a place, with their key and the number of their engine. A pause cancels
        them."""
        self._moved: dict[int, int] = {}
        """Number of the engine on which an aborted request goes on, by its key, until `generate` takes it."""
        self._aborted: dict[int, tuple[int, int]] = {}
        """Result of `PeerEngine.sampled` for each request that a pause has aborted, until `generate` takes it."""
        self._open = anyio.Event()
        """Set while new requests are let in; a pause replaces it."""
        self._open.set()
        self._idle = anyio.Event()
        """Set when no request waits or has a place. Only `pause` waits for it."""

    async def generate(self, prompt: list[int], key: int, max_new_tokens: int, assigned: int | None) -> Response:
        """Sample a response, with another request after each abort. `World` calls this for each turn.

        `key` identifies the response, and `assigned` is the number of the only engine that may serve it; None: any.
        """
        response = Response()
        while True:
            await self._open.wait()
            engine = await self._place(assigned)
            try:
                with anyio.CancelScope() as scope:
                    self._running[scope] = key, engine
                    try:
                        await self._request(self._engines[engine], prompt, key, max_new_tokens, response)
                        return response
                    finally:
                        del self._running[scope]
            finally:
                self._load[engine] -= 1
                self._grant()
            # Here a pause or a move has aborted the request, and its scope has swallowed the cancellation.
            if key in self._aborted:
                response.add(*self._aborted.pop(key))
            if not self._keep_partial:
                response.discarded += response.tokens
                response.tokens, response.oldest_version = 0, None
            assigned = self._moved.pop(key, assigned)

    async def _request(
        self, engine: PeerEngine, prompt: list[int], key: int, max_new_tokens: int, response: Response
    ) -> None:
        """Sample the rest of a response on an engine, and add its tokens to `response` when it is complete.

        If this is cancelled, nothing is added: `PeerEngine.sampled` has counted the tokens so far.
        """
        left = max_new_tokens - response.tokens
        request = ResponseRequest(prompt + [0] * response.tokens, left, key, generated=response.tokens)
        stream = engine.generate(request)
        try:
            async for piece in stream:
                if isinstance(piece, Completion):
                    response.add(len(piece.token_ids), min(run.version for run in piece.versions))
        finally:
            await stream.aclose()

    async def _place(self, assigned: int | None) -> int:
        """Wait for a place on an engine, and return the engine's number. `assigned` is the only engine that may serve;
        None: any.
        """
        waiter = _Waiter(assigned)
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.placed.wait()
        except BaseException:
            # Cancelled: a place that was granted in the same instant goes to the next.
            if waiter.engine >= 0:
                self._load[waiter.engine] -= 1
            else:
                self._waiting.remove(waiter)
            self._grant()
            raise
        return waiter.engine

    def _grant(self) -> None:
        """Give free places to waiting requests, in the order of arrival. Called when a request arrives or ends."""
        still_waiting: list[_Waiter] = []
        for index, waiter in enumerate(self._waiting):
            least = min(range(len(self._load)), key=self._load.__getitem__)
            if self._full(least):  # then all engines are full
                still_waiting += self._waiting[index:]
                break
            engine = least if waiter.assigned is None else waiter.assigned
            if self._full(engine):
                still_waiting.append(waiter)
                continue
            self._load[engine] += 1
            waiter.engine = engine
            waiter.placed.set()
        self._waiting = still_waiting
        if not still_waiting and not any(self._load):
            self._idle.set()

    def _full(self, engine: int) -> bool:
        """Return True if the engine of this number has as many requests as the limit allows."""
        return self._limit is not None and self._load[engine] >= self._limit

    def move(self, source: int, target: int) -> None:
        """Abort the running requests of engine `source`. They go on from their tokens on engine `target`."""
        self._aborted |= self._engines[source].sampled()
        for scope, (key, engine) in self._running.items():
            if engine == source:
                self._moved[key] = target
                scope.cancel()

    async def pause(self, *, drain: bool = False) -> None:
        """Let no new request in, abort the running ones, and wait for the queued ones, which still run to their end.

        Aborted requests wait in `generate` until `resume` lets them in again. With an empty queue and partial responses
        kept, nothing is aborted. The swap of the weights then computes the cache of running sequences again, which
        costs the same as sending the requests again. With `drain` nothing is aborted either, but the running ones are
        waited for.
        """
        self._open = anyio.Event()
        if not drain and not self._waiting and self._keep_partial:
            return
        self._idle = anyio.Event()
        if not drain:
            for engine in self._engines:
                self._aborted |= engine.sampled()
            for scope in self._running:
                scope.cancel()
        self._grant()
        await self._idle.wait()

    def resume(self) -> None:
        """Let requests in again."""
        self._open.set()
