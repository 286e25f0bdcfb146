"""Adapters of an engine: the law that no used adapter is dropped, over random sequences of requests and versions."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.config.tree import Config
from flash.rollout.proxy import ProxySettings
from flash.rollout.vllm.state import Adapter, Adapters


@given(st.integers(2, 5), st.lists(st.integers(0, 9), max_size=80))
def test_law_no_adapter_that_a_request_runs_under_is_dropped_and_all_have_room(
    room: int, course: Sequence[int]
) -> None:
    adapters, loaded, running, version = Adapters(room), set[int](), list[Adapter](), 0
    for choice in course:
        if choice < 5:
            running.append(adapters.begin_request())
        elif choice < 8 and running:
            adapters.end_request(running.pop(choice % len(running)))
        elif (found := adapters.add(version)) is not None:
            adapter, dropped = found
            assert not {one.number for one in running} & {*dropped}
            assert adapters.newest.number not in dropped
            loaded = loaded - {*dropped} | {adapter.number}
            assert len(loaded) <= room
            assert adapter.version == version
            adapters.newest = adapter
            version += 1
        else:
            assert len({one.number for one in running if one.number} | {adapters.newest.number}) == room
        assert {one.number for one in running if one.number} <= loaded


def test_requests_keep_the_version_that_they_began_with_where_there_is_room_for_it() -> None:
    adapters = Adapters(2)
    adapters.newest, _ = adapters.add(0) or pytest.fail("empty")
    old = adapters.begin_request()
    adapters.newest, dropped = adapters.add(1) or pytest.fail("room for two")
    assert (old.version_starts, adapters.begin_request().version_starts, dropped) == ([("0", 0)], [("1", 0)], [])
    assert adapters.add(2) is None
    adapters.end_request(old)
    adapter, dropped = adapters.add(2) or pytest.fail("the first one is free")
    assert (adapter.number, dropped) == (3, [1])


def test_with_room_for_one_the_next_version_takes_its_place_and_what_runs_moves_on() -> None:
    adapters = Adapters(1)
    placed = [adapters.add(version) for version in (0, 1)]
    assert [one and (one[0].number, one[0].version, one[1], one[0].version_starts) for one in placed] == [
        (1, 0, [], None),
        (1, 1, [], None),
    ]
    assert Adapters(0).add(5) is not None
    assert Adapters(0).begin_request().lora_request is None


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_version_waits_for_the_end_of_those_whose_place_it_needs() -> None:
    adapters = Adapters(2)
    adapters.newest, _ = await adapters.wait_and_add(0)
    first = adapters.begin_request()
    adapters.newest, _ = await adapters.wait_and_add(1)
    adapters.begin_request()
    found: list[list[int]] = []

    async def place() -> None:
        found.append((await adapters.wait_and_add(2))[1])

    async with anyio.create_task_group() as group:
        group.start_soon(place)
        await anyio.wait_all_tasks_blocked()
        assert found == []
        adapters.end_request(first)
    assert found == [[1]]


@pytest.mark.parametrize(
    ("swap", "tables", "room", "told"),
    [
        ("recompute", {"lora": {}}, 1, "recompute"),
        ("drain", {"lora": {}}, 3, "beside"),
        ("drain", {"lora": {}, "train": {"async_ratio": 1.5, "max_token_age": 9}}, 5, "beside"),
        ("drain", {"lora": {}, "train": {"async_ratio": 2, "max_token_age": 2}}, 3, "beside"),
        ("drain", {"lora": {}, "train": {"async_ratio": 0}}, 1, "drain"),
        ("drain", {"lora": {}, "train": {"async_ratio": 20}}, 8, "beside"),
        ("drain", {}, 0, "drain"),
    ],
)
def test_what_drains_whole_models_has_adapters_stand_beside_each_other(
    swap: str, tables: dict[str, object], room: int, told: str
) -> None:
    tree = {"run": {"name": "r"}, "model": {"path": "m"}, "env": {"path": "m:E"}, "rollout": {"swap": swap}}
    config = msgspec.convert(tree | tables, Config)
    assert config.adapters == room
    assert ProxySettings.of(config).swap == told
