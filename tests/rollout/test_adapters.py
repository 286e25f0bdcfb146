"""Which requests run under which adapters: the law, over random courses of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.config.tree import Config
from flash.rollout.proxy import ProxySettings
from flash.rollout.vllm.adapters import Adapter, Adapters


@given(st.integers(2, 5), st.lists(st.integers(0, 9), max_size=80))
def test_law_no_adapter_that_a_request_runs_under_is_dropped_and_all_have_room(
    room: int, course: Sequence[int]
) -> None:
    adapters, loaded, running, version = Adapters(room), set[int](), list[Adapter](), 0
    for choice in course:
        if choice < 5:
            running.append(adapters.begins())
        elif choice < 8 and running:
            adapters.ends(running.pop(choice % len(running)))
        elif (found := adapters.place(version)) is not None:
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
    adapters.newest, _ = adapters.place(0) or pytest.fail("empty")
    old = adapters.begins()
    adapters.newest, dropped = adapters.place(1) or pytest.fail("room for two")
    assert (old.labels, adapters.begins().labels, dropped) == ([("0", 0)], [("1", 0)], [])
    assert adapters.place(2) is None
    adapters.ends(old)
    adapter, dropped = adapters.place(2) or pytest.fail("the first one is free")
    assert (adapter.number, dropped) == (3, [1])


def test_with_room_for_one_the_next_version_takes_its_place_and_what_runs_moves_on() -> None:
    adapters = Adapters(1)
    placed = [adapters.place(version) for version in (0, 1)]
    assert [one and (one[0].number, one[0].version, one[1], one[0].labels) for one in placed] == [
        (1, 0, [], None),
        (1, 1, [], None),
    ]
    assert Adapters(0).place(5) is not None
    assert Adapters(0).begins().asked is None


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_version_waits_for_the_end_of_those_whose_place_it_needs() -> None:
    adapters = Adapters(2)
    adapters.newest, _ = await adapters.placed(0)
    first = adapters.begins()
    adapters.newest, _ = await adapters.placed(1)
    adapters.begins()
    found: list[list[int]] = []

    async def place() -> None:
        found.append((await adapters.placed(2))[1])

    async with anyio.create_task_group() as group:
        group.start_soon(place)
        await anyio.wait_all_tasks_blocked()
        assert found == []
        adapters.ends(first)
    assert found == [[1]]


@pytest.mark.parametrize(
    ("swap", "tables", "room", "told"),
    [
        ("recompute", {"lora": {}}, 1, "recompute"),
        ("drain", {"lora": {}}, 2, "beside"),
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
