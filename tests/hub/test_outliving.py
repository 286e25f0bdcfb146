"""Whether the trainer ranks of a former hub go on: the pure decision, and what the hub makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest

from flash.config import waits
from flash.errors import LifeOverError
from flash.hub import protocol as p
from flash.hub.ranks.outliving import Outliving, checksum
from flash.samples.batches import cut, deal
from flash.samples.slices import at_once
from flash.types import Batch, Task
from tests.hub.test_hub import make_config
from tests.hub.test_trainers import Rank, World, tasks_of
from tests.samples.cases import trajectory

Then = Callable[[], None]
"""What happens while they wait for the others."""

FIRST = 100
"""The first life of the hub that decides; the run is at version 5."""
BOOKED, FORMED = [40, 41], [50, 51]


def presents(rank: int = 0, step: int = 5, **other: Any) -> p.OutliveRequest:
    """What a rank presents that fits."""
    seen = (BOOKED if step == 5 else FORMED)[rank]
    return msgspec.structs.replace(p.OutliveRequest(rank, 1, "", 7, step, seen, booked=5), **other)


def verdict(*presented: p.OutliveRequest) -> str:
    outliving = Outliving(2, 5, FIRST)
    for request in presented:
        assert not outliving.complete
        if why := outliving.presents(request):
            return why
    return outliving.compared(BOOKED, FORMED)


@pytest.mark.parametrize(
    "presented",
    [
        [presents(0), presents(1)],
        [presents(1, 6), presents(0, 6)],
        [presents(0, 6), presents(1, 5)],
        [presents(0, checksum=None), presents(1, 6)],
        [presents(0, 6, booked=5), presents(1, 6, booked=0)],
    ],
)
def test_ranks_go_on_that_hold_what_the_run_has_or_are_in_its_next_step(presented: list[p.OutliveRequest]) -> None:
    assert verdict(*presented) == ""


@pytest.mark.parametrize(
    ("presented", "why"),
    [
        ([presents(0), presents(1, 7, checksum=9)], "rank 1 is at step 7, and the run at 5"),
        ([presents(0, 5), presents(1, 4, checksum=9)], "rank 1 is at step 4, and the run at 5"),
        ([presents(0), presents(1, life=8)], "rank 1 is of another life than the hub before this one had"),
        ([presents(0, life=FIRST)], "rank 0 is of another life than the hub before this one had"),
        ([presents(0, 6, booked=6)], "rank 0 knows of version 6, and the run is at 5"),
        ([presents(0), presents(1, checksum=40)], "what rank 1 has of step 4 is not what the run has of it"),
        ([presents(0, 6), presents(1, 6, checksum=50)], "what rank 1 has of step 5 is not what the run has of it"),
        ([presents(0, 6, checksum=None), presents(1)], "what rank 0 has of step 5 is not what the run has of it"),
    ],
)
def test_none_goes_on_where_one_holds_something_else(presented: list[p.OutliveRequest], why: str) -> None:
    assert verdict(*presented) == why


def test_where_nobody_knows_a_batch_any_more_none_goes_on_with_it() -> None:
    outliving = Outliving(1, 5, FIRST)
    outliving.presents(presents(0, 6))
    assert outliving.compared(BOOKED, []) == "what rank 0 has of step 5 is not what the run has of it"


def test_it_is_decided_once_and_only_matters_to_ranks_that_have_come() -> None:
    nobody = Outliving(2, 5, FIRST)
    assert not nobody.decide(go_on=False)
    assert nobody.go_on is False
    some = Outliving(2, 5, FIRST)
    some.presents(presents(0))
    assert some.decide(go_on=True)
    assert not some.decide(go_on=False)
    assert some.go_on is True


def test_a_shard_has_one_checksum_whole_or_in_parts_and_another_one_than_every_other() -> None:
    def shards(reward: float) -> Batch:
        tasks = [Task(number, 0, number, number, "train") for number in range(6)]
        return Batch(3, 2, [trajectory(task, 3, reward=reward) for task in tasks], [])

    (one, other) = at_once(deal(shards(1.0), 2))
    parts = at_once(cut(one, part_bytes=1))
    assert len(parts) > 1
    seen = at_once(checksum([one]))
    assert at_once(checksum(parts)) == seen
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=type(one))
    assert at_once(checksum([decoded])) == seen
    assert at_once(checksum([other])) != seen
    assert at_once(checksum([at_once(deal(shards(0.5), 2))[0]])) != seen


# -- at a hub ----------------------------------------------------------------------------------------------------------


class Outlived:
    """Two ranks of a hub that dies when they have trained two steps, and have their shards of the third or not."""

    def __init__(self) -> None:
        config = make_config()
        config = msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, trainer_ranks=2))
        self.world = World(config)
        self.ranks: list[Rank] = []

    async def begin(self, fetched: int) -> None:
        """So many of the ranks have their shards of step 2 when the hub dies."""
        world = self.world
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.watch)
            tasks.start_soon(world.until_it_fails)
            ranks = self.ranks = [world.rank(0), world.rank(1)]
            for rank in ranks:
                await rank.begin()
            await ranks[0].publish()
            for _ in range(2):
                for rank in ranks:
                    await rank.fetch()
                await ranks[0].commit()
                ranks[1].version = ranks[0].version
                await ranks[0].publish()
            for rank in ranks[:fetched]:
                await rank.fetch()
            tasks.cancel_scope.cancel()
        world.reopen(life=1)

    def held(self, index: int) -> p.OutliveRequest:
        rank = self.ranks[index]
        last = max(rank.shards)
        seen = at_once(checksum([rank.shards[last]]))
        return p.OutliveRequest(index, rank.process, "", 1, last + 1, seen, booked=2 if index == 0 else 0)

    async def present(self, *presented: p.OutliveRequest, then: Then | None = None) -> list[Any]:
        """What each is told: the version, or None."""
        told: list[Any] = [None] * len(presented)

        async def ask(number: int, rank: Rank, request: p.OutliveRequest) -> None:
            try:
                told[number] = (await rank.call(request)).version
            except LifeOverError:
                told[number] = None

        moved = [self.world.rank(request.rank) for request in presented]
        for rank in moved:
            before = self.ranks[rank.index]
            rank.version, rank.shards, rank.process = before.version, before.shards, before.process
        self.ranks = moved
        async with anyio.create_task_group() as tasks:
            for number, request in enumerate(presented):
                tasks.start_soon(ask, number, moved[number], request)
            if then is not None:
                await anyio.sleep(1)
                then()
        return told


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("fetched", [0, 1, 2])
async def test_ranks_go_on_where_they_were_and_their_step_is_booked_once(fetched: int) -> None:
    outlived = Outlived()
    await outlived.begin(fetched)
    world = outlived.world

    async def trainers() -> None:
        assert await outlived.present(outlived.held(0), outlived.held(1)) == [2, 2], world.observer.notes
        ranks = outlived.ranks
        await ranks[0].publish()
        assert world.hub.published_version == 2
        for rank in ranks[fetched:]:
            before = {step: tasks_of(shard) for step, shard in rank.shards.items()}
            await rank.fetch()
            assert before.items() <= {step: tasks_of(shard) for step, shard in rank.shards.items()}.items()
        await ranks[0].commit()
        await ranks[0].publish()
        ranks[1].version = ranks[0].version
        for rank in ranks:
            await rank.fetch()
        await ranks[0].commit()
        await ranks[0].publish()
        ranks[1].version = ranks[0].version
        for rank in ranks:
            assert (await rank.fetch()).shard is None
        await ranks[0].call(p.SnapshotRequest())
        for rank in ranks:
            await rank.call(p.Goodbye(rank.index, []))

    await world.play(trainers)
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    assert [row["trainer_restarts"] for row in world.observer.steps] == [0, 0, 0, 0]
    assert world.observer.notes == ["the trainer ranks have outlived the hub, and go on at version 2"]


@pytest.mark.anyio
@pytest.mark.virtual
async def test_where_one_does_not_come_none_goes_on_and_the_next_life_trains_the_steps_again() -> None:
    outlived = Outlived()
    await outlived.begin(2)
    world = outlived.world

    async def trainers() -> None:
        begun = anyio.current_time()
        assert await outlived.present(outlived.held(1)) == [None]
        assert anyio.current_time() - begun == pytest.approx(waits.claim_s(world.config))
        ranks = await self_started(world)
        assert [tasks_of(rank.shards[0]) for rank in ranks] != []

    async def self_started(world: World) -> list[Rank]:
        ranks = [world.rank(0), world.rank(1)]
        assert len({(await rank.begin()).number for rank in ranks}) == 1
        await ranks[0].publish()
        for rank in ranks:
            await rank.fetch()
        return ranks

    await world.play(trainers)
    (note,) = world.observer.notes
    assert note.startswith("the trainer ranks have outlived the hub, and cannot go on: 1 of 2 ranks came within ")


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize(
    ("dies", "why"),
    [(True, "rank 0 is gone"), (False, "what rank 0 has of step 2 is not what the run has of it")],
)
async def test_where_one_dies_or_holds_something_else_all_are_told_at_once_that_their_life_is_over(
    dies: bool, why: str
) -> None:
    outlived = Outlived()
    await outlived.begin(2)
    world = outlived.world

    async def trainers() -> None:
        held, other = outlived.held(1), msgspec.structs.replace(outlived.held(0), checksum=0)
        if dies:
            assert await outlived.present(held, then=lambda: world.rank(0).die()) == [None]
        else:
            assert await outlived.present(held, other) == [None, None]
        with pytest.raises(LifeOverError):
            await outlived.ranks[0].call(p.LifeWatch(1))

    await world.play(trainers)
    (note,) = world.observer.notes
    assert note == (
        f"the trainer ranks have outlived the hub, and cannot go on: {why}. They start again, and the engines go on "
        "meanwhile"
    )


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_process_that_starts_while_others_wait_ends_these_and_begins_with_the_next_connection() -> None:
    outlived = Outlived()
    await outlived.begin(0)
    world = outlived.world

    async def trainers() -> None:
        fresh = world.rank(1)
        refused: list[LifeOverError] = []

        async def start() -> None:
            await anyio.sleep(1)
            try:
                await fresh.begin()
            except LifeOverError as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            assert await outlived.present(outlived.held(0)) == [None]
        assert len(refused) == 1
        ranks = [world.rank(0), world.rank(1)]
        assert len({(await rank.begin()).number for rank in ranks}) == 1

    await world.play(trainers)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_rank_that_was_cut_off_and_comes_back_to_the_same_hub_takes_nobody_along() -> None:
    outlived = Outlived()
    await outlived.begin(0)
    world = outlived.world

    async def trainers() -> None:
        first = world.rank(0)
        number = (await first.begin()).number
        assert await outlived.present(outlived.held(1)) == [None]
        outlived.ranks[0].die()
        second = world.rank(1)
        assert (await second.begin()).number == number

    await world.play(trainers)
    assert world.observer.notes == []
