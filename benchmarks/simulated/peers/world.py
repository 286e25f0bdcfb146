"""Simulated engines, environments and trainer under the rules of other systems (*peers*), and the counts of a run.

A `Peer` has the rules of one system: it decides when samples begin and which samples a batch gets. The `World` plays
the samples and trains the batches. A run is described by the same configuration as one of ours, and its samples are
drawn from the same workload by the same keys: a response has the same length under every policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Generic, TypeVar

import anyio
import msgspec

from algorithms.advantages import are_equal
from benchmarks.simulated.peers.router import PeerEngine, Router
from flash.config.simulate import SimulateConfig
from flash.config.tree import Config
from flash.rollout.episode.episode import response_key
from flash.rollout.episode.phases import Phases
from flash.samples.tasks import TaskSource
from flash.simulate.clock import run_virtual
from flash.simulate.workload import Workload, env_key
from flash.types import Canary, Lease, Published, Task

NEVER = 1 << 30
"""Steps between two deliveries of tokens, which nothing reads before the end."""


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a peer's run. All seconds are simulated."""

    seconds: float
    """Seconds from the start to the end of the last step."""
    step_s: float
    """Seconds per step. If there are more than 2 steps, the first is left out, since it waits for the first samples."""
    samples_per_s: float
    """Trained samples per second, over the steps of `step_s`."""
    oldest_age: int
    """Age of the oldest trained token, in versions."""
    mean_age: float
    """Mean age of the samples of the second half of the steps, in versions. The first steps have younger samples. The
    age of a sample is that of its oldest token."""
    ends: list[float]
    """Time at which each step ended."""
    generated_tokens: int
    """Tokens of all ended responses and of aborted ones."""
    trained_tokens: int
    """Response tokens of trained samples."""
    stale_groups: float = 0.0
    """Share of the groups that the trainer has taken that were discarded as too old; 0 if the rules discard none."""
    stale_tokens: float = 0.0
    """Share of the tokens of these groups that were discarded with them."""

    @property
    def waste(self) -> float:
        """Share of the generated tokens that were not trained."""
        return 1 - self.trained_tokens / max(1, self.generated_tokens)


class Finished(msgspec.Struct):
    """A finished sample."""

    task: Task
    reward: float
    reward_s: float
    """Seconds that the computation of its reward takes, whether it was waited for or not."""
    tokens: int
    """Number of sampled tokens that are trained."""
    length: int
    """Number of tokens that the trainer processes, including prompt and observations."""
    oldest_version: int
    """Oldest version that sampled one of its tokens."""


class World:
    """Engines, environments and trainer of one run. The class with a peer's rules makes it, and calls its methods.

    Args:
        config: hardware, workload, batch and group size. The peer's rules read all other settings.
        colocated: True if generation and training take turns on all GPUs.
        limit: most requests at once on an engine; None: the router sends all requests at once.
        keep_partial: True if a response that a pause aborts goes on from its tokens; False if it starts again.
        extra_members: samples of a group beyond its size.
    """

    def __init__(
        self,
        config: Config,
        *,
        colocated: bool,
        limit: int | None = None,
        keep_partial: bool = True,
        extra_members: int = 0,
    ) -> None:
        assert config.simulate is not None
        self.config = config
        self.settings: SimulateConfig = config.simulate
        size = config.rollout.group_size + extra_members
        self.workload = Workload(self.settings, config.run.seed, config.rollout.max_new_tokens, size)
        self.tasks = TaskSource(config.run.seed, size)
        gpus = self.settings.gpus if colocated else self.settings.rollout_gpus
        self._train_gpus = self.settings.gpus if colocated else self.settings.gpus - self.settings.rollout_gpus
        """Number of GPUs that train."""
        self.engines = [
            PeerEngine(self.settings, config.engine.max_sequences, self.workload.response_tokens, NEVER)
            for _ in range(gpus // config.engine.tensor_parallel)
        ]
        self.router = Router(self.engines, limit, keep_partial=keep_partial)
        self.version = -1
        """Version of all engines; −1 before the first `publish`."""
        self._environments: Counter[int] = Counter()
        """Number of environments that were made for each problem."""
        self._generated = 0
        """Number of sampled tokens, including discarded ones."""
        self._trained = 0
        """Number of trained tokens."""
        self._ages: list[list[int]] = []
        """Ages of the trained samples of each step, in versions."""
        self._commits: list[float] = []
        """Times at which the steps ended, in virtual seconds."""

    @property
    def groups_per_batch(self) -> int:
        """Groups that a step trains."""
        return self.config.groups_per_batch

    def next_group(self) -> list[Task]:
        """Return the tasks of a new group: one for each sample of the next prompt."""
        return self.tasks.issue(self.tasks.next_problem())

    # -- rollout -----------------------------------------------------------------------------------------------------

    async def play(
        self, task: Task, assigned: int | None = None, phases: Phases | None = None, *, wait_for_reward: bool = True
    ) -> Finished:
        """Play an episode, again with a new environment whenever one does not answer in time.

        `assigned` is the number of the only engine that may serve its requests; None: any. `phases` holds the episodes
        that step together; None: this one steps on its own. With `wait_for_reward` the time of the reward passes, too.
        """
        phases = phases or Phases()
        lease = Lease(task.task_id, task, 0)
        phases.enter(lease)
        try:
            while True:
                finished = await self._try(task, assigned, phases, lease)
                if finished is not None:
                    break
        finally:
            phases.leave(lease)
        if wait_for_reward:
            await anyio.sleep(finished.reward_s)
        return finished

    async def play_group(self, tasks: Sequence[Task], assigned: int | None = None) -> list[Finished]:
        """Play all samples of a group at once, and return them in the order in which they finished."""
        group: list[Finished] = []

        async def play_one(task: Task) -> None:
            """Play one sample."""
            group.append(await self.play(task, assigned))

        async with anyio.create_task_group() as samples:
            for task in tasks:
                samples.start_soon(play_one, task)
        return group

    async def _try(self, task: Task, assigned: int | None, phases: Phases, lease: Lease) -> Finished | None:
        """Play an episode once. Returns None if its environment never answers, after the deadline of a step."""
        work, deadline = self.workload, self.config.deadlines.env_step
        name = env_key(task.seed, self._environments[task.seed])
        self._environments[task.seed] += 1
        turns = work.turns(task.seed)
        stop_turn = work.stop_turn(name, turns)
        await anyio.sleep(work.reset_seconds(name))
        await phases.stepped(lease)
        context, sampled = work.prompt(task.seed), 0
        oldest: int | None = None
        for turn in range(turns):
            limit = self.config.rollout.max_new_tokens
            response = await self.router.generate(context, response_key(task, turn), limit, assigned)
            self._generated += response.tokens + response.discarded
            sampled += response.tokens
            assert response.oldest_version is not None
            oldest = response.oldest_version if oldest is None else min(oldest, response.oldest_version)
            await phases.generated(lease)
            if turn == stop_turn:
                await anyio.sleep(deadline)
                return None
            await anyio.sleep(work.env_seconds(name, turn))
            await phases.stepped(lease)
            shown = work.observation_tokens(name, turn) if turn + 1 < turns else 0
            context = context + [0] * (response.tokens + shown)
        assert oldest is not None
        reward = work.reward(task.seed, name)
        return Finished(task, reward, work.reward_seconds(name), sampled, len(context), oldest)

    def is_filtered_out(self, group: Sequence[Finished]) -> bool:
        """Return True if dynamic filtering drops a group, because nothing can be learned from its rewards.

        The filters are those of the configuration: groups of equal rewards, or with a mean outside of bounds.
        """
        rewards, rollout = [sample.reward for sample in group], self.config.rollout
        if rollout.drop_equal_rewards and are_equal(rewards):
            return True
        low, high = rollout.accuracy_bounds or (0.0, 1.0)
        return not low <= sum(rewards) / len(rewards) <= high

    # -- weights and training ----------------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Load the next version into all engines at once. Running sequences are prefilled again."""
        self.version += 1
        published = Published(self.version, "tcp", b"", Canary([], []))
        async with anyio.create_task_group() as loads:
            for engine in self.engines:
                loads.start_soon(partial(engine.load, published, keep_cache=False))

    async def update(self, *, drain: bool = False) -> None:
        """Load the next version into all engines, between two times of generation.

        New requests are stopped. The queued ones then run to their end under the old version, and the running ones are
        aborted; `Router.pause` says when nothing is aborted. With `drain` the running ones run to their end, too. After
        the load, requests are let in again.
        """
        await self.router.pause(drain=drain)
        await self.publish()
        self.router.resume()

    async def train(self, batch: Sequence[Sequence[Finished]]) -> None:
        """Train one step on the groups of a batch: let its time pass, then count its samples. Loads no weights."""
        samples = [sample for group in batch for sample in group]
        length = sum(sample.length for sample in samples)
        seconds = self.settings.train_step_s + length * self.settings.train_token_s / self._train_gpus
        await anyio.sleep(seconds)
        self._trained += sum(sample.tokens for sample in samples)
        self._ages.append([self.version - sample.oldest_version for sample in samples])
        self._commits.append(anyio.current_time())

    def report(self) -> PeerReport:
        """Return the results of the run, after its last step."""
        first, last, steps = self._commits[0], self._commits[-1], len(self._commits)
        step_s = (last - first) / (steps - 1) if steps > 2 else last / steps
        return PeerReport(
            seconds=last,
            step_s=step_s,
            samples_per_s=self.config.train.batch_size / step_s,
            oldest_age=max(map(max, self._ages)),
            mean_age=mean(age for step in self._ages[steps // 2 :] for age in step),
            ends=self._commits,
            generated_tokens=self._generated,
            trained_tokens=self._trained,
        )


RulesT = TypeVar("RulesT")


class Peer(ABC, Generic[RulesT]):
    """Rules of a system, and the state of one run under them. An instance simulates one run; `simulate` makes it.

    A subclass is made from the configuration of the run and the settings of the system.
    """

    @classmethod
    def simulate(cls, config: Config, rules: RulesT) -> PeerReport:
        """Simulate a whole run under these rules on a new virtual clock."""
        return run_virtual(cls(config, rules).run)  # pyright: ignore[reportArgumentType]: as the class says

    def __init__(self, world: World, rules: RulesT) -> None:
        self._world = world
        self._rules = rules
        self._changed = anyio.Event()
        """Set by `_change`, and then replaced."""

    @abstractmethod
    async def run(self) -> PeerReport:
        """Simulate every step of the run, and report it."""

    def _change(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()
