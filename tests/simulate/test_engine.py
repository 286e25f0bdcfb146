"""The simulated engine against one that takes every step by itself, and its side of the engine's contract."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flash.config.simulate import SimulateConfig
from flash.errors import EngineDeadError
from flash.rollout.engine import Progress, ResponseRequest, TokenTally
from flash.simulate.clock import run_virtual
from flash.simulate.engine import SimEngine
from flash.simulate.steps import CachedContext, PrefixCache
from flash.types import Canary, Completion, Published, VersionRun

NEVER = 1_000_000
"""Limit that no response reaches, in tokens, and time that no workload reaches, in seconds."""
CONSTANTS = SimulateConfig(step_s=0.013, sequence_s=0.0007, context_s=2e-5, prefill_s=3e-4, swap_s=0.4)


class Arrival:
    """Request of the random workload.

    Args:
        at: time of its arrival. Times are seconds since the engine has its first version.
        problem: number of its problem, which is also the first token of its prompt.
        prompt: tokens of its prompt.
        length: tokens of its response.
        key: number of the request.
        leaves: time at which its caller aborts it; None: never.
    """

    def __init__(self, at: float, problem: int, prompt: int, length: int, key: int, leaves: float | None) -> None:
        self.at, self.problem, self.prompt, self.length, self.key = at, problem, prompt, length, key
        self.leaves = leaves

    def __repr__(self) -> str:
        return f"Arrival{(self.at, self.problem, self.prompt, self.length, self.key, self.leaves)}"


class Naive:
    """Engine with the rules of `SimEngine` that takes each step by itself, over plain lists.

    Args:
        constants: constants of the engine.
        places: most sequences that run at once.
        arrivals: requests of the workload.
        loads: swaps, as pairs of the time at which they are requested, and True if the cache is kept.
    """

    def __init__(self, constants: SimulateConfig, places: int, arrivals: list[Arrival], loads: list[tuple]) -> None:
        self.constants, self.places = constants, places
        self.arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        self.loads = deque(loads)
        self.waiting: list[Arrival] = []
        self.running: list[Arrival] = []
        self.tokens: dict[int, list[int]] = {arrival.key: [] for arrival in arrivals}
        """Version of each sampled token, by request."""
        self.cached: OrderedDict[Any, int] = OrderedDict()
        """Cached tokens of each context, by (kind, number, version), the least recently used first."""
        self.cold: set[int] = set()
        """Running requests whose whole context the next step computes again, after a swap."""
        self.ends: dict[int, float] = {}
        """Time at which each response was complete, by request, unless its caller had left."""
        self.preemptions = 0
        self.version = 0
        self.cache_version: dict[int, int] = {}
        """Version of the cached contexts that each request may use."""

    def arrive(self, now: float) -> None:
        """Add the requests that have arrived until `now` to the wait queue."""
        while self.arrivals and self.arrivals[0].at <= now:
            arrival = self.arrivals.popleft()
            self.waiting.append(arrival)
            self.cache_version[arrival.key] = self.version

    def size(self, arrival: Arrival) -> int:
        """Return the tokens of a request's prompt and of its response so far."""
        return arrival.prompt + len(self.tokens[arrival.key])

    def run(self) -> None:
        """Take steps until nothing is left to do."""
        now, c = 0.0, self.constants
        while self.arrivals or self.waiting or self.running or self.loads:
            self.arrive(now)
            self.let_go(now)
            if self.loads and self.loads[0][0] <= now:
                now = self.swap(now)
                continue
            chill = self.preempt_and_join()
            if not self.running:
                coming = [a.at for a in list(self.arrivals)[:1]] + [at for at, _ in list(self.loads)[:1]]
                now = min(coming, default=now)
                continue
            context = sum(self.size(a) for a in self.running)
            now += c.step_s + c.sequence_s * len(self.running) + c.context_s * context + c.prefill_s * chill
            for arrival in list(self.running):
                self.tokens[arrival.key].append(self.version)
                if len(self.tokens[arrival.key]) == arrival.length:
                    self.running.remove(arrival)
                    self.hold("episode", arrival.key, arrival, self.size(arrival))
                    if arrival.leaves is None or arrival.leaves > now:
                        self.ends[arrival.key] = now

    def let_go(self, now: float) -> None:
        """Remove the requests whose callers have left until `now`."""
        for gone in [a for a in self.running + self.waiting if a.leaves is not None and a.leaves <= now]:
            if gone in self.running:
                self.hold("episode", gone.key, gone, self.size(gone))
                self.running.remove(gone)
            else:
                self.waiting.remove(gone)

    def swap(self, now: float) -> float:
        """Load the next version, and return the time at which it is loaded."""
        _, keep = self.loads.popleft()
        now += self.constants.swap_s
        self.arrive(now)
        self.let_go(now)
        self.version += 1
        if not keep:
            self.cached.clear()
            self.cold = {a.key for a in self.running}
            for arrival in self.running + self.waiting:
                self.cache_version[arrival.key] = self.version
            for arrival in self.running:
                self.hold("problem", arrival.problem, arrival, arrival.prompt)
        oldest = min((self.cache_version[a.key] for a in self.running + self.waiting), default=self.version)
        for name in [name for name in self.cached if name[2] < oldest]:
            del self.cached[name]
        return now

    def preempt_and_join(self) -> int:
        """Return requests to the wait queue, and let others join. Returns the tokens that the next step prefills."""
        limit, chill = self.constants.kv_tokens, 0
        while limit and len(self.running) > 1 and sum(map(self.size, self.running)) + len(self.running) > limit:
            self.waiting.insert(0, self.running.pop())
            self.hold("episode", self.waiting[0].key, self.waiting[0], self.size(self.waiting[0]))
            self.preemptions += 1
            self.cold.discard(self.waiting[0].key)
        chill += sum(self.size(a) for a in self.running if a.key in self.cold)
        self.cold.clear()
        while self.waiting and len(self.running) < self.places:
            size = self.size(self.waiting[0])
            if limit and self.running and sum(map(self.size, self.running)) + size + len(self.running) + 1 > limit:
                break
            arrival = self.waiting.pop(0)
            while limit and sum(self.cached.values()) > max(0, limit - sum(map(self.size, self.running))):
                oldest = next(iter(self.cached))
                self.cached[oldest] -= 1
                if not self.cached[oldest]:
                    del self.cached[oldest]
            version = self.cache_version[arrival.key]
            episode = self.cached.pop(("episode", arrival.key, version), 0)
            known = max(self.known("problem", arrival.problem, version), episode)
            chill += size - min(known, size - 1)
            self.hold("problem", arrival.problem, arrival, arrival.prompt)
            self.running.append(arrival)
        return chill

    def known(self, *name: Any) -> int:
        """Return the cached tokens of a context, which becomes the most recently used one."""
        if name in self.cached:
            self.cached.move_to_end(name)
        return self.cached.get(name, 0)

    def hold(self, kind: str, number: int, arrival: Arrival, tokens: int) -> None:
        """Cache a context of a request, as the most recently used one."""
        name = kind, number, self.cache_version[arrival.key]
        self.cached[name] = tokens
        self.cached.move_to_end(name)


def request(arrival: Arrival) -> ResponseRequest:
    """Return the request of an arrival, with the key of the first turn of its episode."""
    prompt = [arrival.problem, *[0] * (arrival.prompt - 1)]
    return ResponseRequest(prompt, NEVER, key=arrival.key * 8192)


def published(version: int) -> Published:
    """Return the announcement of a version."""
    return Published(version, "tcp", b"", Canary([1, 2], [-1.0]))


class Driven:
    """Real `SimEngine` on the virtual clock, with the workload that `Naive` gets."""

    def __init__(self, constants: SimulateConfig, places: int, arrivals: list[Arrival], loads: list[tuple]) -> None:
        lengths = {arrival.key * 8192: arrival.length for arrival in arrivals}
        self.engine = SimEngine(constants, places, lengths.__getitem__, 7)
        self.arrivals, self.loads = arrivals, loads
        self.ends: dict[int, float] = {}
        self.completions: dict[int, Completion] = {}
        self.streamed: dict[int, int] = {}

    async def run(self) -> None:
        """Load version 0, and send the requests and swaps of the workload at their times."""
        await self.engine.load(published(0), keep_cache=True)
        self.begun = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(self.swap)
            for arrival in self.arrivals:
                group.start_soon(self.ask, arrival)
        await anyio.sleep(1)  # a step in flight ends after its reader is gone

    async def swap(self) -> None:
        """Load the versions of the workload, one after the other."""
        for version, (at, keep) in enumerate(self.loads, 1):
            await anyio.sleep_until(self.begun + at)
            await self.engine.load(published(version), keep_cache=keep)

    async def ask(self, arrival: Arrival) -> None:
        """Send one request at its time, and record its pieces and its end, unless its caller leaves before."""
        await anyio.sleep_until(self.begun + arrival.at)
        with anyio.CancelScope(deadline=self.begun + (arrival.leaves or NEVER)):
            async for piece in self.engine.generate(request(arrival)):
                if isinstance(piece, Completion):
                    self.ends[arrival.key] = anyio.current_time() - self.begun
                    self.completions[arrival.key] = piece
                else:
                    self.streamed[arrival.key] = self.streamed.get(arrival.key, 0) + len(piece.token_ids)


times = st.integers(1, 12_000).map(lambda t: t / 1000)
# No two events at one instant, where their order would be a matter of taste: steps and swaps take multiples of 10 µs,
# and every event has its own microseconds.


@st.composite
def workloads(draw: st.DrawFn) -> tuple[SimulateConfig, int, list[Arrival], list[tuple[float, bool]]]:
    """Draw the arguments of `Naive` and `Driven`."""
    prompts = [draw(st.integers(1, 40)) for _ in range(3)]
    arrivals: list[Arrival] = []
    for i in range(draw(st.integers(1, 12))):
        at, problem = draw(times) + i * 1.1e-7, draw(st.integers(1, 3))
        leaves = draw(st.none() | times.map(lambda t, at=at, i=i: round(at, 3) + t + 7e-6 + i * 1.7e-7))
        arrivals.append(Arrival(at, problem, prompts[problem - 1], draw(st.integers(1, 60)), i, leaves))
    swaps = sorted(draw(st.lists(st.tuples(times, st.booleans()), max_size=3)))
    loads = [(at + i * 1.0 + 5e-6 + i * 1.3e-7, keep) for i, (at, keep) in enumerate(swaps)]
    kv_tokens = draw(st.sampled_from([0, 0, 150, 400]))
    constants = SimulateConfig(
        step_s=0.013, sequence_s=0.0007, context_s=2e-5, prefill_s=3e-4, swap_s=0.4, kv_tokens=kv_tokens
    )
    return constants, draw(st.integers(1, 6)), arrivals, loads


THE_FIRST_THAT_WAITS_LEAVES = (
    msgspec.structs.replace(CONSTANTS, kv_tokens=150),
    4,
    [
        *(Arrival(0.001 + i * 1.1e-7, 1, 12, 1, i, None) for i in range(4)),
        Arrival(0.00100044, 1, 12, 15, 4, None),
        Arrival(0.00100055, 2, 40, 14, 5, None),
        Arrival(0.10100066, 1, 12, 1, 6, None),
        Arrival(0.10000077, 2, 40, 9, 7, 0.27600819),
        *(Arrival(0.001 + i * 1.1e-7, 1, 12, 1, i, None) for i in (8, 9)),
        Arrival(0.0010011, 1, 12, 13, 10, None),
    ],
    [],
)
"""Workload in which a preempted request has no room, and keeps a smaller one from joining until it is aborted."""


@given(workloads())
@example(THE_FIRST_THAT_WAITS_LEAVES)
def test_the_closed_form_ends_every_response_when_a_step_by_step_engine_does(workload: Any) -> None:
    constants, places, arrivals, loads = workload
    naive = Naive(constants, places, arrivals, loads)
    naive.run()
    driven = Driven(constants, places, arrivals, loads)
    run_virtual(driven.run)
    assert driven.ends.keys() == naive.ends.keys()
    for key, at in naive.ends.items():
        assert driven.ends[key] == pytest.approx(at, rel=1e-9, abs=1e-9)
        runs = driven.completions[key].versions
        assert [run.version for run in runs for _ in range(run.count)] == naive.tokens[key]
    assert driven.engine.pressure.preemptions == naive.preemptions
    assert driven.engine.pressure.running == driven.engine.pressure.waiting == 0


# -- the engine's contract -------------------------------------------------------------------------------------------


def make(places: int = 4, length: int = 50, interval: int = 10, **constants: Any) -> SimEngine:
    """Return an engine whose steps take 0.1 s and whose responses all have `length` tokens."""
    settings = SimulateConfig(**{"step_s": 0.1, "sequence_s": 0.0, "context_s": 0.0, "prefill_s": 0.0} | constants)
    return SimEngine(settings, places, lambda key: length, interval)


def ask(key: int, *, limit: int = NEVER, done: int = 0) -> ResponseRequest:
    """Return a request of at most `limit` tokens. `done`: number of tokens that another engine has sampled before."""
    return ResponseRequest([key, *[0] * (9 + done)], limit, key=key * 8192, generated=done)


async def collect(engine: SimEngine, request: ResponseRequest) -> tuple[list[Progress], Completion]:
    """Return the pieces of a response, and its completion."""
    pieces = [piece async for piece in engine.generate(request)]
    completion = pieces.pop()
    assert isinstance(completion, Completion)
    return [piece for piece in pieces if isinstance(piece, Progress)], completion


async def versions_around_a_swap(waits_s: float) -> list[VersionRun]:
    """Return the versions of a response of 20 tokens. Version 1 is requested after 0.75 s, and its swap takes 3 s.

    `waits_s`: seconds after which the swap is cancelled.
    """
    engine = make(length=20, swap_s=3.0)
    await engine.load(published(0), keep_cache=False)
    got: list[Completion] = []

    async def one() -> None:
        got.append((await collect(engine, ask(1)))[1])

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await anyio.sleep(0.75)
        with anyio.move_on_after(waits_s):
            await engine.load(published(1), keep_cache=True)
    return got[0].versions


@pytest.mark.anyio
@pytest.mark.virtual
async def test_pieces_come_at_the_interval_and_the_completion_holds_everything() -> None:
    engine = make(length=35)
    await engine.load(published(3), keep_cache=False)
    pieces, completion = await collect(engine, ask(1))
    assert [len(piece.token_ids) for piece in pieces] == [10, 10, 10]
    assert all(piece.versions == [VersionRun(3, 10)] for piece in pieces)
    assert (len(completion.token_ids), len(completion.logprobs)) == (35, 35)
    assert (completion.versions, completion.finish) == ([VersionRun(3, 35)], "stop")


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_limit_cuts_a_response_and_tokens_done_elsewhere_count() -> None:
    engine = make(length=35)
    await engine.load(published(0), keep_cache=False)
    _, cut = await collect(engine, ask(1, limit=20))
    assert (len(cut.token_ids), cut.finish) == (20, "length")
    _, rest = await collect(engine, ask(1, limit=20, done=20))
    assert (len(rest.token_ids), rest.finish) == (15, "stop")


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_pause_with_a_full_queue_takes_no_longer_than_the_step_in_flight() -> None:
    engine = make(places=4, length=1000, swap_s=2.0)
    await engine.load(published(0), keep_cache=False)
    async with anyio.create_task_group() as group:
        for key in range(40):
            group.start_soon(collect, engine, ask(key))
        await anyio.sleep(5.05)
        start = anyio.current_time()
        await engine.load(published(1), keep_cache=True)
        assert anyio.current_time() - start == pytest.approx(2.0 + 0.05)
        assert (engine.pressure.running, engine.pressure.waiting) == (4, 36)
        group.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.virtual
async def test_the_step_in_flight_ends_under_the_old_version() -> None:
    assert await versions_around_a_swap(waits_s=100.0) == [VersionRun(0, 8), VersionRun(1, 12)]


@pytest.mark.anyio
@pytest.mark.virtual
async def test_an_aborted_request_leaves_its_place_at_the_end_of_the_step() -> None:
    engine = make(places=1, length=1000)
    await engine.load(published(0), keep_cache=False)
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(cancel_after, scope, 0.55)
            await collect(engine, ask(1))
        group.start_soon(collect, engine, ask(2))
        await anyio.sleep(0.01)
        assert (engine.pressure.running, engine.pressure.waiting) == (1, 1)
        await anyio.sleep(0.05)
        assert (engine.pressure.running, engine.pressure.waiting) == (1, 0)
        group.cancel_scope.cancel()


async def cancel_after(scope: anyio.CancelScope, seconds: float) -> None:
    """Cancel a scope after some seconds."""
    await anyio.sleep(seconds)
    scope.cancel()


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("at", [0.0, 0.55, 1.25])
async def test_a_killed_engine_fails_running_and_waiting_requests_and_its_load(at: float) -> None:
    engine = make(places=1, length=1000, swap_s=1.0)
    await engine.load(published(0), keep_cache=False)
    failed: list[str] = []

    async def fails(name: str, key: int) -> None:
        with pytest.raises(EngineDeadError):
            await collect(engine, ask(key))
        failed.append(name)

    async def load_fails() -> None:
        await anyio.sleep(0.5)
        with pytest.raises(EngineDeadError):
            await engine.load(published(1), keep_cache=True)
        failed.append("load")

    async with anyio.create_task_group() as group:
        group.start_soon(fails, "running", 1)
        group.start_soon(fails, "waiting", 2)
        group.start_soon(load_fails)
        await anyio.sleep(at)
        engine.kill()
        assert "killed" in str(await engine.wait_dead())
    assert sorted(failed) == ["load", "running", "waiting"]
    with pytest.raises(EngineDeadError):
        await collect(engine, ask(3))


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_cancelled_load_leaves_the_old_version_at_work() -> None:
    assert await versions_around_a_swap(waits_s=1.0) == [VersionRun(0, 20)]


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_swap_that_recomputes_prefills_what_runs_and_one_that_keeps_does_not() -> None:
    seconds: dict[bool, float] = {}
    for keep in (True, False):
        engine = make(length=20, swap_s=1.0, prefill_s=0.01)
        await engine.load(published(0), keep_cache=False)
        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(collect, engine, ask(1))
            await anyio.sleep(0.75)
            await engine.load(published(1), keep_cache=keep)
        seconds[keep] = anyio.current_time() - start
    # 10 tokens of prompt; 7 steps end within 0.75 s, the step in flight gives the seventh token.
    assert seconds[True] == pytest.approx(20 * 0.1 + 10 * 0.01 + 1.0)
    assert seconds[False] == pytest.approx(seconds[True] + 17 * 0.01)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_later_turn_on_the_same_engine_prefills_only_what_is_new() -> None:
    engine = make(length=20, prefill_s=0.01)
    await engine.load(published(0), keep_cache=False)
    await collect(engine, ask(1))
    start = anyio.current_time()
    later = ResponseRequest([1, *[0] * 34], NEVER, key=1 * 8192 + 2)
    await collect(engine, later)
    assert anyio.current_time() - start == pytest.approx(20 * 0.1 + 5 * 0.01)


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("during_the_first_turn", [True, False])
async def test_after_a_swap_that_keeps_the_cache_a_new_request_uses_none_of_it(during_the_first_turn: bool) -> None:
    engine = make(length=20, swap_s=1.0, prefill_s=0.01)
    await engine.load(published(0), keep_cache=False)
    async with anyio.create_task_group() as group:
        group.start_soon(collect, engine, ask(1))
        if during_the_first_turn:
            await anyio.sleep(0.75)
            await engine.load(published(1), keep_cache=True)
    if not during_the_first_turn:
        await engine.load(published(1), keep_cache=True)
    start = anyio.current_time()
    await collect(engine, ResponseRequest([1, *[0] * 34], NEVER, key=1 * 8192 + 2))
    assert anyio.current_time() - start == pytest.approx(20 * 0.1 + 35 * 0.01)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_full_cache_puts_the_youngest_back_and_tells() -> None:
    engine = make(places=4, length=60, kv_tokens=100)
    await engine.load(published(0), keep_cache=False)
    async with anyio.create_task_group() as group:
        group.start_soon(collect, engine, ask(1))
        group.start_soon(collect, engine, ask(2))
        await anyio.sleep(4.15)
        pressure = engine.pressure
    assert (pressure.running, pressure.waiting, pressure.preemptions) == (1, 1, 1)
    assert 0.45 < pressure.kv_used < 0.6


@pytest.mark.anyio
@pytest.mark.virtual
async def test_the_tokens_of_a_request_that_is_aborted_in_the_wait_queue_are_received_or_lost() -> None:
    engine = make(places=4, length=60, kv_tokens=100)
    await engine.load(published(0), keep_cache=False)
    tally, received = TokenTally(), list[int]()

    async def receive() -> None:
        async for piece in engine.generate(msgspec.structs.replace(ask(2), tally=tally)):
            received.extend(piece.token_ids)

    async with anyio.create_task_group() as group:
        group.start_soon(collect, engine, ask(1))
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(receive)
            await anyio.sleep(4.15)
            assert engine.pressure.waiting == 1, "with 40 tokens the request returns to the wait queue"
            leaving.cancel_scope.cancel()
    assert (len(received), tally.lost) == (30, 10)


def test_a_prefix_is_left_where_only_the_end_was_needed() -> None:
    cache = PrefixCache()
    first, second, third = (CachedContext("episode", number, 0) for number in (1, 2, 3))
    cache.hold(first, 50)
    cache.hold(second, 30)
    cache.shrink(60)
    assert (cache.hit(second), cache.hit(first)) == (30, 30)
    cache.shrink(40)
    assert (cache.take(first), cache.take(second)) == (30, 10)
    cache.hold(third, 60)
    cache.shrink(60)
    assert cache.hit(third) == 60, "what was taken counts no more"
