"""Held-out evaluation: when a round is due, and the rounds themselves, as pure state machines.

A round asks the same held-out tasks of an engine that runs at least its version. A sample that fails for a reason
of the infrastructure is tried again within the budget; one that still fails is reported as missing, never scored as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from flash.config.tree import EvalConfig
from flash.observe.stats import mean_interval
from flash.samples.groups import Member
from flash.samples.leases import LeaseTable, failed_last
from flash.samples.measures import means, measured
from flash.samples.slices import at_once
from flash.samples.tasks import held_out_tasks
from flash.sampling import Sampling
from flash.types import Failure, Lease, Trajectory


class EvalRound:
    """What came of one evaluation of one version; `samples` per problem."""

    def __init__(self, version: int, samples: int) -> None:
        self.version = version
        self._samples = samples
        self._rewards: dict[int, list[float]] = {}
        """Per problem."""
        self._versions: set[int] = set()
        """Those that sampled at least one token."""
        self._measured: list[dict[str, float]] = []
        self.missing = 0
        """Samples that failed for good."""

    def add(self, result: Trajectory) -> None:
        """A sample is home."""
        self._rewards.setdefault(result.task.group_id, []).append(result.reward)
        self._versions.update(run.version for run in result.versions)
        self._measured.append(measured(result))

    @property
    def home(self) -> int:
        """Answers that have come, or never will."""
        return len(self._measured) + self.missing

    def row(self) -> dict[str, float]:
        """Mean reward with its 95 % confidence interval, best of k = samples per problem, the environment's own.

        Where every reward is 0 or 1 these are an accuracy and pass@k.
        """
        groups = self._rewards.values()
        flat = [reward for answers in groups for reward in answers]
        interval = mean_interval(flat, [problem for problem, answers in self._rewards.items() for _ in answers])
        whole = [answers for answers in groups if len(answers) == self._samples]
        return {
            "step": self.version,
            "version_min": min(self._versions, default=self.version),
            "version_max": max(self._versions, default=self.version),
            "mean_reward": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "k": self._samples,
            "best_of_k": math.fsum(map(max, whole)) / len(whole) if whole else math.nan,
            "binary": float(all(reward in (0, 1) for reward in flat)),
            "problems": len(self._rewards),
            "samples": len(flat),
            "missing": self.missing,
            **at_once(means(self._measured)),
        }


class Evaluations:
    """The rounds of a run, one at a time: at version 0, every `every` versions, at the last one.

    A round that was due in a former incarnation and left no result is made up for at the first version of this one.

    Args:
        config: how to evaluate.
        retries: attempts of a sample that failed for a reason of the infrastructure.
        first_version: the version this incarnation of the run begins with.
        steps: the last version.
        kind_of: the kind of a problem.
        samplings: of the run, by kind as `TaskSource` has them; answers are drawn so, at a temperature of their own.
        lease_ids: numbers the leases of the whole run, those of training included.
        evaluated: versions whose results stand.
    """

    def __init__(
        self,
        config: EvalConfig,
        retries: int,
        first_version: int,
        steps: int,
        kind_of: Callable[[int], str],
        samplings: Mapping[str, Sampling],
        lease_ids: Iterator[int],
        evaluated: Collection[int] = (),
    ) -> None:
        self._config = config
        self._evaluated = frozenset(evaluated)
        self._first_version = first_version
        self._steps = steps
        self._kind_of = kind_of
        self._samplings = {
            kind: msgspec.structs.replace(sampling, temperature=config.temperature)
            for kind, sampling in samplings.items()
        }
        self._due: list[int] = []
        self._round: EvalRound | None = None
        self._leases = LeaseTable(lease_ids, retries, failed_last)

    def published(self, version: int) -> None:
        """A version is there to be evaluated."""
        due = self._wanted(version)
        if version == self._first_version:
            newest = max(filter(self._wanted, range(version + 1)))
            due = not any(newest <= done <= version for done in self._evaluated)
        if due:
            self._due.append(version)
        self._begin()

    def _wanted(self, version: int) -> bool:
        every = self._config.every
        return version in (0, self._steps) or (every > 0 and version % every == 0)

    def _begin(self) -> None:
        if self._round is None and self._due:
            config = self._config
            self._round = EvalRound(self._due.pop(0), config.samples)
            for task in held_out_tasks(config.problems, config.samples, self._kind_of, self._samplings):
                self._leases.put(Member(task))

    @property
    def measuring_start(self) -> bool:
        """Whether the untrained policy is being measured: nothing else runs then."""
        return self._round is not None and self._round.version == 0

    @property
    def progress(self) -> str:
        """How much of the running round is done; empty while none runs."""
        if self._round is None:
            return ""
        return f"{self._round.home} of {self._config.problems * self._config.samples} answers"

    @property
    def open(self) -> int:
        """Answers of the running round that are still to come."""
        return len(self._leases.queue) + len(self._leases.out)

    @property
    def done(self) -> bool:
        """No round runs or is due."""
        return self._round is None and not self._due

    def lease(self, versions: Sequence[int], node: int = 0, *, nodes: Collection[int] = ()) -> Lease | None:
        """The next task of the running round for a node whose engines run these versions, or None.

        One must run at least the round's. A task goes to another node than those it failed on, as long as there is one
        among `nodes`.
        """
        if self._round is None or max(versions, default=-1) < self._round.version:
            return None
        member = self._leases.queue.first_for(node, nodes)
        return None if member is None else self._leases.grant(member, self._round.version, next(self._leases.ids))

    def at_hand(self, newest: int) -> int:
        """Tasks of the running round that wait for a node whose newest engine runs this version."""
        return len(self._leases.queue) if self._round is not None and newest >= self._round.version else 0

    def finish(self, lease_id: int, result: Trajectory | Failure, node: int) -> dict[str, float] | None:
        """Take what a lease brought home from a node; the row of the round, when it was its last one.

        An unknown lease, of a node that was lost or of a former incarnation, is of no use: its task went out again.
        """
        running, member = self._round, self._leases.out.pop(lease_id, None)
        if running is None or member is None:
            return None
        if isinstance(result, Trajectory):
            running.add(result)
        elif not self._leases.again(member, result.outcome, node):
            running.missing += 1
        if self.open:
            return None
        self._round = None
        self._begin()
        return running.row()

    def revoke(self, lease_id: int) -> None:
        """A lease's node is gone: its task queues again."""
        self._leases.revoke(lease_id)
