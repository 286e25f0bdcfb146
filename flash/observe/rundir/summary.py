"""Summary of a run, computed from its recorded rows, so that any reader can compute it again.

`flash.observe.recorder.write_summary` computes it when a run has ended. `number` and `by_step`, which read numbers and
steps from rows, are used by everything that reads rows.

A *row* is a line of `metrics.jsonl`, one for each step, or of `evals.jsonl`, one for each evaluation on held-out
problems: numbers by the names of their columns (`flash.observe.columns`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flash.config.tree import Config

Row = Mapping[str, Any]

DOMAIN = re.compile(r"domain/((?s:.+))/(?:reward|share)")
"""Column names that contain the name of a domain (the group): a kind of problems that has its own share of the trained
groups of samples."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`. A value that was never measured is None."""

    initial_reward: float | None
    """Mean reward of the first held-out evaluation."""
    final_reward: float | None
    """Mean reward of the last held-out evaluation."""
    initial_step: int | None
    """Step before which the first held-out evaluation was made."""
    final_step: int | None
    """Step before which the last held-out evaluation was made. Equal to `initial_step` if there is only one."""
    binary: bool
    """True if every held-out reward was 0 or 1. The mean rewards are then accuracies."""
    steps: int
    """Steps that were made."""
    samples: int
    """Samples of which a token was trained, as in the ledger."""
    trained_tokens: int
    """Response tokens that entered the loss, as in the ledger."""
    stale_share: float | None
    """Share of too old tokens among all response tokens that were trained or were too old."""
    failures: int
    """Failed attempts at training samples. After each, the sample was tried again or given up."""
    wall_seconds: float
    """Seconds from the start of the run to its last row, without the time between an end and a resume."""
    tokens_per_second: float | None
    """Generated tokens per second of the time in which steps were made."""
    async_ratio: float
    """`train.async_ratio` of the configuration, as are `seed`, `model` and `objective`."""
    trainer_wait_share: float | None
    """Share of the trainer's time spent waiting for batches."""
    engine_idle_share: float | None
    """Share of the engines' time in which they had no request, while steps were made."""
    max_age: float | None
    """Age of the oldest token that was trained, in versions."""
    ledger: dict[str, Any]
    """Counts of samples and tokens by their fate, as in `ledger.json`."""
    restarts: int
    """Restarts of the hub. The engines of the first node restart with it."""
    trainer_restarts: int
    """Restarts of the trainer ranks while the hub went on."""
    engine_restarts: int
    """Number of times that an engine died and was started again."""
    seed: int
    model: str
    """Folder or hub id of the model that the run began with."""
    objective: str
    """Name of the loss."""
    canary_error: float | None
    """Largest mean difference in nats between an engine's log-probs and the trainer's, after a swap of weights."""
    error: str = ""
    """Error that ended the run; empty if none did."""


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
    """Compute the summary of a run from its rows. Missing keys count as not measured.

    Args:
        config: configuration of the run.
        metrics: rows of the steps.
        evaluations: rows of the evaluations.
        undone: rows of steps that a resumed run made again, and restarts after the last step. Only their numbers of
            restarts count, since all their other numbers are in `metrics` or were undone.
        ledger: totals of the ledger, which counts the fate of each sample and token.
        restarts: number of restarts of the hub.
        error: message of the error that ended the run; empty if none did.
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
    """Return the number under `key` as an integer; None if the row has none."""
    return None if (value := number(row, key)) is None else int(value)


def _counted(name: str, *sequences: Sequence[Row]) -> int:
    """Return the sum of the column `name` over all rows of several sequences. Rows without it count as 0."""
    return int(sum(number(row, name) or 0 for rows in sequences for row in rows))


def _stale_share(ledger: Row) -> float | None:
    """Return the share of the response tokens that were too old to be trained, among these and the trained ones.

    None if no token was trained or too old.
    """
    stale = number(ledger, "discarded_tokens_stale") or 0
    known = stale + (number(ledger, "trained_tokens") or 0)
    return stale / known if known else None


def domains_of(*rows: Mapping[str, Any]) -> list[str]:
    """Return the names of the domains that these rows have columns of, in alphabetical order."""
    found = {match[1] for row in rows for key in row if (match := DOMAIN.fullmatch(key)) is not None}
    return sorted(found)


def number(row: Row, key: str) -> float | None:
    """Return the finite number under `key`; None if the row has none. True and False are no numbers.

    A row may have been read from a file that people or other programs have changed, so its values may be anything.
    """
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # The comparison is False for NaN and infinities, and for integers that are too large to become a float.
    return value if abs(value) <= sys.float_info.max else None


def by_step(rows: Sequence[Row]) -> list[Row]:
    """Return rows in the order of their steps. If a step was recorded twice, only its later row is returned."""
    latest = {row["step"]: row for row in rows if number(row, "step") is not None}
    return [latest[step] for step in sorted(latest)]


def _step_seconds(row: Row) -> float:
    """Return the seconds from the end of the step before to the end of this row's step; 0 if unknown.

    A row without `interval_s` gets them from its tokens and their rate.
    """
    if (seconds := number(row, "interval_s")) is not None:
        return seconds
    tokens, rate = number(row, "tokens"), number(row, "tokens_per_second")
    return tokens / rate if tokens is not None and rate else 0.0


def _over_time(metrics: Sequence[Row], key: str) -> float | None:
    """Return the mean of the column `key`, a rate or a share, weighted by the steps' seconds; None if not measured.

    Times without a step, such as start-up, restarts and the last evaluation, do not lower it.
    """
    known = [(rate, _step_seconds(row)) for row in metrics if (rate := number(row, key)) is not None]
    seconds = sum(step for _, step in known)
    return sum(rate * step for rate, step in known) / seconds if seconds else None


def _wait_share(metrics: Sequence[Row]) -> float | None:
    """Return the share of all steps' seconds in which the trainer waited for a batch; None if no row has both."""
    known = [
        (wait, seconds)
        for row in metrics
        if (wait := number(row, "trainer_wait_s")) is not None and (seconds := number(row, "interval_s")) is not None
    ]
    total = sum(seconds for _, seconds in known)
    return sum(wait for wait, _ in known) / total if total else None
