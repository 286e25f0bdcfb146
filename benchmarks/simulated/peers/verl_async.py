"""verl's fully asynchronous rules (`verl/experimental/fully_async_policy`), on the simulated engines and trainer.

A sample of verl is a prompt with all of its answers, called a group here. Groups are started one by one. Between two
updates of the engines, as many groups count as (1 + threshold) times the groups that an update needs; groups that run
or wait for the trainer at an update count for the next one. The trainer takes complete groups in the order of their
end, trains whenever it has a batch, and updates the engines after `sync_every` batches. With a threshold above 0
running requests are aborted at an update, and go on afterwards from the tokens that they have.
"""

from __future__ import annotations

import math

import anyio
import msgspec
from anyio.abc import TaskGroup

from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.simulate.clock import run_virtual
from flash.types import Task


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of verl."""

    threshold: float = 0.0
    """`staleness_threshold`: groups that may be started ahead, as a share of the groups of an update."""
    sync_every: int = 4
    """`trigger_parameter_sync_step`: batches between two updates of the engines."""


def verl_async(config: Config, rules: Rules) -> PeerReport:
    """Simulate a whole run under verl's rules on a new virtual clock. Its steps are batches, not updates."""
    return run_virtual(VerlAsync(World(config, colocated=False), rules).run)


class VerlAsync:
    """verl's rules, and the state of one run under them. An instance simulates one run."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._most = int(world.groups_per_batch * (1 + rules.threshold) * rules.sync_every)
        """Groups that may count between two updates."""
        self._counted = 0
        """Groups that were started since the last update, and those that ran or waited at it."""
        self._running = 0
        """Number of groups that are being generated."""
        self._send, self._complete = anyio.create_memory_object_stream[list[Finished]](math.inf)
        """Complete groups that the trainer has not taken yet, in the order of their end."""

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        await world.publish()
        async with self._send, self._complete, anyio.create_task_group() as groups:
            self._start(groups)
            for step in range(1, world.config.run.steps + 1):
                await world.train([await self._complete.receive() for _ in range(world.groups_per_batch)])
                if step % self._rules.sync_every == 0:
                    await world.update()
                    self._counted = self._running + self._complete.statistics().current_buffer_used
                    self._start(groups)
            groups.cancel_scope.cancel()
        return world.report()

    def _start(self, groups: TaskGroup) -> None:
        """Start as many groups as may count until the next update."""
        while self._counted < self._most:
            self._counted += 1
            self._running += 1
            groups.start_soon(self._group, self._world.tasks.issue(self._world.tasks.next_problem()))

    async def _group(self, tasks: list[Task]) -> None:
        """Generate a group, and hand it to the trainer."""
        group = await self._world.play_group(tasks)
        self._running -= 1
        self._send.send_nowait(group)
