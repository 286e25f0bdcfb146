"""The limit of requests per engine, under any history of lengths and pressure."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.config.tree import Config
from flash.rollout.concurrency import DEVIATIONS, EDGES, PRIOR, ConcurrencyLimit, ResponseLengths
from flash.rollout.engine import Pressure
from flash.simulate.clock import run_virtual
from flash.simulate.report import SimReport
from flash.simulate.world import World

CACHE = 10_000
"""Number of tokens that the KV cache of an engine can hold."""
TWO_ENGINES = {
    "gpus": 3,
    "rollout_gpus": 2,
    "step_s": 0.02,
    "sequence_s": 0.0,
    "context_s": 0.0,
    "prefill_s": 0.0,
    "swap_s": 0.1,
    "train_token_s": 0.0,
}
"""Two engines and one trainer whose time is easily computed: only decoding steps, swaps and training steps."""


def run_world(config: Config) -> tuple[World, SimReport]:
    """Simulate a run; return its world and its report."""

    async def run() -> tuple[World, SimReport]:
        """Run the simulation on the virtual clock."""
        world = World(config)
        return world, world.report(await world.run())

    return run_virtual(run)


def pressure(kv_used: float, *, waiting: int = 0, kv_tokens: int = CACHE) -> Pressure:
    """Return the load of an engine of which only the use of the cache and the waiting requests matter."""
    return Pressure(running=0, waiting=waiting, kv_used=kv_used, preemptions=0, kv_tokens=kv_tokens)


def lengths_of(responses: list[int]) -> ResponseLengths:
    """Return the statistics of responses that have ended by themselves with these lengths."""
    lengths = ResponseLengths()
    for length in responses:
        lengths.grow(0, length)
        lengths.end(length)
    return lengths


def limit_of(lengths: ResponseLengths, rows: list[tuple[int, int, int]], ceiling: int = 256) -> ConcurrencyLimit:
    """Return the limit of an engine that runs responses with these prompts, lengths, and greatest lengths."""
    limit = ConcurrencyLimit(ceiling, lengths)
    for number, (prompt, done, longest) in enumerate(rows):
        limit.begin(number, prompt, done, longest)
        limit.grow(number, 0)
    return limit


@pytest.mark.parametrize(("kv_tokens", "longest"), [(0, 1000), (256 * 40, 30)])
def test_where_all_fits_or_nothing_is_known_the_limit_is_the_engines_number_of_sequences(
    kv_tokens: int, longest: int
) -> None:
    limit = limit_of(ResponseLengths(), [(10, 0, longest)] * 3)
    limit.observe(pressure(0.9, kv_tokens=kv_tokens))
    assert limit.limit == 256


def test_what_ends_within_a_few_steps_is_replaced_in_advance_unless_the_cache_is_short() -> None:
    limits: list[int] = []
    for length, count, kv_tokens in [(16, 256, 0), (16, 255, 0), (1024, 256, 0), (4, 256, 0), (16, 256, 256 * 39)]:
        limit = limit_of(lengths_of([length] * count), [(10, 0, 30)] * 3)
        limit.observe(pressure(0.9, kv_tokens=kv_tokens))
        limits.append(limit.limit)
    # Of 256 responses with a mean length of 16, 1024 or 4 tokens, 128, 2 or all end within 8 steps (`STEPS_AHEAD`).
    # After 255 responses the mean is not known yet (`MIN_ENDED`).
    assert limits[:4] == [256 + 128, 256, 256 + 2, 256 + 256]
    assert limits[4] < 256, "what runs has to fit"


def test_the_hazard_is_the_ends_over_the_tokens_of_those_that_still_run_too() -> None:
    lengths = ResponseLengths()
    for _ in range(1000):
        lengths.grow(0, 6)
        lengths.end(6)
        lengths.grow(0, 4)  # and runs on
    rates = dict(zip(EDGES[:-1].round(3), np.diff(lengths.cumulative_hazard(8)) / np.diff(EDGES), strict=True))
    assert rates[1.0] == pytest.approx(PRIOR / (2000 + PRIOR * 4)), "the token after the first"
    assert rates[2.828] == pytest.approx(PRIOR / (2000 + PRIOR * 4)), "the token after three, of both"
    assert rates[5.657] == pytest.approx((1000 + PRIOR) / PRIOR / 4), "none has grown beyond six"
    assert rates[32.0] == pytest.approx(1 / 4), "where none was, a response has half its greatest length"


def test_a_response_counts_the_same_in_one_piece_or_in_many() -> None:
    whole, pieces = ResponseLengths(), ResponseLengths()
    whole.grow(0, 1000)
    for first in range(0, 1000, 7):
        pieces.grow(first, min(1000, first + 7))
    assert whole.cumulative_hazard(2000) == pytest.approx(pieces.cumulative_hazard(2000))


def test_responses_of_one_length_fill_the_cache_up_to_it() -> None:
    """All responses end at 1,000 tokens: a young one needs room for as many, and an old one is about to end."""
    lengths = lengths_of([1000] * 5000)
    young = limit_of(lengths, [(24, 0, 4096)])
    young.observe(pressure(24 / CACHE))
    # A hazard that is constant from 861 to 1,023 tokens has some of them end sooner.
    assert CACHE / 1024 - 1 <= young.limit <= CACHE / 880


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.2, 0.9))
def test_as_many_may_begin_as_keep_expectation_and_deviations_within_the_cache(
    seed: int, count: int, used: float
) -> None:
    draw = random.Random(seed)
    lengths = lengths_of([max(1, int(draw.lognormvariate(5.5, 0.8))) for _ in range(400)])
    rows = [(draw.randrange(10, 200), draw.randrange(600), 2000) for _ in range(count)]
    limit = limit_of(lengths, rows)
    limit.observe(pressure(used))
    hazard = lengths.cumulative_hazard(2000)

    def outlives(age: int, more: float) -> float:
        """Return the probability that a response of `age` tokens lives for `more` further tokens."""
        return math.exp(np.interp(age, EDGES, hazard) - np.interp(age + more, EDGES, hazard)) * (age + more < 2000)

    spread = (used * CACHE - sum(prompt + age for prompt, age, _ in rows)) / count
    prompt = sum(prompt for prompt, _, _ in rows) / count

    def most(more: int) -> float:
        """Return the largest share of the cache that is in use at any time if so many more begin."""
        found = 0.0
        for step in (0.0, *(2.0 ** (power / 4) for power in range(4, 44))):
            if step >= 2000:
                break
            sizes = [(max(1.0, p + age + spread) + step, outlives(age, step)) for p, age, _ in rows]
            mean = sum(size * alive for size, alive in sizes)
            deviation = DEVIATIONS * math.sqrt(sum(size**2 * alive * (1 - alive) for size, alive in sizes))
            new = (prompt + step) * math.exp(-np.interp(step, EDGES, hazard))
            found = max(found, (mean + deviation + more * new) / CACHE)
        return found

    more = limit.limit - count
    assert more >= 0 or count == 0
    if limit.limit > max(1, count):
        assert most(more) <= 1 + 1e-9
    if limit.limit < 256:
        assert most(more + 1) > 1 - 1e-9


def test_while_the_engine_has_put_some_back_no_other_begins() -> None:
    limit = limit_of(lengths_of([100] * 50), [(10, 10, 4000)] * 5)
    limit.observe(pressure(0.1))
    assert limit.limit > 5
    limit.observe(pressure(0.1, waiting=1))
    assert limit.limit == 5


def test_who_waits_there_for_a_first_token_keeps_nobody_out() -> None:
    limit = limit_of(lengths_of([100] * 50), [(10, 10, 4000)] * 5)
    limit.begin("new", 10, 0, 4000)
    limit.observe(pressure(0.1, waiting=1))
    assert limit.limit > 6
    limit.grow("new", 1)
    limit.observe(pressure(0.1, waiting=1))
    assert limit.limit == 6, "it was put back"


def test_what_is_expected_to_decode_for_longer_than_its_context_is_computed_is_worth_moving_the_shortest_first() -> (
    None
):
    lengths = lengths_of([1000] * 200)
    rows = [(100, 0, 4000), (100, 900, 4000), (40_000, 0, 4000), (100, 3990, 4000)]
    limit = limit_of(lengths, rows)
    # The third has a context of 40,000 tokens, and the fourth ends within 10 tokens.
    assert limit.worth_moving(range(4)) == [0, 1]
    assert limit.worth_moving([1, 0]) == [0, 1]
    assert limit.worth_moving([]) == []


def test_one_may_always_run() -> None:
    limit = limit_of(ResponseLengths(), [(2 * CACHE, 0, CACHE)])
    limit.observe(pressure(1.0))
    assert limit.limit == 1
    limit.end(0, complete=True)
    limit.observe(pressure(0.0))
    assert limit.limit == 1, "what comes next may be as large"


def test_a_response_that_moves_away_is_no_end() -> None:
    lengths = ResponseLengths()
    limit = limit_of(lengths, [(10, 0, 4000)] * 2)
    for name, whole in ((0, False), (1, True)):
        limit.grow(name, 100)
        limit.end(name, complete=whole)
    (place,) = np.flatnonzero((EDGES[:-1] <= 100) & (EDGES[1:] > 100))
    rate = np.diff(lengths.cumulative_hazard(4000))[place] / np.diff(EDGES)[place]
    assert rate == pytest.approx((1 + PRIOR) / (2 * (100 - math.ceil(EDGES[place])) + PRIOR * 2000))


@pytest.mark.slow
@pytest.mark.parametrize(
    "responses",
    [
        {"kind": "lognormal", "mean": 600, "deviation": 450, "low": 1, "high": 3000},
        {"kind": "uniform", "low": 1, "high": 1500},
        800,
    ],
)
def test_drawn_lengths_fill_the_cache_without_a_storm_of_preemptions(responses: object) -> None:
    tables = {
        "run": {"name": "limit", "steps": 12, "seed": 3},
        "model": {"path": "none", "max_length": 1 << 20},
        "env": {"path": "none:None"},
        "rollout": {"group_size": 8, "max_new_tokens": 3000},
        "train": {"batch_size": 64, "async_ratio": 4},
        "engine": {"max_sequences": 256, "stream_interval": 64},
        "simulate": TWO_ENGINES | {"kv_tokens": 20_000, "response_tokens": responses, "train_step_s": 1.0},
    }
    config = msgspec.convert(tables, Config)
    world, report = run_world(config)
    assert len(world.engines) == 2
    assert sum(engine.pressure.preemptions for engine in world.engines) < report.samples


class Decoder:
    """A simulated engine without a clock: each step gives every running sequence one token.

    If the cache is too small, the youngest sequence is preempted. It runs again before all other waiting sequences.
    """

    def __init__(self, cache: int) -> None:
        self._cache = cache
        self.running: list[list[int]] = []
        """Number, context, and tokens left of each sequence; the youngest comes last."""
        self.waiting: deque[list[int]] = deque()
        """Sequences that wait, in the form of `running`."""
        self.put_back = 0
        """Number of preemptions."""
        self.used_steps = self.steps = 0
        """Sum of the tokens in the cache over all steps, and number of steps."""

    @property
    def used(self) -> int:
        """Number of tokens in the cache."""
        return sum(context for _, context, _ in self.running)

    def step(self) -> list[int]:
        """Begin the sequences that fit, decode one token of each, and return the numbers of those that have ended."""
        while self.waiting and (not self.running or self.used + self.waiting[0][1] + len(self.running) < self._cache):
            self.running.append(self.waiting.popleft())
        for one in self.running:
            one[1] += 1
            one[2] -= 1
        while self.used > self._cache and len(self.running) > 1:
            self.waiting.appendleft(self.running.pop())
            self.put_back += 1
        self.steps, self.used_steps = self.steps + 1, self.used_steps + self.used
        ended = [one[0] for one in self.running if one[2] <= 0]
        self.running = [one for one in self.running if one[2] > 0]
        return ended

    @property
    def told(self) -> Pressure:
        """Load that the engine reports."""
        return Pressure(len(self.running), len(self.waiting), min(1.0, self.used / self._cache), 0, self._cache)


def replayed(cache: int, ceiling: int, longest: int, interval: int, responses: list[tuple[int, int]]) -> Decoder:
    """Run a queue of responses, each a (prompt tokens, length), on an engine within the limit, and return the
    engine."""
    engine, limit = Decoder(cache), ConcurrencyLimit(ceiling, ResponseLengths())
    left, given = deque(enumerate(responses)), dict[int, int]()
    while left or given:
        limit.observe(engine.told)
        while left and len(given) < limit.limit:
            number, (prompt, length) = left.popleft()
            given[number] = 0
            engine.waiting.append([number, prompt, length])
            limit.begin(number, prompt, 0, longest)
            limit.observe(engine.told)
        ended = engine.step()
        if engine.steps % interval == 0:
            for number, context, _ in engine.running:
                more = context - responses[number][0] - given[number]
                limit.grow(number, more)
                given[number] += more
        for number in ended:
            limit.grow(number, responses[number][1] - given.pop(number))
            limit.end(number, complete=True)
    return engine


SHAPES: dict[str, Callable[[random.Random, int], float]] = {
    "equal": lambda rng, longest: longest / 3,
    "any": lambda rng, longest: rng.uniform(1, longest),
    "tailed": lambda rng, longest: rng.lognormvariate(math.log(longest / 8), 1.0),
    "two kinds": lambda rng, longest: rng.choice((longest / 50, longest / 2)),
    "as long as may be": lambda rng, longest: longest,
}


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.integers(0, 1 << 30),
    st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=3),
    st.sampled_from([100, 400]),
    st.integers(1, 16),
    st.integers(3, 24),
)
def test_whatever_lengths_are_drawn_the_cache_is_used_and_there_is_no_storm_of_preemptions(
    seed: int, shapes: list[str], longest: int, interval: int, fit: int
) -> None:
    """The lengths change on the way, so the statistics of earlier responses are misleading."""
    rng = random.Random(seed)
    responses = [
        (rng.randrange(5, longest // 4), max(1, min(longest, int(SHAPES[shape](rng, longest)))))
        for shape in shapes
        for _ in range(120)
    ]
    mean = sum(prompt + length for prompt, length in responses) // len(responses)
    cache = max(2 * longest, fit * mean)
    engine = replayed(cache, 64, longest, interval, responses)
    assert engine.put_back < len(responses)
    assert engine.used_steps > 0.4 * cache * engine.steps


def test_prompts_that_the_engine_has_not_counted_yet_take_their_room() -> None:
    lengths = lengths_of([500] * 400)
    limit = ConcurrencyLimit(64, lengths)
    told = pressure(0.0, kv_tokens=100_000)
    for number in range(64):
        limit.begin(number, 8000, 0, 4000)
        limit.observe(told)
    assert limit.limit <= 12


def test_what_is_told_again_is_looked_at_once() -> None:
    limit = limit_of(lengths_of([100] * 50), [(10, 10, 4000)] * 5)
    limit.observe(pressure(0.1, waiting=1))
    assert limit.limit == 5
    told = pressure(0.1)
    limit.observe(told)
    more = limit.limit
    assert more > 5
    limit.observe(told)
    assert limit.limit == more
