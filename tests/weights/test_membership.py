"""Who is sent a version together: rounds, epochs, and workers that come, go or break."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from flash.weights.membership import Membership, Round

GATHER_S = 2.0


def served(membership: Membership, version: int, *members: str, now: float = 0.0) -> Round:
    """They ask, and get all of it."""
    for member in members:
        membership.asks(member, version, 0, now)
    assert membership.wait_s(now) == 0.0
    turn = membership.begin()
    for member in members:
        membership.got(member)
    return turn


def together(membership: Membership, version: int, *members: str) -> Round:
    """The same for the first time, where nobody knows of the others."""
    for member in members:
        membership.asks(member, version, 0, 0.0)
    turn = membership.begin()
    for member in members:
        membership.got(member)
    return turn


def test_the_same_workers_keep_their_group_from_version_to_version() -> None:
    membership = Membership(GATHER_S)
    first = together(membership, 1, "a", "b")
    assert first == Round(1, 1, ("a", "b"), 0)
    assert served(membership, 2, "b", "a") == Round(1, 2, ("a", "b"), 0)


def test_a_round_waits_for_those_who_lack_the_version_and_no_longer_than_that() -> None:
    membership = Membership(GATHER_S)
    together(membership, 1, "a", "b")
    membership.asks("a", 2, 0, 10.0)
    assert membership.wait_s(10.5) == GATHER_S - 0.5
    membership.asks("b", 2, 0, 11.0)
    assert membership.wait_s(11.0) == 0.0


def test_one_that_never_comes_again_is_waited_for_once() -> None:
    membership = Membership(GATHER_S)
    together(membership, 1, "a", "b")
    membership.asks("a", 2, 0, 10.0)
    assert membership.wait_s(10.0 + GATHER_S) == 0.0
    assert membership.begin() == Round(2, 2, ("a",), 0)
    membership.got("a")
    assert served(membership, 3, "a", now=20.0).epoch == 2


def test_one_that_comes_between_versions_waits_for_nobody_and_is_of_the_next_round() -> None:
    membership = Membership(GATHER_S)
    together(membership, 1, "a", "b")
    assert served(membership, 1, "c").members == ("c",)
    assert served(membership, 2, "a", "b", "c") == Round(3, 2, ("a", "b", "c"), 0)


def test_a_round_that_a_member_leaves_is_broken_and_begins_again_where_the_last_of_the_others_was() -> None:
    membership = Membership(GATHER_S)
    for member in "abc":
        membership.asks(member, 1, 0, 0.0)
    membership.begin()
    assert not membership.broken
    membership.left("b")
    assert membership.broken
    membership.asks("a", 1, 3, 1.0)
    assert math.isinf(membership.wait_s(9.0)), "c has not left the group yet"
    membership.asks("c", 1, 2, 1.0)
    assert membership.wait_s(1.0) == 0.0
    assert membership.begin() == Round(2, 1, ("a", "c"), 2)
    assert not membership.broken


def test_a_broken_group_is_not_kept_for_the_same_members() -> None:
    membership = Membership(GATHER_S)
    together(membership, 1, "a", "b")
    for member in "ab":
        membership.asks(member, 2, 0, 1.0)
    membership.begin()
    membership.asks("a", 2, 1, 2.0)
    membership.got("b")
    assert served(membership, 2, "a").epoch == 2
    assert served(membership, 3, "a", "b").epoch == 3


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "got", "again", "leave", "publish", "wait"]), st.integers(0, 4)),
    max_size=80,
)


@given(EVENTS)
def test_whoever_asks_is_in_a_round_or_has_left_and_an_epochs_members_never_change(
    events: list[tuple[str, int]],
) -> None:
    membership, now, version = Membership(GATHER_S), 0.0, 1
    has, waits, epochs = dict[str, int](), dict[str, float](), dict[int, tuple[str, ...]]()

    def begin() -> None:
        while membership.wait_s(now) <= 0:
            assert not membership.owing
            turn = membership.begin()
            assert epochs.setdefault(turn.epoch, turn.members) == turn.members == tuple(sorted(membership.owing))
            for member in turn.members:
                waits.pop(member)
        assert membership.owing or all(now - since < GATHER_S for since in waits.values())

    for kind, number in events:
        member = f"worker {number}"
        if kind == "publish":
            version += 1
        elif kind == "wait":
            now += 0.75
        elif kind == "leave":
            membership.left(member)
            waits.pop(member, None)
        elif kind in ("got", "again") and member in membership.owing:
            if kind == "got":
                membership.got(member)
                has[member] = version
            else:
                membership.asks(member, version, 1, now)
                waits[member] = now
                assert membership.broken
        elif kind == "ask" and member not in waits and member not in membership.owing and has.get(member, 0) < version:
            membership.asks(member, version, 0, now)
            waits[member] = now
        begin()
    while waits or membership.owing:
        for member in sorted(membership.owing):
            membership.got(member)
        now += GATHER_S
        begin()
