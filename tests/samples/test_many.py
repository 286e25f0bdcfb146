"""The hub stays quick with 100,000 samples in flight: counts follow each change, and long work is done in slices."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.samples.buffer import choose
from flash.samples.groups import EligibleGroups, Group, Member, PoolCounts
from flash.samples.rules import AgeContract
from flash.samples.store import Backlog
from flash.samples.tasks import Places, TaskQueue, by_issue
from flash.types import Failure, Outcome, Task
from tests.samples.cases import finish_all, in_order, lease_all, make_buffer, trajectory


@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 40))
def test_places_are_those_that_renumbering_would_give(returned: list[int], forgotten: int) -> None:
    places, alive = Places(), list(range(40))
    for group_id in returned:
        places.give_back(group_id)
        alive.remove(group_id)
    oldest = next(group_id for group_id in alive if group_id >= min(forgotten, alive[-1]))
    places.forget(oldest)
    for place, group_id in enumerate(alive):
        if group_id >= oldest:
            assert places.of(group_id) == place
            assert places.first_at(place) in {group_id, alive[place - 1] + 1 if place else 0}
    assert places.of(40) == len(alive)
    assert places.first_at(len(alive) + 5) == 45


STATES = st.sampled_from(["queued", "leased", "done", "lost", "beaten"])
"""States of a member."""
VERSIONS = st.integers(0, 5)
"""Oldest versions of a member's tokens."""
MEMBERS = st.lists(st.tuples(STATES, VERSIONS), min_size=2, max_size=4)
"""Members of a group in any state."""
COMPLETE = st.lists(st.tuples(st.just("done"), VERSIONS), min_size=2, max_size=2)
"""Members of a complete group."""


def make_group(group_id: int, members: list[tuple[str, int]]) -> Group:
    """Return a group that needs two results. Each member has a state and the oldest version of its tokens."""
    made: list[Member] = []
    for index, (state, version) in enumerate(members):
        task = Task(group_id * 4 + index, group_id, index, 0, kind="ab"[group_id % 2])
        done = trajectory(task, version) if state == "done" else None
        made.append(Member(task, state, oldest_version=version, trajectory=done))  # pyright: ignore[reportArgumentType]
    return Group(group_id, 2, made)


def oldest_of(group: Group) -> int | None:
    """Return the oldest version that a token of a leased or finished member can have; None if there is none."""
    return min((member.oldest_version for member in group.members if member.state in ("leased", "done")), default=None)


def patient(
    contract: AgeContract, step: int, groups: list[Group], before: int | None, wait: bool, most: dict[str, int]
) -> list[int] | None:
    """Make the choice of `choose` by looking at every group. `most` has the limits by kind."""
    ready = [group for group in groups if group.complete and (before is None or group.group_id < before)]
    ready.sort(key=lambda group: (oldest_of(group), group.group_id))
    left = Counter(most)
    chosen: list[int] = []
    for group in ready:
        if len(chosen) < contract.groups_per_batch and (group.kind not in most or left[group.kind] > 0):
            left[group.kind] -= 1
            chosen.append(group.group_id)
    if len(chosen) < contract.groups_per_batch:
        return None
    due: dict[int, list[Group]] = {}
    for group in groups:
        if group.group_id not in chosen and (oldest := oldest_of(group)) is not None:
            due.setdefault(contract.last_step(oldest), []).append(group)
    total, waiting = 0, False
    for last in sorted(due):
        total += len(due[last])
        waiting = waiting or any(not group.complete for group in due[last])
        if wait and waiting and total > max(0, last - step) * contract.groups_per_batch:
            return None
    return chosen


@given(
    st.lists(MEMBERS, max_size=12) | st.lists(COMPLETE, min_size=6, max_size=16),
    st.integers(0, 5),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.one_of(st.none(), st.integers(0, 12)),
    st.booleans(),
    st.dictionaries(st.sampled_from("ac"), st.integers(0, 3)),
)
def test_the_choice_by_counts_is_that_of_looking_at_every_group(
    members: list[list[tuple[str, int]]],
    step: int,
    size: int,
    alpha: float,
    before: int | None,
    wait: bool,
    most: dict[str, int],
) -> None:
    groups = [make_group(group_id, of_group) for group_id, of_group in enumerate(members)]
    counts, eligible = PoolCounts(), EligibleGroups()
    for group in groups:
        oldest = counts.count(make_group(group.group_id, [("queued", 0)] * 2)).oldest
        oldest = counts.count(group).oldest
        if group.complete and oldest is not None:
            # The second call changes the version of a group that is in already.
            eligible.put(group.group_id, 99, group.kind)
            eligible.put(group.group_id, oldest, group.kind)
    contract = AgeContract(alpha, size * 2, 2, 10)
    expected = patient(contract, step, groups, before, wait, most)
    assert choose(contract, step, size, eligible, counts.begun, before=before, wait=wait, limits=most) == expected
    assert counts.in_flight == sum(group.alive for group in groups)
    assert counts.tokens == sum(t.action_count for group in groups for t in group.trajectories())
    for group in groups:
        counts.forget(group.group_id)
        eligible.remove(group.group_id)
    assert (counts.in_flight, counts.tokens, counts.begun) == (0, 0, {})
    assert eligible.first(1, None) == {}


def test_chores_are_done_in_order_a_slice_at_a_time() -> None:
    done: list[tuple[str, int]] = []
    backlog = Backlog(slice_size=2)
    backlog.add(lambda number: done.append(("a", number)), range(3))
    assert done == [("a", 0), ("a", 1)]
    backlog.add(lambda number: done.append(("b", number)), [7])
    assert done == [("a", 0), ("a", 1), ("a", 2), ("b", 7)]
    assert not backlog.do_slice()
    assert not backlog


def test_a_quarantine_gives_up_a_slice_of_groups_at_a_time_and_all_in_the_end() -> None:
    buffer = make_buffer(
        alpha=0, batch=16, group=2, retries=0, quarantine=1, at_once=1, kind_of=lambda seed: "ab"[seed % 2]
    )
    leases = lease_all(buffer, 0)
    failed = next(lease for lease in leases if lease.task.kind == "b")
    left = buffer.samples.in_flight
    buffer.deliver(failed.lease_id, Failure(failed.task, Outcome.ENV_ERROR, "boom", 0))
    assert buffer.samples.in_flight == left - 2
    while buffer.do_slice():
        left -= 2
        assert buffer.samples.in_flight == left - 2
        buffer.samples.check()
    assert buffer.samples.in_flight == 8


@pytest.mark.parametrize("at_once", [1, 3, None])
def test_a_batch_is_the_same_however_it_is_gathered(at_once: int | None) -> None:
    buffer = make_buffer(alpha=1, batch=8, group=2, at_once=at_once)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[2:], 0)
    slices = 0
    while (groups := buffer.next_round(0)) is None:
        assert buffer.samples.backlog
        buffer.do_slice()
        slices += 1
        # Nobody else is given the same batch meanwhile, and results go on coming in.
        if slices == 2:
            finish_all(buffer, leases[:2], 0)
        buffer.samples.check()
    assert [group.group_id for group in groups] == [1, 2, 3, 4]
    buffer.commit(0)
    while buffer.do_slice():
        buffer.samples.check()
    assert buffer.samples.ledger.trained == 8


def test_a_window_in_order_of_issue_follows_the_places_of_returned_groups() -> None:
    buffer = make_buffer(alpha=2, batch=4, group=2, retries=0, fifo_window=1.0)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[4:8], 0)
    assert buffer.next_round(0) is None
    for lease in leases[:2]:
        buffer.deliver(lease.lease_id, Failure(lease.task, Outcome.ENV_ERROR, "boom", 0))
    finish_all(buffer, leases[2:4], 0)
    groups = buffer.next_round(0)
    assert groups is not None
    assert [group.group_id for group in groups] == [1, 2]


def test_a_snapshot_made_ahead_is_that_of_the_moment_in_which_it_is_taken() -> None:
    ahead, plain = (make_buffer(alpha=2, batch=8, group=2, at_once=2) for _ in range(2))
    leases = [(buffer, lease_all(buffer, 0)) for buffer in (ahead, plain)]
    steps = 0
    for _ in ahead.samples.pool.copy_ahead():
        for buffer, held in leases:
            finish_all(buffer, held[steps * 3 : steps * 3 + 3], 0)
            buffer.revoke([held[20 - steps].lease_id])
        steps += 1
    assert steps > 3
    assert msgspec.msgpack.encode(ahead.samples.snapshot()) == msgspec.msgpack.encode(plain.samples.snapshot())
    for buffer, held in leases:
        finish_all(buffer, held[12:16], 0)
    assert msgspec.msgpack.encode(ahead.samples.snapshot()) == msgspec.msgpack.encode(plain.samples.snapshot())


def test_the_leases_of_a_lost_node_go_back_a_slice_at_a_time_and_no_batch_is_formed_meanwhile() -> None:
    buffer = make_buffer(alpha=1, batch=8, group=2, at_once=1)
    leases = lease_all(buffer, 0)
    finish_all(buffer, leases[:8], 0)
    buffer.revoke([lease.lease_id for lease in leases[8:]])
    slices = 0
    while buffer.samples.backlog:
        assert not buffer.has_round(0)
        buffer.samples.check()
        buffer.do_slice()
        slices += 1
    assert slices == 8
    assert buffer.has_round(0)
    assert [lease.task for lease in lease_all(buffer, 0)] == [lease.task for lease in leases[8:]]


@given(
    st.permutations(range(64)),
    st.lists(st.integers(0, 63), unique=True),
    st.dictionaries(st.integers(0, 63), st.lists(st.integers(0, 2), max_size=3)),
    st.sets(st.integers(0, 2)),
)
def test_a_queue_in_lines_is_a_sorted_list(
    put: list[int], taken: list[int], failed: dict[int, list[int]], nodes: set[int]
) -> None:
    queue = TaskQueue(by_issue)
    tasks = {
        number: Member(Task(number, number // 4, number % 4, number), avoid=tuple(failed.get(number, ())))
        for number in put
    }
    for member in tasks.values():
        queue.put(member)
    for number in taken:
        queue.take(tasks.pop(number))
    waiting = [tasks[number] for number in sorted(tasks)]
    assert in_order(queue) == waiting
    assert len(queue) == len(waiting)
    for node in range(3):
        allowed = (member for member in waiting if node not in member.avoid or nodes <= set(member.avoid))
        assert queue.first_for(node, nodes) is next(allowed, None)


def calls_of_a_lease_that_all_tasks_avoid(tasks: int) -> int:
    """Count the function calls until a node is told that all waiting tasks have failed on it."""
    buffer = make_buffer(alpha=0, batch=tasks, group=1)
    for lease in lease_all(buffer, 0):
        buffer.deliver(lease.lease_id, Failure(lease.task, Outcome.ENV_ERROR, "boom", 0), node=0)
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        # A collection of garbage may call others in between.
        if frame.f_globals["__name__"].startswith("flash."):
            calls.append(event)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        lease = buffer.lease([0], node=0, nodes={0, 1})
    finally:
        sys.setprofile(before)
    assert lease is None
    assert buffer.available(0) == tasks
    return len(calls)


def test_a_node_that_all_tasks_avoid_hears_so_without_a_look_at_each() -> None:
    assert calls_of_a_lease_that_all_tasks_avoid(3000) == calls_of_a_lease_that_all_tasks_avoid(3)
