"""The row of metrics of one committed step: what the trainer measured, and what only the hub sees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flash.branches import branch_tokens
from flash.hub.protocol import EngineStatus
from flash.samples.store import SampleStore
from flash.types import RETRIED, Outcome, Trajectory

FAILURES = (*sorted(RETRIED), Outcome.ENGINE_KILLED, Outcome.TOO_LONG)
"""Ends of an attempt that count as failures."""
ROUNDING_S = 1e-3
"""By which an engine that was idle throughout may seem to have been idle longer than that."""


NOTHING = {"loop_blocked_s": 0.0, "abandoned_calls": 0}
"""Figures of a step in which no user's code has misbehaved."""


class Branches:
    """How the episodes of a step branched."""

    def __init__(self) -> None:
        self._episodes = 0
        self._branches = 0
        self._tokens = 0
        self._later = 0
        """Tokens of branches beyond the first."""

    def count(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Count them as they pass."""
        for trajectory in trajectories:
            self._episodes += 1
            self._branches += len(trajectory.branches)
            self._tokens += trajectory.action_count
            self._later += sum(branch_tokens(trajectory)[1:]) if len(trajectory.branches) > 1 else 0
            yield trajectory

    def metrics(self) -> dict[str, float]:
        """Branches per episode, and the share of the sampled tokens that later ones than the first have."""
        return {
            "branches": self._branches / max(self._episodes, 1),
            "branch_token_share": self._later / max(self._tokens, 1),
        }


class StepMetrics:
    """Remembers where the last step ended. Waiting and rates count from the first lease: before, nothing ran.

    A resumed run may take a step before that, from samples that it had. Its interval is the step itself, and nothing is
    said of rates and waits.
    """

    def __init__(self, samples: SampleStore) -> None:
        self._before = samples.ledger.totals(0)
        self._ended_groups = _ended_groups(samples)
        self._since: float | None = None
        self._canary_error = 0.0
        self._idle: dict[int, tuple[float, float]] = {}
        """Of each engine, its idle seconds and its lifetime, as of the last row."""
        self._drafts: dict[int, tuple[int, int]] = {}
        """Of each engine, tokens that it had drafted and accepted."""
        self.restarts = {"engine_restarts": 0, "trainer_restarts": 0}
        """That no row has yet."""
        self._misbehaved = dict(NOTHING)
        """Seconds and calls that no row has yet."""

    def began(self, now: float) -> None:
        """A training sample was handed out, or one of the hub before this one was claimed."""
        self._since = now if self._since is None else self._since

    def canaries(self, engines: Sequence[EngineStatus]) -> None:
        """Engines have passed their canaries."""
        self._canary_error = max([self._canary_error, *(engine.canary_error for engine in engines)])

    def restarted(self, engines: int) -> None:
        """Engines have died, and start again."""
        self.restarts["engine_restarts"] += engines

    def misbehaved(self, blocked_s: float, abandoned: int) -> None:
        """Add the seconds in which a user's code blocked a node's loop, and its calls that were abandoned."""
        self._misbehaved["loop_blocked_s"] += blocked_s
        self._misbehaved["abandoned_calls"] += abandoned

    def trainers_returned(self) -> None:
        """The trainer ranks have come back."""
        self.restarts["trainer_restarts"] += 1

    def row(
        self,
        version: int,
        env: Mapping[str, float],
        trainer: Mapping[str, float],
        samples: SampleStore,
        engines: Sequence[EngineStatus],
        now: float,
    ) -> dict[str, float]:
        """The row of the step that made `version`; `env` is what the hub saw of its samples, `measured` of each.

        Times in seconds, `now` in Unix seconds.
        """
        ledger = samples.ledger
        ran = self._since is not None
        elapsed = max(trainer.get("trainer_step_s", 0.0), 0.0 if self._since is None else now - self._since, 1e-9)
        totals = ledger.totals(0)
        booked = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._since, self._before = now if ran else None, totals
        restarts, self.restarts = self.restarts, dict.fromkeys(self.restarts, 0)
        misbehaved, self._misbehaved = self._misbehaved, dict(NOTHING)
        before, self._ended_groups = self._ended_groups, _ended_groups(samples)
        ended, equal = (now - then for now, then in zip(self._ended_groups, before, strict=True))
        wait = max(0.0, min(trainer.get("trainer_wait_s", 0.0), elapsed - trainer.get("trainer_step_s", 0.0)))
        return {
            **trainer,
            "step": version - 1,
            "version": version,
            "time": now,
            "samples": booked["trained"],
            "stale_share": _stale_share(booked),
            **_failures(booked),
            "trainer_wait_s": wait,
            "interval_s": elapsed,
            **self._rates(wait / elapsed, booked["generated_tokens"] / elapsed, engines, ran=ran),
            "generated_tokens": ledger.generated_tokens,
            **self._accepted(engines),
            "engines": len(engines),
            **restarts,
            **misbehaved,
            "canary_error": self._canary_error,
            "queue_ready_groups": samples.pool.ready_groups,
            "in_flight": samples.in_flight,
            "stale_tokens": ledger.discarded_tokens.get(Outcome.STALE, 0),
            "wasted_tokens": sum(ledger.discarded_tokens.values()),
            "filtered": ledger.filtered,
            "equal_rewards_share": equal / max(ended, 1),
            "given_up": sum(ledger.given_up.values()),
            **samples.domains.row(samples.quarantined),
            **env,
        }

    def _rates(self, waits: float, tokens: float, engines: Sequence[EngineStatus], *, ran: bool) -> dict[str, float]:
        """Of the time since the last row; of engines since what they had told by then."""
        rates = {"trainer_wait_share": waits, "tokens_per_second": tokens} if ran else {}
        idle = lifetime = 0.0
        for engine in engines:
            before = self._idle.get(engine.index, (math.inf, math.inf))
            more_idle, more = engine.idle_s - before[0], engine.lifetime_s - before[1]
            if -ROUNDING_S <= more_idle <= more + ROUNDING_S:  # else it is new
                idle, lifetime = idle + more_idle, lifetime + more
            self._idle[engine.index] = engine.idle_s, engine.lifetime_s
        return rates | ({"engine_idle_share": idle / lifetime} if lifetime > 0 else {})

    def _accepted(self, engines: Sequence[EngineStatus]) -> dict[str, float]:
        """Of the tokens that were drafted since the last row."""
        drafted = accepted = 0
        for engine in engines:
            known = self._drafts.get(engine.index, (0, 0))
            more = engine.drafted - known[0], engine.accepted - known[1]
            if not 0 <= more[1] <= more[0]:  # it is new
                more = engine.drafted, engine.accepted
            drafted, accepted = drafted + more[0], accepted + more[1]
            self._drafts[engine.index] = engine.drafted, engine.accepted
        return {"draft_accepted_share": accepted / drafted} if drafted > 0 else {}


def _ended_groups(samples: SampleStore) -> tuple[int, int]:
    """Return the number of groups that ended in this run, and how many of them had equal rewards."""
    return samples.source.cursor.ended, samples.source.cursor.equal


def _stale_share(booked: Mapping[str, int]) -> float:
    """Of the tokens that were trained or grew too old, those that did."""
    stale = booked.get(f"discarded_tokens_{Outcome.STALE}", 0)
    return stale / max(stale + booked["trained_tokens"], 1)


def _failures(booked: Mapping[str, int]) -> dict[str, float]:
    """Attempts that failed, whether they were tried again or given up: all, and by reason where there are any."""
    kinds = {f"failures_{why}": booked.get(f"retried_{why}", 0) + booked.get(f"given_up_{why}", 0) for why in FAILURES}
    # Given up as cancelled is what redundancy withdraws; tried again is what a lost node had.
    kinds[f"failures_{Outcome.CANCELLED}"] = booked.get(f"retried_{Outcome.CANCELLED}", 0)
    return {"failures": sum(kinds.values()), **{name: count for name, count in kinds.items() if count}}
