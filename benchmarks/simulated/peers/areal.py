"""AReaL's rules of admission and batching, on the simulated engines and trainer of `benchmarks.simulated.peers.world`.

The benchmarks of `benchmarks.simulated` call `areal`, and compare its report with that of Flash's own code.

A group is the samples of one prompt. Groups may be started up to a capacity:
min(max_concurrent − running, (η + version + 1)·B − (accepted + running)), where B is the number of groups in a batch.
A group that is filtered out gives its place back. A batch takes the results that were issued first. New weights
interrupt generation. AReaL aborts the running requests and sends them again with the tokens that they have. Here the
load of the weights prefills these tokens again, which costs the same. With `interruptible` off, requests run to their
end before the weights are loaded, and no request begins meanwhile. The age of a sample is not checked when it is
trained.
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
    """Settings of AReaL."""

    eta: float = 1.0
    """η: largest age of samples, in versions, that admission aims at."""
    max_concurrent: int | None = None
    """Most groups that are generated at once; None: as many as η allows."""
    interruptible: bool = True
    """True if new weights interrupt the running requests."""


def areal(config: Config, rules: Rules) -> PeerReport:
    """Simulate a whole run under AReaL's rules on a new virtual clock."""
    return run_virtual(Areal(World(config, colocated=False), rules).run)


def capacity(rules: Rules, version: int, batch: int, accepted: int, running: int) -> int:
    """Return the number of prompt groups that may be started now.

    `accepted` groups are in batches or wait for one; `running` groups are being generated. The first bound limits the
    staleness: version v may use (η + v + 1)·B groups in all.
    """
    by_staleness = int((rules.eta + version + 1) * batch) - (accepted + running)
    return by_staleness if rules.max_concurrent is None else min(rules.max_concurrent - running, by_staleness)


class Areal:
    """AReaL's rules, and the state of one run under them. An instance simulates one run."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._running = 0
        """Number of groups that are being generated."""
        self._accepted = 0
        """Number of groups that were generated and not filtered out, in the whole run."""
        self._results: dict[int, list[Finished]] = {}
        """Accepted groups that no batch has taken yet, by the group's number."""
        self._changed = anyio.Event()
        """Set when there is a new result."""

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        await world.publish()
        async with anyio.create_task_group() as groups:
            self._groups: TaskGroup = groups
            self._admit()
            for _ in range(world.config.run.steps):
                await world.train(await self._batch())
                await world.update(drain=not self._rules.interruptible)
                self._admit()
            groups.cancel_scope.cancel()
        return world.report()

    def _admit(self) -> None:
        """Start as many groups as the capacity allows. Called after each event that changes the capacity."""
        world = self._world
        while capacity(self._rules, world.version, world.groups_per_batch, self._accepted, self._running) > 0:
            self._running += 1
            self._groups.start_soon(self._group, world.tasks.issue(world.tasks.next_problem()))

    async def _group(self, tasks: list[Task]) -> None:
        """Play all samples of a group, and keep the group as a result unless dynamic filtering drops it.

        Dynamic filtering drops groups from which nothing can be learned, such as groups of equal rewards.
        """
        group = await self._world.play_group(tasks)
        self._running -= 1
        if not self._world.is_filtered_out(group):
            self._accepted += 1
            self._results[tasks[0].group_id] = group
            self._changed.set()
        self._admit()

    async def _batch(self) -> list[list[Finished]]:
        """Wait for enough results, and take those that were issued first as a batch."""
        wanted = self._world.groups_per_batch
        while len(self._results) < wanted:
            self._changed = anyio.Event()
            await self._changed.wait()
        return [self._results.pop(group_id) for group_id in sorted(self._results)[:wanted]]
