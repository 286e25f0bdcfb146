"""The share of the available tasks that each node gets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.hub.shares import KEPT_S, NodeLoad, NodeShares, equal_loads
from flash.hub.work import Holders
from flash.types import Lease, Task

NODES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8)
"""Nodes, each with the leases that it holds and the number of tasks that it could start besides."""


def loads_of(nodes: list[tuple[int, int]]) -> list[NodeLoad]:
    """Return the loads of nodes as in `NODES`."""
    return [NodeLoad(node, held, held + free) for node, (held, free) in enumerate(nodes)]


@given(NODES, st.integers(0, 200))
def test_all_tasks_are_given_while_there_is_room_and_the_loads_become_as_equal_as_they_can(
    nodes: list[tuple[int, int]], tasks: int
) -> None:
    loads = loads_of(nodes)
    shares = equal_loads(loads, tasks, 1)
    assert sum(shares) == min(tasks, sum(free for _, free in nodes))
    assert all(0 <= share <= free for share, (_, free) in zip(shares, nodes, strict=True))
    for taker, took in zip(loads, shares, strict=True):
        for other, got in zip(loads, shares, strict=True):
            if took and other.held + got < other.room:
                assert (taker.held + took) / taker.room <= (other.held + got + 1) / other.room + 1e-9


@given(NODES, st.integers(0, 12), st.integers(2, 16))
def test_groups_that_stay_together_are_given_whole(nodes: list[tuple[int, int]], groups: int, unit: int) -> None:
    shares = equal_loads(loads_of(nodes), groups * unit, unit)
    assert all(share % unit == 0 for share in shares)
    assert all(share < free + unit for share, (_, free) in zip(shares, nodes, strict=True))
    fit = sum(-(-free // unit) for _, free in nodes)
    assert sum(shares) == min(groups, fit) * unit


def test_the_loads_that_many_tasks_make_equal_are_those_of_one_task_after_the_other() -> None:
    nodes = [(10, 30), (0, 8), (90, 10), (3, 0), (0, 64)]
    loads = loads_of(nodes)
    one_by_one = [0] * len(nodes)
    for _ in range(70):
        now = [NodeLoad(load.node, load.held + got, load.room) for load, got in zip(loads, one_by_one, strict=True)]
        one_by_one = [got + more for got, more in zip(one_by_one, equal_loads(now, 1, 1), strict=True)]
    assert equal_loads(loads, 70, 1) == one_by_one


class Nodes:
    """The shares of nodes, and the leases that each node holds.

    `capacities` has the capacity of each node that waits, by its number behind an `n`.
    """

    def __init__(self, **capacities: int) -> None:
        self.held = Counter[int]()
        """Number of leases of each node."""
        self.shares = NodeShares(lambda node: self.held[node], unit=1)
        for name, capacity in capacities.items():
            self.shares.node_waits(int(name[1:]), capacity)

    def deal(self, tasks: int, now: float = 0.0, passed: tuple[int, ...] = ()) -> dict[int, int]:
        """Return the share of each waiting node. The nodes in `passed` can run none of the tasks."""
        return self.shares.compute(tasks, now, passed)


def test_a_node_that_brings_results_home_has_its_room_again() -> None:
    nodes = Nodes(n0=2, n1=100)
    nodes.held[0] = 98
    nodes.shares.set_capacity(0, 2)
    assert nodes.deal(80) == {1: 80}
    nodes.held[0] = 18
    nodes.shares.set_capacity(0, 82)
    assert nodes.deal(80) == {0: 31, 1: 49}


def test_the_share_of_a_node_that_loads_the_version_is_kept_until_it_has_it_but_not_for_ever() -> None:
    nodes = Nodes(n0=8, n1=8)
    nodes.shares.version_published(now=100.0)
    nodes.shares.version_loaded(0)
    assert nodes.deal(8, now=100.0, passed=(1,)) == {0: 4}
    assert nodes.deal(8, now=100.0 + KEPT_S, passed=(1,)) == {0: 8}
    nodes.shares.version_loaded(1)
    assert nodes.deal(8, now=100.0, passed=(1,)) == {0: 8}


def test_nothing_is_kept_for_a_node_without_engines_until_it_has_one_that_loads() -> None:
    nodes = Nodes(n0=8, n1=8)
    nodes.shares.reply_full(1, now=99.0)
    nodes.shares.engines_died(1)
    assert nodes.deal(8, now=100.0) == {0: 8}
    nodes.shares.version_published(now=100.0)
    nodes.shares.version_loaded(0)
    assert nodes.deal(8, now=100.0) == {0: 8}
    nodes.shares.version_loaded(1)
    nodes.shares.version_published(now=200.0)
    nodes.shares.version_loaded(0)
    assert nodes.deal(8, now=200.0, passed=(1,)) == {0: 4}


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_share_of_a_node_whose_reply_was_too_short_is_kept_until_it_asks_again(comes_back: bool) -> None:
    nodes = Nodes(n0=8, n1=8)
    nodes.held.update({0: 2, 1: 4})
    nodes.shares.reply_full(0, now=0.0)
    nodes.shares.set_capacity(0, 6)
    assert nodes.deal(4, now=1.0) == {1: 1}
    if comes_back:
        nodes.shares.node_waits(0, 6)
        assert nodes.deal(4, now=1.0) == {0: 3, 1: 1}
    else:
        assert nodes.deal(4, now=KEPT_S) == {1: 4}


def test_nodes_that_do_not_wait_take_nothing_from_the_others() -> None:
    nodes = Nodes(n0=8, n1=8, n2=8)
    nodes.shares.stops_waiting(1)
    nodes.shares.remove(2)
    assert nodes.deal(8) == {0: 8}


def test_a_node_is_told_once_of_the_leases_it_still_holds_and_a_lost_one_of_none() -> None:
    one, two, three = (Lease(index, Task(index, index, 0, index), 0) for index in range(3))
    holders = Holders()
    holders.granted(7, [one, two], now=1.0)
    holders.granted(8, [three], now=2.0)
    assert holders.granted_before(1.5) == [(7, one), (7, two)]
    holders.ended(one.lease_id)
    holders.withdraw([one.lease_id, two.lease_id, three.lease_id])
    assert holders.has_cancels(7)
    assert (holders.take_cancels(7), holders.take_cancels(7)) == ([two.lease_id], [])
    assert holders.lost(8) == [three]
    assert not holders.has_cancels(8)
    assert holders.lost(8) == []
