"""A trainer rank's way from hub to hub, with hubs that are told to die in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from flash.errors import DeadlineError, LifeOverError, PeerLostError
from flash.hub import protocol as p
from flash.hub.ranks.outliving import checksum
from flash.run.rank_hubs import RankHubs
from flash.samples.slices import at_once
from flash.transport.request import ReplyT, Request
from flash.types import Activity, Canary, Published, Shard
from tests.run.test_launcher import make_config

HELD = p.OutliveRequest(0, 1, "", 7, 3, None, 0)
DID = [Activity("trainer 0", "wait", 0.0, 1.0)]


def shard(step: int, tokens: int = 1) -> Shard:
    return Shard(step, step, [], [], tokens, 1)


class FakeHub:
    """Answers until it dies; a class of requests in `dies_in` is heard, and kills it before the answer."""

    def __init__(self, *, dies_in: tuple[type, ...] = (), more: bool = True, tokens: int = 1) -> None:
        self.heard: list[Any] = []
        self.loss: Exception = PeerLostError("the connection to hub ended")
        self.dead = threading.Event()
        self._dies_in = dies_in
        self._more = more
        self._tokens = tokens

    def die(self, loss: Exception | None = None) -> None:
        self.loss = loss or self.loss
        self.dead.set()

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        if isinstance(request, p.LifeWatch):
            self.dead.wait(30)
            raise self.loss
        if not self.dead.is_set():
            self.heard.append(request)
        if isinstance(request, self._dies_in):
            self.die()
        if self.dead.is_set():
            raise self.loss
        reply: Any = p.Ack()
        if isinstance(request, p.BatchRequest):
            reply = p.BatchReply(shard(request.step, self._tokens) if self._more else None)
        return reply


class World:
    """The hubs that follow on each other, and what is presented to each but the first."""

    def __init__(self, *hubs: FakeHub, versions: list[int] | None = None, outlives: bool = True) -> None:
        self.hubs = list(hubs)
        self.versions = list(versions or [])
        self.presented: list[p.OutliveRequest] = []
        self.ended = threading.Event()
        self.comes = threading.Event()
        self.comes.set()
        find = self.find if outlives else None
        self.rank = RankHubs(make_config(), self.hubs.pop(0), HELD, find, self.ended.set)
        self.thread = threading.Thread(target=self.rank.watch, daemon=True)
        self.thread.start()

    def find(self, held: p.OutliveRequest) -> tuple[FakeHub, p.OutliveReply]:
        self.comes.wait(30)
        self.presented.append(held)
        if not self.versions:
            raise LifeOverError("the next hub does not go on with this rank")
        return self.hubs.pop(0), p.OutliveReply(self.versions.pop(0))

    def end(self) -> None:
        self.rank.close()
        self.comes.set()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.end()


def published(version: int) -> p.PublishRequest:
    return p.PublishRequest(Published(version, "tcp", b"", Canary([], [])))


def test_what_the_loss_of_a_hub_has_ended_is_asked_again_of_the_next_one(worlds: list[World]) -> None:
    first, second = FakeHub(dies_in=(p.SnapshotRequest,)), FakeHub()
    worlds.append(world := World(first, second, versions=[3]))
    assert world.rank.call(p.SnapshotRequest(), 1.0) == p.Ack()
    assert [first.heard, second.heard] == [[p.SnapshotRequest()], [p.SnapshotRequest()]]
    assert world.presented == [HELD]
    assert not world.ended.is_set()


def test_a_rank_in_the_middle_of_a_step_presents_its_shard_and_publishes_what_it_had_announced(
    worlds: list[World],
) -> None:
    first, second = FakeHub(), FakeHub()
    worlds.append(world := World(first, second, versions=[3]))
    world.rank.call(published(3), 1.0)
    assert world.rank.fetch(3, DID, 1.0).shard == shard(3)
    first.die()
    assert world.rank.call(p.Commit(3, {"loss": 1.0}), 1.0) == p.Ack()
    seen = at_once(checksum([shard(3)]))
    assert world.presented == [msgspec.structs.replace(HELD, step=4, checksum=seen)]
    assert second.heard == [published(3), p.Commit(3, {"loss": 1.0})]


@pytest.mark.parametrize(("version", "heard"), [(4, []), (3, [p.Commit(3, {})])])
def test_a_commit_whose_answer_was_lost_is_told_again_only_where_it_is_not_booked(
    worlds: list[World], version: int, heard: list[Any]
) -> None:
    first, second = FakeHub(dies_in=(p.Commit,)), FakeHub()
    worlds.append(world := World(first, second, versions=[version]))
    world.rank.fetch(3, [], 1.0)
    assert world.rank.call(p.Commit(3, {}), 1.0) == p.Ack()
    assert second.heard == heard
    world.rank.call(published(4), 1.0)
    assert second.heard == [*heard, published(4)]
    second.die()
    assert world.ended.wait(10)
    assert [held.booked for held in world.presented] == [0, 4], "what a hub has said is booked, told by it or to it"


def test_a_shard_is_fetched_anew_as_a_whole_and_what_was_done_is_told_once(worlds: list[World]) -> None:
    first, second = FakeHub(dies_in=(p.BatchRequest,)), FakeHub(tokens=9)
    worlds.append(world := World(first, second, versions=[3]))
    assert world.rank.fetch(3, DID, 1.0).shard == shard(3, 9)
    assert first.heard == [p.BatchRequest(0, 3, DID)]
    assert second.heard == [p.BatchRequest(0, 3, [])]


def test_what_a_hub_has_booked_and_what_was_fetched_last_is_presented(worlds: list[World]) -> None:
    first, second, third = FakeHub(), FakeHub(), FakeHub()
    worlds.append(world := World(first, second, third, versions=[4, 4]))
    world.rank.fetch(3, [], 1.0)
    world.rank.call(p.Commit(3, {}), 1.0)
    world.rank.call(published(4), 1.0)
    first.die()
    world.rank.call(p.SnapshotRequest(), 1.0)
    second.die()
    world.rank.fetch(4, [], 1.0)
    last = msgspec.structs.replace(HELD, step=4, checksum=at_once(checksum([shard(3)])), booked=4)
    assert world.presented == [last, last]
    assert second.heard == [published(4), p.SnapshotRequest()]
    assert third.heard[0] == published(4)


def test_where_the_next_hub_does_not_go_on_with_it_the_process_ends(worlds: list[World]) -> None:
    first = FakeHub()
    worlds.append(world := World(first))
    first.die()
    assert world.ended.wait(10)
    with pytest.raises(PeerLostError):
        world.rank.call(p.SnapshotRequest(), 1.0)


@pytest.mark.parametrize("loss", [LifeOverError("over"), DeadlineError("the reply", 1, "the log")])
def test_the_end_of_its_life_is_no_loss_of_a_hub(worlds: list[World], loss: Exception) -> None:
    first = FakeHub()
    worlds.append(world := World(first, FakeHub(), versions=[3]))
    first.die(loss)
    assert world.ended.wait(10)
    with pytest.raises(type(loss)):
        FakeHub.call(first, p.SnapshotRequest(), 1.0)
    assert world.presented == []


def test_after_the_last_batch_a_rank_ends_with_its_hub(worlds: list[World]) -> None:
    first = FakeHub(more=False)
    worlds.append(world := World(first, FakeHub(), versions=[3]))
    assert world.rank.fetch(3, [], 1.0).shard is None
    first.die()
    assert world.ended.wait(10)
    assert world.presented == []


def test_where_ranks_cannot_outlive_a_hub_the_call_fails_as_well(worlds: list[World]) -> None:
    first = FakeHub(dies_in=(p.SnapshotRequest,))
    worlds.append(world := World(first, outlives=False))
    with pytest.raises(PeerLostError):
        world.rank.call(p.SnapshotRequest(), 1.0)
    assert world.ended.wait(10)


def test_a_signal_ends_a_rank_that_has_no_hub_and_no_other(worlds: list[World]) -> None:
    first = FakeHub()
    worlds.append(world := World(first, FakeHub(), versions=[3]))
    world.rank.told_to_end(15, None)
    assert not world.ended.is_set()
    first.die()
    assert world.ended.wait(10)
    assert world.presented == []


def test_a_signal_ends_a_rank_that_looks_for_a_hub(worlds: list[World]) -> None:
    first = FakeHub(dies_in=(p.SnapshotRequest,))
    worlds.append(world := World(first))
    world.comes.clear()

    def ask() -> None:
        with pytest.raises(PeerLostError):
            world.rank.call(p.SnapshotRequest(), 1.0)

    asking = threading.Thread(target=ask)
    asking.start()
    assert first.dead.wait(10)
    world.thread.join(0.1)
    assert not world.ended.is_set()
    world.rank.told_to_end(15, None)
    assert world.ended.is_set()
    world.end()
    asking.join(10)


def test_a_last_word_waits_for_no_other_hub(worlds: list[World]) -> None:
    first = FakeHub(dies_in=(p.Fatal,))
    worlds.append(world := World(first, FakeHub(), versions=[3]))
    with pytest.raises(PeerLostError):
        world.rank.call(p.Fatal("WeightsError", "x"), 1.0)
    assert p.Fatal("WeightsError", "x") not in first.heard[1:]
