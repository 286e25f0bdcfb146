"""SimEngine: the timing of an inference engine with continuous batching, without a model, on the event loop's clock.

`flash.simulate.world` makes one `SimEngine` where a real run has a vLLM engine. The real proxy of the node calls it
through the interface `flash.rollout.engine.Engine`. The loop's clock is the virtual clock of `flash.simulate.clock`.

A decoding step gives each of the b running sequences one token and takes

    step_s + sequence_s · b + context_s · C + prefill_s · P        seconds,

where C is the context of all running sequences before the step. P is the number of tokens of joining sequences that are
not in the KV cache. The time of several steps has a closed form, `Stretch`, so only arrivals, ends, aborts, swaps and
deliveries are events.

A swap is the change to the weights of a new policy version (`load`). Admission: requests wait in order of arrival for
one of `max_sequences` places. Arrivals, aborts and `load` take effect at the end of the running step; `load` then
pauses the engine for `swap_s`. Cache: it holds the prompt of a problem as soon as one of its requests has joined. It
holds the context of an episode between two responses on this engine. It evicts the least recently used contexts when
`kv_tokens` are used up. A request that arrives after a swap never uses contexts of older weights. A swap without
`keep_cache` clears the cache and prefills the running sequences again. If the running sequences need more than
`kv_tokens`, the one that joined last returns to the wait queue. Its context is cached as far as there is room.

Lifecycle: the engine has no task. `generate` and `load` set timers of the loop, and `close` cancels the last one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from flash.config.simulate import SimulateConfig
from flash.errors import EngineDeadError
from flash.rollout.engine import Pressure, Progress, ResponseRequest
from flash.simulate.steps import PrefixCache, SimSequence, Stretch, VersionStart
from flash.simulate.workload import turn_of
from flash.types import Completion, Published

LOGPROB = -1.0
"""Log-probability of every simulated token. Its value does not matter, because nothing is trained."""


class _Swap(msgspec.Struct):
    """A swap that is requested or in progress."""

    version: int
    """Policy version that the engine has after the swap."""
    keep_cache: bool
    """False if the KV cache of the running sequences is computed again."""
    done: asyncio.Future[None]
    """Completes when the swap is done or the engine is dead."""


class _PlannedEnd(NamedTuple):
    """Entry of the heap of ends: the earliest step first, and among equal steps the sequence that joined first."""

    step: int
    """Step count at which the response is complete, if the sequence runs without a break until then."""
    order: int
    """Number of the entry, counted from 0. All entries of an engine have different ones, so that the heap never
    compares two sequences."""
    sequence: SimSequence
    """Sequence that ends. The entry is out of date if it has left, or if its `end` is another step."""


class SimEngine:
    """A simulated inference engine. Implements `flash.rollout.engine.Engine`.

    The engine counts its decoding steps from its start. This number is called the *step count* below.

    Args:
        settings: the simulation's settings.
        max_sequences: most sequences that run at once.
        response_tokens: returns the tokens of a whole response for the key of its request. The request's own limit,
            `max_new_tokens`, is applied to it afterwards.
        stream_interval: number of steps between two deliveries of new tokens.
        on_change: called between two steps, and when the engine is killed, because running sequences or the swap may
            have changed.
    """

    def __init__(
        self,
        settings: SimulateConfig,
        max_sequences: int,
        response_tokens: Callable[[int], int],
        stream_interval: int,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._max_sequences = max_sequences
        self._response_tokens = response_tokens
        self._stream_interval = stream_interval
        self._on_change = on_change
        self._version = -1
        """Policy version in use; −1 before the first `load`."""
        self._version_starts: list[VersionStart] = []
        """One item for each swap, the oldest first."""
        self._dead: EngineDeadError | None = None
        """Error of the killed engine; None while it lives."""
        self._died = anyio.Event()
        self._running: dict[SimSequence, None] = {}
        """Sequences that the engine decodes, as keys, in the order in which they joined. The values mean nothing: a
        dict is used because it removes any key at once."""
        self._waiting: OrderedDict[SimSequence, None] = OrderedDict()
        """Wait queue: sequences that have not joined, as keys. The first one joins next. The values mean nothing."""
        self._leaving: list[SimSequence] = []
        """Running sequences whose request was aborted. `_remove_ended` removes them at the end of the running step."""
        self._planned_ends: list[_PlannedEnd] = []
        """Heap with an entry for each running sequence. Entries of sequences that have left are skipped when they come
        to the top, because a heap cannot remove an item in its middle."""
        self._order = 0
        """`order` of the next entry of `_planned_ends`."""
        self._done_steps = 0
        """Step count without the steps of the present stretch."""
        self._context = 0
        """Tokens of all running sequences after `_done_steps` steps."""
        self._to_prefill = 0
        """Tokens that the next step prefills: those of joining sequences, or of all sequences after a swap."""
        self._cache = PrefixCache()
        """Contexts for later requests. They use the part of the `kv_tokens` that running sequences leave free."""
        self._preemptions = 0
        """Number of times that a sequence returned to the wait queue for lack of KV cache."""
        self.recomputed = 0
        """Tokens of running sequences that were computed again after swaps. Only tests read it."""
        self._stretch: Stretch | None = None
        """Steps that run at present; None while the engine is idle or paused for a swap."""
        self._planned_steps = 0
        """Steps of the stretch until the next event. At the end of them `_timer` fires."""
        self._timer: asyncio.Handle | None = None
        """Timer of the next event: the end of a stretch, the end of a swap, or the start of an idle engine."""
        self._swap: _Swap | None = None
        """Swap that is requested or in progress; None if there is none."""
        self._swapping = False
        """True while the engine is paused for the swap; False while the swap waits for the end of the step."""

    # -- the interface `Engine` --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version in use; −1 before the first `load`."""
        return self._version

    @property
    def swapping(self) -> bool:
        """True while the engine is paused for new weights."""
        return self._swapping

    @property
    def running(self) -> int:
        """Number of sequences that the engine decodes."""
        return len(self._running)

    @property
    def occupied(self) -> bool:
        """True if the engine has a request that runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def pressure(self) -> Pressure:
        """Load of the engine at this moment. The proxy limits the engine's requests by it."""
        used = 0.0
        if self._settings.kv_tokens and self._running:
            # Each running sequence has got one more token in each step of the stretch that is over.
            context = self._context + len(self._running) * self._steps_over()
            used = min(1.0, context / self._settings.kv_tokens)
        return Pressure(len(self._running), len(self._waiting), used, self._preemptions, self._settings.kv_tokens)

    async def start(self) -> None:
        """Return at once, since there is no process to start."""
        await anyio.lowlevel.checkpoint()

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response. All its tokens have id 0, and `response_tokens` gives its length.

        The proxy reads the stream, and closes or cancels it to abort the request. Raises EngineDeadError once the
        engine is killed.
        """
        assert self._version >= 0, "an engine generates under a version"
        self._refuse_if_dead()
        sequence = self._new_sequence(request)
        self._waiting[sequence] = None
        self._end_step_soon()
        try:
            while not sequence.ended:
                sequence.waiter = asyncio.get_running_loop().create_future()
                await sequence.waiter
                if (piece := self._next_piece(sequence)) is not None:
                    yield piece
                self._refuse_if_dead()
            tokens = sequence.length
            yield Completion([0] * tokens, [LOGPROB] * tokens, sequence.runs, sequence.finish)
        finally:
            # The request was aborted, or the engine is dead. Sampled tokens that were not delivered are lost. Tokens of
            # the present stretch do not count.
            if not sequence.ended:
                request.tally.lost += sequence.tokens(self._done_steps) - sequence.streamed
                self._abort(sequence)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Pause for `swap_s` at the end of the running step, then continue with the new version.

        The proxy calls this for each policy version. If the call is cancelled, the engine keeps the old version.
        Returns 0, the difference between the log-probs of the canary: there are no weights that could differ. Raises
        EngineDeadError if the engine is killed before or during the call.
        """
        self._refuse_if_dead()
        assert self._swap is None, "an engine loads one version at a time"
        assert published.version > self._version, "an engine never goes back"
        swap = self._swap = _Swap(published.version, keep_cache, asyncio.get_running_loop().create_future())
        self._end_step_soon()
        try:
            await swap.done
        finally:
            # `load` itself was cancelled. asyncio then cancels the future too, if `load` already waited for it.
            if not swap.done.done() or swap.done.cancelled():
                self._cancel_swap()
        self._refuse_if_dead()
        return 0.0

    def reassign(self, number: int) -> None:
        """Do nothing, since a simulated engine does not use its number. The supervisor calls this for a new hub."""

    def kill(self) -> None:
        """Die like a process that is killed: every request and every later call fails. Runs with faults call this."""
        self._dead = EngineDeadError("the simulated engine was killed")
        self._died.set()
        self._cancel_timer()
        self._swapping = False
        for sequence in (*self._running, *self._waiting):
            sequence.wake()
        self._running.clear()
        self._waiting.clear()
        if self._swap is not None and not self._swap.done.done():
            self._swap.done.set_result(None)
        self._on_change()

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is killed, and return the error. The proxy waits for it throughout the run."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def close(self) -> None:
        """Cancel the last timer."""
        self._cancel_timer()
        await anyio.lowlevel.checkpoint()

    def _refuse_if_dead(self) -> None:
        """Raise EngineDeadError if the engine was killed."""
        if self._dead is not None:
            raise self._dead

    def _new_sequence(self, request: ResponseRequest) -> SimSequence:
        """Return the sequence for a request that has just arrived. It is not in the wait queue yet."""
        # A request that has moved here from another engine asks only for the rest of its response.
        natural = max(1, self._response_tokens(request.key) - request.generated)
        limit = request.max_new_tokens
        return SimSequence(request, min(natural, limit), "length" if natural > limit else "stop", self._version)

    def _next_piece(self, sequence: SimSequence) -> Progress | None:
        """Return the tokens of a running sequence that were not delivered yet, and count them as delivered.

        Returns None if there are none, if the sequence waits, and if it has ended: its `Completion` then holds all
        tokens. Tokens of the present stretch are delivered after its end.
        """
        if sequence.ended or sequence.joined < 0:
            return None
        sequence.note_versions(self._done_steps, self._version_starts)
        new = sequence.tokens(self._done_steps) - sequence.streamed
        if not new:
            return None
        sequence.streamed += new
        return Progress([0] * new, [LOGPROB] * new, sequence.newest_runs(new))

    # -- time --------------------------------------------------------------------------------------------------------

    def _end_step_soon(self) -> None:
        """Let `_between_steps` run at the end of the running step, or in this moment if no step is running.

        Called after each arrival, abort, request to swap and cancelled swap, which take effect between two steps.
        """
        if self._swapping:
            return  # The end of the swap calls `_between_steps`.
        if self._stretch is not None:
            steps = self._steps_over() + 1
            if steps < self._planned_steps:
                self._set_timer(self._stretch, steps)
        elif self._timer is None:
            # Not in this call: all requests that arrive at this moment share the first step.
            self._timer = asyncio.get_running_loop().call_soon(self._start_idle)

    def _steps_over(self) -> int:
        """Return the number of steps of the present stretch that are over by the clock.

        The last planned step never counts, even if its timer fires late: `_end_stretch` is still to count it.
        """
        if self._stretch is None:
            return 0
        return self._stretch.steps_over(asyncio.get_running_loop().time(), self._planned_steps - 1)

    def _start_idle(self) -> None:
        """Start the first steps of an engine that was idle. `_end_step_soon` sets the timer that calls this."""
        self._timer = None
        self._between_steps(asyncio.get_running_loop().time())

    def _set_timer(self, stretch: Stretch, steps: int) -> None:
        """Set the timer to the end of the first `steps` steps of a stretch. An earlier timer is cancelled."""
        self._cancel_timer()
        self._stretch, self._planned_steps = stretch, steps
        self._timer = asyncio.get_running_loop().call_at(stretch.end_of(steps), self._end_stretch)

    def _cancel_timer(self) -> None:
        """Cancel the timer and forget the stretch."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._stretch = None

    def _end_stretch(self) -> None:
        """Count the planned steps of the stretch, and call `_between_steps`. The timer fires at their end."""
        stretch, steps = self._stretch, self._planned_steps
        assert stretch is not None
        self._timer = None
        self._stretch = None
        self._done_steps += steps
        self._context += steps * len(self._running)
        self._between_steps(stretch.end_of(steps))

    def _between_steps(self, now: float) -> None:
        """Remove ended sequences, deliver tokens, and begin a requested swap; without a swap, start the next steps.

        Before the next steps, waiting sequences join if there is room for them. If no sequence runs, the engine is idle
        until `_end_step_soon` is called.

        `now` is the computed end of the last step or swap, because timers that fire late must not slow down the engine.
        For an idle engine it is the clock's time.
        """
        self._remove_ended()
        if self._done_steps % self._stream_interval == 0:
            for sequence in self._running:
                sequence.wake()
        if self._swap is not None:
            self._swapping = True
            end = now + self._settings.swap_s
            self._timer = asyncio.get_running_loop().call_at(end, self._end_swap, end)
        else:
            self._preempt()
            self._admit()
            if self._running:
                self._start_stretch(now)
        self._on_change()

    def _start_stretch(self, now: float) -> None:
        """Start the steps up to the next event that is known in advance. `now` is the time at which they begin.

        These events are the end of a response, a delivery of tokens, and the step that would overfill the KV cache.
        """
        settings, count = self._settings, len(self._running)
        step_s = settings.step_s + settings.sequence_s * count + settings.context_s * self._context
        stretch = Stretch(now, settings.prefill_s * self._to_prefill, step_s, settings.context_s * count)
        self._to_prefill = 0
        # Drop entries of sequences that have left. A preempted sequence that joined again has a later end than before.
        while (first := self._planned_ends[0]).sequence not in self._running or first.step != first.sequence.end:
            heapq.heappop(self._planned_ends)
        steps = min(first.step - self._done_steps, self._stream_interval - self._done_steps % self._stream_interval)
        # A step adds a token to each sequence. A single sequence may exceed the cache, as `_preempt` never removes it.
        if settings.kv_tokens and count > 1:
            steps = min(steps, (settings.kv_tokens - self._context) // count)
        self._set_timer(stretch, steps)

    # -- running and waiting sequences -------------------------------------------------------------------------------

    def _remove_ended(self) -> None:
        """Remove the sequences that are complete or were aborted. `generate` then delivers the complete responses."""
        for sequence in self._leaving:
            if sequence in self._running:
                self._remove_to_cache(sequence)
        self._leaving.clear()
        while self._planned_ends and self._planned_ends[0].step <= self._done_steps:
            end = heapq.heappop(self._planned_ends)
            sequence = end.sequence
            if sequence in self._running and end.step == sequence.end:
                sequence.note_versions(self._done_steps, self._version_starts)
                self._remove_to_cache(sequence)
                sequence.ended = True
                sequence.wake()

    def _remove_to_cache(self, sequence: SimSequence) -> None:
        """Remove a running sequence. Its context stays in the cache until the room is needed."""
        del self._running[sequence]
        context = sequence.context(self._done_steps)
        self._context -= context
        self._cache.hold(sequence.episode_context, context)

    def _abort(self, sequence: SimSequence) -> None:
        """Remove the sequence of a request whose caller no longer reads the response.

        A running sequence leaves at the end of the running step. After `kill` the engine holds no sequence, and nothing
        happens.
        """
        if sequence in self._waiting:
            first = next(iter(self._waiting)) is sequence
            del self._waiting[sequence]
            if first:  # There may be room for the next sequence, if that is shorter.
                self._end_step_soon()
        elif sequence in self._running:
            self._leaving.append(sequence)
            if self._swapping:  # No step runs, so nothing has to be waited for.
                self._remove_ended()
                self._on_change()
            else:
                self._end_step_soon()

    def _preempt(self) -> None:
        """Return the sequences that joined last to the wait queue until the next step fits into the KV cache.

        One sequence always keeps running. Otherwise a sequence that is longer than the cache would never end.
        """
        limit = self._settings.kv_tokens  # 0: the cache never fills
        while limit and len(self._running) > 1 and self._context + len(self._running) > limit:
            sequence = next(reversed(self._running))
            sequence.note_versions(self._done_steps, self._version_starts)
            self._remove_to_cache(sequence)
            sequence.sampled = sequence.tokens(self._done_steps)
            sequence.joined = -1
            self._waiting[sequence] = None
            self._waiting.move_to_end(sequence, last=False)
            self._preemptions += 1

    def _admit(self) -> None:
        """Let waiting sequences join, in order of arrival, while there are places and room in the KV cache."""
        limit = self._settings.kv_tokens  # 0: the cache never fills
        while self._waiting and len(self._running) < self._max_sequences:
            sequence = next(iter(self._waiting))
            context = sequence.context(self._done_steps)
            # The next step adds one token to each running sequence and to this one.
            if limit and self._running and self._context + context + len(self._running) + 1 > limit:
                return
            if limit:  # Before `_join` looks into the cache: it only holds what running sequences leave room for.
                self._cache.shrink(max(0, limit - self._context))
            del self._waiting[sequence]
            self._join(sequence, context)

    def _join(self, sequence: SimSequence, context: int) -> None:
        """Let a sequence run from the next step on, which prefills what is not cached.

        `context` is the number of tokens of its prompt and of the response so far.
        """
        # The prompt of the problem stays in the cache, for other episodes. The context of this episode leaves it, since
        # the running sequence holds these tokens from now on, and `_context` counts them.
        cached = max(self._cache.hit(sequence.problem_context), self._cache.take(sequence.episode_context))
        # The last token is always computed, because the next token is sampled from its logits.
        self._to_prefill += context - min(cached, context - 1)
        self._cache_prompt(sequence)
        self._running[sequence] = None
        self._context += context
        # `_preempt` has recorded the versions of tokens that were sampled before the sequence lost its place.
        sequence.joined = sequence.versions_until = self._done_steps
        heapq.heappush(self._planned_ends, _PlannedEnd(sequence.end, self._order, sequence))
        self._order += 1

    def _cache_prompt(self, sequence: SimSequence) -> None:
        """Put the prompt of a first turn into the cache, for other sequences of the same problem."""
        if turn_of(sequence.request.key) == 0:
            # In a request that has moved here, the prompt ends with tokens of the response, which others do not share.
            self._cache.hold(sequence.problem_context, sequence.prompt - sequence.request.generated)

    # -- weights -----------------------------------------------------------------------------------------------------

    def _end_swap(self, now: float) -> None:
        """End a swap: use the new version for all later tokens, and let `load` return.

        `now` is the computed end of the swap.
        """
        swap = self._swap
        assert swap is not None
        self._timer, self._swap, self._swapping = None, None, False
        self._version = swap.version
        self._version_starts.append(VersionStart(self._done_steps, swap.version))
        live = (*self._running, *self._waiting)
        if swap.keep_cache:
            # A request keeps the cache version of its arrival, so contexts of versions before `oldest` have no user.
            oldest = min((sequence.cache_version for sequence in live), default=swap.version)
            self._cache.forget_before(oldest)
        else:
            # The next step computes the contexts of all running sequences with the new weights.
            self._cache.clear()
            self._to_prefill = self._context
            self.recomputed += self._context
            for sequence in live:
                sequence.cache_version = swap.version
            for sequence in self._running:
                self._cache_prompt(sequence)
        if not swap.done.done():
            swap.done.set_result(None)
        self._between_steps(now)

    def _cancel_swap(self) -> None:
        """Continue with the old weights. `load` calls this if it is cancelled."""
        self._swap = None
        if self._swapping:  # Otherwise the swap still waited for the end of a step.
            self._swapping = False
            self._cancel_timer()
            self._end_step_soon()
