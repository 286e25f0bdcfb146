"""A node that loses its hub goes on with its engines at the next one, on the virtual clock."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from flash.environment.shared import sharing
from flash.environment.threaded import wrap
from flash.errors import PeerLostError
from flash.hub.hub import Hub, RunEnd
from flash.hub.in_process import InProcessCaller
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.node import RolloutNode
from flash.simulate.clock import run_virtual
from flash.transport.request import ReplyT, Request
from flash.waiting import first_error, unwrapped_group
from tests.rollout.test_node import CharTokenizer, Echo, World, ages
from tests.rollout.test_node_engines import config, engine


class Line:
    """A connection to a hub, until it is cut."""

    def __init__(self, hub: Hub) -> None:
        self._hub = InProcessCaller(hub)
        self.cut = anyio.Event()

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        async with unwrapped_group() as race:
            race.start_soon(self._fail)
            reply = await self._hub.call(request, timeout)
            race.cancel_scope.cancel()
            return reply
        raise AssertionError("cancelled from outside, and not told")

    async def _fail(self) -> None:
        await self.cut.wait()
        raise PeerLostError("the hub is gone")


class Lives:
    """One node, and the hubs that it serves one after the other; each begins its run anew."""

    def __init__(self, *, engines: int, **changes: Any) -> None:
        self.config = config(run={"steps": 12}, **changes)
        self.lines = [FakeLine(lambda: engine(text="yes and more")) for _ in range(engines)]
        self.node: RolloutNode | None = None

    async def serve(self, number: int, first_engine: int, cut_at: int | None) -> tuple[World, RunEnd | None]:
        """One hub's life with this node; it is cut off at this version."""
        world, ends = World(self.config), list[RunEnd]()
        hub = world.build()
        line = Line(hub)
        if self.node is None:
            make_env, now = lambda kind: wrap(Echo()), anyio.current_time
            self.node = RolloutNode(
                number, self.config, self.lines, first_engine, CharTokenizer(), make_env, line, now=now
            )
        else:
            self.node.rehome(number, first_engine, line)

        async def run() -> None:
            ends.append(await hub.run())

        async with anyio.create_task_group() as life:
            life.start_soon(world.trainer.run)
            life.start_soon(run)
            if cut_at is None:
                await self.node.work()
            else:
                life.start_soon(self._cut, world, line, cut_at)
                with pytest.raises(ExceptionGroup) as caught:
                    await self.node.work()
                assert isinstance(first_error(caught.value), PeerLostError)
                life.cancel_scope.cancel()
        return world, ends[0] if ends else None

    async def _cut(self, world: World, line: Line, version: int) -> None:
        await world.trainer.reached(version)
        line.cut.set()

    @property
    def engines(self) -> list[FakeEngine]:
        return [each for line in self.lines for each in line.made]


@pytest.mark.parametrize("swap", ["recompute", "keep"])
@pytest.mark.parametrize("engines", [1, 3])
def test_a_node_goes_on_with_its_engines_at_the_next_hub(engines: int, swap: str) -> None:
    lives = Lives(engines=engines, rollout={"swap": swap})
    loads: list[int] = []

    async def go() -> tuple[World, RunEnd | None]:
        async with sharing("test"):
            await lives.serve(1, 1, cut_at=3)
            assert all(each.version > 0 for each in lives.engines), "it was cut off in the midst of work"
            assert all(each.running + each.waiting == 0 for each in lives.engines), "nothing of it is left"
            loads.extend(len(each.kept_cache) for each in lives.engines)
            end = await lives.serve(2, 5, cut_at=None)
            assert lives.node is not None
            await lives.node.close()
        return end

    world, end = run_virtual(go)
    assert end is not None
    assert end.ledger["issued"] == end.ledger["trained"] == 96
    assert min(ages(world)) >= 0, "no sample has a version of the former life"
    assert len(lives.engines) == engines, "none was made anew"
    assert [each.numbers for each in lives.engines] == [[5 + place] for place in range(engines)]
    for each, before in zip(lives.engines, loads, strict=True):
        assert not each.kept_cache[before], "the cache of a former life is of no use"
        assert all(kept == (swap == "keep") for kept in each.kept_cache[before + 1 :])
        assert each.closed


def test_an_engine_that_died_while_there_was_no_hub_is_started_again() -> None:
    lives = Lives(engines=2)

    async def go() -> tuple[World, RunEnd | None]:
        async with sharing("test"):
            await lives.serve(1, 1, cut_at=3)
            lives.lines[0].newest.kill()
            end = await lives.serve(1, 1, cut_at=None)
            assert lives.node is not None
            await lives.node.close()
        return end

    world, end = run_virtual(go)
    assert end is not None
    assert end.ledger["trained"] == 96
    assert [len(line.made) for line in lives.lines] == [2, 1]
    assert any("is back after" in note for note in world.observer.notes)
