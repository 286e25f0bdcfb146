"""A bounded queue between engines and trainer that drops its oldest groups, as Applied Compute's article describes it.

The engines always have as many samples as they have places. A group enters the queue when all of its samples have
ended. If the queue is then longer than its capacity, its oldest group is dropped. The trainer waits for a whole batch,
takes the oldest groups, and publishes new weights after each step; running samples go on under them.
"""

from __future__ import annotations

from collections import deque

import anyio
import msgspec
from anyio.abc import TaskGroup

from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.simulate.clock import run_virtual
from flash.types import Task


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the queue."""

    queue_factor: float = 1.0
    """Capacity of the queue, in batches."""
    stagger_s: float = 0.0
    """Seconds between the starts of the first groups. Samples of constant length then end one by one, not at once."""


def queue_drop(config: Config, rules: Rules) -> PeerReport:
    """Simulate a whole run under these rules on a new virtual clock."""
    world = World(config, colocated=False, limit=config.engine.max_sequences)
    return run_virtual(QueueDrop(world, rules).run)


class QueueDrop:
    """The rules, and the state of one run under them. An instance simulates one run."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._places = len(world.engines) * world.config.engine.max_sequences
        """Number of samples that run at once."""
        self._active = 0
        """Number of samples that run or wait for a place."""
        self._queue: deque[list[Finished]] = deque()
        """Complete groups, in the order in which they were completed."""
        self._changed = anyio.Event()
        """Set when a group enters the queue, and then replaced."""

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        await world.publish()
        async with anyio.create_task_group() as samples:
            self._samples: TaskGroup = samples
            samples.start_soon(self._start)
            for _ in range(world.config.run.steps):
                while len(self._queue) < world.groups_per_batch:
                    await self._changed.wait()
                await world.train([self._queue.popleft() for _ in range(world.groups_per_batch)])
                await world.publish()
            samples.cancel_scope.cancel()
        return world.report()

    async def _start(self) -> None:
        """Start the first groups, one after the other."""
        while self._active < self._places:
            self._start_group()
            await anyio.sleep(self._rules.stagger_s)

    def _start_group(self) -> None:
        """Start the samples of a new group. Those without a place wait for one in the router."""
        tasks = self._world.tasks.issue(self._world.tasks.next_problem())
        self._active += len(tasks)
        group: list[Finished] = []
        for task in tasks:
            self._samples.start_soon(self._sample, task, group, len(tasks))

    async def _sample(self, task: Task, group: list[Finished], size: int) -> None:
        """Play one sample of a group of `size`, start a new group if places are free, and queue a complete group."""
        group.append(await self._world.play(task))
        self._active -= 1
        if self._active < self._places:
            self._start_group()
        if len(group) == size:
            self._queue.append(group)
            if len(self._queue) > self._rules.queue_factor * self._world.groups_per_batch:
                self._queue.popleft()
            self._changed.set()
            self._changed = anyio.Event()
