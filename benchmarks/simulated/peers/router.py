"""Router of the peers: a limit of requests per engine, first come first served, and a pause by abort."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from flash.rollout.engine import ResponseRequest
from flash.simulate.engine import SimEngine
from flash.types import Completion


class Response(msgspec.Struct):
    """Tokens of a response, over all the engine requests that it took."""

    tokens: int = 0
    discarded: int = 0
    """Sampled and thrown away, because the turn started again."""
    oldest_version: int | None = None

    def add(self, tokens: int, oldest_version: int) -> None:
        """A piece was sampled."""
        self.tokens += tokens
        if self.oldest_version is None or oldest_version < self.oldest_version:
            self.oldest_version = oldest_version

    def restart(self) -> None:
        """Throw away what was sampled so far."""
        self.discarded += self.tokens
        self.tokens, self.oldest_version = 0, None


class PeerEngine(SimEngine):
    """A simulated engine that can tell how far its requests are, as one that is aborted does."""

    def sampled(self) -> dict[int, tuple[int, int]]:
        """Tokens sampled so far and the oldest version among them, by the request's key."""
        now = self._done_steps + self._steps_over()
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
        self.engine = -1
        self.placed = anyio.Event()


class Router:
    """Requests over engines: to the least loaded one, or to an assigned one, at most `limit` at once on each.

    `keep_partial`: a response that a pause aborts goes on from its tokens so far; otherwise it starts again.
    """

    def __init__(self, engines: Sequence[PeerEngine], limit: int | None, *, keep_partial: bool = True) -> None:
        self._engines = engines
        self._limit = limit
        self._keep_partial = keep_partial
        self._load = [0] * len(engines)
        self._waiting: list[_Waiter] = []
        self._running: set[anyio.CancelScope] = set()
        self._aborted: dict[int, tuple[int, int]] = {}
        """Tokens that the requests that a pause aborts have sampled."""
        self._open = anyio.Event()
        self._open.set()
        self._idle = anyio.Event()

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    async def generate(self, prompt: list[int], key: int, max_new_tokens: int, assigned: int | None) -> Response:
        """Sample a response, again after each abort."""
        response = Response()
        while True:
            await self._open.wait()
            engine = await self._place(assigned)
            try:
                with anyio.CancelScope() as scope:
                    self._running.add(scope)
                    try:
                        await self._request(self._engines[engine], prompt, key, max_new_tokens, response)
                        return response
                    finally:
                        self._running.discard(scope)
            finally:
                self._load[engine] -= 1
                self._grant()
            if key in self._aborted:
                response.add(*self._aborted.pop(key))
            if not self._keep_partial:
                response.restart()

    async def _request(
        self, engine: PeerEngine, prompt: list[int], key: int, max_new_tokens: int, response: Response
    ) -> None:
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
        left: list[_Waiter] = []
        for index, waiter in enumerate(self._waiting):
            least = min(range(len(self._load)), key=self._load.__getitem__)
            if self._full(least):
                left += self._waiting[index:]
                break
            engine = least if waiter.assigned is None else waiter.assigned
            if self._full(engine):
                left.append(waiter)
                continue
            self._load[engine] += 1
            waiter.engine = engine
            waiter.placed.set()
        self._waiting = left
        if not left and not any(self._load):
            self._idle.set()

    def _full(self, engine: int) -> bool:
        return self._limit is not None and self._load[engine] >= self._limit

    async def pause(self) -> None:
        """Let no new request in and abort the running ones; those that queue already still run to their end.

        With an empty queue and partial responses kept, the abort is left to the swap: an engine that recomputes the
        cache of its running sequences does the same work as one that is sent them again.
        """
        self._open = anyio.Event()
        if not self._waiting and self._keep_partial:
            return
        self._idle = anyio.Event()
        for engine in self._engines:
            self._aborted |= engine.sampled()
        for scope in self._running:
            scope.cancel()
        self._grant()
        await self._idle.wait()

    def resume(self) -> None:
        """Let requests in again."""
        self._open.set()
