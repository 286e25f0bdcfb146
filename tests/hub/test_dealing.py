"""Dealing what can be had to the nodes that wait."""

from __future__ import annotations

from itertools import count

from flash.hub.dealing import LEASES_AT_ONCE, SLICE, LeaseDealer
from flash.types import Lease, Task


class Tasks:
    """So many that anybody can run; it counts how often one is asked for."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._ids = count()

    def lease(self, node: int) -> list[Lease]:
        if not self.left:
            return []
        self.left -= 1
        number = next(self._ids)
        return [Lease(number, Task(number, number, 0, number), 0)]


def test_a_burst_is_dealt_in_slices_after_which_whoever_was_dealt_to_has_its_share() -> None:
    tasks = Tasks(4_000)
    dealer = LeaseDealer(lambda: tasks.left, tasks.lease, 1)
    replies = {node: dealer.open_reply(node, 100) for node in range(40)}
    slices = 0
    dealing = True
    while dealing:
        before = tasks.left
        for node in dealer.deal(0.0):
            assert len(replies[node]) == 100
            dealer.close_reply(node, replies[node])
        assert before - tasks.left <= SLICE + LEASES_AT_ONCE
        slices += 1
        dealing = dealer.unfinished
    assert (tasks.left, slices) == (0, 20)
    assert all(len(reply) == 100 for reply in replies.values())


def test_a_deal_that_nobody_waits_for_any_more_is_over() -> None:
    tasks = Tasks(1_000)
    dealer = LeaseDealer(lambda: tasks.left, tasks.lease, 1)
    for node in range(5):
        dealer.open_reply(node, 200)
    dealer.deal(0.0)
    assert dealer.unfinished
    for node in range(5):
        dealer.lost(node)
    dealer.deal(0.0)
    assert not dealer.unfinished
