"""Held-out evaluation rounds, as a pure state machine.

A round asks the same held-out tasks of an engine that runs at least its version. A sample that fails for a reason
of the infrastructure is tried again within the budget; one that still fails is reported as missing, never scored as 0.
"""

from __future__ import annotations

import math
from collections import deque

from flash.hub.buffer import RETRIED
from flash.hub.tasks import held_out_tasks
from flash.observe.stats import mean_interval, pass_at_k
from flash.types import Failure, Lease, Outcome, Task, Trajectory

LEASE_BASE = 1 << 40
"""Lease ids of evaluations start here, far above those of training."""


class EvalRound:
    """One evaluation of one version."""

    def __init__(self, version: int, problems: int, samples: int, retries: int, first_lease: int) -> None:
        self.version = version
        self._samples = samples
        self._retries = retries
        self._next_lease = LEASE_BASE + first_lease
        self._queue: deque[Task] = deque(held_out_tasks(problems, samples))
        self._leases: dict[int, Task] = {}
        self.rewards: dict[int, list[float]] = {}
        """Rewards per problem."""
        self.missing = 0
        """Samples that failed for good."""
        self.versions: set[int] = set()
        """Versions that sampled at least one token."""

    def lease(self, engine_version: int) -> Lease | None:
        """The next task, for an engine that runs at least the round's version."""
        if not self._queue or engine_version < self.version:
            return None
        lease = Lease(self._next_lease, self._queue.popleft(), self.version)
        self._next_lease += 1
        self._leases[lease.lease_id] = lease.task
        return lease

    def owns(self, lease_id: int) -> bool:
        """Whether a lease belongs to this round."""
        return lease_id in self._leases

    def finish(self, lease_id: int, result: Trajectory | Failure) -> None:
        """Take a result."""
        task = self._leases.pop(lease_id)
        if isinstance(result, Trajectory):
            self.rewards.setdefault(task.group_id, []).append(result.reward)
            self.versions.update(run.version for run in result.versions)
        elif result.outcome is Outcome.CANCELLED:
            self._queue.appendleft(task)
        elif result.outcome in RETRIED and task.attempt < self._retries:
            self._queue.append(
                Task(task.task_id, task.group_id, task.sample_index, task.seed, "eval", task.attempt + 1)
            )
        else:
            self.missing += 1

    def revoke(self, lease_id: int) -> None:
        """A lease's node is gone."""
        self._queue.appendleft(self._leases.pop(lease_id))

    @property
    def done(self) -> bool:
        """No task is queued or leased."""
        return not self._queue and not self._leases

    def row(self) -> dict[str, float]:
        """Mean reward with its 95 % confidence interval, and pass@k for k = samples per problem."""
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
        }
