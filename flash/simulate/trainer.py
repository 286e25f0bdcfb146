"""SimTrainer: the protocol and the timing of a trainer rank, without a model.

publish version 0 → request a round → sleep for the time of training → … → commit → publish → … → goodbye. A round is a
part of a step's batch, or all of it. A commit tells the hub that a step is trained. To publish is to offer a new policy
version to the engines. Version n is the weights after n steps, so step n trains version n.

`flash.simulate.world.World` makes one trainer, the only rank, and reads its record: more GPUs for training only make it
faster. Runs with faults have several ranks, of the subclass in `flash.simulate.faults.parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import anyio

from flash.ages import age_of, young_enough
from flash.config import waits
from flash.config.simulate import SimulateConfig
from flash.config.tree import Config
from flash.hub import protocol as p
from flash.hub.protocol import fetch_shard
from flash.types import Activity, Canary, Published, Shard


class Trained(NamedTuple):
    """Number of samples and tokens of a round, or of a whole step, that enter the loss."""

    samples: int
    """Samples with at least one token in the loss."""
    tokens: int
    """Tokens in the loss: response tokens that are not too old."""


class SimTrainer:
    """A simulated trainer, and the record of its work.

    Args:
        config: the run's configuration.
        settings: the simulation's settings.
        hub: connection to the hub.
        now: the clock, in seconds.
        rank: number of the rank. Only rank 0 commits and publishes.
        version: version that the trainer holds at first.
    """

    def __init__(
        self,
        config: Config,
        settings: SimulateConfig,
        hub: p.HubCaller,
        now: Callable[[], float],
        *,
        rank: int = 0,
        version: int = 0,
    ) -> None:
        self._config = config
        self._settings = settings
        self._train_gpus = settings.gpus - settings.rollout_gpus
        self._hub = hub
        self._now = now
        self._rank = rank
        self._version = version
        """Version that the trainer holds, which is also the number of the next step."""
        self.activities: list[Activity] = []
        """Activities of the trainer: `train`, `batch` (it waits for one) or `publish` (it waits for the engines)."""
        self.commits: list[float] = []
        """Time at which each step was committed."""
        self.trained: list[Trained] = []
        """Number of samples and tokens that each step trained."""
        self.ages: Counter[int] = Counter()
        """Number of trained tokens by age, in versions."""
        self.lengths: Counter[int] = Counter()
        """Number of trained samples by length, in response tokens. Tokens that are too old to be trained count too."""

    async def run(self) -> None:
        """Train until the hub has no more batches. `World.run` runs this as a task.

        The loop consumes shards, which it waits for, and produces commits and versions. It ends when the hub replies
        that there is no further shard.
        """
        await self._publish()
        while (await self._train_step()).shard is not None:
            await self._publish()
        await self._hub.call(p.Goodbye(self._rank, activities=[]), timeout=waits.leaving_s(self._config))

    async def _meet(self) -> None:
        """Do nothing, since there is one rank. Runs with faults override it: their ranks wait here for each other."""

    async def _train_step(self) -> p.BatchReply:
        """Train the rounds of a step as they come, and commit the step. Returns the last reply.

        A reply without a shard ends training.
        """
        waited_s = 0.0
        shards: list[Shard] = []
        trained: list[tuple[float, float]] = []  # start and stop of the training of each round, as `Commit` wants it
        while True:
            start = self._now()
            reply = await fetch_shard(self._hub, self._rank, self._version, waits.batch_s(self._config), len(shards))
            waited_s += self._now() - start
            self._record("batch", start)
            if reply.shard is None:
                return reply
            shards.append(reply.shard)
            await self._meet()
            start = self._now()
            await anyio.sleep(self._training_s(reply.shard))
            await self._meet()
            self._record("train", start)
            trained.append((start, self._now()))
            if reply.shard.round.last:
                break
        metrics = {"trainer_wait_s": waited_s, "trainer_step_s": sum(stop - start for start, stop in trained)}
        commit = p.Commit(self._version, metrics, trained=trained)
        if self._rank == 0:
            await self._hub.call(commit, timeout=self._config.deadlines.hub)
        self.commits.append(self._now())
        rounds = [self._count(shard) for shard in shards]
        self.trained.append(Trained(sum(each.samples for each in rounds), sum(each.tokens for each in rounds)))
        self._version += 1
        return reply

    def _training_s(self, shard: Shard) -> float:
        """Return the seconds of training on a shard. The update of the weights belongs to the last round of a step."""
        # The trainer also computes prompts, observations and tokens that are too old, so the whole length counts.
        tokens = sum(sample.trajectory.length for sample in shard.samples)
        update_s = self._settings.train_step_s if shard.round.last else 0.0
        return update_s + tokens * self._settings.train_token_s / self._train_gpus

    async def _publish(self) -> None:
        """Publish the present version without weights. The hub replies when the engines have loaded the one before."""
        start = self._now()
        if self._rank != 0:
            return
        # Backend, encoded weights and canary are placeholders: simulated engines read only the version.
        published = Published(self._version, "tcp", b"", Canary([0, 0], [-1.0]))
        await self._hub.call(p.PublishRequest(published), timeout=waits.taken_s(self._config))
        self._record("publish", start)

    def _record(self, name: str, start: float) -> None:
        """Record an activity that has lasted from `start` until now."""
        self.activities.append(Activity(f"trainer {self._rank}", name, start, self._now()))

    def _count(self, shard: Shard) -> Trained:
        """Return the number of trained samples and tokens of a round, and add them to `lengths` and `ages`.

        Tokens of versions before `shard.min_version` are too old, so they do not enter the loss.
        """
        samples = tokens = 0
        for sample in shard.samples:
            if count := sample.trajectory.trained_tokens(shard.min_version):
                samples, tokens = samples + 1, tokens + count
                self.lengths[sample.trajectory.action_count] += 1
            for run in sample.trajectory.versions:
                if young_enough(run.version, shard.min_version):
                    self.ages[age_of(run.version, shard.step)] += run.count
        return Trained(samples, tokens)
