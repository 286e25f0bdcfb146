"""ROLL Flash's rules for tasks of one turn and of many, and its synchronous baseline, on simulated engines.

ROLL Flash is the asynchronous mode of Alibaba's ROLL framework (paper: "Part II: ROLL Flash"). A prompt's candidates
are one group. In tasks of one turn, each candidate is a task, which makes one request to an engine. Dynamic filtering
drops a group from whose rewards nothing can be learned, such as equal ones. These are the rules for one turn:

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

from benchmarks.simulated.peers.world import Finished, Peer, PeerReport, World
from flash.config.tree import Config
from flash.rollout.episode.phases import LockStep, Phases
from flash.types import Task

ENGINE_LIMIT = 128
"""Requests at once on an engine."""


class RollRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ROLL Flash."""

    async_ratio: float = 0.0
    """α: asynchronous ratio."""
    replicate: bool = True
    """True if candidates are placed one by one; False if the candidates of a prompt share an engine."""
    extra_prompts: int | None = None
    """At least a batch plus this many prompts run at all times; None: no such minimum."""


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


class RollFlash(Peer[RollRules]):
    """ROLL Flash's rules for one turn. The module's docstring describes them."""

    def __init__(self, config: Config, rules: RollRules) -> None:
        super().__init__(World(config, colocated=False, limit=ENGINE_LIMIT), rules)
        self._cohorts: dict[int, Cohort] = {}
        """Prompts of each step that are not too old, by the number of the step."""
        self._step = -1
        """Current step; −1 before the first one."""
        self._admitted = 0
        """Prompts that may have been started so far, over all steps; filtered and dropped ones do not count."""
        self._completed = 0
        """Prompts that passed the filter, also if a batch has taken them; without those that `_drop` removed."""
        self._assignments = itertools.cycle(range(len(self._world.engines)))
        """Engine of each next prompt, in turn, where the candidates of a prompt share an engine."""

    async def run(self) -> PeerReport:
        """Train every step, while prompts run beside it (`_prompt`), and report the run."""
        world = self._world
        async with anyio.create_task_group() as prompts:
            for step in range(world.config.run.steps):
                await world.update()
                self._advance(step, prompts)
                batch: list[list[Finished]] = []  # the oldest prompts first, with a wait for each older step
                for older in sorted(self._cohorts):
                    batch += await self._cohorts[older].take(
                        world.groups_per_batch - len(batch), growing=older == self._step
                    )
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
            tasks = self._world.next_group()
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


class AgenticRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ROLL Flash for many turns."""

    async_ratio: float = 0.0
    """α: asynchronous ratio."""
    extra_groups: int = 0
    """Groups of environments beyond the groups of a batch."""
    extra_per_group: int = 0
    """Environments of a group beyond its size."""
    colocated: bool = False
    """True if generation and training take turns on all GPUs."""


class _Episode:
    """A prompt that a group of environments plays."""

    def __init__(self, step: int, tasks: list[Task]) -> None:
        self.step = step
        """Step in which the episode was opened."""
        self.unclaimed = list(reversed(tasks))
        """Tasks that no environment has begun, the next one last."""
        self.finished: list[Finished] = []
        """Results of the environments that have finished."""
        self.dropped = False
        """True if the episode is too old for every later batch."""


class RollAgentic(Peer[AgenticRules]):
    """ROLL Flash's rules for many turns.

    A fixed set of environments: G + `extra_groups` groups of `group_size` + `extra_per_group`. Each environment works
    on its own, and keeps to one engine. A group may open one episode per step, ⌈α⌉ ahead of the trainer; an environment
    that is free joins the oldest one of its group that still wants members. The first `group_size` finishers make an
    episode complete and the first G episodes make the batch, by the step in which they were opened, oldest first, with
    a wait for each older step. The others run on to their end, are discarded, and keep their environment busy
    meanwhile. At each step the running requests are aborted (queued ones still run to their end), all engines are
    updated together, and the aborted turns start again.
    """

    def __init__(self, config: Config, rules: AgenticRules) -> None:
        colocated, extra = rules.colocated, rules.extra_per_group
        world = World(config, colocated=colocated, limit=ENGINE_LIMIT, keep_partial=False, extra_members=extra)
        super().__init__(world, rules)
        self._slots = world.groups_per_batch + rules.extra_groups
        """Number of groups of environments."""
        self._open: list[list[_Episode]] = [[] for _ in range(self._slots)]
        """Episodes that are not complete, for each group of environments."""
        self._opened = [0] * self._slots
        """Number of steps whose episode each group of environments has opened or skipped."""
        self._complete: list[_Episode] = []
        """Complete episodes that no batch has taken yet."""
        self._step = -1
        """Current step; −1 before the first one."""

    async def run(self) -> PeerReport:
        """Train every step, while the environments play beside it (`_environment`), and report the run."""
        world = self._world
        async with anyio.create_task_group() as environments:
            for step in range(world.config.run.steps):
                await world.update()
                self._advance(step)
                if step == 0:
                    members = world.config.rollout.group_size + self._rules.extra_per_group
                    for number in range(self._slots * members):  # each environment keeps to one engine
                        environments.start_soon(self._environment, number // members, number % len(world.engines))
                await world.train(await self._batch())
            environments.cancel_scope.cancel()
        return world.report()

    def _advance(self, step: int) -> None:
        """Begin a step: drop the episodes that are too old for it, complete or not."""
        self._step = step
        oldest = step - math.ceil(self._rules.async_ratio)
        self._complete = [episode for episode in self._complete if episode.step >= oldest]
        for slot, episodes in enumerate(self._open):
            for episode in episodes:
                episode.dropped = episode.step < oldest
            self._open[slot] = [episode for episode in episodes if not episode.dropped]
        self._change()

    async def _environment(self, slot: int, assigned: int) -> None:
        """Run one environment, which plays an episode after the other until it is cancelled at the end of the run.

        `slot` is the number of its group of environments, and `assigned` the number of its engine.
        """
        while True:
            while (episode := self._join(slot)) is None:
                await self._changed.wait()
            finished = await self._world.play(episode.unclaimed.pop(), assigned)
            if episode.dropped or episode not in self._open[slot]:
                continue  # the episode was too old, or complete without this result
            episode.finished.append(finished)
            if len(episode.finished) == self._world.config.rollout.group_size:
                self._open[slot].remove(episode)
                self._complete.append(episode)
                self._change()

    def _join(self, slot: int) -> _Episode | None:
        """Return the oldest episode of a group of environments that wants members; None if there is none.

        A new episode is opened if the group may have one. `slot` is the number of the group.
        """
        for episode in self._open[slot]:
            if episode.unclaimed:
                return episode
        if self._opened[slot] >= self._step + 1 + math.ceil(self._rules.async_ratio):
            return None
        # Episodes of steps that went by without this group are skipped, not caught up with.
        self._opened[slot] = max(self._opened[slot], self._step) + 1
        episode = _Episode(self._step, self._world.next_group())
        self._open[slot].append(episode)
        return episode

    async def _batch(self) -> list[list[Finished]]:
        """Take the batch of this step: the oldest episodes first, with a wait for each older step."""
        wanted = self._world.groups_per_batch
        while True:
            open_steps = (episode.step for episodes in self._open for episode in episodes)
            # An open episode of an older step must go into the batch before any newer one. None is opened there later.
            newest = min([self._step, *open_steps])
            ready = sorted(self._complete, key=lambda episode: episode.step)
            chosen = [episode for episode in ready if episode.step <= newest][:wanted]
            if len(chosen) == wanted:
                self._complete = [episode for episode in self._complete if episode not in chosen]
                return [episode.finished for episode in chosen]
            await self._changed.wait()


class BaselineRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the baseline."""

    replicate: bool = False
    """True if each sample of a prompt is a request of its own."""
    env_async: bool = False
    """True if each environment steps on its own; False if all step together."""
    colocated: bool = True
    """True if generation and training take turns on all GPUs."""


class Synchronous(Peer[BaselineRules]):
    """The synchronous baseline: generate a batch, then train on it, on the same GPUs.

    B samples are issued at once and all are waited for; where groups are filtered, whole further batches are issued
    until enough have passed. Rewards are computed after the generation of the batch. With `replicate` off the samples
    of a prompt are one request, on one engine. With `env_async` off the environments step together. All engines are
    updated after the step.
    """

    def __init__(self, config: Config, rules: BaselineRules) -> None:
        super().__init__(World(config, colocated=rules.colocated), rules)
        self._assignments = itertools.cycle(range(len(self._world.engines)))
        """Engine of each next prompt, in turn, where the samples of a prompt share an engine."""

    async def run(self) -> PeerReport:
        """Generate and train every step in turn, and report the run."""
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
                for task in self._world.next_group():
                    episodes.start_soon(self._play, task, assigned, phases, group)
        await anyio.sleep(max(sample.reward_s for group in groups for sample in group))
        return groups

    async def _play(self, task: Task, assigned: int | None, phases: Phases, group: list[Finished]) -> None:
        """Play one sample, and append it to its group. Its reward is not waited for: `_wave` waits for all at once."""
        group.append(await self._world.play(task, assigned, phases, wait_for_reward=False))
