"""An engine is told to record from one version to another, and serves as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flash.errors import EngineDeadError, EngineError
from flash.profile.order import ProfileOrder
from flash.profile.parts import read_part
from flash.rollout.fake_engine import FakeEngine
from flash.rollout.wrapped_engine import MOST_STEPS, ProfiledEngine
from flash.types import Canary, Published

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

BEGIN = ("flash_profile_begin", "/out", "engine-3", MOST_STEPS)
END = ("flash_profile_end",)


class Asked(FakeEngine):
    """Remembers what its workers are asked, beside the versions that it loads."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [1])
        self.done: list[Any] = []
        self.failure: Exception | None = None

    async def ask_workers(self, method: str, *arguments: object) -> list[Any]:
        self.done.append((method, *arguments))
        if self.failure is not None:
            raise self.failure
        return [None]

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        self.done.append(published.version)
        return await super().load(published, keep_cache=keep_cache)


async def loads(engine: ProfiledEngine, *versions: int) -> None:
    for version in versions:
        await engine.load(Published(version, "tcp", b"", Canary([], [])), keep_cache=False)


async def test_it_records_from_the_first_version_to_the_last_and_never_again() -> None:
    inner = Asked()
    engine = ProfiledEngine(inner, 3, ProfileOrder("/out", 2, 4))
    await engine.start()
    await loads(engine, 0, 1, 2, 3, 4, 5)
    await engine.close()
    assert inner.done == [0, 1, BEGIN, 2, 3, END, 4, 5]
    assert inner.closed


async def test_what_was_recorded_is_written_before_an_early_end() -> None:
    inner = Asked()
    engine = ProfiledEngine(inner, 3, ProfileOrder("/out", 0, 4))
    await engine.start()
    await loads(engine, 1)
    await engine.close()
    assert inner.done == [BEGIN, 1, END]
    assert inner.closed


async def test_an_engine_that_cannot_record_is_told_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    inner = Asked()
    inner.failure = EngineError("there is no profiler")
    engine = ProfiledEngine(inner, 3, ProfileOrder("/out", 0, 4))
    await engine.start()
    await loads(engine, 1, 2, 4)
    assert engine.version == 4
    assert caplog.messages == ["engine 3 is not profiled: there is no profiler"]
    assert inner.done == [BEGIN, 1, 2, 4]


async def test_a_dead_engine_is_closed_as_ever_and_told_by_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    inner = Asked()
    engine = ProfiledEngine(inner, 3, ProfileOrder("/out", 0, 4))
    await engine.start()
    await loads(engine, 1)
    inner.failure = EngineDeadError("gone")
    await engine.close()
    assert inner.closed
    assert caplog.messages == []


async def test_an_engine_that_starts_after_the_steps_says_so_in_its_file_and_takes_no_other_away(
    tmp_path: Path,
) -> None:
    order = ProfileOrder(str(tmp_path), 2, 4)
    late, early = Asked(), Asked()
    engine = ProfiledEngine(late, 3, order)
    await engine.start()
    await loads(engine, 4, 5)
    await engine.close()
    assert late.done == [4, 5]
    _, facts = read_part(order.file("engine-3"))
    assert (facts.who, facts.steps) == ("engine 3", 0)
    order.file("engine-5").write_bytes(b"what the engine before it has recorded")
    engine = ProfiledEngine(early, 5, order)
    await engine.start()
    await loads(engine, 4)
    assert order.file("engine-5").read_bytes() == b"what the engine before it has recorded"
