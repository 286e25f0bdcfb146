"""Agents whose episodes branch, in whole runs on the virtual clock: hub, node, episodes, a trainer without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from envs.agent import ENDPOINT
from flash.branches import spans_by_turn
from flash.environment import shared
from flash.hub.recovery import HubState
from flash.rollout.fake_engine import FakeEngine
from flash.samples.journal import Event, MemoryJournal, Replay
from flash.simulate.clock import run_virtual
from flash.trainer.packing import pack
from flash.types import Shard
from tests.envs.agents import END, NODE, ByteTokenizer, ask, make
from tests.rollout.test_node import World, make_config


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def branches(base_url: str, api_key: str, task: str) -> str:
    """Asks, asks two things at once, begins anew with what it was told, and takes its time about it."""
    dice = random.Random(int(task))
    told: list[str] = []
    async with NODE.client(base_url, api_key) as client:

        async def say(*contents: str) -> None:
            reply = await ask(client, [user(content) for content in contents])
            told.append(reply.raise_for_status().json()["choices"][0]["message"]["content"])

        await say(task)
        await anyio.sleep(dice.uniform(0, 3))
        if dice.random() < 0.8:
            async with anyio.create_task_group() as calls:
                calls.start_soon(say, task, "this")
                calls.start_soon(say, task, "and that")
        await say(f"so far: {told}")
    return told[-1]


def babbles(prompt: Sequence[int]) -> list[int]:
    dice = random.Random(bytes(token % 256 for token in prompt))
    return [dice.randrange(97, 123) for _ in range(dice.randrange(1, 9))] + [END]


def world(alpha: float = 1.0, **more: Any) -> World:
    config = make_config(
        run={"steps": 5},
        model={"max_length": 400},
        train={"async_ratio": alpha, "max_token_age": math.ceil(alpha)},
        deadlines={"env_step": 60.0},
    )

    async def prepare() -> None:
        await shared(ENDPOINT, NODE.open)

    return World(
        config,
        env=partial(make, f"{__name__}:branches"),
        engines=[partial(FakeEngine, babbles, 0.05)] * 2,
        tokenizer=ByteTokenizer(),
        prepare=prepare,
        **more,
    )


def check(run: World, shards: Sequence[Shard], first: int, tokens: int) -> None:
    """Every step trains whole episodes, each token once, none too old, and the rows tell of branches."""
    asked = [tuple(request.prompt) for engine in run.engines for request in engine.requests]
    trained = 0
    for shard in shards:
        assert len({entry.group_id for entry in shard.batch}) * 2 == len(shard.batch) == 8, "groups are of episodes"
        packed = pack(shard.samples, min_version=shard.min_version, max_tokens=2000)
        trained += sum(int(micro.mask_T.sum()) for micro in packed)
        assert sum(int(micro.mask_T.sum()) for micro in packed) == shard.total_tokens
        assert sum(micro.sequences for micro in packed) == shard.total_sequences
        for sample in shard.samples:
            made = sample.trajectory
            assert shard.step - made.oldest_version <= 1 or shard.min_version > made.oldest_version
            for span, turn in zip(spans_by_turn(made), made.turns, strict=True):
                prompt = tuple(made.tokens()[made.branches[turn.branch] : span.start].tolist())
                assert first or prompt in asked, "what is trained is what an engine was asked"
    rows = run.observer.steps
    assert [row["step"] for row in rows] == list(range(first, 5))
    assert all(1.5 < row["branches"] <= 4 and 0.3 < row["branch_token_share"] < 1 for row in rows)
    assert trained == tokens


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_run_trains_every_branch_of_its_episodes_and_its_books_balance(alpha: float) -> None:
    run = world(alpha)
    end = run_virtual(run.run)
    assert (end.reason, end.version) == ("finished", 5)
    assert end.ledger["trained"] == 40, "an episode counts once"
    assert end.ledger["in_flight"] == 0
    assert end.ledger["given_up"] == end.ledger.get("given_up_cancelled", 0), "no agent failed"
    check(run, run.trainer.shards, 0, end.ledger["trained_tokens"])


@pytest.mark.slow
def test_a_run_whose_hub_dies_goes_on_from_its_journal_with_all_branches() -> None:
    journal = MemoryJournal()
    first = world(journal=journal)

    async def dies() -> None:
        first.build()
        async with anyio.create_task_group() as group:
            group.start_soon(first.node.run)
            group.start_soon(first.trainer.run)
            await first.trainer.reached(2)
            await anyio.sleep(2.5)
            group.cancel_scope.cancel()

    run_virtual(dies)
    kept = HubState.restore(first.trainer.snapshots[2], first.config)
    replay = Replay(kept.buffer, kept.version)
    for event in journal.after(kept.journal):
        replay.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event))
    assert replay.delivered > 0
    buffer = replay.state(replay.reached)
    assert buffer is not None
    state = HubState(replay.reached, buffer, journal=0)
    second = world(state=msgspec.msgpack.encode(state), journal=journal, incarnation=1)
    end = run_virtual(second.run)
    assert end.version == 5
    assert (end.ledger["trained"], end.ledger["in_flight"]) == (40, 0)
    shards = [shard for shard in first.trainer.shards if shard.step < replay.reached] + second.trainer.shards
    assert [shard.step for shard in shards] == [0, 1, 2, 3, 4]
    check(second, shards, replay.reached, end.ledger["trained_tokens"])
