"""What a person is told of a run's rows while it goes on: numbers that are worth a change of the configuration.

Each alarm looks at the last rows together. It is given once, and again only after its number has been well within its
limit, so that one which hovers does not fill the terminal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flash.config.alarms import AlarmName, AlarmsConfig
from flash.observe.rundir.summary import number

Row = Mapping[str, Any]

FEWEST = 3
"""Steps before the first alarm: those at the start of a run, or of one that goes on, are not like the others."""
WELL = 0.5
"""Distance from the limit, as a share of it, at which an alarm may be given again."""
BY_ENVIRONMENT = "mismatch_k3_env_"
"""Begins the names of its columns by environment."""
SKIPPED = "skipped_steps"
"""The counter of updates that were left out for a non-finite gradient."""
FINITE = ("loss", "entropy", "grad_norm")
"""What every step of a run that is well has as finite numbers."""


class Alarm(NamedTuple):
    """One number of a row, weighed by `weight`, and what to do about it."""

    name: AlarmName
    number: Callable[[Row], float]
    weight: Callable[[Row], float]
    text: str
    """After the number."""
    below: bool = False
    """Whether it is given below its limit, and not above."""
    shown: str = "{:.0%}"
    fewest: int = FEWEST


class Given(NamedTuple):
    """An alarm that is given now."""

    name: AlarmName
    text: str


def _number(row: Row, key: str) -> float:
    return number(row, key) or 0.0


def _of(key: str) -> Callable[[Row], float]:
    return lambda row: _number(row, key)


def _steps_with(key: str) -> Callable[[Row], float]:
    """Each step that has the number counts the same."""
    return lambda row: float(number(row, key) is not None)


def _tokens_with(key: str) -> Callable[[Row], float]:
    return lambda row: _number(row, "trained_tokens") * (number(row, key) is not None)


def _nonfinite(row: Row) -> float:
    bad = any(isinstance(value := row.get(key), float) and not math.isfinite(value) for key in FINITE)
    return float(bad or _number(row, "skipped_now") > 0)


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "stale",
        _of("stale_share"),
        _of("trained_tokens"),
        "of the tokens were too old and not trained: raise train.async_ratio, shorten the answers "
        "(rollout.max_new_tokens), add engines, or set rollout.on_expire",
    ),
    Alarm(
        "masked",
        lambda row: _number(row, "masked_correction_share") + _number(row, "masked_cap_share"),
        _of("trained_tokens"),
        "of the trained tokens got weight 0 from the objective's cap or algorithm.corrections: lower "
        "train.async_ratio or train.learning_rate, or widen what masks them",
    ),
    Alarm(
        "failures",
        lambda row: _number(row, "failures") / max(_number(row, "failures") + _number(row, "samples"), 1.0),
        lambda row: _number(row, "failures") + _number(row, "samples"),
        "of the episodes failed and were tried again or given up: failures_WHY in metrics.jsonl counts them by reason",
    ),
    Alarm(
        "ess",
        _of("ess"),
        _tokens_with("ess"),
        "is the effective share of the tokens, since the others have drifted too far from the policy: lower "
        "train.async_ratio or train.learning_rate",
        below=True,
    ),
    Alarm(
        "clipping",
        _of("clip_fraction"),
        _tokens_with("clip_fraction"),
        "of the tokens have their gradient clipped: lower train.async_ratio, train.learning_rate or "
        "train.minibatches, or use m2po or cispo, which keep more of it",
    ),
    Alarm(
        "entropy",
        _of("entropy"),
        _tokens_with("entropy"),
        "nats is the entropy of the policy, which hardly explores any more: where the reward is not high yet, lower "
        "train.learning_rate, or set algorithm.entropy_bonus",
        below=True,
        shown="{:.2g}",
    ),
    Alarm(
        "equal_rewards",
        lambda row: float(_number(row, "advantage_abs_mean") == 0),
        _steps_with("advantage_abs_mean"),
        "of the steps had nothing to learn from, since the rewards of each group were equal: take problems that are "
        "neither too easy nor too hard, grade the reward, raise rollout.group_size, or set rollout.drop_equal_rewards",
    ),
    Alarm(
        "age",
        _of("age_mean"),
        _tokens_with("age_mean"),
        "versions is the mean age of the trained tokens: lower train.async_ratio, or add engines",
        shown="{:.2g}",
    ),
    Alarm(
        "lag",
        _of("lag_scale"),
        _steps_with("lag_scale"),
        "of the learning rate is left by algorithm.lag, since the policy runs away from those that sampled: lower "
        "train.async_ratio or train.learning_rate; the steps are taken all the same, only smaller",
        below=True,
    ),
    Alarm(
        "trainer_waits",
        _of("trainer_wait_share"),
        _of("interval_s"),
        "of its time the trainer waited for batches: give more of the devices to engines, or raise train.async_ratio; "
        "flash simulate says how many",
    ),
    Alarm(
        "engines_idle",
        _of("engine_idle_share"),
        _of("interval_s"),
        "of their time the engines had no request: give more of the devices to the trainer, or raise "
        "train.async_ratio or rollout.max_concurrent",
    ),
    Alarm(
        "nonfinite",
        _nonfinite,
        lambda row: 1.0,
        "of the steps had a loss or a gradient that is no finite number: lower train.learning_rate, or set "
        'model.dtype = "float32", and look in plots/offpolicy.png for what moved first',
        fewest=1,
    ),
)


def _measured(alarm: Alarm, row: Row) -> tuple[float, float]:
    weight = alarm.weight(row)
    return weight, alarm.number(row) * weight


def mismatch_alarm(key: str) -> Alarm:
    """Over the tokens of age 0, so that the policy's own drift is not in it."""
    where = f" in {key.removeprefix(BY_ENVIRONMENT)!r}" if key.startswith(BY_ENVIRONMENT) else ""
    return Alarm(
        "mismatch",
        _of(key),
        lambda row: _number(row, "age_0") * _number(row, "trained_tokens") * (key in row),
        f"is the mismatch of engine and trainer at equal weights{where} (mean of w − 1 − log w): set "
        'model.dtype = "float32", use the objective tis, or one of algorithm.corrections',
        shown="{:.2g}",
    )


class Alarms:
    """Feed it rows, read what to say."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self._measured: deque[dict[str, tuple[float, float]]] = deque(maxlen=config.window)
        """Of the last rows, by an alarm's text: what the row weighs in it, and its number times that."""
        self._raised: set[str] = set()
        self._skipped: float | None = None

    def step(self, row: Row) -> list[Given]:
        """The alarms that this row gives rise to."""
        row = {**row, "skipped_now": self._skipped_now(row)}
        environments = [key for key in row if key.startswith(BY_ENVIRONMENT)]
        alarms = [*ALARMS, *map(mismatch_alarm, environments or ["mismatch_k3_age_0"])]
        self._measured.append({alarm.text: _measured(alarm, row) for alarm in alarms})
        return list(self._given(alarms))

    def _given(self, alarms: Sequence[Alarm]) -> Iterator[Given]:
        rows = self._measured
        for alarm in alarms:
            limit: float | None = getattr(self._config, alarm.name)
            known = [measured[alarm.text] for measured in rows if alarm.text in measured]
            weight = sum(weight for weight, _ in known)
            if limit is None or weight == 0:
                continue
            found = sum(weighed for _, weighed in known) / weight
            beyond = limit - found if alarm.below else found - limit
            if beyond <= -WELL * limit:
                self._raised.discard(alarm.text)
            # The first rows of a small window are all that there will ever be.
            enough = len(rows) >= min(alarm.fewest, self._config.window)
            if beyond > 0 and enough and alarm.text not in self._raised:
                self._raised.add(alarm.text)
                count = len(rows)
                last = f"the last {count} steps" if count > 1 else "the last step"
                yield Given(alarm.name, f"{alarm.shown.format(found)} {alarm.text} ({last})")

    def _skipped_now(self, row: Row) -> float:
        """Updates of this step that were left out: the counter is the run's, and its first value may be an old one."""
        before, self._skipped = self._skipped, number(row, SKIPPED)
        return 0.0 if before is None or self._skipped is None else self._skipped - before
