"""Trainer ranks that hang: the hub treats them as lost. On the virtual clock.

`make_config` gives a synchronous run: 4 steps of two groups of two samples, without retries. `trajectory` gives a
sample of 3 tokens. Times are seconds of a virtual clock, so tests may wait for long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest

from flash.config import waits
from flash.config.tree import ClusterConfig, Config, DeadlinesConfig
from flash.errors import DeadlineError, PeerLostError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.hub.stages import Stage
from flash.hub.trainers import INCARNATION_OVER
from flash.transport.frames import Request
from tests.hub.test_hub import make_config
from tests.hub.test_trainers import Rank, World, tasks_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

RENDEZVOUS, STEP, COLLECTIVE, SILENCE = 500.0, 200.0, 50.0, 30.0
"""Deadlines of the runs here, and the silence of a rank after which its incarnation ends, in seconds."""


def config_of(ranks: int = 1, **cluster: Any) -> Config:
    """Return a run with this number of trainer ranks and the deadlines above. `cluster`: further settings of it."""
    return msgspec.structs.replace(
        make_config(),
        cluster=ClusterConfig(gpus_per_node=0, trainer_ranks=ranks, **cluster),
        deadlines=DeadlinesConfig(rendezvous=RENDEZVOUS, step=STEP, collective=COLLECTIVE),
    )


async def until_over(rank: Rank, request: Request[Any]) -> None:
    """Call the hub, and expect that the call ends with the rank's incarnation."""
    said = ""
    while not said:
        try:
            await rank.call(request)
        except PeerLostError as error:
            said = str(error)
    assert said == INCARNATION_OVER


async def launcher_hears(world: World, node: int, ended: set[int]) -> list[int]:
    """Wait until the launcher of a node knows that these processes have ended. Returns those that caused the end."""
    news = p.RanksReply(-1, [], [], [])
    while set(news.ended) != ended:
        news = await world.hub.handle(p.RanksRequest(node, news.number))
    return news.causes


async def begun(rank: Rank) -> None:
    """Leave a rank as it is: it has begun, and published nothing."""


async def published(rank: Rank) -> None:
    """Let a rank publish its first version."""
    await rank.publish()


async def in_a_step(rank: Rank) -> None:
    """Let a rank train one step, and begin the next one."""
    await rank.publish()
    await rank.step()
    await rank.fetch()


async def after_a_commit(rank: Rank) -> None:
    """Let a rank train two steps, without publishing the version that the second one has made."""
    await rank.publish()
    await rank.step()
    await rank.fetch()
    await rank.commit()


@pytest.mark.parametrize(
    ("until", "seconds", "words"),
    [
        (begun, RENDEZVOUS, "500 s (deadlines.rendezvous) for the trainer ranks to publish their first version"),
        (published, STEP, "200 s (deadlines.step) for the trainer ranks to publish version 0 and to ask for a batch"),
        (in_a_step, STEP, "200 s (deadlines.step) for the trainer ranks to finish step 1"),
        (after_a_commit, STEP, "200 s (deadlines.step) for the trainer ranks to publish version 2 and to ask"),
    ],
)
async def test_a_rank_that_hangs_is_lost_after_the_deadline_of_what_the_run_waits_for(
    until: Callable[[Rank], Awaitable[None]], seconds: float, words: str
) -> None:
    world = World(config_of())

    async def trainers() -> None:
        first = world.rank()
        await first.begin()
        await until(first)
        hangs = anyio.current_time()
        await launcher_hears(world, 0, {first.process})
        assert anyio.current_time() - hangs == pytest.approx(seconds, abs=1)
        with pytest.raises(PeerLostError):
            await first.publish()
        first.die()
        await anyio.sleep(20)
        second = world.rank()
        assert await second.begin() == p.IncarnationReply(2, "step-0")
        await second.publish()
        await world.to_the_end(second)
        for step, shard in first.shards.items():
            assert tasks_of(second.shards[step]) == tasks_of(shard)

    await world.play(trainers)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version, end.ledger["trained"]) == ("finished", 4, 16)
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    lost = next(note for note in world.observer.notes if "hangs" in note)
    # `World` numbers connections from 11, and a process is 1000 more.
    assert lost.startswith(f"trainer rank 0 (process 1011 on node 0) hangs: the run has waited {words}")
    assert lost.endswith("The trainer ranks start again, and the engines go on meanwhile")


async def test_a_rank_that_trains_again_and_hangs_and_the_next_one_too_are_each_a_lost_incarnation() -> None:
    world = World(config_of())

    async def trainers() -> None:
        first = world.rank()
        await first.begin()
        await first.publish()
        await first.step()
        await first.step()
        first.die()
        for number in (2, 3):
            hanging = world.rank()
            assert (await hanging.begin()).number == number
            await hanging.publish()
            await hanging.fetch()
            await launcher_hears(world, 0, {hanging.process})
            hanging.die()
        last = world.rank()
        assert (await last.begin()).number == 4
        await last.publish()
        await world.to_the_end(last)

    await world.play(trainers)
    assert isinstance(world.ended[0], RunEnd)
    assert [row["step"] for row in world.observer.steps] == [0, 1, 2, 3]
    words = "200 s (deadlines.step) for the trainer ranks to train step 0 again"
    assert len([note for note in world.observer.notes if words in note]) == 2


async def test_ranks_that_never_come_to_their_first_version_are_tried_again_as_long_as_any_comes() -> None:
    world = World(config_of(2))

    async def trainers() -> None:
        for number in (1, 2):
            rank = world.rank(0)
            assert (await rank.begin()).number == number
            await launcher_hears(world, 0, {rank.process})
            rank.die()
        await anyio.sleep(RENDEZVOUS + 1)

    await world.play(trainers)
    (error,) = world.ended
    assert isinstance(error, DeadlineError)
    assert "waited 500 s for the trainer ranks to start again, at version 0; look at " in str(error)


async def test_a_host_that_is_lost_for_good_is_named_and_not_the_ranks_that_wait_for_it() -> None:
    world = World(config_of(1, nodes=2, trainer_nodes=2))

    async def trainers() -> None:
        first = [world.rank(index) for index in range(2)]
        for rank in first:
            await rank.begin()
        for rank in reversed(first):
            rank.die()
        survivor = world.rank(0)
        await survivor.begin()
        assert await launcher_hears(world, 0, {survivor.process}) == [survivor.process]
        news = await world.hub.handle(p.RanksRequest(0, -1))
        assert news.missing == "trainer rank 1 of node 1 (host-1) did not come, and the run needs that machine back"
        survivor.die()

    await world.play(trainers)
    assert world.ended == []
    *_, note = world.observer.notes
    assert note == (
        "trainer rank 1 of node 1 (host-1) did not come, and the run needs that machine back: the run has waited 500 s "
        "(deadlines.rendezvous) for the trainer ranks to start again, at version 0. The trainer ranks start again, and "
        "the engines go on meanwhile"
    )


async def test_of_several_ranks_the_one_that_is_silent_is_named_where_a_collective_has_failed() -> None:
    world = World(config_of(2, nodes=3, trainer_nodes=2))

    async def trainers() -> None:
        ranks = [world.rank(index) for index in range(4)]
        for rank in ranks:
            await rank.begin()
        await ranks[0].publish()
        for rank in ranks:
            await rank.fetch()
        async with anyio.create_task_group() as group:
            # Rank 2 sends its last heartbeat within 7 s. The others send theirs until the incarnation is over.
            for rank in (ranks[0], ranks[1], ranks[3]):
                group.start_soon(until_over, rank, p.RankHeartbeat(rank.index))
            with anyio.move_on_after(7):
                while True:
                    await ranks[2].call(p.RankHeartbeat(2))
            await anyio.sleep(COLLECTIVE)
            group.start_soon(
                ranks[0].call, p.Fatal("CollectiveError", "trainer rank 0: a collective failed: timed out")
            )
            # Each launcher gets only the processes of its own node.
            assert await launcher_hears(world, 0, {ranks[0].process, ranks[1].process}) == []
            assert await launcher_hears(world, 1, {ranks[2].process, ranks[3].process}) == [ranks[2].process]
            group.cancel_scope.cancel()  # a `Fatal` is never answered

    await world.play(trainers)
    assert world.ended == []
    (note,) = (note for note in world.observer.notes if "hangs" in note)
    assert note == (
        "trainer rank 2 (process 1013 on node 1) hangs: it has been silent for 53 s: trainer rank 0: a collective "
        "failed: timed out; the run waited for the trainer ranks to finish step 0, in which a collective may take "
        "50 s (deadlines.collective). The trainer ranks start again, and the engines go on meanwhile"
    )


async def test_a_rank_that_does_not_show_any_more_that_it_runs_is_lost_long_before_its_stage_is_late() -> None:
    config = config_of(2)
    config = msgspec.structs.replace(config, deadlines=msgspec.structs.replace(config.deadlines, request=SILENCE))
    world = World(config)

    async def trainers() -> None:
        ranks = [world.rank(index) for index in range(2)]
        for rank in ranks:
            await rank.begin()
        await ranks[0].publish()
        for rank in ranks:
            await rank.fetch()
        async with anyio.create_task_group() as group:
            group.start_soon(until_over, ranks[0], p.RankHeartbeat(0))
            with anyio.move_on_after(2 * SILENCE):
                while True:
                    await ranks[1].call(p.RankHeartbeat(1))
            quiet = anyio.current_time()
            assert await launcher_hears(world, 0, {rank.process for rank in ranks}) == [ranks[1].process]
            assert SILENCE < anyio.current_time() - quiet + waits.BEAT_S < SILENCE + 2 * waits.BEAT_S

    await world.play(trainers)
    assert world.ended == []
    (note,) = (note for note in world.observer.notes if "hangs" in note)
    assert note.startswith("trainer rank 1 (process 1012 on node 0) hangs: it has been silent for 31 s: a rank ")


async def test_a_launcher_without_news_is_answered_before_it_takes_the_hub_for_one_that_hangs() -> None:
    config = config_of()
    world = World(msgspec.structs.replace(config, deadlines=msgspec.structs.replace(config.deadlines, request=0.2)))
    with anyio.fail_after(1.0):
        news = await world.hub.handle(p.RanksRequest(0, 0))
    assert news == p.RanksReply(0, [], [], [])


async def test_a_rank_that_is_gone_is_the_cause_of_its_incarnations_end_and_its_peers_are_not() -> None:
    world = World(config_of(2, nodes=3, trainer_nodes=2))

    async def trainers() -> None:
        ranks = [world.rank(index) for index in range(4)]
        for rank in ranks:
            await rank.begin()
        ranks[3].die()
        assert await launcher_hears(world, 0, {ranks[0].process, ranks[1].process}) == []
        assert await launcher_hears(world, 1, {ranks[2].process, ranks[3].process}) == [ranks[3].process]

    await world.play(trainers)
    assert world.ended == []


async def test_while_a_batch_is_waited_for_the_ranks_that_wait_too_are_not_blamed() -> None:
    config = config_of()
    config = msgspec.structs.replace(config, deadlines=msgspec.structs.replace(config.deadlines, step=1000.0))
    world = World(config)

    rank = world.rank()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.watch)
        await rank.begin()
        await rank.publish()
        await world.report(0)
        tasks.start_soon(rank.fetch)
        await world.over.wait()
        tasks.cancel_scope.cancel()
    assert "waited 1000 s for a batch for step 0" in str(world.ended[0])
    assert [note for note in world.observer.notes if "hangs" in note] == []


async def test_a_rank_that_hangs_after_a_goodbye_of_another_keeps_nobody() -> None:
    world = World(config_of(2))

    async def trainers() -> None:
        ranks = [world.rank(index) for index in range(2)]
        for rank in ranks:
            await rank.begin()
        await ranks[0].publish()
        while (await ranks[0].fetch()).shard is not None:
            ranks[1].version = ranks[0].version
            await ranks[1].fetch()
            await ranks[0].commit()
            await ranks[0].publish()
        await ranks[0].call(p.SnapshotRequest())
        await ranks[0].call(p.Goodbye(0, []))
        # Rank 1 says no goodbye. The deadline of the last stage passes.
        await anyio.sleep(STEP + 1)

    await world.play(trainers)
    (end,) = world.ended
    assert isinstance(end, RunEnd)
    assert (end.reason, end.version) == ("finished", 4)


def test_each_stage_of_the_trainer_ranks_names_its_deadline() -> None:
    config = config_of()
    for stage in Stage:
        if stage.deadline:
            assert stage.seconds(config) == getattr(config.deadlines, stage.deadline)
        assert stage.seconds(config) > 0
        assert bool(stage.look_at) == (stage is not Stage.ENDING)
    others = {Stage.STARTING, Stage.RETURNING, Stage.BATCH, Stage.LOADING, Stage.EVALUATING, Stage.ENDING}
    assert {stage for stage in Stage if not stage.of_trainers} == others
