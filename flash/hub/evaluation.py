"""Held-out evaluation: when a round is due, and the rounds themselves, as pure state machines.

A round asks the same held-out tasks of an engine that runs at least its version. A sample that fails for a reason
of the infrastructure is tried again within the budget; one that still fails is reported as missing, never scored as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from flash.config.tree import EvalConfig
from flash.hub.groups import Member
from flash.hub.leases import LeaseTable, failed_last
from flash.hub.metrics import env_metrics
from flash.hub.tasks import held_out_tasks
from flash.observe.stats import mean_interval, pass_at_k
from flash.types import Failure, Lease, Task, Trajectory


class EvalRound:
    """One evaluation of one version; `samples` per problem. Its tasks wait and are worked on in `leases`."""

    def __init__(self, version: int, tasks: Sequence[Task], samples: int, leases: LeaseTable) -> None:
        self.version = version
        self._samples = samples
        self._leases = leases
        for task in tasks:
            leases.put(Member(task))
        self.rewards: dict[int, list[float]] = {}
        """Rewards per problem."""
        self.missing = 0
        """Samples that failed for good."""
        self.versions: set[int] = set()
        """Versions that sampled at least one token."""
        self._measured: list[dict[str, float]] = []

    def lease(self, versions: Sequence[int]) -> Lease | None:
        """The next task, for a node whose engines run these versions: one must run at least the round's."""
        if not self._leases.queue or max(versions, default=-1) < self.version:
            return None
        return self._leases.grant(self._leases.queue[0], self.version)

    def finish(self, member: Member, result: Trajectory | Failure, node: int) -> None:
        """Book what a task brought home from a node, or that it is to be tried again."""
        if isinstance(result, Trajectory):
            self.rewards.setdefault(member.task.group_id, []).append(result.reward)
            self.versions.update(run.version for run in result.versions)
            self._measured.append(result.env_metrics())
        elif not self._leases.again(member, result.outcome, node):
            self.missing += 1

    @property
    def done(self) -> bool:
        """No task is queued or leased."""
        return not self._leases.queue and not self._leases.out

    def row(self) -> dict[str, float]:
        """Mean reward with its 95 % confidence interval, pass@k for k = samples per problem, the environment's own."""
        groups = self.rewards.values()
        flat = [reward for answers in groups for reward in answers]
        interval = mean_interval(flat, [problem for problem, answers in self.rewards.items() for _ in answers])
        whole = [answers for answers in groups if len(answers) == self._samples]
        passes = [pass_at_k(len(answers), sum(r >= 1 for r in answers), self._samples) for answers in whole]
        return {
            "step": self.version,
            "version_min": min(self.versions, default=self.version),
            "version_max": max(self.versions, default=self.version),
            "mean_reward": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "k": self._samples,
            "pass_at_k": sum(passes) / len(passes) if passes else math.nan,
            "problems": len(self.rewards),
            "samples": len(flat),
            "missing": self.missing,
            **env_metrics(self._measured),
        }


class Evaluations:
    """The rounds of a run, one at a time: at the first version of a new run, every `every` versions, at the last one.

    Args:
        config: how to evaluate.
        retries: attempts of a sample that failed for a reason of the infrastructure.
        first_version: the version this life of the run begins with.
        steps: the last version.
        kind_of: the kind of a problem.
        lease_ids: numbers the leases of the whole run, those of training included.
    """

    def __init__(
        self,
        config: EvalConfig,
        retries: int,
        first_version: int,
        steps: int,
        kind_of: Callable[[int], str],
        lease_ids: Iterator[int],
    ) -> None:
        self._config = config
        self._first_version = first_version
        self._steps = steps
        self._kind_of = kind_of
        self._due: list[int] = []
        self._round: EvalRound | None = None
        self._leases = LeaseTable(lease_ids, retries, failed_last)

    def published(self, version: int) -> None:
        """A version is there to be evaluated."""
        every = self._config.every
        first = version == 0
        last = version == self._steps
        regular = every > 0 and version > self._first_version and version % every == 0
        if first or last or regular:
            self._due.append(version)
        self._begin()

    def _begin(self) -> None:
        if self._round is None and self._due:
            problems, samples = self._config.problems, self._config.samples
            tasks = held_out_tasks(problems, samples, self._kind_of)
            self._round = EvalRound(self._due.pop(0), tasks, samples, self._leases)

    @property
    def measuring_start(self) -> bool:
        """Whether the untrained policy is being measured: nothing else runs then."""
        return self._round is not None and self._round.version == 0

    @property
    def done(self) -> bool:
        """No round runs or is due."""
        return self._round is None and not self._due

    def lease(self, versions: Sequence[int]) -> Lease | None:
        """A task of the running round, or None."""
        return self._round.lease(versions) if self._round is not None else None

    def finish(self, lease_id: int, result: Trajectory | Failure, node: int) -> dict[str, float] | None:
        """Take what a lease brought home from a node; the row of the round, when it was its last one.

        An unknown lease, of a node that was lost or of a former life, is of no use: its task was handed out again.
        """
        running, member = self._round, self._leases.ended(lease_id)
        if running is None or member is None:
            return None
        running.finish(member, result, node)
        if not running.done:
            return None
        self._round = None
        self._begin()
        return running.row()

    def revoke(self, lease_id: int) -> None:
        """A lease's node is gone: its task queues again."""
        self._leases.revoke(lease_id)
