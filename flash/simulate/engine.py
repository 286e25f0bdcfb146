"""SimEngine: the timing of an inference engine with continuous batching, without a model, on the event loop's clock.

A decoding step gives each of the b running sequences one token and takes

    step_s + sequence_s · b + context_s · C + prefill_s · P        seconds,

where C is the context of all running sequences before the step. P is the number of tokens of joining sequences that are
not in the KV cache. The time of several steps has a closed form, `Stretch`, so only arrivals, ends, aborts, swaps and
deliveries are events.

A swap is the change to the weights of a new policy version (`load`). Admission: requests wait in order of arrival for
one of `max_sequences` places. Arrivals, aborts and `load` take effect at the end of the running step; `load` then
pauses the engine for `swap_s`. Cache: it holds the prompt of a problem as soon as one of its requests has joined. It
holds the context of an episode between two responses on this engine. It evicts the least recently used contexts when
`kv_tokens` are used up. A swap that recomputes clears the cache and prefills the running sequences again. If the
running sequences need more than `kv_tokens`, the one that joined last returns to the wait queue. Its context is cached
as far as there is room.

Lifecycle: the engine has no task. `generate` and `load` set timers of the loop, and `close` cancels the last one.
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
"""Log-probability of every simulated token. Its value does not matter, because nothing is trained."""


class _Swap(msgspec.Struct):
    """A swap that is requested or in progress."""

    version: int
    keep_cache: bool
    """False if the KV cache of the running sequences is computed again."""
    done: asyncio.Future[None]
    """Completes when the swap is done or the engine is dead."""


class SimEngine:
    """A simulated inference engine.

    Args:
        settings: the simulation's settings.
        max_sequences: most sequences that run at once.
        response_tokens: returns the length of a response, without limits, for the key of its request.
        stream_interval: steps between two deliveries of new tokens.
        on_change: called after each change of the running sequences or of the engine's state.
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
        """Swaps as (step count, version): tokens from that step on have that version."""
        self._dead: EngineDeadError | None = None
        self._died = anyio.Event()
        self._running: dict[SimSequence, None] = {}
        self._waiting: OrderedDict[SimSequence, None] = OrderedDict()
        self._leaving: list[SimSequence] = []
        """Running sequences whose request was aborted. They leave at the end of the running step."""
        self._ends: list[tuple[int, int, SimSequence]] = []
        """Heap of (step count, order, sequence): the step at which each running sequence will be complete. Entries of
        sequences that have left are ignored."""
        self._order = 0
        """Number of the next heap entry, which orders entries with the same step."""
        self._step = 0
        """Steps since the start, without the steps of the present stretch."""
        self._context = 0
        """Tokens of all running sequences at `_step`."""
        self._cold = 0
        """Tokens that the next step prefills."""
        self._cache = PrefixCache()
        self._preemptions = 0
        self.recomputed = 0
        """Tokens of running sequences that were computed again after swaps."""
        self._stretch: Stretch | None = None
        """Steps in progress; None while the engine is idle or swaps."""
        self._steps = 0
        """Steps of the stretch until the next event, at which `_timer` fires."""
        self._timer: asyncio.Handle | None = None
        self._swap: _Swap | None = None
        """Swap that is requested or in progress; None if there is none."""
        self._swapping = False
        """True while the engine is paused for the swap; False while the swap waits for the end of the step."""

    # -- the protocol ------------------------------------------------------------------------------------------------

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
        """Load of the engine at this moment."""
        used = 0.0
        if self._settings.kv_tokens and self._running:
            context = self._context + len(self._running) * self._over()
            used = min(1.0, context / self._settings.kv_tokens)
        return Pressure(len(self._running), len(self._waiting), used, self._preemptions, self._settings.kv_tokens)

    async def start(self) -> None:
        """Return at once, since there is no process to start."""
        await anyio.lowlevel.checkpoint()

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response of zero tokens (token id 0), with the length that the workload gives."""
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
                    request.tally.lost += len(piece.token_ids)
                self._abort(sequence)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Pause for `swap_s` at the end of the running step, then continue with the new version. Returns 0."""
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
        """Do nothing: a simulated engine does not know its number."""

    def kill(self) -> None:
        """Die like a process that is killed: every request and every later call fails."""
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
        """Wait until the engine is killed, and return the error."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def close(self) -> None:
        """Cancel the last timer."""
        self._halt()
        await anyio.lowlevel.checkpoint()

    def _refuse_if_dead(self) -> None:
        """Raise EngineDeadError if the engine was killed."""
        if self._dead is not None:
            raise self._dead

    def _sequence(self, request: ResponseRequest) -> SimSequence:
        """Return a new sequence for a request. A request that continues a response asks only for the rest of it."""
        natural = max(1, self._response_tokens(request.key) - request.generated)
        limit = request.max_new_tokens
        return SimSequence(request, min(natural, limit), "length" if natural > limit else "stop")

    def _piece(self, sequence: SimSequence) -> Progress | None:
        """Return the tokens since the last piece, up to the last event; None if there are none."""
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
        """Handle a change from outside at the end of the running step, or in this moment if no step is running."""
        if self._swapping:
            return
        loop = asyncio.get_running_loop()
        if self._stretch is not None:
            steps = min(self._over() + 1, self._steps)
            if steps < self._steps:
                self._arm(self._stretch, steps)
        elif self._timer is None:
            # Not in this call: all requests that arrive at this moment share the first step.
            self._timer = loop.call_soon(self._wake_up)

    def _over(self) -> int:
        """Return the number of steps of the stretch that are over, but not yet in `_step`."""
        if self._stretch is None:
            return 0
        return self._stretch.over(asyncio.get_running_loop().time(), self._steps - 1)

    def _wake_up(self) -> None:
        """Start the first steps of an idle engine."""
        self._timer = None
        self._turn_over(asyncio.get_running_loop().time())

    def _arm(self, stretch: Stretch, steps: int) -> None:
        """Set the timer to the end of this many steps of a stretch. An earlier timer is cancelled."""
        self._halt()
        self._stretch, self._steps = stretch, steps
        self._timer = asyncio.get_running_loop().call_at(stretch.after(steps), self._stepped)

    def _halt(self) -> None:
        """Cancel the timer and forget the stretch."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._stretch = None

    def _stepped(self) -> None:
        """Count the steps up to the event that is due now, and handle the event."""
        stretch, steps = self._stretch, self._steps
        assert stretch is not None
        self._timer = None
        self._stretch = None
        self._step += steps
        self._context += steps * len(self._running)
        self._turn_over(stretch.after(steps))

    def _turn_over(self, now: float) -> None:
        """Do the work between two steps.

        Remove complete and aborted sequences, deliver tokens, begin a swap if one is requested, else admit waiting
        sequences and start the next steps.

        `now` is the computed end of the last step and not the clock's time: timers that fire late must not slow down
        the engine.
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
        """Start the steps up to the next event that is known in advance."""
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
        """Remove the sequences that are complete or were aborted."""
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
        """Remove a running sequence. Its context stays in the cache until the room is needed."""
        del self._running[sequence]
        context = sequence.context(self._step)
        self._context -= context
        self._cache.hold("episode", episode_of(sequence.request.key), context)

    def _abort(self, sequence: SimSequence) -> None:
        """Remove the sequence of a request whose reader has left."""
        if sequence in self._waiting:
            first = next(iter(self._waiting)) is sequence
            del self._waiting[sequence]
            if first:  # There may be room for the next sequence, if that is shorter.
                self._stir()
        elif sequence in self._running:
            self._leaving.append(sequence)
            if self._swapping:
                self._part()
                self._on_change()
            else:
                self._stir()

    def _preempt(self) -> None:
        """Return the sequences that joined last to the wait queue until the next step fits into the KV cache.

        One sequence always keeps running.
        """
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
        """Let waiting sequences join, in order of arrival, while there are places and room in the KV cache."""
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
        """Let a sequence with this much context run from the next step on, which prefills what is not cached."""
        request = sequence.request
        problem = request.prompt[0]
        known = max(self._cache.hit("problem", problem), self._cache.take("episode", episode_of(request.key)))
        # The last token is always computed, because the next token is sampled from its logits.
        self._cold += context - min(known, context - 1)
        self._hold_problem(sequence)
        self._running[sequence] = None
        self._context += context
        sequence.joined = sequence.seen = self._step
        heapq.heappush(self._ends, (sequence.end, self._order, sequence))
        self._order += 1

    def _hold_problem(self, sequence: SimSequence) -> None:
        """Put the prompt of a first turn into the cache, for other sequences of the same problem."""
        request = sequence.request
        if turn_of(request.key) == 0:
            self._cache.hold("problem", request.prompt[0], sequence.prompt - request.generated)

    # -- weights -----------------------------------------------------------------------------------------------------

    def _swapped(self, now: float) -> None:
        """End a swap: use the new version, and clear the cache unless the swap keeps it. `now` is its computed end."""
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
        """Continue with the old weights, because the caller of `load` was cancelled."""
        self._swap = None
        if self._swapping:
            self._swapping = False
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            if self._dead is None:
                self._stir()
