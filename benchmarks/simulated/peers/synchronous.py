"""The synchronous baseline: generate a batch, then train on it, on the same GPUs.

Rules: B samples are issued at once and all are waited for; where groups are filtered, whole further batches are issued
until enough have passed. Rewards are computed after the generation of the batch. With `replicate` off the samples of a
prompt are one request, on one engine. With `env_async` off the environments step together. All engines are updated
after the step.
"""

from __future__ import annotations

import itertools

import anyio
import msgspec

from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.rollout.episode.phases import LockStep, Phases
from flash.simulate.clock import run_virtual
from flash.types import Task


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the baseline."""

    replicate: bool = False
    """True if each sample of a prompt is a request of its own."""
    env_async: bool = False
    """True if each environment steps on its own; False if all step together."""
    colocated: bool = True
    """True if generation and training take turns on all GPUs."""


def synchronous(config: Config, rules: Rules = Rules()) -> PeerReport:  # noqa: B008 (frozen)
    """Simulate a whole run of the baseline on a new virtual clock."""
    return run_virtual(_Synchronous(World(config, colocated=rules.colocated), rules).run)


class _Synchronous:
    """Rules of the synchronous baseline, and the state of one run under them."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._assignments = itertools.cycle(range(len(world.engines)))

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        await world.publish()
        for _ in range(world.config.run.steps):
            passed: list[list[Finished]] = []
            while len(passed) < world.groups_per_batch:
                passed += [group for group in await self._wave() if not world.is_filtered_out(group)]
            await world.train(passed[: world.groups_per_batch])
            await world.publish()
        return world.report()

    async def _wave(self) -> list[list[Finished]]:
        """Play a batch of groups to the end of the last one, then compute their rewards."""
        groups: list[list[Finished]] = [[] for _ in range(self._world.groups_per_batch)]
        phases = Phases() if self._rules.env_async else Phases(LockStep())
        async with anyio.create_task_group() as episodes:
            for group in groups:
                assigned = None if self._rules.replicate else next(self._assignments)
                for task in self._world.tasks.issue(self._world.tasks.next_problem()):
                    episodes.start_soon(self._play, task, assigned, phases, group)
        await anyio.sleep(max(sample.reward_s for group in groups for sample in group))
        return groups

    async def _play(self, task: Task, assigned: int | None, phases: Phases, group: list[Finished]) -> None:
        """Play one sample, and append it to its group."""
        group.append(await self._world.play(task, assigned, phases, wait_for_reward=False))
