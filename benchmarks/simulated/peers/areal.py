"""AReaL, by its rules.

Capacity in prompt groups: min(max_concurrent − running, (η + version + 1)·B − (accepted + running)); a rejected group
gives its place back. A batch takes the oldest results. New weights interrupt generation: running requests are aborted
and sent again with what they have, which costs a prefill of it. Nothing is checked at consumption.
"""

from __future__ import annotations

import anyio
import msgspec
from anyio.abc import TaskGroup

from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.simulate.clock import run_virtual
from flash.types import Task


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Switches of the system."""

    eta: float = 1.0
    """η, the largest staleness that admission aims at."""
    max_concurrent: int | None = None
    """Prompt groups at once; None: as many as the staleness allows."""


def areal(config: Config, rules: Rules) -> PeerReport:
    """Simulate a whole run."""
    return run_virtual(Areal(World(config, colocated=False), rules).run)


def capacity(rules: Rules, version: int, batch: int, accepted: int, running: int) -> int:
    """Prompt groups that may be started."""
    by_staleness = int((rules.eta + version + 1) * batch) - (accepted + running)
    return by_staleness if rules.max_concurrent is None else min(rules.max_concurrent - running, by_staleness)


class Areal:
    """State of one run; an instance is used once."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._running = 0
        self._accepted = 0
        self._results: dict[int, list[Finished]] = {}
        self._changed = anyio.Event()

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        await world.publish()
        async with anyio.create_task_group() as groups:
            self._groups: TaskGroup = groups
            self._admit()
            for _ in range(world.config.run.steps):
                await world.train(await self._batch())
                await world.router.pause()
                await world.publish()
                world.router.resume()
                self._admit()
            groups.cancel_scope.cancel()
        return world.report()

    def _admit(self) -> None:
        world = self._world
        while capacity(self._rules, world.version, world.groups_per_batch, self._accepted, self._running) > 0:
            self._running += 1
            self._groups.start_soon(self._group, world.tasks.issue(world.tasks.next_problem()))

    async def _group(self, tasks: list[Task]) -> None:
        group: list[Finished] = []
        async with anyio.create_task_group() as samples:
            for task in tasks:
                samples.start_soon(self._sample, task, group)
        self._running -= 1
        if self._world.keeps(group):
            self._accepted += 1
            self._results[tasks[0].group_id] = group
            self._changed.set()
        self._admit()

    async def _sample(self, task: Task, group: list[Finished]) -> None:
        group.append(await self._world.play(task))

    async def _batch(self) -> list[list[Finished]]:
        wanted = self._world.groups_per_batch
        while len(self._results) < wanted:
            self._changed = anyio.Event()
            await self._changed.wait()
        return [self._results.pop(group_id) for group_id in sorted(self._results)[:wanted]]
