"""LLMProxy: the only object through which the episodes of a node request responses of its engines.

The episode calls `generate`. The proxy waits until the `Router` has placed the request on an engine that has room, and
collects the engine's tokens. The request may have to leave the engine before its end. This happens if the engine dies
or fails the request, if a less loaded engine has room, or if the engine must be free of requests before a *swap*. Then
another engine continues the response after the tokens that exist so far. If there is no other engine, the request waits
for the next one.

A swap is the load of a new policy version (the weights after one more training step). `ProxySettings.swap` says whether
requests go on during the swap, are aborted and moved before it (`abort`), or are allowed to end before it (`drain`).

A node has a fixed number of *places* for engines. If an engine has died, a new engine gets its place. The supervisor
(`flash.rollout.supervisor`) calls `load`, `retire` and `replace`.

A request is a *suspect* if engines have died while they worked on it: it may be the cause (`flash.rollout.routing`).

Invariant: every `generate` call waits in the queue, is held by exactly one engine, or is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Literal

import anyio
import msgspec

from flash.branches import divide_versions
from flash.config.tree import Config
from flash.errors import DeadlineError, EngineDeadError, EngineError, EngineRefusal, PoisonError
from flash.hub.protocol import EngineStatus
from flash.rollout.concurrency import ResponseLengths
from flash.rollout.engine import Engine, Progress, ResponseRequest
from flash.rollout.engine_state import EngineRecord, OutageClock
from flash.rollout.routing import MAX_DEATHS, RequestRecord, Router
from flash.sampling import Kept, join_kept
from flash.types import Activity, Completion, Published, VersionRun, append_versions
from flash.waiting import deadline

MAX_FAILURES = 3
"""Number of engines that may fail one request before the request fails. If several engines fail it, the cause is
probably the request, and further attempts would only cost time. Deaths of engines are counted separately
(`MAX_DEATHS`)."""
MAX_FAILED_IN_A_ROW = 8
"""Number of requests in a row that an engine may fail, without giving any token in between, before it counts as dead.
Without this limit one broken engine would use up the attempts of every sample. Requests that the engine refuses do not
count."""


class ProxySettings(msgspec.Struct, frozen=True):
    """Settings that the proxies of all nodes of a run have in common."""

    max_sequences: int
    """Largest number of requests that an engine holds at once."""
    swap: Literal["recompute", "keep", "abort", "drain", "beside"]
    """Treatment of running requests during a swap: a value of `rollout.swap`, or `beside`.

    `recompute` and `keep`: the requests go on under the new version, with a KV cache that is computed again, or that is
    kept. `abort`: the requests move to other engines before the load. `drain`: the requests end before the load, and
    the engine takes no new request. `beside`: an engine holds several versions of LoRA adapters, and a request ends
    under the version with which it began."""
    bind_groups: bool
    """True if all requests of a group go to one engine (`group` in `rollout.barriers`, for comparison)."""
    swap_s: float
    """Seconds in which aborted requests must leave an engine: before a swap (`abort`), and after the engine has
    died."""
    drain_s: float
    """Seconds that the requests of an engine have to end before a swap (`drain`)."""

    @staticmethod
    def of(config: Config) -> ProxySettings:
        """Return the settings of a run. A response may take `deadlines.generate`, so a drain gives requests as long."""
        return ProxySettings(
            max_sequences=config.engine.max_sequences,
            swap="beside" if config.adapters > 1 else config.rollout.swap,
            bind_groups="group" in config.rollout.barriers,
            swap_s=config.deadlines.swap,
            drain_s=config.deadlines.generate,
        )


class PartialResponse:
    """The tokens of one response so far, from all engines that have worked on it.

    A token's *kept set* has the tokens that settings such as top_k, or a grammar, left in the distribution from which
    it was sampled.

    Invariant: tokens, log-probs, versions and kept sets stay aligned, and each token stays as its engine gave it.
    """

    def __init__(self, request: ResponseRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRun] = []
        self._kept: list[Kept | None] = []
        """Kept sets of each piece."""
        self._sizes: list[int] = []
        """Number of tokens of each piece."""
        self._moved_at = 0
        """Number of tokens that the response had when the newest engine got the request."""

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def rest(self) -> ResponseRequest:
        """Return the request for the next engine, which continues after the tokens so far.

        Call this once for each engine that gets the request. This method notes the number of tokens so far, because
        `complete` needs to know where that engine begins.
        """
        self._moved_at = len(self._tokens)
        if not self._tokens:
            return self._request
        request = self._request
        return msgspec.structs.replace(
            request,
            prompt=request.prompt + self._tokens,
            max_new_tokens=request.max_new_tokens - len(self._tokens),
            generated=request.generated + len(self._tokens),
        )

    def add(self, piece: Progress) -> None:
        """Add new tokens from the engine that has the request now."""
        self._tokens += piece.token_ids
        self._logprobs += piece.logprobs
        append_versions(self._versions, piece.versions)
        self._kept.append(piece.kept)
        self._sizes.append(len(piece.token_ids))

    def exhausted(self) -> Completion | None:
        """Return the whole response if it has reached its token limit, else None.

        An engine may give the last token and then die before it gives the completion. Then no other engine has to
        continue. The routes of the response (experts that the engine chose) are unknown then.
        """
        if len(self._tokens) < self._request.max_new_tokens:
            return None
        return Completion(self._tokens, self._logprobs, self._versions, "length", self._kept_until(len(self._tokens)))

    def complete(self, last: Completion) -> Completion:
        """Return the whole response. `last` is the completion of the last engine, with all tokens of that engine.

        The pieces of that engine that `add` has appended are left out, because `last` contains them again. This object
        is not used after this, except for `length`, which then is the length of the whole response.
        """
        at = self._moved_at
        self._tokens = self._tokens[:at] + last.token_ids
        if at == 0:
            # One engine has sampled everything.
            return last
        # The versions of the first `at` tokens.
        (versions,) = divide_versions(self._versions, [at])
        append_versions(versions, last.versions)
        before = self._kept_until(at)
        kept = join_kept((before, last.kept), (at, len(last.token_ids)))
        # The last engine has computed the earlier tokens again, so its routes (the experts that it chose) are for all
        # tokens.
        return Completion(self._tokens, self._logprobs[:at] + last.logprobs, versions, last.finish, kept, last.routes)

    def _kept_until(self, tokens: int) -> Kept | None:
        """Return the kept sets of the first `tokens` tokens; None if the engines have given none."""
        kept = join_kept(self._kept, self._sizes)
        return None if kept is None else kept.part(0, tokens)


class _Wait:
    """The wait of one request in the queue. `LLMProxy.generate` waits for `over` (in `LLMProxy._wait_in_queue`).

    `over` is set when the router has placed the request on an engine (`engine`), or when the request has to ask the
    router again, because the engines have changed.
    """

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.engine: EngineRecord | None = None
        """Engine on which the request was placed; None while it waits, or if it has to ask again."""


class LLMProxy:
    """Distributes the requests of a node's episodes among the node's engines, and collects their responses.

    Args:
        engines: the node's engines, in the order of their places; they need not have started.
        first_index: number in the run of the node's first engine.
        settings: settings of the run.
        outages: clock of the time without any engine. The proxy calls `begin` when the last engine dies, and `end` when
            one serves again.
        on_room: called whenever `capacity` may have grown. The node's scheduler then starts further episodes.
        now: returns the present time in Unix seconds.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        first_index: int,
        settings: ProxySettings,
        outages: OutageClock,
        *,
        on_room: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._outages = outages
        lengths = ResponseLengths()
        self.records = [
            EngineRecord(engine, index, first_index + index, settings.max_sequences, lengths)
            for index, engine in enumerate(engines)
        ]
        """State of the engine in each of the node's places, in their order."""
        self._router = Router(self.records, bind_groups=settings.bind_groups)
        self._waits: dict[RequestRecord, _Wait] = {}
        """Requests in the queue, and requests that have just left it but whose `generate` has not continued since."""
        self._on_room = on_room
        self._now = now

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: ResponseRequest) -> Completion:
        """Sample one response. `EpisodePlayer` calls this for each response of an episode.

        Several engines may work on the response, one after the other. Each pass of the loop gives the request to one
        engine.

        Raises:
            PoisonError: `MAX_DEATHS` engines died under the request, so it probably kills engines.
            EngineError: all engines, or `MAX_FAILURES` of them, have failed the request.
            DeadlineError: the response took longer than `request.timeout_s`.
            Exception: `request.on_tokens` raised it, and the request was aborted.
        """
        response = PartialResponse(request)
        record = RequestRecord(request)
        end = anyio.current_time() + request.timeout_s
        completion = response.exhausted()
        while completion is None:
            if anyio.current_time() >= end:
                raise DeadlineError("a response", request.timeout_s, self._timeout_advice(request.min_version))
            # The scope is cancelled at the deadline, or earlier to make the request leave its engine.
            with anyio.CancelScope(deadline=end) as scope, self._outages.extending(scope):
                engine = await self._acquire_engine(record)
                completion = await self._stream(engine, record, response, scope)
            # An engine may die just after it has given the last token. Then the response is complete all the same.
            completion = completion or response.exhausted()
            end = scope.deadline  # an outage may have changed it
        return completion

    async def _acquire_engine(self, record: RequestRecord) -> EngineRecord:
        """Wait until an engine holds the request, and return the engine. `_stream` gives the engine's room back.

        Raises PoisonError if `MAX_DEATHS` engines died under the request. Other suspects of its group then fail, too.
        """
        while True:
            if record.deaths >= MAX_DEATHS:
                self._fail_suspects(record.request.group_id)
                raise PoisonError(f"{MAX_DEATHS} engines died before they had given a token of it: {record.death}")
            index = self._router.ask(record)
            if index is not None:
                return self.records[index]
            engine = await self._wait_in_queue(record)
            if engine is None:
                continue
            if engine.alive and not engine.closed:
                return engine
            # The request was placed on the engine while this coroutine waited. Before the coroutine continued, the
            # engine has died or has begun a swap for which it must be empty. So the request asks the router again.
            self._release(engine, record)

    async def _wait_in_queue(self, record: RequestRecord) -> EngineRecord | None:
        """Wait until the request leaves the queue.

        Returns the engine on which it was placed, or None if it has to ask the router again. If the caller is
        cancelled, the request leaves the queue, or gives back the room on an engine that it has just got.
        """
        wait = self._waits[record] = _Wait()
        try:
            await wait.over.wait()
        except BaseException:  # this includes a cancellation
            if wait.engine is not None:
                self._release(wait.engine, record)
            elif record.arrival is not None:
                self._router.withdraw(record)
                self._on_room()
            # Otherwise the request was taken out of the queue to ask again, and holds nothing.
            raise
        finally:
            del self._waits[record]
        return wait.engine

    async def _stream(
        self, engine: EngineRecord, record: RequestRecord, response: PartialResponse, scope: anyio.CancelScope
    ) -> Completion | None:
        """Make one engine sample the rest of a response, and release the engine's room at the end.

        Returns the whole response, or None if another engine has to continue, because this one has died or has failed
        the request. `scope`: scope around this call. The proxy cancels it, as a key of `engine.running`, to make the
        request leave the engine.

        Raises:
            EngineError: the engine has failed the request, and no other engine may try.
            Exception: `request.on_tokens` raised it.
        """
        concurrency, rest, completion = engine.concurrency, response.rest(), None
        self._add_running(engine, scope, record)
        # `own` is the number of tokens at the end of the prompt that belong to the response, because other engines have
        # sampled them.
        own = rest.generated
        concurrency.begin(scope, len(rest.prompt) - own, own, own + rest.max_new_tokens)
        self._adapt_limit_and_fill(engine)
        # `sticky` is True if the engine that served the task or the group before is preferred. It is False from the
        # first move by `_balance` on, also if the request moves again for another reason. While a moved request is on
        # its way, `_balance` moves no other request. The request has arrived now, so balance once for each engine,
        # because some may have got room.
        if not record.sticky:
            for other in self.records:
                self._balance(other)
        try:
            async with aclosing(engine.backend.generate(rest)) as pieces:
                async for piece in pieces:
                    engine.failed_in_a_row = 0
                    if isinstance(piece, Completion):
                        # The completion has all tokens of this engine, but only the last of them are new.
                        # `response.length` is read first, because `complete` changes it.
                        before, completion = response.length, response.complete(piece)
                        engine.tokens += response.length - before
                        concurrency.grow(scope, response.length - before)
                        return completion
                    engine.tokens += len(piece.token_ids)
                    concurrency.grow(scope, len(piece.token_ids))
                    if not record.proven:
                        self._on_first_token(engine, record)
                        self._adapt_limit_and_fill(engine)
                    response.add(piece)
                    # The last tokens come with the completion, and the caller counts them.
                    record.request.on_tokens(piece.token_ids)
            raise EngineError(f"engine {engine.number} ended a response without completing it")
        except EngineDeadError as error:
            self._on_death(engine, error)
        except EngineError as error:
            self._on_failure(engine, error)
            record.barred |= {engine.index}
            # If `_on_failure` has just retired the engine, the failure is the engine's fault, so others may try.
            if engine.alive and (len(record.barred) >= MAX_FAILURES or self._router.failed_by_all(record)):
                raise
        finally:
            concurrency.end(scope, complete=completion is not None)
            self._remove_running(engine, scope)
            self._release(engine, record)
        return None

    def _release(self, engine: EngineRecord, record: RequestRecord) -> None:
        """Note that an engine no longer holds a request, and give the room to waiting requests, the oldest first.

        Wakes `_wait_until_empty` if it was the engine's last request.
        """
        self._adapt_limit(engine)
        engine.release(record)
        if engine.held == 0:
            engine.emptied.set()
        self._fill(engine)

    def _adapt_limit_and_fill(self, engine: EngineRecord) -> None:
        """Update an engine's limit after a request has begun or has got its first tokens, and fill any new room.

        `_fill` is skipped without new room, because it runs for every request.
        """
        before = engine.limit
        self._adapt_limit(engine)
        if engine.limit > before:
            self._fill(engine)

    def _adapt_limit(self, engine: EngineRecord) -> None:
        """Set the number of requests that an engine may hold by its reported load (`flash.rollout.concurrency`)."""
        engine.concurrency.observe(engine.backend.pressure)
        engine.limit = engine.concurrency.limit

    def _fill(self, engine: EngineRecord) -> None:
        """Fill the room of an engine: with waiting requests, then with requests that fuller engines run.

        This is called whenever the room may have grown. At the end `on_room` notifies the scheduler, which can use the
        remaining room for new episodes.
        """
        for record in self._router.fill(engine.index):
            wait = self._waits[record]
            wait.engine = engine
            wait.over.set()
        self._balance(engine)
        self._on_room()

    def _on_failure(self, engine: EngineRecord, error: EngineError) -> None:
        """Count a request that an engine has failed. An engine that fails too many in a row is retired.

        Refusals do not count: they are the fault of the request, not of the engine.
        """
        if isinstance(error, EngineRefusal):
            return
        engine.failed_in_a_row += 1
        if engine.failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            times = f"{engine.failed_in_a_row} requests in a row"
            self.retire(engine.index, EngineDeadError(f"engine {engine.number} failed {times}; the last: {error}"))

    def _timeout_advice(self, min_version: int) -> str:
        """Return the advice in the DeadlineError that `generate` raises for a response that was too late.

        The advice names the settings that the user may change, the state of each living engine, and the number of
        requests in the router's wait queue. `self.waiting` may be larger than this number, because it also counts
        requests that have just left the queue.

        `min_version`: oldest version that may serve the request.
        """
        states = [
            f"engine {engine.number} has version {engine.backend.version} and {engine.held} of {engine.limit} requests"
            for engine in self.records
            if engine.alive
        ]
        waiting = f"{self._router.waiting} requests wait; this one needs version {min_version} or a newer one"
        return f"deadlines.generate and rollout.max_new_tokens ({'; '.join([*states, waiting])})"

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine, or have just left the queue. Status reports show it."""
        return len(self._waits)

    def capacity(self) -> int:
        """Return how many more requests, and so episodes, could start now on engines that have a version."""
        return self._router.room()

    # -- engines -----------------------------------------------------------------------------------------------------

    async def load(self, index: int, published: Published) -> None:
        """Load a version into the engine in place `index` (a swap). The supervisor calls this for each new version.

        With `abort` and `drain` the engine takes no request until the load is over. After an error it stays closed to
        requests, because its weights are undefined; the supervisor then starts another engine or ends the run. If the
        engine dies meanwhile, it raises an EngineDeadError, or the supervisor cancels this call.

        Raises:
            WeightsError: the engine got damaged weights, or its log-probs differ too much from the trainer's.
            EngineError: the load failed for another reason.
            DeadlineError: the requests did not leave the engine in time, or the load took too long.
        """
        engine, mode = self.records[index], self._settings.swap
        engine.begin_swap(closed=mode in ("abort", "drain"))
        if mode == "abort":
            self._move_all(engine)
            await self._wait_until_empty(engine, "to stop before its swap", self._settings.swap_s)
        elif mode == "drain":
            await self._wait_until_empty(engine, "to end before its swap", self._settings.drain_s)
        start = self._now()
        # The first version replaces the weights of the model folder. Nothing was sampled with these weights, so there
        # is no cache to keep.
        keep_cache = mode == "keep" and engine.backend.version >= 0
        engine.canary_error = await engine.backend.load(published, keep_cache=keep_cache)
        engine.loaded = start, self._now()
        engine.usage.note_load(*engine.loaded, busy=bool(engine.running))
        engine.end_swap(engine.backend.version)
        # If no engine was alive, this engine ends the outage.
        self._outages.end()
        self._adapt_limit(engine)
        self._fill(engine)

    def _balance(self, engine: EngineRecord) -> None:
        """Move requests from fuller engines to `engine`, if it has room, because the fullest engine is the slowest.

        The requests with the shortest contexts move, since they cost the least to compute again. Cancelling the scope
        of a request makes it leave its engine; it then asks the router, which places it on the emptiest engine. No
        further request moves until these requests have left, because the loads would be wrong meanwhile.
        """
        gives = self._router.surplus(engine.index)
        if not gives or any(scope.cancel_called for each in self.records for scope in each.running):
            return
        for giver, count in gives:
            fuller = self.records[giver]
            scopes = {fuller.running[scope]: scope for scope in fuller.concurrency.worth_moving([*fuller.running])}
            for record in self._router.movable(engine.index, scopes, count):
                record.sticky = False
                scopes[record].cancel()

    async def _wait_until_empty(self, engine: EngineRecord, purpose: str, seconds: float) -> None:
        """Wait until an engine holds no request. The caller has made sure that the engine gets no new requests.

        Raises DeadlineError, whose message `purpose` completes, if this takes longer than `seconds`.
        """

        def waited_for() -> str:
            """Return the event for the error message, with the number of requests at the time of the error."""
            return f"{engine.held} requests of engine {engine.number} {purpose}"

        with deadline(seconds, waited_for, "the engine, deadlines.swap and rollout.swap"):
            while engine.held:
                engine.emptied = anyio.Event()
                await engine.emptied.wait()

    def _move_all(self, engine: EngineRecord) -> None:
        """Make all running requests leave an engine, before a swap or after its death; other engines continue them."""
        for scope in engine.running:
            scope.cancel()

    def _on_first_token(self, engine: EngineRecord, record: RequestRecord) -> None:
        """Note that an engine has given a first token of a request: so the request does not kill this engine.

        If the request was a suspect, it is none any more, so the engine may get another suspect.
        """
        record.proven = True
        if record.deaths:
            record.deaths = 0
            engine.clear_suspect(record)
            self._fill(engine)

    def _fail_suspects(self, group: int) -> None:
        """Make the waiting suspects of a group fail after one of its requests has killed `MAX_DEATHS` engines.

        These suspects have the same prompt as that request, so they would probably kill more engines. With this number
        of deaths they raise a PoisonError in `_acquire_engine` as soon as they are woken.
        """
        for record, wait in self._waits.items():
            if record.suspected and record.request.group_id == group:
                record.deaths = MAX_DEATHS
                if record.arrival is not None:
                    self._router.withdraw(record)
                wait.over.set()

    def _on_death(self, engine: EngineRecord, error: EngineDeadError) -> None:
        """Note that an engine has died by itself, and retire it. Each of its requests may be the cause."""
        if engine.alive:
            for record in engine.running.values():
                record.died_under(str(error))
        self.retire(engine.index, error)

    def retire(self, index: int, error: EngineDeadError) -> None:
        """Take an engine out of service. `error` says how it died.

        The supervisor calls this, too, if an engine was killed while it started or could not load a version. The
        requests of the engine, and requests that wait for it alone, go to other engines or wait for the next one. Wakes
        `wait_dead`. Does nothing if the engine is out of service already.
        """
        engine = self.records[index]
        if not engine.alive:
            return
        engine.death = error
        engine.died.set()
        self._move_all(engine)
        # The router marks the engine as dead (`alive`).
        self._ask_again(self._router.retire(index))
        if not self._router.alive:
            # Requests now wait for the next engine. This time does not count for the deadlines of the requests.
            self._outages.begin()

    async def replace(self, index: int, new: Engine) -> None:
        """Put a new engine into the place `index`. The old engine of this place must be dead and closed.

        `new` has started and has no version yet, so it gets requests only after its first `load`. Raises DeadlineError
        if requests of the dead engine did not leave it in time.
        """
        engine = self.records[index]
        # The requests of the dead engine were cancelled when it died. A request that leaves only later would be counted
        # for the new engine.
        await self._wait_until_empty(engine, "to leave", self._settings.swap_s)
        engine.install(new, self._settings.max_sequences)
        self._ask_again(self._router.replace(index, self._settings.max_sequences, new.version))

    def _ask_again(self, records: Sequence[RequestRecord]) -> None:
        """Wake requests that the router has taken out of its queue: each asks the router again, in this order."""
        for record in records:
            self._waits[record].over.set()

    async def wait_dead(self, index: int) -> EngineDeadError:
        """Wait until the engine in place `index` is dead, and return the error that says how it died.

        The engine is dead if it reports so itself, or if `retire` was called for it. The supervisor waits for this, and
        then starts another engine.
        """
        engine = self.records[index]

        async def watch() -> None:
            """Retire the engine when it reports its own death, which sets `died`."""
            self._on_death(engine, await engine.backend.wait_dead())

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await engine.died.wait()
            group.cancel_scope.cancel()
        assert engine.death is not None
        return engine.death

    def renumber(self, first_index: int) -> None:
        """Give the engines their numbers at the next hub, from `first_index` on. Called when the hub was lost."""
        for engine in self.records:
            engine.renumber(first_index + engine.index)

    def versions(self) -> list[int]:
        """Return the version of each engine; −1 for an engine that is dead or has no version yet."""
        return [engine.backend.version if engine.alive else -1 for engine in self.records]

    # -- usage -------------------------------------------------------------------------------------------------------

    def _add_running(self, engine: EngineRecord, scope: anyio.CancelScope, record: RequestRecord) -> None:
        """Note that a request begins to run on an engine. Cancelling `scope` later makes it leave the engine."""
        engine.running[scope] = record
        record.proven = False
        if len(engine.running) == 1:
            engine.usage.busy(self._now())

    def _remove_running(self, engine: EngineRecord, scope: anyio.CancelScope) -> None:
        """Note that the request with `scope` no longer runs on an engine. Without any request the engine is idle."""
        del engine.running[scope]
        if not engine.running:
            engine.usage.idle(self._now())

    def report(self) -> tuple[list[EngineStatus], list[Activity]]:
        """Return the state of the living engines, and the activities of all engines since the last report.

        An activity is a bar of the run's timeline, such as a swap. `NodeReports` sends both to the hub. The activities
        are removed, so a report that is lost loses them.
        """
        now = self._now()
        statuses: list[EngineStatus] = []
        activities: list[Activity] = []
        for engine in self.records:
            if engine.alive:
                idle_s, lifetime_s = engine.usage.seconds(now)
                version, pressure = engine.backend.version, engine.backend.pressure
                drafts = (pressure.drafted, pressure.accepted)
                statuses.append(EngineStatus(engine.number, version, idle_s, lifetime_s, engine.canary_error, *drafts))
            activities += engine.usage.take_bars(now, busy=bool(engine.running))
        return statuses, activities
