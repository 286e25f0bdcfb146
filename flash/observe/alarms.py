"""Alarms: warnings about the numbers of a run while it goes on, each with advice for the configuration.

`flash.observe.recorder` and `flash watch` call `Alarms.step` with the row of each step. An alarm compares the weighted
mean of the last `WINDOW` rows with its limit. It is raised once, and again only after its number has been well
within the limit: otherwise a number that hovers around its limit would fill the terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from flash.config.tree import AlarmName
from flash.observe.columns.column import Alarm, Column, Row, without_marks
from flash.observe.columns.speed import AFTER_RESTART
from flash.observe.columns.table import columns, named
from flash.observe.columns.training import SKIPPED, SKIPPED_NOW
from flash.observe.rundir.summary import number

WINDOW = 10
"""Number of steps in the mean that is compared with a limit. A single step may have an unusual batch."""
RECOVERED = 0.5
"""Distance from the limit, as a share of the limit, that a number must reach before its alarm can be raised again."""
MISMATCH = named("mismatch_k3_age_0")
"""Column that measures how far the log-probs of engines and trainer differ for the same tokens and weights."""
BY_ENVIRONMENT = named("mismatch_k3_env_NAME")
"""Replaces `MISMATCH` in a run with several environments: each environment has its own mismatch."""
ALARMS = {column.name: (column, column.alarm) for column in columns("step") if column.alarm is not None}
"""All alarms with their columns, by the name of the column, which is the key of its number in a row."""


class RaisedAlarm(NamedTuple):
    """Alarm that a step raised. The recorder prints it, and starts the command of `alarms.command` with it."""

    name: AlarmName
    """Name in the settings of `[alarms]`."""
    text: str
    """Line for people: the number, its meaning, advice, and the number of steps in the mean."""


class _Contribution(NamedTuple):
    """Contribution of a row to the mean of an alarm. Both numbers are 0 if the row does not have the alarm's number."""

    weight: float
    """Weight of the row in the mean (`Alarm.weight`)."""
    weighted: float
    """The alarm's number in the row times the weight."""


class Alarms:
    """State of all alarms of a run: numbers of the last rows, and the alarms that are raised now.

    A *key* is the name of a number in a row. Each alarm has one, but the mismatch has one for each environment.
    """

    def __init__(self, off: Collection[AlarmName] = ()) -> None:
        """Start without rows. `off`: names of alarms that are never raised."""
        self._off = off
        self._contributions: deque[dict[str, _Contribution]] = deque(maxlen=WINDOW)
        """Contributions of each of the last rows, by the key of the alarm."""
        self._raised: set[str] = set()
        """Keys whose alarm was raised, and whose number has not been well within the limit since (`RECOVERED`)."""
        self._skipped: float | None = None
        """Number of updates of the whole run that were skipped until the last row; None before the first row, or if the
        last row has no such number."""
        self._restarted = False
        """True if the last row counted a restart."""

    def step(self, row: Row) -> list[RaisedAlarm]:
        """Add the row of a step, and return the alarms that it raises."""
        # The number of a step's restarts is in its row, but the waiting for the restart may be in the next one.
        restarted = bool(number(row, "engine_restarts") or number(row, "trainer_restarts"))
        row = {**row, SKIPPED_NOW: self._skipped_now(row), AFTER_RESTART: restarted or self._restarted}
        self._restarted = restarted
        alarms = _alarms_by_key(row)
        self._contributions.append({key: _contribution(key, alarm, row) for key, (_, alarm) in alarms.items()})
        return list(self._raise(alarms))

    def _raise(self, alarms: Mapping[str, tuple[Column, Alarm]]) -> Iterator[RaisedAlarm]:
        """Compare the mean of each number with its limit, and yield the alarms that are newly raised.

        `alarms` has the alarms by key, from `_alarms_by_key`. The newest row must have been added.
        """
        rows = self._contributions
        for key, (column, alarm) in alarms.items():
            limit = alarm.limit
            known = [by_key[key] for by_key in rows if key in by_key]
            weight = sum(one.weight for one in known)
            if alarm.name in self._off or weight == 0:
                continue  # weight 0: no row has the number
            mean = sum(one.weighted for one in known) / weight
            beyond = limit - mean if alarm.below else mean - limit
            # The number is far on the healthy side of the limit: the alarm may be raised again.
            if beyond <= -RECOVERED * limit:
                self._raised.discard(key)
            if beyond > 0 and len(rows) >= alarm.min_steps and key not in self._raised:
                self._raised.add(key)
                count = len(rows)
                last = f"the last {count} steps" if count > 1 else "the last step"
                shown = f"{mean:.0%}" if alarm.is_share(column) else f"{mean:.2g}"
                # If the key is not the column's name, it is the key of one environment's mismatch.
                where = "" if key == column.name else f" in {BY_ENVIRONMENT.placeholder_text(key)!r}"
                text = f"{shown} {alarm.message.format(where)}: {without_marks(column.helps)} ({last})"
                yield RaisedAlarm(alarm.name, text)

    def _skipped_now(self, row: Row) -> float:
        """Return the number of updates that this step skipped; 0 in the first row of a process. Remembers the count.

        The column counts for the whole run, so the first value of a resumed run is from earlier steps.
        """
        before, self._skipped = self._skipped, number(row, SKIPPED)
        return 0.0 if before is None or self._skipped is None else self._skipped - before


def _alarms_by_key(row: Row) -> Mapping[str, tuple[Column, Alarm]]:
    """Return the alarms with their columns, by the key of `row` that each is about.

    In a row with a mismatch for each environment, each of these keys has the alarm of the mismatch.
    """
    environments = [key for key in row if BY_ENVIRONMENT.placeholder_text(key) is not None]
    if not environments:
        return ALARMS
    without_mismatch = {key: alarm for key, alarm in ALARMS.items() if key != MISMATCH.name}
    return without_mismatch | dict.fromkeys(environments, ALARMS[MISMATCH.name])


def _contribution(key: str, alarm: Alarm, row: Row) -> _Contribution:
    """Return the contribution of a row to the mean of an alarm, whose key is `key`."""
    value = number(row, key) if alarm.number is None else alarm.number(row)
    # `alarm.number` returns a value for any row, also for one without the numbers that it needs.
    if value is None or key not in row:
        return _Contribution(0.0, 0.0)
    weight = alarm.weight(row)
    return _Contribution(weight, value * weight)
