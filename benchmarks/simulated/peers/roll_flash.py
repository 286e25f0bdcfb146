"""ROLL Flash's rules for tasks of one turn, on the simulated engines of `benchmarks.simulated.peers.world`.

ROLL Flash is the asynchronous mode of Alibaba's ROLL framework (paper: "Part II: ROLL Flash"). A prompt's candidates
are one group. Each candidate is a task, which makes one request to an engine.

Admission per prompt, cumulative: B + ⌈αB⌉ at the first step, B more at each later one; a filtered prompt is replaced.
With `extra_prompts`, so many more than a batch are kept running all the time. The candidates of a prompt are requests
of their own, at most 128 at once on an engine. A batch takes prompts by the step in which they began, oldest first, and
waits for each older step before a newer one. At each step no new request begins, running requests are aborted and
waited for (queued ones still run to their end), and all engines are updated together and lose their cache. Then
generation goes on, and prompts older than ⌈α⌉ steps are dropped.
"""

from __future__ import annotations

import itertools
import math

import anyio
import msgspec
from anyio.abc import TaskGroup

from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.simulate.clock import run_virtual
from flash.types import Task

ENGINE_LIMIT = 128
"""Requests at once on an engine."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ROLL Flash."""

    async_ratio: float = 0.0
    """α: asynchronous ratio."""
    replicate: bool = True
    """True if candidates are placed one by one; False if the candidates of a prompt share an engine."""
    extra_prompts: int | None = None
    """At least a batch plus this many prompts run at all times; None: no such minimum."""


def roll_flash(config: Config, rules: Rules) -> PeerReport:
    """Simulate a whole run under ROLL Flash's rules for one turn on a new virtual clock."""
    return run_virtual(RollFlash(World(config, colocated=False, limit=ENGINE_LIMIT), rules).run)


class Cohort:
    """Prompts that began in one step. `RollFlash` makes one for each step."""

    def __init__(self) -> None:
        self.running: dict[int, anyio.CancelScope] = {}
        """Scopes of the prompts that are being played, by group id."""
        self.finished: list[list[Finished]] = []
        """Groups that passed the filter and that no batch has taken yet."""
        self._changed = anyio.Event()
        """Set when a prompt has ended, and then replaced."""

    def change(self) -> None:
        """Wake the tasks that wait for this step's prompts."""
        self._changed.set()
        self._changed = anyio.Event()

    async def take(self, count: int, *, growing: bool = False) -> list[list[Finished]]:
        """Wait for up to `count` finished prompts, remove them from this step, and return their groups.

        Returns fewer if no prompt of the step runs any more. `growing` is True for the present step, in which more
        prompts may begin: then it waits until there are `count`.
        """
        while len(self.finished) < count and (self.running or growing):
            await self._changed.wait()
        taken, self.finished = self.finished[:count], self.finished[count:]
        return taken


class RollFlash:
    """ROLL Flash's rules for one turn, and the state of one run under them. An instance simulates one run."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._cohorts: dict[int, Cohort] = {}
        """Prompts of each step that are not too old, by the number of the step."""
        self._step = -1
        """Current step; −1 before the first one."""
        self._admitted = 0
        """Prompts that may have been started so far, over all steps; filtered and dropped ones do not count."""
        self._completed = 0
        """Prompts that passed the filter, also if a batch has taken them; without those that `_drop` removed."""
        self._assignments = itertools.cycle(range(len(world.engines)))
        """Engine of each next prompt, in turn, where the candidates of a prompt share an engine."""

    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""
        world = self._world
        async with anyio.create_task_group() as prompts:
            for step in range(world.config.run.steps):
                await world.update()
                self._advance(step, prompts)
                batch = await self._batch()
                if self._rules.async_ratio == 0:  # the rest of the step is discarded before training begins
                    self._drop(step + 1)
                await world.train(batch)
            prompts.cancel_scope.cancel()
        return world.report()

    def _advance(self, step: int, prompts: TaskGroup) -> None:
        """Begin a step: drop the prompts that are too old for it, and admit new ones."""
        batch, ratio = self._world.groups_per_batch, self._rules.async_ratio
        self._drop(step - math.ceil(ratio))
        self._step = step
        self._admitted += batch + (math.ceil(batch * ratio) if step == 0 else 0)
        self._cohorts[step] = Cohort()
        self._prompts = prompts
        self._admit()

    def _drop(self, oldest: int) -> None:
        """Forget the prompts of the steps before `oldest`, running or finished. `_admit` then starts others."""
        for step in [step for step in self._cohorts if step < oldest]:
            cohort = self._cohorts.pop(step)
            self._completed -= len(cohort.finished)
            for scope in cohort.running.values():
                scope.cancel()

    def _admit(self) -> None:
        """Start as many prompts as the rules allow. Called at each step and when a prompt ends."""
        running = sum(len(cohort.running) for cohort in self._cohorts.values())
        extra = self._rules.extra_prompts
        most = 0 if extra is None else self._world.groups_per_batch + extra
        while running + self._completed < self._admitted or running < most:
            tasks = self._world.tasks.issue(self._world.tasks.next_problem())
            cohort = self._cohorts[self._step]
            cohort.running[tasks[0].group_id] = anyio.CancelScope()
            self._prompts.start_soon(self._prompt, tasks, cohort)
            running += 1

    async def _prompt(self, tasks: list[Task], cohort: Cohort) -> None:
        """Play all candidates of a prompt, and keep the group for a batch unless dynamic filtering drops it."""
        group: list[Finished] = []
        assigned = None if self._rules.replicate else next(self._assignments)
        with cohort.running[tasks[0].group_id]:
            group = await self._world.play_group(tasks, assigned)
        del cohort.running[tasks[0].group_id]
        # A prompt that was just ending is not cancelled, so `cancelled_caught` does not tell that its step was dropped.
        if cohort not in self._cohorts.values():
            return
        if not self._world.is_filtered_out(group):
            cohort.finished.append(group)
            self._completed += 1
        cohort.change()
        self._admit()

    async def _batch(self) -> list[list[Finished]]:
        """Take the batch of this step: the oldest prompts first, with a wait for each older step."""
        wanted, batch = self._world.groups_per_batch, []
        for step in sorted(self._cohorts):
            batch += await self._cohorts[step].take(wanted - len(batch), growing=step == self._step)
        return batch
