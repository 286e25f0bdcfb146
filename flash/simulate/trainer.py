"""SimTrainer: the protocol and the timing of a trainer rank, without a model.

publish version 0 → request a round → sleep for the time of training → … → commit → publish → … → goodbye. A round is a
part of a step's batch, or all of it. The trainer is the only rank: more GPUs for training only make it faster. A commit
tells the hub that a step is trained. To publish is to offer a new policy version to the engines.
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
    """Samples and tokens of one step that enter the loss."""

    samples: int
    """Samples with at least one token in the loss."""
    tokens: int
    """Tokens in the loss."""

    @staticmethod
    def of(shard: Shard) -> Trained:
        """Count a shard's tokens that are not too old (`min_version`), and the samples with at least one such token."""
        counts = [sample.trajectory.trained_tokens(shard.min_version) for sample in shard.samples]
        return Trained(sum(count > 0 for count in counts), sum(counts))


class SimTrainer:
    """A simulated trainer, and the record of its work.

    Args:
        config: the run's configuration.
        settings: the simulation's settings.
        hub: connection to the hub.
        now: the clock, in seconds.
        version: version that the trainer publishes first.
    """

    def __init__(
        self, config: Config, settings: SimulateConfig, hub: p.HubCaller, now: Callable[[], float], *, version: int = 0
    ) -> None:
        self._config = config
        self._settings = settings
        self._train_gpus = settings.gpus - settings.rollout_gpus
        self._hub = hub
        self._now = now
        self._version = version
        self.activities: list[Activity] = []
        """Activities of the trainer: `train`, `batch` (it waits for one) or `publish` (it waits for the engines)."""
        self.commits: list[float] = []
        """Time at which each step was committed."""
        self.trained: list[Trained] = []
        """Number of samples and tokens that each step trained."""
        self.ages: Counter[int] = Counter()
        """Trained tokens by age."""
        self.lengths: Counter[int] = Counter()
        """Number of trained samples by response tokens."""

    async def run(self) -> None:
        """Train until the hub has no more batches.

        The loop consumes shards, which it waits for, and produces commits and versions. It ends when the hub replies
        that there is no further shard.
        """
        await self._publish()
        while await self._train():
            await self._publish()
        await self._hub.call(p.Goodbye(0, []), timeout=waits.leaving_s(self._config))

    async def _train(self) -> bool:
        """Train the rounds of a step as they come, and commit the step. Returns False when the run ends."""
        waited_s, shards, trained = 0.0, list[Shard](), list[tuple[float, float]]()
        while not shards or not shards[-1].round.last:
            start = self._now()
            reply = await fetch_shard(self._hub, 0, self._version, waits.batch_s(self._config), len(shards))
            waited_s += self._now() - start
            self._record("batch", start)
            if reply.shard is None:
                return False
            shards.append(reply.shard)
            start = self._now()
            await self.work(self._seconds(reply.shard))
            self._record("train", start)
            trained.append((start, self._now()))
        metrics = {"trainer_wait_s": waited_s, "trainer_step_s": sum(stop - start for start, stop in trained)}
        commit = p.Commit(self._version, metrics, trained=trained)
        await self._hub.call(commit, timeout=self._config.deadlines.request)
        self.commits.append(self._now())
        for shard in shards:
            self._count(shard)
        counts = [Trained.of(shard) for shard in shards]
        self.trained.append(Trained(sum(one.samples for one in counts), sum(one.tokens for one in counts)))
        self._version += 1
        await self.committed()
        return True

    async def work(self, seconds: float) -> None:
        """Sleep for the time of a round."""
        await anyio.sleep(seconds)

    async def committed(self) -> None:
        """Do nothing. Called after a commit, before its version is published, where a real rank saves checkpoints."""

    def _seconds(self, shard: Shard) -> float:
        """Return the seconds of training on a shard. The update of the weights belongs to the last round of a step."""
        tokens = sum(sample.trajectory.length for sample in shard.samples)
        update_s = self._settings.train_step_s if shard.round.last else 0.0
        return update_s + tokens * self._settings.train_token_s / self._train_gpus

    async def _publish(self) -> None:
        """Publish the present version without weights. The hub replies when the engines have loaded the one before."""
        start = self._now()
        published = Published(self._version, "tcp", b"", Canary([0, 0], [-1.0]))
        await self._hub.call(p.PublishRequest(published), timeout=waits.taken_s(self._config))
        self._record("publish", start)

    def _record(self, name: str, start: float) -> None:
        """Record an activity that has lasted from `start` until now."""
        self.activities.append(Activity("trainer 0", name, start, self._now()))

    def _count(self, shard: Shard) -> None:
        """Count the samples of a round by length, and its tokens by age."""
        for sample in shard.samples:
            if sample.trajectory.trained_tokens(shard.min_version):
                self.lengths[sample.trajectory.action_count] += 1
            for run in sample.trajectory.versions:
                if young_enough(run.version, shard.min_version):
                    self.ages[age_of(run.version, shard.step)] += run.count
