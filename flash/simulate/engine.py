"""SimEngine: an inference engine's timing, without a model.

Continuous batching on the loop's clock. A decoding step gives each of the b running sequences one token and takes

    step_s + sequence_s · b + context_s · C + prefill_s · P        seconds,

where C is the context of all running sequences before the step and P counts the tokens of sequences that join in it
and are not in the KV cache. While nobody joins or leaves, k steps have a closed form (C grows by b in each), so that
only arrivals, ends, aborts, swaps and deliveries are events: `Stretch` holds the formula.

Who joins: requests wait in order of arrival for one of `max_sequences` places. A request that arrives or leaves takes
effect at the end of the step in flight; so does `load`, which then pauses for `swap_s`.
What is cached: the prompt of a problem as soon as one of its requests joined, and the context of an episode from the
end of a response here until it joins again; least recently used ones go, from their ends, when `kv_tokens` are short.
A swap that recomputes forgets both and prefills the running sequences again. When the running sequences themselves
outgrow the cache, the one that joined last is put back; what is left of its context then need not be prefilled again.

Lifecycle: no task of its own; `generate` and `load` set the loop's timers, `close` cancels the last one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

import anyio
import anyio.lowlevel
import msgspec

from flash.config.simulate import SimulateConfig
from flash.errors import EngineDeadError
from flash.rollout.engine import Pressure, Progress, ResponseRequest
from flash.simulate.steps import PrefixCache, SimSequence, Stretch
from flash.simulate.workload import episode_of, turn_of
from flash.types import Completion, Published

LOGPROB = -1.0
"""What every simulated token claims as its log-prob."""


class _Swap(msgspec.Struct):
    """A swap that is asked for or going on."""

    version: int
    keep_cache: bool
    done: asyncio.Future[None]


class SimEngine:
    """One simulated engine.

    `response_tokens(key)` is the natural length of a response, `stream_interval` the steps between two deliveries.
    `on_change`, when given, is told after every change of who runs.
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
        self._epochs: list[tuple[int, int]] = []
        """(step count, version) of each swap: the version of the tokens from that step on."""
        self._dead: EngineDeadError | None = None
        self._died = anyio.Event()
        self._running: dict[SimSequence, None] = {}
        self._waiting: OrderedDict[SimSequence, None] = OrderedDict()
        self._leaving: list[SimSequence] = []
        """Aborted in the step in flight."""
        self._ends: list[tuple[int, int, SimSequence]] = []
        """Heap of (step count, order, sequence)."""
        self._order = 0
        self._step = 0
        self._context = 0
        """Tokens of all running sequences at `_step`."""
        self._cold = 0
        """Tokens to prefill in the next step."""
        self._cache = PrefixCache()
        self._preemptions = 0
        self.recomputed = 0
        """Tokens of running sequences that swaps had computed again."""
        self._stretch: Stretch | None = None
        """The steps in flight; None while idle or swapping."""
        self._steps = 0
        """How many steps of the stretch until the next event."""
        self._timer: asyncio.Handle | None = None
        self._swap: _Swap | None = None
        self._swapping = False

    # -- the protocol ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy version in use."""
        return self._version

    @property
    def swapping(self) -> bool:
        """Whether it is paused for new weights."""
        return self._swapping

    @property
    def running(self) -> int:
        """Sequences that it decodes."""
        return len(self._running)

    @property
    def occupied(self) -> bool:
        """Whether it holds a request, begun or not."""
        return bool(self._running or self._waiting)

    @property
    def pressure(self) -> Pressure:
        """How full it is at this moment."""
        used = 0.0
        if self._settings.kv_tokens and self._running:
            context = self._context + len(self._running) * self._over()
            used = min(1.0, context / self._settings.kv_tokens)
        return Pressure(len(self._running), len(self._waiting), used, self._preemptions, self._settings.kv_tokens)

    async def start(self) -> None:
        """Ready at once: it has no process to start."""
        await anyio.lowlevel.checkpoint()

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response of zeros, as long as the workload says."""
        assert self._version >= 0, "an engine generates under a version"
        self._refuse_if_dead()
        sequence = self._sequence(request)
        self._waiting[sequence] = None
        self._stir()
        try:
            while not sequence.ended:
                sequence.waiter = asyncio.get_running_loop().create_future()
                await sequence.waiter
                if (piece := self._piece(sequence)) is not None:
                    yield piece
                self._refuse_if_dead()
            tokens = sequence.length
            finish = "length" if sequence.finish == "length" else "stop"
            yield Completion([0] * tokens, [LOGPROB] * tokens, sequence.runs, finish)
        finally:
            if not sequence.ended:
                if (piece := self._piece(sequence)) is not None:
                    request.on_lost(len(piece.token_ids))
                self._abort(sequence)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Pause at the end of the step in flight for `swap_s`, then go on under the new version."""
        self._refuse_if_dead()
        assert self._swap is None, "an engine loads one version at a time"
        assert published.version > self._version, "an engine never goes back"
        swap = self._swap = _Swap(published.version, keep_cache, asyncio.get_running_loop().create_future())
        self._stir()
        try:
            await swap.done
        finally:
            if not swap.done.done() or swap.done.cancelled():
                self._give_up_swap()
        self._refuse_if_dead()
        return 0.0

    def reassign(self, number: int) -> None:
        """See `Engine`."""

    def kill(self) -> None:
        """Die, as a process does: every request fails."""
        self._dead = EngineDeadError("the simulated engine was killed")
        self._died.set()
        self._halt()
        self._swapping = False
        for sequence in (*self._running, *self._waiting):
            sequence.wake()
        self._running.clear()
        self._waiting.clear()
        if self._swap is not None and not self._swap.done.done():
            self._swap.done.set_result(None)
        self._on_change()

    async def wait_dead(self) -> EngineDeadError:
        """Return when it was killed."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def close(self) -> None:
        """Set no more timers."""
        self._halt()
        await anyio.lowlevel.checkpoint()

    def _refuse_if_dead(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _sequence(self, request: ResponseRequest) -> SimSequence:
        natural = max(1, self._response_tokens(request.key) - request.generated)
        limit = request.max_new_tokens
        return SimSequence(request, min(natural, limit), "length" if natural > limit else "stop")

    def _piece(self, sequence: SimSequence) -> Progress | None:
        """What was sampled since the last piece, as far as the engine has counted its steps."""
        if sequence.ended or sequence.joined < 0:
            return None
        sequence.note_versions(self._step, self._epochs)
        new = sequence.tokens(self._step) - sequence.streamed
        if not new:
            return None
        sequence.streamed += new
        return Progress([0] * new, [LOGPROB] * new, sequence.newest_runs(new))

    # -- time --------------------------------------------------------------------------------------------------------

    def _stir(self) -> None:
        """Something changed from outside: see to it at the end of the step in flight, or now if there is none."""
        if self._swapping:
            return
        loop = asyncio.get_running_loop()
        if self._stretch is not None:
            steps = min(self._over() + 1, self._steps)
            if steps < self._steps:
                self._arm(self._stretch, steps)
        elif self._timer is None:
            # Not at once: all that arrives at this moment shall share the first step.
            self._timer = loop.call_soon(self._wake_up)

    def _over(self) -> int:
        """Steps of the stretch that are over and not yet counted."""
        if self._stretch is None:
            return 0
        return self._stretch.over(asyncio.get_running_loop().time(), self._steps - 1)

    def _wake_up(self) -> None:
        self._timer = None
        self._turn_over(asyncio.get_running_loop().time())

    def _arm(self, stretch: Stretch, steps: int) -> None:
        self._halt()
        self._stretch, self._steps = stretch, steps
        self._timer = asyncio.get_running_loop().call_at(stretch.after(steps), self._stepped)

    def _halt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._stretch = None

    def _stepped(self) -> None:
        """The steps up to the next event are over."""
        stretch, steps = self._stretch, self._steps
        assert stretch is not None
        self._timer = None
        self._stretch = None
        self._step += steps
        self._context += steps * len(self._running)
        self._turn_over(stretch.after(steps))

    def _turn_over(self, now: float) -> None:
        """Between two steps: who ended leaves, weights are swapped, who waits joins, and the next steps begin.

        `now` is the end of the last step on the engine's own account: timers that fire late must not slow it down.
        """
        self._part()
        if self._step % self._stream_interval == 0:
            for sequence in self._running:
                sequence.wake()
        if self._swap is not None:
            self._swapping = True
            self._timer = asyncio.get_running_loop().call_at(
                now + self._settings.swap_s, self._swapped, now + self._settings.swap_s
            )
        else:
            self._preempt()
            self._admit()
            if self._running:
                self._begin(now)
        self._on_change()

    def _begin(self, now: float) -> None:
        """Start the steps up to the next event that is known."""
        settings, count = self._settings, len(self._running)
        step = settings.step_s + settings.sequence_s * count + settings.context_s * self._context
        stretch = Stretch(now, settings.prefill_s * self._cold, step, settings.context_s * count)
        self._cold = 0
        while self._ends[0][2] not in self._running or self._ends[0][0] != self._ends[0][2].end:
            heapq.heappop(self._ends)
        steps = min(self._ends[0][0] - self._step, self._stream_interval - self._step % self._stream_interval)
        if settings.kv_tokens and count > 1:
            steps = min(steps, (settings.kv_tokens - self._context) // count)
        self._arm(stretch, steps)

    # -- who runs ----------------------------------------------------------------------------------------------------

    def _part(self) -> None:
        """Take out the sequences that are complete or were aborted."""
        for sequence in self._leaving:
            if sequence in self._running:
                self._put_by(sequence)
        self._leaving.clear()
        while self._ends and self._ends[0][0] <= self._step:
            end, _, sequence = heapq.heappop(self._ends)
            if sequence in self._running and end == sequence.end:
                sequence.note_versions(self._step, self._epochs)
                self._put_by(sequence)
                sequence.ended = True
                sequence.wake()

    def _put_by(self, sequence: SimSequence) -> None:
        """It runs no more, and its context stays until others need the place."""
        del self._running[sequence]
        context = sequence.context(self._step)
        self._context -= context
        self._cache.hold("episode", episode_of(sequence.request.key), context)

    def _abort(self, sequence: SimSequence) -> None:
        """Its reader is gone."""
        if sequence in self._waiting:
            first = next(iter(self._waiting)) is sequence
            del self._waiting[sequence]
            if first:  # there may be room for the one behind it
                self._stir()
        elif sequence in self._running:
            self._leaving.append(sequence)
            if self._swapping:
                self._part()
                self._on_change()
            else:
                self._stir()

    def _preempt(self) -> None:
        """Put back the youngest sequences until the next step fits into the KV cache; one always stays."""
        limit = self._settings.kv_tokens
        while limit and len(self._running) > 1 and self._context + len(self._running) > limit:
            sequence = next(reversed(self._running))
            sequence.note_versions(self._step, self._epochs)
            self._put_by(sequence)
            sequence.sampled = sequence.tokens(self._step)
            sequence.joined = -1
            self._waiting[sequence] = None
            self._waiting.move_to_end(sequence, last=False)
            self._preemptions += 1

    def _admit(self) -> None:
        """Let those who wait join, in order, while there is place and KV cache."""
        limit = self._settings.kv_tokens
        while self._waiting and len(self._running) < self._max_sequences:
            sequence = next(iter(self._waiting))
            context = sequence.context(self._step)
            if limit and self._running and self._context + context + len(self._running) + 1 > limit:
                return
            if limit:
                self._cache.shrink(max(0, limit - self._context))
            del self._waiting[sequence]
            self._join(sequence, context)

    def _join(self, sequence: SimSequence, context: int) -> None:
        request = sequence.request
        problem = request.prompt[0]
        known = max(self._cache.hit("problem", problem), self._cache.take("episode", episode_of(request.key)))
        # The last token is always computed: the next one is sampled from what it gives.
        self._cold += context - min(known, context - 1)
        self._hold_problem(sequence)
        self._running[sequence] = None
        self._context += context
        sequence.joined = sequence.seen = self._step
        heapq.heappush(self._ends, (sequence.end, self._order, sequence))
        self._order += 1

    def _hold_problem(self, sequence: SimSequence) -> None:
        """Whoever shares the prompt of this sequence finds it in the cache."""
        request = sequence.request
        if turn_of(request.key) == 0:
            self._cache.hold("problem", request.prompt[0], sequence.prompt - request.generated)

    # -- weights -----------------------------------------------------------------------------------------------------

    def _swapped(self, now: float) -> None:
        swap = self._swap
        assert swap is not None
        self._timer, self._swap, self._swapping = None, None, False
        self._version = swap.version
        self._epochs.append((self._step, swap.version))
        if not swap.keep_cache:
            self._cache.clear()
            self._cold = self._context
            self.recomputed += self._context
            for sequence in self._running:
                self._hold_problem(sequence)
        if not swap.done.done():
            swap.done.set_result(None)
        self._turn_over(now)

    def _give_up_swap(self) -> None:
        """Whoever asked for the swap is gone: go on with the old weights."""
        self._swap = None
        if self._swapping:
            self._swapping = False
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            if self._dead is None:
                self._stir()
