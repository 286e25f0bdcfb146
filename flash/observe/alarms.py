"""What a person is told of a run's rows while it goes on: shares that are worth a change of the configuration.

Each alarm looks at the last rows together. It is given once, and again only after the share has been back at half of
its limit, so that one which hovers does not fill the terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flash.observe.summary import number

Row = Mapping[str, Any]

ROWS = 10
"""Steps that are looked at together."""
FEWEST = 3
"""Steps before the first alarm: those at the start of a run, or of one that goes on, are not like the others."""
LIMIT = 0.1
"""Share from which a person is told."""
MISMATCH = 0.01
"""The same for the mismatch of engine and trainer: bfloat16 makes 1e-4 to 1e-3 in dense models; from about here on runs
have been seen to collapse (Liu, Li et al. 2025, "When Speed Kills Stability")."""
BY_ENVIRONMENT = "mismatch_k3_env_"
"""Begins the names of its columns by environment."""


class Alarm(NamedTuple):
    """One share of a row, weighed by `weight`, and what to do about it."""

    share: Callable[[Row], float]
    weight: Callable[[Row], float]
    text: str
    """After the number."""
    limit: float = LIMIT
    shown: str = "{:.0%}"


def _number(row: Row, key: str) -> float:
    return number(row, key) or 0.0


ALARMS = (
    Alarm(
        lambda row: _number(row, "stale_share"),
        lambda row: _number(row, "trained_tokens"),
        "of the tokens were too old and not trained: raise train.async_ratio, shorten the answers "
        "(rollout.max_new_tokens), add engines, or set rollout.on_expire",
    ),
    Alarm(
        lambda row: _number(row, "masked_correction_share") + _number(row, "masked_cap_share"),
        lambda row: _number(row, "trained_tokens"),
        "of the trained tokens got weight 0 from the objective's cap or algorithm.corrections: lower "
        "train.async_ratio or train.learning_rate, or widen what masks them",
    ),
    Alarm(
        lambda row: _number(row, "failures") / max(_number(row, "failures") + _number(row, "samples"), 1.0),
        lambda row: _number(row, "failures") + _number(row, "samples"),
        "of the episodes failed and were tried again or given up: failures_WHY in metrics.jsonl counts them by reason",
    ),
)


def mismatch_alarm(key: str) -> Alarm:
    """Over the tokens of age 0, so that the policy's own drift is not in it."""
    where = f" in {key.removeprefix(BY_ENVIRONMENT)!r}" if key.startswith(BY_ENVIRONMENT) else ""
    return Alarm(
        lambda row: _number(row, key),
        lambda row: _number(row, "age_0") * _number(row, "trained_tokens") * (key in row),
        f"is the mismatch of engine and trainer at equal weights{where} (mean of w − 1 − log w): set "
        'model.dtype = "float32", use the objective tis, or one of algorithm.corrections',
        MISMATCH,
        "{:.2g}",
    )


class Alarms:
    """Feed it rows, read what to say."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=ROWS)
        self._raised: set[str] = set()

    def step(self, row: Row) -> list[str]:
        """The warnings that this row gives rise to."""
        self._rows.append(row)
        told: list[str] = []
        environments = [key for key in row if key.startswith(BY_ENVIRONMENT)]
        for alarm in (*ALARMS, *map(mismatch_alarm, environments or ["mismatch_k3_age_0"])):
            weight = sum(alarm.weight(one) for one in self._rows)
            share = sum(alarm.share(one) * alarm.weight(one) for one in self._rows) / max(weight, 1e-9)
            if share < alarm.limit / 2:
                self._raised.discard(alarm.text)
            elif share > alarm.limit and alarm.text not in self._raised and len(self._rows) >= FEWEST:
                self._raised.add(alarm.text)
                told.append(f"{alarm.shown.format(share)} {alarm.text} (the last {len(self._rows)} steps)")
        return told
