"""Which problems are issued, and which are passed over."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.samples.buffer import SampleBuffer
from flash.samples.journal import MemoryJournal
from flash.samples.replay import Replay
from flash.samples.state import BufferState
from flash.samples.tasks import HALF_LIFE, Selection, Shown, TaskSource, Tried, Tries
from flash.types import VersionRun
from tests.samples.cases import finish_all, lease_all, make_buffer, trajectory

EQUAL, MIXED = [0.0] * 8, [0.0, 1.0] * 4
NAMES = "abcd"


def by_turns(seed: int) -> str:
    return NAMES[seed % len(NAMES)]


def make(
    floor: float = 0.1, run_seed: int = 0, name: Callable[[int], str | None] = by_turns, redundant: int = 0
) -> TaskSource:
    return TaskSource(run_seed, 8 + redundant, selection=Selection(name, floor, redundant))


def known(
    *shown: tuple[str, Sequence[float]], groups: int = 20, floor: float = 0.1, run_seed: int = 0, redundant: int = 0
) -> TaskSource:
    """A source that knows so many groups of these problems, of version 0."""
    source = make(floor, run_seed, redundant=redundant)
    for name, rewards in shown:
        for _ in range(groups):
            source.ended(name, rewards, 0)
    return source


def issue(source: TaskSource, count: int, version: int = 1) -> list[str]:
    """The names of the next problems."""
    names: list[str] = []
    for _ in range(count):
        problem = source.next_problem(version=version)
        source.issue(problem)
        names.append(problem.name)
    return names


# -- the chance ------------------------------------------------------------------------------------------------------


@given(passed=st.integers(0, 40), failed=st.integers(0, 40), size=st.integers(2, 16))
def test_the_chance_is_that_of_rewards_that_differ_under_the_posterior(passed: int, failed: int, size: int) -> None:
    tried = Tried("a", 1, Shown(), Shown(passed, failed))
    angle = (np.arange(20_000) + 0.5) / 20_000 * np.pi / 2  # p = sin², under which Beta(½, ½) is flat
    p, q = np.sin(angle) ** 2, np.cos(angle) ** 2
    density = p**passed * q**failed
    expected = float((density * (1 - p**size - q**size)).sum() / density.sum())
    assert tried.chance(size, 1) == pytest.approx(expected, abs=1e-4)


def test_what_groups_showed_counts_for_half_after_a_half_life_and_from_the_next_version_on() -> None:
    tries = Tries()
    tries.ended("a", EQUAL, 5)
    tried = tries.known["a"]
    assert tried.chance(8, 5) == Tried("a", 0, Shown()).chance(8, 0)
    assert tried.chance(8, 5 + HALF_LIFE) == Tried("a", 0, Shown(), Shown(0, 4)).chance(8, 0)
    tries.ended("a", MIXED, 5 + HALF_LIFE)
    later = tries.known["a"]
    assert later.before == Shown(0, 4, 0, 0.5)
    assert later.now == Shown(4, 4, 1, 0)
    assert later.chance(8, 5 + HALF_LIFE) == pytest.approx(tried.chance(8, 5 + HALF_LIFE))


def test_of_graded_rewards_the_share_of_groups_that_differed_counts() -> None:
    tries = Tries()
    for rewards in ([0.1, 0.5, 0.9], [0.3, 0.3, 0.3], [0.3, 0.3, 0.3]):
        tries.ended("a", rewards, 0)
    assert tries.known["a"].chance(3, 0) == 0.5
    assert 0.37 < tries.known["a"].chance(3, 1) < 0.376
    tries.ended("pass or fail", [-1.0, 1.0, 1.0], 0)
    assert not tries.known["pass or fail"].graded


def test_redundant_members_do_not_count() -> None:
    plain, redundant = known(("a", EQUAL)), known(("a", EQUAL), redundant=8)
    assert issue(plain, 60) == issue(redundant, 60)


def test_the_problems_longest_not_seen_are_forgotten() -> None:
    tries = Tries(most=2)
    for name in "abac":
        tries.ended(name, EQUAL, 0)
    assert [*tries.known] == ["a", "c"]


# -- what is issued --------------------------------------------------------------------------------------------------


def test_problems_whose_rewards_differ_are_issued_more_often() -> None:
    source = known(("a", EQUAL), ("b", MIXED), ("c", EQUAL))
    names = issue(source, 300)
    assert names.count("b") > 3 * names.count("a")
    assert names.count("d") >= names.count("b"), "of which nothing is known is always issued"


@given(floor=st.sampled_from([0.02, 0.1, 0.3, 1.0]), run_seed=st.integers(0, 99))
def test_law_no_problem_is_passed_over_more_often_in_a_row_than_the_floor_allows(floor: float, run_seed: int) -> None:
    source = known(*((name, EQUAL) for name in NAMES), groups=1000, floor=floor, run_seed=run_seed)
    first = source.cursor.next_problem
    issued: dict[str, list[int]] = {}
    for _ in range(40):
        problem = source.next_problem(version=1)
        source.issue(problem)
        issued.setdefault(problem.name, [first]).append(problem.following)
    rounds = [len(NAMES) * math.ceil(1 / floor)] * len(NAMES)
    for each in issued.values():
        assert all(later - before <= rounds[0] for before, later in itertools.pairwise(each))
    assert source.cursor.passed_over + source.cursor.next_group == source.cursor.next_problem


def test_one_problem_alone_is_issued_as_often_as_is_asked() -> None:
    source = TaskSource(0, 8, selection=Selection(lambda seed: "only", 0.01))
    for _ in range(1000):
        source.ended("only", EQUAL, 0)
    assert issue(source, 50) == ["only"] * 50


def test_among_thousands_of_hopeless_problems_one_is_issued_all_the_same() -> None:
    source = TaskSource(0, 8, selection=Selection(str, 0.01))
    for seed in range(3000):
        for _ in range(20):
            source.ended(str(seed), EQUAL, 0)
    issue(source, 5)
    assert source.cursor.next_problem <= 3000


def test_problems_without_a_name_are_issued_as_they_come() -> None:
    source = make(name=lambda seed: None)
    source.ended("", EQUAL, 0)
    issue(source, 9)
    assert (source.cursor.next_problem, source.cursor.passed_over) == (9, 0)
    assert source.tries.known == {}


def test_kinds_are_known_apart_and_a_domain_passes_over_its_own_problems_only() -> None:
    source = TaskSource(0, 8, lambda seed: "xy"[seed % 2], selection=Selection(lambda seed: "p", 0.1))
    for _ in range(20):
        source.ended("x/p", EQUAL, 0)
    for domain in "xyxyxyxy":
        problem = source.next_problem(domain, 1)
        assert problem.kind == domain
        source.issue(problem)
    assert source.cursor.next_of["y"] == 8
    assert source.cursor.next_of["x"] > 8


# -- determinism -----------------------------------------------------------------------------------------------------


def test_the_choice_follows_from_the_run_s_seed() -> None:
    shown = [(name, EQUAL) for name in NAMES]
    assert issue(known(*shown), 40) == issue(known(*shown), 40)
    assert issue(known(*shown), 40) != issue(known(*shown, run_seed=4), 40)


@given(st.randoms(use_true_random=False))
def test_the_order_in_which_groups_end_within_a_step_decides_nothing(dice: random.Random) -> None:
    groups = [(name, rewards) for name in NAMES for rewards in (EQUAL, MIXED, EQUAL)]
    issued: list[list[str]] = []
    for source in (make(), make()):
        issued.append([])
        for version in range(4):
            dice.shuffle(groups)
            for name, rewards in groups:
                source.ended(name, rewards, version)
                issued[-1] += issue(source, 1, version)
    assert issued[0] == issued[1]


def test_a_group_that_is_trained_in_parts_counts_once() -> None:
    buffer = make_buffer(alpha=1, batch=8, group=4, steps=9, selection=Selection(by_turns, 0.1))
    leases = lease_all(buffer, 0)
    late = leases[3]
    for lease in leases:
        if lease is not late:
            buffer.finish(lease.lease_id, trajectory(lease.task, 0, reward=float(lease.lease_id % 2)))
    for version in (0, 1):
        assert buffer.take(version) is not None
        buffer.commit(version)
        buffer.tidy()
    cursor = buffer.samples.source.cursor
    assert cursor.ended == 4
    assert buffer.samples.pool[late.task.group_id].earlier, "it was to be trained in parts"
    buffer.finish(late.lease_id, trajectory(late.task, 0, 2, versions=[VersionRun(0, 1), VersionRun(2, 1)]))
    assert cursor.ended == 4
    assert sum(each.now.differed + each.before.differed for each in buffer.samples.source.tries.known.values()) > 3


def start(journal: MemoryJournal, state: BufferState | None = None, step: int = 0) -> SampleBuffer:
    selection = Selection(by_turns, 0.1)
    return make_buffer(0.0, 8, 2, 30, selection=selection, journal=journal, state=state, step=step)


def train(buffer: SampleBuffer, steps: range) -> list[str]:
    """The names of the problems: those of "a" have equal rewards."""
    names: list[str] = []
    for step in steps:
        leases = lease_all(buffer, step)
        names += [buffer.samples.pool[lease.task.group_id].problem for lease in leases]
        for lease in leases:
            right = by_turns(lease.task.seed) == "a" or lease.task.sample_index
            buffer.finish(lease.lease_id, trajectory(lease.task, step, reward=float(right)))
        assert buffer.take(step) is not None
        buffer.commit(step)
    return names


def test_a_run_goes_on_with_the_same_problems_from_a_checkpoint_and_its_journal() -> None:
    journal = MemoryJournal()
    buffer = start(journal)
    train(buffer, range(4))
    kept = msgspec.msgpack.encode(buffer.samples.snapshot())
    number = journal.begin(4)
    train(buffer, range(4, 8))
    replay = Replay(msgspec.msgpack.decode(kept, type=BufferState), 4)
    for event in journal.after(number):
        replay.apply(event)
    again = start(MemoryJournal(), replay.state(8), 8)
    expected = train(buffer, range(8, 20))
    assert train(again, range(8, 20)) == expected
    assert expected.count("b") > 2 * expected.count("a")


def test_other_problems_are_not_known_by_the_names_of_the_former_ones() -> None:
    buffer = make_buffer(problems="one", selection=Selection(by_turns, 0.1))
    finish_all(buffer, lease_all(buffer, 0), 0)
    state = buffer.samples.snapshot()
    assert state.tried
    assert make_buffer(problems="one", state=state).samples.source.tries.known
    assert not make_buffer(problems="two", state=state).samples.source.tries.known
