"""Rounds, epochs, and workers that come, leave or fail."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from flash.weights.rounds import Round, RoundPlanner

GATHER_S = 2.0
"""Seconds for which a round waits for known workers."""


def served(planner: RoundPlanner, version: int, *members: str, now: float = 0.0) -> Round:
    """Let known members request a version and receive all of it."""
    for member in members:
        planner.request(member, version, 0, now)
    assert planner.wait_s(now) == 0.0
    turn = planner.begin()
    for member in members:
        planner.finish(member)
    return turn


def together(planner: RoundPlanner, version: int, *members: str) -> Round:
    """Let members that are not known yet request a version and receive all of it, in one round."""
    for member in members:
        planner.request(member, version, 0, 0.0)
    turn = planner.begin()
    for member in members:
        planner.finish(member)
    return turn


def test_the_same_workers_keep_their_group_from_version_to_version() -> None:
    planner = RoundPlanner(GATHER_S)
    first = together(planner, 1, "a", "b")
    assert first == Round(1, 1, ("a", "b"), 0)
    assert served(planner, 2, "b", "a") == Round(1, 2, ("a", "b"), 0)


def test_a_round_waits_for_known_workers_that_lack_the_version() -> None:
    planner = RoundPlanner(GATHER_S)
    together(planner, 1, "a", "b")
    planner.request("a", 2, 0, 10.0)
    assert planner.wait_s(10.5) == GATHER_S - 0.5
    planner.request("b", 2, 0, 11.0)
    assert planner.wait_s(11.0) == 0.0


def test_a_worker_that_is_gone_delays_one_round_only() -> None:
    planner = RoundPlanner(GATHER_S)
    together(planner, 1, "a", "b")
    planner.request("a", 2, 0, 10.0)
    assert planner.wait_s(10.0 + GATHER_S) == 0.0
    assert planner.begin() == Round(2, 2, ("a",), 0)
    planner.finish("a")
    assert served(planner, 3, "a", now=20.0).epoch == 2


def test_a_worker_that_joins_between_versions_gets_a_round_of_its_own() -> None:
    planner = RoundPlanner(GATHER_S)
    together(planner, 1, "a", "b")
    assert served(planner, 1, "c").members == ("c",)
    assert served(planner, 2, "a", "b", "c") == Round(3, 2, ("a", "b", "c"), 0)


def test_a_round_that_a_member_leaves_fails_and_continues_at_the_first_missing_piece() -> None:
    planner = RoundPlanner(GATHER_S)
    for member in "abc":
        planner.request(member, 1, 0, 0.0)
    planner.begin()
    assert not planner.failed
    planner.remove("b")
    assert planner.failed
    planner.request("a", 1, 3, 1.0)
    assert math.isinf(planner.wait_s(9.0)), "c has not left the group yet"
    planner.request("c", 1, 2, 1.0)
    assert planner.wait_s(1.0) == 0.0
    assert planner.begin() == Round(2, 1, ("a", "c"), 2)
    assert not planner.failed


def test_a_broken_group_is_not_kept_for_the_same_members() -> None:
    planner = RoundPlanner(GATHER_S)
    together(planner, 1, "a", "b")
    for member in "ab":
        planner.request(member, 2, 0, 1.0)
    planner.begin()
    planner.request("a", 2, 1, 2.0)
    planner.finish("b")
    assert served(planner, 2, "a").epoch == 2
    assert served(planner, 3, "a", "b").epoch == 3


# Pairs of an event and the number of a worker. ask: it requests the newest version. got: it reports the whole version.
# again: it requests again during its round. leave: its connection ends. publish: there is a newer version. wait: time
# passes.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "got", "again", "leave", "publish", "wait"]), st.integers(0, 4)),
    max_size=80,
)


@given(EVENTS)
def test_each_request_leads_to_a_round_and_the_members_of_an_epoch_never_change(
    events: list[tuple[str, int]],
) -> None:
    planner, now, version = RoundPlanner(GATHER_S), 0.0, 1
    # The version that each worker has, the time since which each waits, and the members of each epoch.
    has, waits, epochs = dict[str, int](), dict[str, float](), dict[int, tuple[str, ...]]()

    def begin() -> None:
        # Begin all rounds that can begin now, and check that nobody has waited too long.
        while planner.wait_s(now) <= 0:
            assert not planner.unfinished
            turn = planner.begin()
            assert epochs.setdefault(turn.epoch, turn.members) == turn.members == tuple(sorted(planner.unfinished))
            for member in turn.members:
                waits.pop(member)
        assert planner.unfinished or all(now - since < GATHER_S for since in waits.values())

    for kind, number in events:
        member = f"worker {number}"
        if kind == "publish":
            version += 1
        elif kind == "wait":
            now += 0.75
        elif kind == "leave":
            planner.remove(member)
            waits.pop(member, None)
        elif kind in ("got", "again") and member in planner.unfinished:
            if kind == "got":
                planner.finish(member)
                has[member] = version
            else:
                planner.request(member, version, 1, now)
                waits[member] = now
                assert planner.failed
        elif kind == "ask" and member not in {*waits, *planner.unfinished} and has.get(member, 0) < version:
            planner.request(member, version, 0, now)
            waits[member] = now
        begin()
    while waits or planner.unfinished:
        for member in sorted(planner.unfinished):
            planner.finish(member)
        now += GATHER_S
        begin()
