"""What a person is told of a run's rows while it goes on: numbers that are worth a change of the configuration.

Each alarm looks at the last rows together. It is given once, and again only after its number has been well within its
limit, so that one which hovers does not fill the terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flash.config.observe import AlarmName, AlarmsConfig
from flash.observe.columns.column import Alarm, Column, Row, without_marks
from flash.observe.columns.speed import AFTER_RESTART
from flash.observe.columns.table import columns, named
from flash.observe.columns.training import SKIPPED, SKIPPED_NOW
from flash.observe.rundir.summary import number

WELL = 0.5
"""Distance from the limit, as a share of it, at which an alarm may be given again."""
MISMATCH = named("mismatch_k3_age_0")
BY_ENVIRONMENT = named("mismatch_k3_env_NAME")
"""In its place, where there are several environments: each has its own mismatch."""
ALARMS = {column.name: (column, column.alarm) for column in columns("step") if column.alarm is not None}


class Given(NamedTuple):
    """An alarm that is given now."""

    name: AlarmName
    text: str


class Alarms:
    """Feed it rows, read what to say."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self._measured: deque[dict[str, tuple[float, float]]] = deque(maxlen=config.window)
        """Of the last rows, by the column: what the row weighs in its alarm, and the alarm's number times that."""
        self._raised: set[str] = set()
        self._skipped: float | None = None
        self._restarted = False
        """Whether the last row told of a restart."""

    def step(self, row: Row) -> list[Given]:
        """The alarms that this row gives rise to."""
        restarted = bool(number(row, "engine_restarts") or number(row, "trainer_restarts"))
        row = {**row, SKIPPED_NOW: self._skipped_now(row), AFTER_RESTART: restarted or self._restarted}
        self._restarted = restarted
        alarms = _looking_at(row)
        self._measured.append({key: _measured(key, alarm, row) for key, (_, alarm) in alarms.items()})
        return list(self._given(alarms))

    def _given(self, alarms: Mapping[str, tuple[Column, Alarm]]) -> Iterator[Given]:
        rows = self._measured
        for key, (column, alarm) in alarms.items():
            limit: float | None = getattr(self._config, alarm.name)
            known = [measured[key] for measured in rows if key in measured]
            weight = sum(weight for weight, _ in known)
            if limit is None or weight == 0:
                continue
            found = sum(weighed for _, weighed in known) / weight
            beyond = limit - found if alarm.below else found - limit
            if beyond <= -WELL * limit:
                self._raised.discard(key)
            # The first rows of a small window are all that there will ever be.
            enough = len(rows) >= min(alarm.fewest, self._config.window)
            if beyond > 0 and enough and key not in self._raised:
                self._raised.add(key)
                count = len(rows)
                last = f"the last {count} steps" if count > 1 else "the last step"
                shown = f"{found:.0%}" if alarm.is_share(column) else f"{found:.2g}"
                where = "" if key == column.name else f" in {BY_ENVIRONMENT.kind(key)!r}"
                said = f"{shown} {alarm.says.format(where)}: {without_marks(column.helps)} ({last})"
                yield Given(alarm.name, said)

    def _skipped_now(self, row: Row) -> float:
        """Updates of this step that were left out: the counter is the run's, and its first value may be an old one."""
        before, self._skipped = self._skipped, number(row, SKIPPED)
        return 0.0 if before is None or self._skipped is None else self._skipped - before


def _looking_at(row: Row) -> Mapping[str, tuple[Column, Alarm]]:
    """The alarms, by the key of a row that each looks at."""
    environments = [key for key in row if BY_ENVIRONMENT.kind(key) is not None]
    if not environments:
        return ALARMS
    others = {key: one for key, one in ALARMS.items() if key != MISMATCH.name}
    return others | dict.fromkeys(environments, ALARMS[MISMATCH.name])


def _measured(key: str, alarm: Alarm, row: Row) -> tuple[float, float]:
    """What the row weighs, and the alarm's number times that."""
    found = number(row, key) if alarm.number is None else alarm.number(row)
    if found is None or key not in row:
        return 0.0, 0.0
    weight = alarm.weight(row)
    return weight, found * weight
