"""A trainer rank's process ends with its life, and with its hub."""

from __future__ import annotations

import threading

import pytest

from flash.errors import LifeOverError, PeerLostError
from flash.hub import protocol as p
from flash.run.trainer_rank import RankLife


class FakeHub:
    """Answers so many signs of life; then the connection ends."""

    def __init__(self, answers: int, end: Exception) -> None:
        self.heard: list[p.LifeWatch] = []
        self.asked_last = threading.Event()
        self.may_end = threading.Event()
        self._answers = answers
        self._end = end

    def call(self, request: p.LifeWatch, timeout: float) -> p.Ack:
        self.heard.append(request)
        if len(self.heard) <= self._answers:
            return p.Ack()
        self.asked_last.set()
        self.may_end.wait(30)
        raise self._end


@pytest.mark.parametrize("end", [PeerLostError("the hub is gone"), LifeOverError("another rank is gone"), OSError()])
def test_a_rank_ends_when_its_hub_or_its_life_does(end: Exception) -> None:
    hub, ended = FakeHub(3, end), threading.Event()
    hub.may_end.set()
    RankLife(2, hub, ended.set).watch()
    assert ended.is_set()
    assert hub.heard == [p.LifeWatch(2)] * 4


def test_who_is_done_ends_by_himself() -> None:
    hub, ended = FakeHub(0, PeerLostError("the hub is gone")), threading.Event()
    life = RankLife(0, hub, ended.set)
    thread = threading.Thread(target=life.watch, daemon=True)
    thread.start()
    assert hub.asked_last.wait(30)
    life.close()
    hub.may_end.set()
    thread.join(30)
    assert not ended.is_set()
