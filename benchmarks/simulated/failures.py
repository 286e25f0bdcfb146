"""What fails when, and what the two ways to go on make of it in the simulator.

`draw_failures` and `spans_alive` are pure; failures are drawn once, so that both ways meet the same ones.

*All restart*: whatever dies, every process starts again, from the last checkpoint (`RestartedWorld`, one per life).
What engines were sampling is lost, and the steps since.
*Each its own work* (`FailingWorld`): the leases of a node that dies go back to the hub, and it comes again when it has
started; an engine that dies is started again in its place, with its requests waiting or moved; when a trainer dies the
trainers alone start again, load the last checkpoint and train the recorded batches since once more, while the hub and
the engines go on as far as admission lets them. The hub, nodes, schedulers and proxies are those of real runs. The
trainers' restart is a pause of as many seconds here: the hub sees nothing else of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Literal

import anyio
import msgspec

from flash.config.simulate import SimulateConfig
from flash.config.tree import Config
from flash.hub import protocol as p
from flash.hub.hub import InProcessCaller
from flash.hub.recovery import HubState, RecoveredState
from flash.rollout.engine import Engine
from flash.simulate.engine import SimEngine
from flash.simulate.trainer import SimTrainer
from flash.simulate.world import SimNode, World
from flash.types import Published

Kind = Literal["node", "engine", "preempted", "trainer"]
SAVE_WAIT_S = 1e6
"""Deadline of a checkpoint: no wait of the simulation ends by itself."""


class Failure(msgspec.Struct, frozen=True, order=True):
    """A death. `place` counts the rollout nodes from 0; of trainers it says nothing."""

    time: float
    place: int
    kind: Kind


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that failures and checkpoints take, beside the work that is lost."""

    every: int
    """Steps between two checkpoints."""
    save_s: float
    """The trainers' pause for a checkpoint."""
    noticed_s: float
    """From a death until those who have to act know of it."""
    engine_start_s: float
    trainer_start_s: float
    """Processes, process groups and the checkpoint's load."""
    away_s: float
    """From a preemption until the machine is there again."""

    @property
    def restart_s(self) -> float:
        """From a death until all processes serve again, where all of them restart."""
        return self.noticed_s + max(self.engine_start_s, self.trainer_start_s)


def draw_failures(
    seed: int, rollout_nodes: int, trainer_nodes: int, mean_s: float, spot_s: float | None, away_s: float, end: float
) -> list[Failure]:
    """Every death before `end`, in order. Lives are exponential; a seed has the same deaths whatever comes of them.

    Args:
        seed: of the draws.
        rollout_nodes: each dies every `mean_s` seconds on average, half of the time as a whole, else one engine.
        trainer_nodes: each takes a trainer rank with it, as often.
        mean_s: seconds.
        spot_s: mean life of a rollout node that is preempted, which it is instead; None: none is.
        away_s: how long a preempted node is away, and cannot die.
        end: seconds.
    """
    found: list[Failure] = []
    for number in range(rollout_nodes + trainer_nodes):
        dice = random.Random(f"{seed}, node {number}")
        trains = number >= rollout_nodes
        time = 0.0
        while True:
            time += dice.expovariate(1 / (spot_s if spot_s is not None and not trains else mean_s))
            if time >= end:
                break
            kinds: Sequence[Kind] = ("trainer",) if trains else ("node", "engine") if spot_s is None else ("preempted",)
            found.append(Failure(time, number, dice.choice(kinds)))
            time += away_s if found[-1].kind == "preempted" else 0.0
    return sorted(found)


def spans_alive(failures: Iterable[Failure], costs: Costs, end: float) -> Generator[tuple[float, float]]:
    """When all processes live, where all of them start again at each death. One that comes during a start repeats it,
    and nothing starts while a machine is away."""
    up = 0.0
    for failure in failures:
        if failure.time > up:
            yield up, failure.time
        away_s = costs.away_s if failure.kind == "preempted" else 0.0
        up = max(up, failure.time + away_s + costs.restart_s)
    if up < end:
        yield up, end


class SavingTrainer(SimTrainer):
    """Writes checkpoints: the hub is asked for its state, as by a real one."""

    def __init__(
        self,
        config: Config,
        settings: SimulateConfig,
        hub: p.HubCaller,
        now: Callable[[], float],
        costs: Costs,
        *,
        version: int = 0,
    ) -> None:
        super().__init__(config, settings, hub, now, version=version)
        self.costs = costs
        self.caller = hub
        self.since: list[float] = []
        """Seconds of each step since the last checkpoint."""
        self.saved = 0
        """Steps of this life that are in a checkpoint."""

    async def work(self, seconds: float) -> None:
        """A step."""
        await super().work(seconds)
        self.since.append(seconds)

    async def committed(self) -> None:
        """Save what is due."""
        if len(self.since) >= self.costs.every and await self.pause(self.costs.save_s):
            await self.caller.call(p.SnapshotRequest(), timeout=SAVE_WAIT_S)
            self.saved = len(self.trained)
            self.since.clear()

    async def pause(self, seconds: float) -> bool:
        """Let time pass; whether the trainers have lived through it."""
        await anyio.sleep(seconds)
        return True


class ReplayingTrainer(SavingTrainer):
    """Dies, and trains again what it has trained since the last checkpoint."""

    _back_at = 0.0
    _died: anyio.Event | None = None
    """Set by the next death; None before the first step."""

    def die(self) -> None:
        """A trainer rank is gone, and with it all of them."""
        costs = self.costs
        self._back_at = self._now() + costs.noticed_s + costs.trainer_start_s + sum(self.since)
        if self._died is not None:
            self._died.set()

    async def back(self) -> None:
        """Wait until the trainers hold what they held."""
        if self._back_at > self._now():
            await anyio.sleep_until(self._back_at)
            await self.back()  # another death may have put it off

    async def work(self, seconds: float) -> None:
        """A step, from its beginning where a death comes into it."""
        while not await self.pause(seconds):
            pass
        self.since.append(seconds)

    async def pause(self, seconds: float) -> bool:
        """Let time pass from when the trainers are back; whether they have lived through it."""
        await self.back()
        died = self._died = anyio.Event()
        with anyio.move_on_after(seconds):
            await died.wait()
        return not died.is_set()


class StartingEngine(SimEngine):
    """Takes its time to start, and cannot have weights while the trainers are away."""

    start_s: float
    trainers_back: Callable[[], Awaitable[None]]

    async def start(self) -> None:
        """Load the model."""
        await anyio.sleep(self.start_s)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Swap to a published version, which the trainers hand out."""
        await self.trainers_back()
        return await super().load(published, keep_cache=keep_cache)


class RestartedWorld(World):
    """A life of a run that ends as a whole."""

    def __init__(self, config: Config, costs: Costs, kept: bytes | None) -> None:
        self._costs = costs
        self.kept = kept
        """The hub's state in the last checkpoint, as it is written: each life reads it anew."""
        state = None if kept is None else HubState.restore(kept, config)
        super().__init__(config, recovered=RecoveredState(state, (0,)), save_state=self._keep)

    def make_trainer(self, hub: InProcessCaller) -> SimTrainer:
        """One that saves."""
        version = self.hub.progress.version
        self.saving = SavingTrainer(self.config, self.settings, hub, self._now, self._costs, version=version)
        return self.saving

    async def _keep(self, version: int, pieces: Generator[bytearray]) -> p.SnapshotReply:
        data = bytearray()
        for piece in pieces:  # each is gone with the next
            data += piece
        self.kept = bytes(data)
        return p.SnapshotReply(len(data), crc32=0)


class FailingWorld(World):
    """A run in which each death costs its own work."""

    def __init__(self, config: Config, costs: Costs) -> None:
        self._costs = costs
        self._born = anyio.current_time()
        self._lives: dict[int, anyio.CancelScope] = {}
        self._away_s: dict[int, float] = {}
        super().__init__(config, recovered=RecoveredState(evaluated=(0,)))

    def make_trainer(self, hub: InProcessCaller) -> SimTrainer:
        """One that can die."""
        self.replaying = ReplayingTrainer(self.config, self.settings, hub, self._now, self._costs)
        return self.replaying

    def make_engine(self, index: int, settings: SimulateConfig | None = None) -> SimEngine:
        """One that takes its time to start, unless all begins."""
        engine = StartingEngine(
            settings or self.settings,
            self.config.engine.max_sequences,
            self.workload.response_tokens,
            self.config.engine.stream_interval,
            on_change=lambda: self._changed(index),
        )
        engine.start_s = 0.0 if self._now() == self._born else self._costs.engine_start_s
        engine.trainers_back = lambda: self.replaying.back()
        return engine

    def makers(self, node: SimNode) -> list[Callable[[int], Engine]]:
        """Each engine is followed by others in its place."""
        return [partial(self._next_engine, node, place) for place in range(len(node.engines))]

    def _next_engine(self, node: SimNode, place: int, index: int) -> Engine:
        self.engines[index] = node.engines[place] = self.make_engine(index)
        self._changed(index)
        return self.engines[index]

    async def serve(self, node: SimNode, made: Counter[int]) -> None:
        """One life of a node after the other."""
        while True:
            with anyio.CancelScope() as self._lives[node.number]:
                await super().serve(node, made)
                return
            await anyio.sleep(self._costs.noticed_s)
            node.alive = 0
            self.hub.peer_lost(f"node-{node.number}")
            await anyio.sleep(self._away_s[node.number])

    async def strike(self, failures: Iterable[Failure]) -> None:
        """Let all of them happen. Nobody dies who is away."""
        for failure in failures:
            await anyio.sleep(self._born + failure.time - self._now())
            if failure.kind == "trainer":
                self.replaying.die()
                continue
            node = self.nodes[failure.place]
            if failure.kind == "engine":
                engine = node.engines[int(failure.time) % len(node.engines)]
                engine.kill()
            else:
                self._away_s[node.number] = self._costs.away_s if failure.kind == "preempted" else 0.0
                self._lives[node.number].cancel()
