"""A node that loses its hub goes on with all that it has at the next one, on the virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.waits import claim_s
from flash.environment.interface import HELD_OUT
from flash.environment.shared import sharing
from flash.environment.threaded import wrap
from flash.errors import PeerLostError, TransportError
from flash.hub.context import RunEnd
from flash.hub.hub import Hub, InProcessCaller
from flash.hub.recovery import HubState
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.samples.journal import MemoryJournal, Replay
from flash.simulate.clock import run_virtual
from flash.transport.frames import ReplyT, Request
from flash.waiting import unwrapped_group
from tests.rollout.test_node import CharTokenizer, Echo, World, ages
from tests.rollout.test_node_engines import config, engine

AWAY_S = 3.0
"""Seconds between two hubs: some samples end meanwhile, and some do not."""


IN_THE_MIDST_S = 0.7
"""Seconds from a version and its checkpoint to the loss of the hub, in the middle of a step. The hub has leased further
samples since."""


class Line:
    """A connection to a hub, until it is cut."""

    def __init__(self, hub: Hub) -> None:
        self._hub = InProcessCaller(hub)
        self.cut = anyio.Event()

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request to the hub. Raises PeerLostError when the connection is cut."""
        async with unwrapped_group() as race:
            race.start_soon(self._end, race.cancel_scope)
            reply = await self._hub.call(request, timeout)
            race.cancel_scope.cancel()
            return reply
        raise PeerLostError("the hub is gone")

    async def _end(self, call: anyio.CancelScope) -> None:
        """Cancel a call when the connection is cut."""
        await self.cut.wait()
        call.cancel()


class Incarnations:
    """A node, and the hubs of a run that it serves one after the other.

    Args:
        engines: number of the node's engines.
        away_s: seconds in which the node finds no hub.
    """

    def __init__(self, *, engines: int, away_s: float = AWAY_S, **changes: Any) -> None:
        self.config = config(run={"steps": 12}, eval={"every": 0, "problems": 1}, **changes)
        self.lines = [FakeLine(lambda: engine(text="yes and more")) for _ in range(engines)]
        self.node: RolloutNode | None = None
        self.begun: Counter[int] = Counter()
        """Number of episodes that were begun, by seed."""
        self.worlds: list[World] = []
        """Hub and trainer of each incarnation so far."""
        self._away_s = away_s
        self._journal = MemoryJournal()
        self._lost = anyio.Event()
        self.away = anyio.Event()
        """Event that is set when the first hub is gone."""

    def make_env(self, kind: str) -> Any:
        """Return an environment that counts its episodes by seed, with steps of 0 to 2 s."""
        begun = self.begun

        class Counted(Echo):
            async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
                begun[seed] += 1
                return await super().reset(seed)

        return wrap(Counted(lambda seed: seed % 5 / 2))

    def lose(self, error: TransportError) -> None:
        """Note that the node has lost its hub."""
        self._lost.set()

    async def run(self, cuts: Sequence[int]) -> RunEnd:
        """Run until the end. The hub is lost at each of the versions `cuts`, and the next hub recovers its state."""
        async with sharing("test"), anyio.create_task_group() as tasks:
            for number, cut in enumerate([*cuts, None], start=1):
                end = await self._serve(tasks, number, cut)
            assert self.node is not None
            await self.node.close()
            assert end is not None
            return end
        raise AssertionError("cancelled from outside, and not told")

    async def _serve(self, tasks: Any, number: int, cut: int | None) -> RunEnd | None:
        """Run hub `number` until it has lost the node after version `cut` (None: until the run ends). Returns the end,
        or None."""
        state = self._state() if self.worlds else None
        world = World(self.config, state=state, evaluated={0}, journal=self._journal, incarnation=number)
        ends = list[RunEnd]()
        hub, finished = world.build(), anyio.Event()
        self.worlds.append(world)
        line = Line(hub)

        async def run() -> None:
            ends.append(await hub.run())
            finished.set()

        async with anyio.create_task_group() as incarnation:
            incarnation.start_soon(world.trainer.run)
            incarnation.start_soon(run)
            if self.node is None:
                self.node = RolloutNode(
                    *(self.config, HubLink(number, number, line), self.lines),
                    *(CharTokenizer(), NodeEnvironment(self.make_env)),
                    now=anyio.current_time,
                    on_loss=self.lose,
                )
                tasks.start_soon(self.node.work)
            else:
                self.away.set()
                await anyio.sleep(self._away_s)
                await self.node.move(HubLink(number, number, line))
            if cut is None:
                await finished.wait()
            else:
                await world.trainer.reached(cut)
                await anyio.sleep(IN_THE_MIDST_S)
                self._lost = anyio.Event()
                line.cut.set()
                await self._lost.wait()
                incarnation.cancel_scope.cancel()
        return ends[0] if ends else None

    def _state(self) -> bytes:
        """Return the state that the next hub recovers."""
        replay = Replay(None, 0)
        for event in (event for file in self._journal.files for event in file):
            replay.apply(event)
        buffer = replay.state(replay.reached)
        assert buffer is not None
        return msgspec.msgpack.encode(HubState(replay.reached, buffer, journal=0))

    @property
    def engines(self) -> list[FakeEngine]:
        """All engines that were made, in the order of their places."""
        return [each for line in self.lines for each in line.made]


@pytest.mark.parametrize("cuts", [[3], [2, 3, 7]])
@pytest.mark.parametrize("engines", [1, 3])
def test_episodes_outlive_the_hub_and_no_sample_is_made_twice(engines: int, cuts: list[int]) -> None:
    incarnations = Incarnations(engines=engines)
    end = run_virtual(lambda: incarnations.run(cuts))
    assert end.ledger["issued"] == end.ledger["trained"] == 96
    assert {seed: number for seed, number in incarnations.begun.items() if seed < HELD_OUT and number != 2} == {}
    assert all(min(ages(world)) >= 0 for world in incarnations.worlds)
    assert len(incarnations.engines) == engines, "none was made anew"
    assert [each.numbers for each in incarnations.engines] == [
        [number + place for number in range(2, len(cuts) + 2)] for place in range(engines)
    ]
    assert all(each.closed for each in incarnations.engines)


def test_a_node_that_comes_too_late_drops_what_it_has_and_others_make_it_again() -> None:
    # The next hub waits `claim_s` for nodes that hold leases, and the node comes a second later.
    incarnations = Incarnations(engines=2, away_s=claim_s(config()) + 1)
    end = run_virtual(lambda: incarnations.run([3]))
    assert end.ledger["issued"] == end.ledger["trained"] == 96
    assert end.ledger["retried_cancelled"] > 0
    assert any("since their nodes did not come back" in note for note in incarnations.worlds[-1].observer.notes)
    assert max(incarnations.begun[seed] for seed in incarnations.begun if seed < HELD_OUT) > 2


def test_an_engine_that_dies_while_there_is_no_hub_is_started_again() -> None:
    incarnations = Incarnations(engines=2)

    async def go() -> RunEnd:
        ends: list[RunEnd] = []

        async def run() -> None:
            ends.append(await incarnations.run([3]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await incarnations.away.wait()
            incarnations.lines[0].newest.kill()
        return ends[0]

    end = run_virtual(go)
    assert end.ledger["trained"] == 96
    assert [len(line.made) for line in incarnations.lines] == [2, 1]
    assert any("is back after" in note for note in incarnations.worlds[-1].observer.notes)
