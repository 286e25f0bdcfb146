"""Laminar's rules (arXiv 2510.12633): each engine generates at its own pace, and long answers are packed together.

Each engine loads the newest weights, generates its share of a batch under them, and begins again when all of its
samples have ended. With `repack`, engines are checked every few seconds. If an engine has room for the samples of
another one of the same version, and both are at most half full, these samples move there, and the other engine begins
again at once. No sample is generated under two versions. The trainer takes complete groups in the order of their end,
and never waits for the engines.
"""

from __future__ import annotations

import math

import anyio
import msgspec

from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.simulate.clock import run_virtual
from flash.types import Canary, Published, Task

CHECK_S = 5.0
"""Seconds between two checks, as published."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of Laminar."""

    repack: bool = True
    """True if long answers are packed together."""


def laminar(config: Config, rules: Rules) -> PeerReport:
    """Simulate a whole run under Laminar's rules on a new virtual clock."""
    return run_virtual(Laminar(World(config, colocated=False), rules).run)


class Laminar:
    """Laminar's rules, and the state of one run under them. An instance simulates one run."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._share = world.groups_per_batch // len(world.engines)
        """Groups that an engine generates before it loads weights again."""
        self._engine_of: dict[int, int] = {}
        """Number of the engine that generates a sample, by task id, for each sample that has not ended."""
        self._load = [0] * len(world.engines)
        """Number of samples that each engine generates."""
        self._send, self._complete = anyio.create_memory_object_stream[list[Finished]](math.inf)
        """Complete groups that the trainer has not taken yet, in the order of their end."""
        self._changed = anyio.Event()
        """Set when an engine may have no sample any more, and then replaced."""

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        world.version = 0
        async with self._send, self._complete, anyio.create_task_group() as tasks:
            for engine in range(len(world.engines)):
                tasks.start_soon(self._rollout, engine)
            if self._rules.repack:
                tasks.start_soon(self._repack)
            for _ in range(world.config.run.steps):
                await world.train([await self._complete.receive() for _ in range(world.groups_per_batch)])
                world.version += 1
            tasks.cancel_scope.cancel()
        return world.report()

    def _change(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _rollout(self, number: int) -> None:
        """Generate shares of batches on one engine, each under the newest weights, until cancelled."""
        world, engine = self._world, self._world.engines[number]
        async with anyio.create_task_group() as samples:
            while True:
                if engine.version < world.version:
                    await engine.load(Published(world.version, "tcp", b"", Canary([], [])), keep_cache=False)
                for _ in range(self._share):
                    tasks, group = world.tasks.issue(world.tasks.next_problem()), list[Finished]()
                    for task in tasks:
                        self._engine_of[task.task_id] = number
                        self._load[number] += 1
                        samples.start_soon(self._sample, task, number, group, len(tasks))
                while self._load[number]:
                    await self._changed.wait()

    async def _sample(self, task: Task, number: int, group: list[Finished], size: int) -> None:
        """Generate a sample of a group of `size`, at first on the engine `number`."""
        group.append(await self._world.play(task, number))
        self._load[self._engine_of.pop(task.task_id)] -= 1
        if len(group) == size:
            self._send.send_nowait(group)
        self._change()

    async def _repack(self) -> None:
        """Move samples from nearly empty engines to others of the same version, until cancelled."""
        world, load = self._world, self._load
        half = self._share * world.config.rollout.group_size // 2
        while True:
            await anyio.sleep(CHECK_S)
            for source in sorted(range(len(load)), key=load.__getitem__):
                version = world.engines[source].version
                # The fullest engine that has room, so that most engines become empty.
                fitting = [
                    (load[target], target)
                    for target in range(len(load))
                    if target != source and world.engines[target].version == version
                    if 0 < load[source] <= load[target] <= half - load[source]
                ]
                if fitting:
                    target = max(fitting)[1]
                    world.router.move(source, target)
                    self._engine_of |= {task: target for task, at in self._engine_of.items() if at == source}
                    load[target], load[source] = load[target] + load[source], 0
            self._change()
