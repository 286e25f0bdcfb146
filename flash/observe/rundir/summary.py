"""What a run comes down to: computed from the rows it recorded, so that any reader can compute it again."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flash.config.tree import Config

Row = Mapping[str, Any]

DOMAIN = re.compile(r"domain/(.+)/(?:reward|share)")
"""Metrics of a domain, by which its name is known."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`. None stands for what was never measured."""

    initial_reward: float | None
    """Mean reward of the first held-out evaluation."""
    final_reward: float | None
    """Mean reward of the last held-out evaluation."""
    initial_step: int | None
    """Step before which the first held-out evaluation was made."""
    final_step: int | None
    """The same of the last one; equal where there is only one."""
    binary: bool
    """Whether every held-out reward was 0 or 1: then these two are means."""
    steps: int
    samples: int
    """Samples of which a token was trained, as in the ledger."""
    trained_tokens: int
    """Response tokens that entered the loss, as in the ledger."""
    stale_share: float | None
    """Share of the response tokens that were too old to be trained; the rest was trained."""
    failures: int
    """Attempts at a training sample that failed, tried again or given up."""
    wall_seconds: float
    tokens_per_second: float | None
    """Generated tokens per second of the time in which steps were made."""
    async_ratio: float
    trainer_wait_share: float | None
    """Share of the trainer's time spent waiting for batches."""
    engine_idle_share: float | None
    """Share of their time the engines had no request, in the steps."""
    max_age: float | None
    """Age of the oldest token that was trained, in versions."""
    ledger: dict[str, Any]
    restarts: int
    """Of the hub, with the engines of the first node."""
    trainer_restarts: int
    """Of the trainer ranks, while the run went on."""
    engine_restarts: int
    """How often an engine that had died was started again."""
    seed: int
    model: str
    objective: str
    canary_error: float | None
    """Largest difference between an engine's log-probs and the trainer's after a swap."""
    error: str = ""
    """What ended it, where an error did."""


def summarise(
    config: Config,
    metrics: Sequence[Row],
    evaluations: Sequence[Row],
    *,
    undone: Sequence[Row] = (),
    ledger: Mapping[str, Any],
    restarts: int,
    error: str = "",
) -> Summary:
    """Sum up a run from its rows; missing keys count as not measured.

    `undone` are rows of steps that were done again: their restarts have happened all the same.
    """
    held_out = [row for row in by_step(evaluations) if number(row, "mean_reward") is not None] or [{}]
    first, last = held_out[0], held_out[-1]
    return Summary(
        initial_reward=number(first, "mean_reward"),
        final_reward=number(last, "mean_reward"),
        initial_step=_whole(first, "step"),
        final_step=_whole(last, "step"),
        binary=bool(evaluations) and all(number(row, "binary") == 1 for row in evaluations),
        steps=1 + int(max((number(row, "step") or 0 for row in metrics), default=-1)),
        samples=int(number(ledger, "trained") or 0),
        trained_tokens=int(number(ledger, "trained_tokens") or 0),
        stale_share=_stale_share(ledger),
        failures=int(sum(number(row, "failures") or 0 for row in metrics)),
        wall_seconds=max((number(row, "wall_s") or 0.0 for row in (*metrics, *evaluations)), default=0.0),
        tokens_per_second=_over_time(metrics, "tokens_per_second"),
        async_ratio=config.train.async_ratio,
        trainer_wait_share=_wait_share(metrics),
        engine_idle_share=_over_time(metrics, "engine_idle_share"),
        max_age=max((age for row in metrics if (age := number(row, "age_max")) is not None), default=None),
        ledger=dict(ledger),
        restarts=restarts,
        trainer_restarts=_counted("trainer_restarts", metrics, undone),
        engine_restarts=_counted("engine_restarts", metrics, undone),
        seed=config.run.seed,
        model=config.model.path,
        objective=config.algorithm.objective,
        canary_error=max((far for row in metrics if (far := number(row, "canary_error")) is not None), default=None),
        error=error,
    )


def _whole(row: Row, key: str) -> int | None:
    return None if (value := number(row, key)) is None else int(value)


def _counted(name: str, *rows: Sequence[Row]) -> int:
    return int(sum(number(row, name) or 0 for some in rows for row in some))


def _stale_share(ledger: Row) -> float | None:
    stale = number(ledger, "discarded_tokens_stale") or 0
    known = stale + (number(ledger, "trained_tokens") or 0)
    return stale / known if known else None


def domains_of(*rows: Mapping[str, Any]) -> list[str]:
    """The names of the domains that these rows tell of, in order."""
    found = {match[1] for row in rows for key in row if (match := DOMAIN.fullmatch(key)) is not None}
    return sorted(found)


def number(row: Row, key: str) -> float | None:
    """The finite number under `key`, or None; an integer that no float can hold is none."""
    value = row.get(key)
    return value if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max else None


def by_step(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of their steps; of a step that was recorded twice, the later record."""
    latest = {row["step"]: row for row in rows if number(row, "step") is not None}
    return [latest[step] for step in sorted(latest)]


def _step_seconds(row: Row) -> float:
    """Wall time one step stands for: recorded, or from its token count and rate; 0 when unknown."""
    if (seconds := number(row, "interval_s")) is not None:
        return seconds
    tokens, rate = number(row, "tokens"), number(row, "tokens_per_second")
    return tokens / rate if tokens is not None and rate else 0.0


def _over_time(metrics: Sequence[Row], key: str) -> float | None:
    """The rows' rates or shares, weighted by time: start-up, restarts and the last evaluation do not dilute it."""
    known = [(rate, _step_seconds(row)) for row in metrics if (rate := number(row, key)) is not None]
    seconds = sum(step for _, step in known)
    return sum(rate * step for rate, step in known) / seconds if seconds else None


def _wait_share(metrics: Sequence[Row]) -> float | None:
    """As of each row, over all of them: of the time from step to step, the part in which the trainer waited."""
    known = [
        (wait, seconds)
        for row in metrics
        if (wait := number(row, "trainer_wait_s")) is not None and (seconds := number(row, "interval_s")) is not None
    ]
    total = sum(seconds for _, seconds in known)
    return sum(wait for wait, _ in known) / total if total else None
