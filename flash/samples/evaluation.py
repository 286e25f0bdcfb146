"""Evaluation of the policy on held-out problems, in rounds. Pure state machines.

*Held-out* problems are never trained. A *round* evaluates one version of the weights on them, and all rounds have the
same tasks. The hub reports each published version to `Evaluations`. It leases the tasks of the running round to nodes
beside training tasks, and delivers the results. (A lease assigns one task to one node.) Engines run a task with the
round's version or a newer version.

A task that fails because of the infrastructure is tried again. If all attempts fail, the sample is reported as missing
and never scored as 0. Rounds are not part of a checkpoint: a restarted hub begins an interrupted round from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from flash.config.tree import EvalConfig
from flash.observe.stats import mean_interval
from flash.samples.batches import mean_metrics, sample_metrics
from flash.samples.groups import Member
from flash.samples.tasks import LeaseTable, by_attempt, held_out_tasks
from flash.sampling import Sampling
from flash.types import Failure, Lease, Trajectory
from flash.waiting import run_to_end


class EvalRound:
    """Results of one round of evaluation.

    Args:
        version: the version that is evaluated.
        samples: number of samples of each problem.
    """

    def __init__(self, version: int, samples: int) -> None:
        self.version = version
        self._samples = samples
        self._rewards: dict[int, list[float]] = {}
        """Rewards of the finished samples, by the number of their problem."""
        self._versions: set[int] = set()
        """Versions that sampled at least one token."""
        self._metrics: list[dict[str, float]] = []
        """Metrics of each finished sample."""
        self.missing = 0
        """Number of tasks for which all attempts failed, so that their samples have no reward."""

    def add(self, result: Trajectory) -> None:
        """Add a finished sample."""
        self._rewards.setdefault(result.task.group_id, []).append(result.reward)
        self._versions.update(run.version for run in result.versions)
        self._metrics.append(sample_metrics(result))

    @property
    def finished(self) -> int:
        """Number of samples that have finished, or for which all attempts failed."""
        return len(self._metrics) + self.missing

    def row(self) -> dict[str, float]:
        """Return the row of metrics of the round, a line of `evals.jsonl`, after the last result.

        The row has the mean reward with its 95 % confidence interval, and the means of the environment's metrics.
        `step` is the evaluated version; `version_min` and `version_max` are the versions that sampled any token.
        `best_of_k` is the mean, over the problems with all k samples, of a problem's largest reward; NaN if there is no
        such problem. If every reward is 0 or 1, the mean reward is an accuracy, and `best_of_k` is pass@k. If no sample
        has finished, because all attempts failed, the mean reward and its interval are NaN.
        """
        groups = self._rewards.values()
        flat = [reward for answers in groups for reward in answers]
        binary = all(reward in (0, 1) for reward in flat)
        # The samples of a problem depend on each other, so the interval is computed over problems.
        problems = [problem for problem, answers in self._rewards.items() for _ in answers]
        interval = mean_interval(flat, problems, binary=binary)
        complete = [answers for answers in groups if len(answers) == self._samples]
        return {
            "step": self.version,
            "version_min": min(self._versions, default=self.version),
            "version_max": max(self._versions, default=self.version),
            "mean_reward": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "k": self._samples,
            "best_of_k": math.fsum(map(max, complete)) / len(complete) if complete else math.nan,
            "binary": float(binary),
            "problems": len(self._rewards),
            "samples": len(flat),
            "missing": self.missing,
            **run_to_end(mean_metrics(self._metrics)),
        }


class Evaluations:
    """Runs the rounds of a run one after another.

    Version 0, each version divisible by `eval.every`, and the last version are evaluated.

    Args:
        config: settings of the evaluations.
        retries: largest number of further attempts at a task that fails because of the infrastructure.
        first_version: the version with which this hub begins.
        steps: the last version of the run.
        kind_of: returns the kind (the name of the environment, in a run that mixes several) of the problem with a seed.
            In a run with one environment it returns an empty name.
        samplings: sampling settings of the run, by kind; the entry under the empty name is for all other kinds, and is
            the only entry in a run with one environment. The temperature is replaced by the temperature of `config`.
        lease_ids: numbers of new leases, which training and evaluation share.
        evaluated: versions that have results from previous hubs.
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
        """Versions to evaluate after the running round, in this order."""
        self._round: EvalRound | None = None
        """Running round; None while there is none."""
        self._leases = LeaseTable(lease_ids, retries, by_attempt)
        """Queued and leased tasks of the running round. With the sort key `by_attempt` they are leased in the order of
        issue, but tasks that have failed come last."""

    def published(self, version: int) -> None:
        """If an evaluation of a published version is due, begin it now, or after the running round.

        The version with which this hub begins is evaluated if no hub has finished the last round that was due up to
        now. So a restart repeats no finished round, and makes up for an unfinished one. Raises the errors of `kind_of`.
        """
        due = self._is_scheduled(version)
        if version == self._first_version:
            # The weights of the version for which the round was due are gone, so this version takes its place. No round
            # is missing if the newest scheduled version up to now, or a later version, has a result.
            newest = max(filter(self._is_scheduled, range(version + 1)))
            due = not any(newest <= done <= version for done in self._evaluated)
        if due:
            self._due.append(version)
        self._begin()

    def _is_scheduled(self, version: int) -> bool:
        """Return True for version 0, the last version, and each version divisible by `eval.every`.

        With `eval.every` = 0, only version 0 and the last version are evaluated.
        """
        every = self._config.every
        return version in (0, self._steps) or (every > 0 and version % every == 0)

    def _begin(self) -> None:
        """Start the next round that is due, and queue its tasks. Does nothing if a round runs or no round is due.

        Raises the errors of `kind_of`, which may call a user's code.
        """
        if self._round is None and self._due:
            config = self._config
            self._round = EvalRound(self._due.pop(0), config.samples)
            for task in held_out_tasks(config.problems, config.samples, self._kind_of, self._samplings):
                self._leases.put(Member(task))

    @property
    def evaluates_untrained(self) -> bool:
        """True while version 0, the untrained policy, is evaluated. The hub then leases no training task, so that no
        newer version is made and version 0 samples the whole round."""
        return self._round is not None and self._round.version == 0

    @property
    def progress(self) -> str:
        """Progress of the running round, for the console; empty while none runs."""
        if self._round is None:
            return ""
        return f"{self._round.finished} of {self._config.problems * self._config.samples} answers"

    @property
    def open(self) -> int:
        """Number of tasks of the running round that are queued or leased."""
        return len(self._leases.queue) + len(self._leases.out)

    @property
    def done(self) -> bool:
        """True if no round runs and none is due, so that nodes and trainer ranks may leave at the end of the run."""
        return self._round is None and not self._due

    def lease(self, versions: Sequence[int], node: int = 0, *, nodes: Collection[int] = ()) -> Lease | None:
        """Lease the next task of the running round to a node. Returns None if the round has no task for this node.

        Args:
            versions: versions that the node's engines run. One of them must be the round's version or newer.
            node: number of the node, from 0. A task that has failed on this node is leased to it only if the task has
                failed on all `nodes`.
            nodes: all nodes that could take the task. If empty, earlier failures do not matter.
        """
        if self._round is None or max(versions, default=-1) < self._round.version:
            return None
        if (member := self._leases.queue.first_for(node, nodes)) is None:
            return None
        # No version older than the version of the round may sample for the lease.
        return self._leases.grant(member, self._round.version, next(self._leases.ids))

    def available(self, newest: int) -> int:
        """Return the number of queued tasks that a node may run whose newest engine runs version `newest`."""
        return len(self._leases.queue) if self._round is not None and newest >= self._round.version else 0

    def deliver(self, lease_id: int, result: Trajectory | Failure, node: int) -> dict[str, float] | None:
        """Take the result of a lease from a node. Returns the round's row of metrics if this was the last result.

        A failed task is tried again, or its sample is missing. After the last result the next round that is due begins.
        A result is dropped if its lease is not known, because the node was lost or the hub has restarted. In both cases
        the task runs again. Returns None also if this was not the last result. Raises the errors of `kind_of`.
        """
        running, member = self._round, self._leases.out.pop(lease_id, None)
        if running is None or member is None:
            return None
        if isinstance(result, Trajectory):
            running.add(result)
        elif not self._leases.retry(member, result.outcome, node):
            running.missing += 1
        if self.open:
            return None
        self._round = None
        self._begin()
        return running.row()

    def revoke(self, lease_id: int) -> None:
        """Queue the task of a lease again, because its node is lost. This does not count as an attempt. An unknown
        lease is ignored."""
        self._leases.revoke(lease_id)
