"""The row of metrics of one committed step, and the flow of samples that the cluster's page shows.

The row joins three sources: the metrics that the trainer measured, the means over the batch's samples, and the numbers
that only the hub knows (counts of the ledger, rates, engines, restarts). `flash.hub.steps.TrainingSteps` asks for it
after each step. The *ledger* counts every task and every token of the run. `flash/observe/columns/` describes each
column of the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flash.ages import SLACK
from flash.branches import branch_tokens
from flash.config.tree import Config
from flash.hub.protocol import EngineStatus
from flash.observe.cluster import Flow
from flash.samples.evaluation import Evaluations
from flash.samples.store import SampleStore
from flash.types import RETRIED, Outcome, Trajectory

FAILURES = (*sorted(RETRIED), Outcome.ENGINE_KILLED, Outcome.TOO_LONG)
"""Outcomes of an attempt that count as failures."""
ROUNDING_S = 1e-3
"""Seconds by which rounding may make the idle time of an engine negative, or longer than its lifetime."""
NO_MISBEHAVIOUR = {"loop_blocked_s": 0.0, "abandoned_calls": 0}
"""Metrics of a step in which no user code has blocked a loop or ignored its cancellation."""


class BranchCounts:
    """Counts of the branches of a step's episodes, and the end of their generation. A branch is one of the token
    sequences of an episode.

    Sampled tokens, also called action tokens, are the tokens that the policy has generated.
    """

    def __init__(self) -> None:
        self._episodes = 0
        self._branches = 0
        self._tokens = 0
        """Sampled tokens of all branches."""
        self._later_tokens = 0
        """Sampled tokens of all branches but the first of each episode."""
        self._sampled_at = 0.0
        """Unix seconds at which the last response of these episodes was complete."""

    def count(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Yield each trajectory, and count its branches and sampled tokens on the way.

        So the caller needs no second loop over a large batch. Nothing is counted before the caller takes the
        trajectories, so `metrics` is right only after the last one.
        """
        for trajectory in trajectories:
            self._episodes += 1
            self._branches += len(trajectory.branches)
            self._tokens += trajectory.action_count
            self._later_tokens += sum(branch_tokens(trajectory)[1:]) if len(trajectory.branches) > 1 else 0
            self._sampled_at = max([self._sampled_at, *(turn.start + turn.generate_s for turn in trajectory.turns)])
            yield trajectory

    def metrics(self, trained: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Return three metrics of the step, by the names of their columns.

        `branches` is the number of branches per episode. `branch_token_share` is the share of sampled tokens that are
        not in a first branch. `streamed_share` is the share of the training time that lay inside the generation of the
        same batch.

        `trained`: start and end of each block of training in the step, in Unix seconds.
        """
        seconds = sum(stop - start for start, stop in trained)
        inside = sum(max(0.0, min(stop, self._sampled_at) - start) for start, stop in trained)
        return {
            "streamed_share": inside / seconds if seconds > 0 else 0.0,
            "branches": self._branches / max(self._episodes, 1),
            "branch_token_share": self._later_tokens / max(self._tokens, 1),
        }


class StepMetrics:
    """Sums up the metrics of the time between two steps, which make the row of the later step.

    The parts of the hub report each event to it, and `row` returns the sums and begins new ones. Waits and rates count
    from the first lease of a training task, because no engine worked for training before it. A resumed run may train a
    step from samples of the previous hub before it grants its first lease. The interval of such a step is only the time
    of training, and the row of the step has a wait of 0 and no rates.
    """

    def __init__(self, samples: SampleStore) -> None:
        self._booked = samples.ledger.totals(0)
        """Totals of the ledger at the last row. The argument is the number of tasks in flight, which is not used here:
        it is no sum over time."""
        self._ended_groups = _ended_groups(samples)
        """Numbers of ended groups, and of ended groups with equal rewards, at the last row."""
        self._since: float | None = None
        """Unix seconds of the last row, or of the first lease; None before both."""
        self._canary_error = 0.0
        """Largest canary error of any engine so far, in nats."""
        self._idle: dict[int, tuple[float, float]] = {}
        """Idle seconds and lifetime of each engine, at the last row."""
        self._drafts: dict[int, tuple[int, int]] = {}
        """Drafted and accepted tokens of each engine, at the last row."""
        self.restarts = {"engine_restarts": 0, "trainer_restarts": 0}
        """Restarts since the last row."""
        self._misbehaviour = dict(NO_MISBEHAVIOUR)
        """Seconds and calls of misbehaving user code since the last row."""

    def sampling_began(self, now: float) -> None:
        """Note that a training task was leased, or that a node has claimed a lease of the previous hub.

        Only the first call counts: it begins the time in which waits and rates are measured.
        """
        self._since = now if self._since is None else self._since

    def add_canaries(self, engines: Sequence[EngineStatus]) -> None:
        """Note the canary errors of engines: the distance between the engine's and the trainer's log-probs of a fixed
        text."""
        self._canary_error = max([self._canary_error, *(engine.canary_error for engine in engines)])

    def add_engine_restarts(self, engines: int) -> None:
        """Add the number of engines that have died and start again."""
        self.restarts["engine_restarts"] += engines

    def add_trainer_restart(self) -> None:
        """Add one restart of the trainer ranks."""
        self.restarts["trainer_restarts"] += 1

    def add_misbehaviour(self, blocked_s: float, abandoned: int) -> None:
        """Add the seconds for which user code blocked a node's event loop, and the calls of user code that ignored
        cancellation."""
        self._misbehaviour["loop_blocked_s"] += blocked_s
        self._misbehaviour["abandoned_calls"] += abandoned

    def row(
        self,
        version: int,
        batch: Mapping[str, float],
        trainer: Mapping[str, float],
        samples: SampleStore,
        engines: Sequence[EngineStatus],
        now: float,
    ) -> dict[str, float]:
        """Return the row of a step: numbers by the names of their columns. Sets the sums back to 0 for the next row.

        The ledger has only totals, so a number of this step is the difference to the total at the last row.

        Args:
            version: the version that the step made.
            batch: means over the samples of the step's batch.
            trainer: metrics that the trainer measured; times in seconds.
            samples: the store of the training samples, with the ledger.
            engines: all living engines.
            now: Unix seconds.
        """
        ledger = samples.ledger
        ran = self._since is not None  # False if no training task ran under this hub before the step was trained
        step_s = trainer.get("trainer_step_s", 0.0)
        # The smallest value keeps a division by `elapsed` possible if no time was measured.
        elapsed = max(step_s, 0.0 if self._since is None else now - self._since, 1e-9)
        # If a wait began before the interval, only the part inside the interval counts.
        wait = max(0.0, min(trainer.get("trainer_wait_s", 0.0), elapsed - step_s))
        totals = ledger.totals(0)
        booked = {name: total - self._booked.get(name, 0) for name, total in totals.items()}
        before, self._ended_groups = self._ended_groups, _ended_groups(samples)
        ended, equal = (new - old for new, old in zip(self._ended_groups, before, strict=True))
        stale = booked.get(f"discarded_tokens_{Outcome.STALE}", 0)
        rates = {"trainer_wait_share": wait / elapsed, "tokens_per_second": booked["generated_tokens"] / elapsed}
        row = {
            **trainer,
            "step": version - 1,
            "version": version,
            "time": now,
            "samples": booked["trained"],
            "stale_share": stale / max(stale + booked["trained_tokens"], 1),
            **_failures(booked),
            "trainer_wait_s": wait,
            "interval_s": elapsed,
            **(rates if ran else {}),
            **self._idle_share(engines),
            "generated_tokens": ledger.generated_tokens,
            **self._accepted_share(engines),
            "engines": len(engines),
            **self.restarts,
            **self._misbehaviour,
            "canary_error": self._canary_error,
            "queue_ready_groups": samples.pool.ready_groups,
            "in_flight": samples.in_flight,
            "stale_tokens": ledger.discarded_tokens.get(Outcome.STALE, 0),
            "wasted_tokens": sum(ledger.discarded_tokens.values()),
            "filtered": ledger.filtered,
            "equal_rewards_share": equal / max(ended, 1),
            "given_up": sum(ledger.given_up.values()),
            # A domain is a kind of problem that has a share of the groups of its own.
            **samples.domains.row(samples.quarantined),
            **batch,
        }
        self._since, self._booked = now if ran else None, totals
        self.restarts = dict.fromkeys(self.restarts, 0)
        self._misbehaviour = dict(NO_MISBEHAVIOUR)
        return row

    def _idle_share(self, engines: Sequence[EngineStatus]) -> dict[str, float]:
        """Return `engine_idle_share`: the idle share of the engines' time since the last row.

        The result is empty if no engine that counts has run since the last row. An engine that was not there at the
        last row does not count in this row. The times of such an engine are kept for the next row.
        """
        idle = lifetime = 0.0
        for engine in engines:
            # For an engine that was not there before, the differences are minus infinity, and the condition below is
            # false.
            before = self._idle.get(engine.index, (math.inf, math.inf))
            more_idle, more = engine.idle_s - before[0], engine.lifetime_s - before[1]
            if -ROUNDING_S <= more_idle <= more + ROUNDING_S:  # otherwise it is a new engine, whose times began at 0
                idle, lifetime = idle + more_idle, lifetime + more
            self._idle[engine.index] = engine.idle_s, engine.lifetime_s
        return {"engine_idle_share": idle / lifetime} if lifetime > 0 else {}

    def _accepted_share(self, engines: Sequence[EngineStatus]) -> dict[str, float]:
        """Return `draft_accepted_share`: the share of drafted tokens that engines accepted, counted since the last row.

        In speculative decoding several tokens are drafted cheaply, and the engine accepts some of them. The result is
        empty if no token was drafted. An engine that was not there at the last row counts with all tokens since its
        start. After a restart of the hub this holds for all engines.
        """
        drafted = accepted = 0
        for engine in engines:
            before = self._drafts.get(engine.index, (0, 0))
            more_drafted, more_accepted = engine.drafted - before[0], engine.accepted - before[1]
            # This finds most new engines in the place of an old one, because their counts began at 0.
            if not 0 <= more_accepted <= more_drafted:
                more_drafted, more_accepted = engine.drafted, engine.accepted
            drafted, accepted = drafted + more_drafted, accepted + more_accepted
            self._drafts[engine.index] = engine.drafted, engine.accepted
        return {"draft_accepted_share": accepted / drafted} if drafted > 0 else {}


def _ended_groups(samples: SampleStore) -> tuple[int, int]:
    """Return the number of groups that ended in this run, and how many of them had equal rewards.

    Most objectives learn nothing from groups with equal rewards, so the share of these groups is a metric.
    """
    return samples.source.cursor.ended, samples.source.cursor.equal


def _failures(booked: Mapping[str, int]) -> dict[str, float]:
    """Return the number of failed attempts, which were tried again or given up, in total and for each reason.

    `booked` has the changes of the ledger's totals since the last row. Reasons that did not occur are left out.
    """
    kinds = {f"failures_{why}": booked.get(f"retried_{why}", 0) + booked.get(f"given_up_{why}", 0) for why in FAILURES}
    # A cancelled task counts only if it was tried again, for example because its node was lost. Redundant tasks are
    # cancelled and given up all the time, and that is no failure.
    kinds[f"failures_{Outcome.CANCELLED}"] = booked.get(f"retried_{Outcome.CANCELLED}", 0)
    return {"failures": sum(kinds.values()), **{name: count for name, count in kinds.items() if count}}


def sample_flow(config: Config, samples: SampleStore, evaluations: Evaluations) -> Flow:
    """Return the numbers of samples between their issue and their step, for the cluster's page.

    `Flow.most`, the most samples that may be in flight, is (1 + α) batches and the redundant samples, where α is
    `train.async_ratio`.
    """
    rollout, train = config.rollout, config.train
    groups_per_batch = train.batch_size // rollout.group_size
    groups = (1 + train.async_ratio) * groups_per_batch + rollout.extra_groups
    # Without `SLACK`, a product that a float holds slightly too large would be rounded up by one.
    return Flow(
        in_flight=samples.in_flight,
        most=math.ceil(groups * (rollout.group_size + rollout.extra_per_group) - SLACK),
        queued=len(samples.leases.queue),
        leased=len(samples.leases.out),
        evaluating=evaluations.open,
        ready_groups=samples.pool.ready_groups,
        groups_per_batch=groups_per_batch,
    )
