"""The screen of `flash watch`: the state of a run in a terminal. It only reads the files that the run writes.

`flash.cli.runs` makes one `Watched`, and prints its `picture` every second until the user ends the command.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from flash.config.load import load
from flash.errors import ConfigError
from flash.observe.alarms import Alarms
from flash.observe.cluster import CLUSTER_NUMBERS, Cluster, EngineNow, NodeNow, engines_of, read_cluster
from flash.observe.columns.column import clock
from flash.observe.columns.table import columns, named
from flash.observe.console import RECENT_STEPS, domain_line, evaluation_line
from flash.observe.rundir.rundir import Followed, RunDirectory, open_regular_file
from flash.observe.rundir.summary import number
from flash.text import one_line

Row = Mapping[str, Any]
"""A line of `metrics.jsonl` or `evals.jsonl`: numbers by the names of their columns."""

QUIET_S = 60.0
"""Seconds without a step from which on the title says how long ago the last step was."""
SHOWN_ALARMS = 5
"""Largest number of alarms that are shown: the last ones."""
MEAN_OF = 20
"""Number of last steps over which the means of the table are taken."""
BAR = 24
"""Characters of a bar."""
TABLE_COLUMNS, LEAST_SPARKLINE = 52, 8
"""Width of the table without sparklines, and the smallest width of a sparkline that is drawn, in terminal columns."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from the lowest value to the highest."""
OLD_S = 15.0
"""Age in seconds from which on the state of the cluster is called old. A live run writes it every two seconds."""
MOST_KINDS, MOST_NODES = 5, 3
"""Largest number of kinds of failures, and of missing nodes, that are shown."""
MESSAGE = 160
"""Largest number of characters of a message. The web page shows all of it."""


EVALUATED = (named("mean_reward", "evaluation"), named("held_out_nll", "evaluation"))
"""Columns of evaluations. All other columns here are of steps."""
NUMBERS = (
    *map(named, ("reward_mean", "nll")),
    *EVALUATED,
    *map(named, ("entropy", "grad_norm", "ess", "clip_fraction", "age_mean", "stale_share", "mismatch_k3_age_0")),
    named("tokens_per_second"),
)
"""Columns that have a line with last value, mean and sparkline. No run has all of them: `flash sft` has losses (`nll`)
in place of rewards."""
WAITS = tuple(map(named, ("trainer_wait_share", "engine_idle_share")))
"""Columns with shares of time, which are shown as bars."""
COUNTERS = (
    *map(named, ("engines", "in_flight", "queue_ready_groups", "failures", "given_up", "filtered")),
    *map(named, ("engine_restarts", "trainer_restarts")),
)
"""Columns with counters, whose last values are shown in one line."""


class Watched:
    """State of a run directory that is followed while the run writes it.

    The constructor raises RunDirectoryError if the run's configuration is no regular file, or may not be read.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._steps = Followed(directory.metrics, dict[str, Any])
        """Rows of the steps. `picture` reads new ones."""
        self._evals = Followed(directory.evals, dict[str, Any])
        """Rows of the evaluations. `picture` reads new ones."""
        self._restarts_seen = -1
        """`self._steps.restarts` at the last call of `_reset_alarms`."""
        self._facts: dict[str, str] = {}
        """Main settings of the run, under names for people."""
        self._reset_alarms()

    def _reset_alarms(self) -> None:
        """Make new alarms that have seen no row, and forget those that are shown.

        The constructor calls this, and `picture` if a resumed run has replaced the rows.

        Raises:
            RunDirectoryError: the configuration is no regular file, or it may not be read.
        """
        self._alarms = self._new_alarms()
        """Alarms, of which those are left out that the configuration turns off; None while it cannot be read."""
        self._raised: deque[str] = deque(maxlen=SHOWN_ALARMS)
        """Texts of the last alarms, which the screen shows."""
        self._checked = 0
        """Number of rows that the alarms have seen."""
        self._restarts_seen = self._steps.restarts

    def _new_alarms(self) -> Alarms | None:
        """Return the alarms of the run's configuration; None if another version of Flash wrote it or it is missing."""
        try:
            # Raises if the configuration is a pipe, at which `load` would block.
            with open_regular_file(self._directory.config):
                pass
            return Alarms(load([self._directory.config], []).alarms.off)
        except (ConfigError, FileNotFoundError):
            return None

    def picture(self, now: float, width: int) -> Group:
        """Read the new rows of the run, and return the screen. `flash watch` calls this every second.

        `now` is in Unix seconds, `width` is that of the terminal in columns.

        Raises:
            RunDirectoryError: a file of the run cannot be read.
        """
        self._facts = self._directory.facts()  # a resumed run may have more steps than before
        self._steps.read()
        self._evals.read()
        if self._steps.restarts != self._restarts_seen:
            self._reset_alarms()
        elif self._alarms is None:  # a folder has no configuration for a moment while a new run replaces another
            self._alarms = self._new_alarms()
        rows, evals = self._steps.rows, self._evals.rows
        if self._alarms is not None:
            for row in rows[self._checked :]:
                step = f"step {number(row, 'step') or 0:.0f}"
                self._raised.extend(f"{step}: {alarm.text}" for alarm in self._alarms.step(row))
            self._checked = len(rows)
        cluster = read_cluster(self._directory)
        return Group(*self._parts(rows, evals, now, width), *(() if cluster is None else cluster_lines(cluster, now)))

    def _parts(self, rows: Sequence[Row], evals: Sequence[Row], now: float, width: int) -> Iterator[Table | Text]:
        """Yield the parts of the screen that come from rows and settings, from top to bottom."""
        yield self._title(rows, now)
        known = [f"{name} {value}" for name, value in self._facts.items()]
        yield Text(one_line("  ".join(known)), style="dim")
        if rows:
            yield Text()
            yield numbers(rows, evals, width)
            yield Text()
            yield from waits(rows[-MEAN_OF:])
            yield counts(rows[-1])
        if rows and (domains := domain_line(rows[-1])):
            yield Text(one_line(domains.strip()))
        if evals:
            step = number(evals[-1], "step") or 0
            yield Text(one_line(f"evaluation at step {step:.0f}: {evaluation_line(evals[-1])}"), style="green")
        for text in self._raised:
            yield Text(one_line(f"alarm at {text}"), style="yellow")

    def _title(self, rows: Sequence[Row], now: float) -> Text:
        """Return the first line: the run's name, its progress, and its end, silence or remaining time."""
        setting = self._facts.get("steps", "")
        steps = int(setting) if setting.isdecimal() else 0
        done = 0 if not rows else int(number(rows[-1], "step") or 0) + 1
        title = Text(one_line(self._directory.path.resolve().name), style="bold")
        title.append(f"  step {done}/{steps} {bar(done / steps if steps else 0.0)}", style="default")
        if self._directory.has_ended():
            return title.append("  ended", style="cyan")
        if not self._directory.config.exists():
            return title.append("  gone: its directory was moved or removed", style="bold yellow")
        if not rows:
            return title.append("  no step yet", style="cyan")
        walls = [wall for row in rows[-RECENT_STEPS - 1 :] if (wall := number(row, "wall_s")) is not None]
        silent = now - (number(rows[-1], "time") or now)
        if silent > QUIET_S:
            return title.append(f"  no step for {clock(silent)}", style="bold yellow")
        if len(walls) > 1:
            title.append(f"  {clock((walls[-1] - walls[0]) / (len(walls) - 1) * max(0, steps - done))} left")
        return title


def numbers(rows: Sequence[Row], evals: Sequence[Row], width: int) -> Table:
    """Return a table with a line for each measured number.

    A line has the last value, the mean of the last `MEAN_OF` values (none for evaluations) and, if `width` is large
    enough, a sparkline of all values. Numbers that no recent row has are left out.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column(f"mean of {MEAN_OF}", justify="right", no_wrap=True)
    room = width - TABLE_COLUMNS
    if room >= LEAST_SPARKLINE:
        table.add_column("so far", no_wrap=True)
    for line in NUMBERS:
        values = [line.value_in(row) for row in (evals if line in EVALUATED else rows)]
        recent = [value for value in values[-MEAN_OF:] if value is not None]
        if not recent:
            continue
        mean = None if line in EVALUATED else sum(recent) / len(recent)
        cells = [line.label, line.text(values[-1]), line.text(mean)]
        table.add_row(*cells, *([sparkline(values, room)] if room >= LEAST_SPARKLINE else []))
    return table


def waits(rows: Sequence[Row]) -> Iterator[Text]:
    """Yield a bar for the waiting trainer and one for the idle engines, as shares of the time of `rows`, last steps."""
    for column in WAITS:
        known = [
            (value, number(row, "interval_s") or 0.0) for row in rows if (value := number(row, column.name)) is not None
        ]
        # The summary weights by time, too: a long step counts for more than a short one.
        if seconds := sum(weight for _, weight in known):
            share = sum(value * weight for value, weight in known) / seconds
            steps = f"last {len(known)} steps" if len(known) > 1 else "last step"
            yield Text(f"{column.label:14}{100 * share:4.0f} % {bar(share)}  {steps}")


def counts(row: Row) -> Text:
    """Return the counters in `row`, that of the last step, as a line. From the fourth on, zeros are left out."""
    known = [(column, value) for column in COUNTERS if (value := number(row, column.name)) is not None]
    shown = [(column, value) for place, (column, value) in enumerate(known) if value or place < 3]
    return Text("  ".join(f"{column.label} {column.text(value)}" for column, value in shown))


def bar(share: float) -> str:
    """Return a share of 1, such as 0.3, as a bar of BAR characters."""
    full = round(BAR * min(1.0, max(0.0, share)))
    return "█" * full + "░" * (BAR - full)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a sparkline: values drawn with at most `width` characters, scaled from the lowest to the highest.

    Each character is the mean of neighbouring values: a space if there is none, `!` if one is not finite. None is a row
    without the number.
    """
    count = min(width, len(values))  # number of characters
    cuts = [len(values) * place // count for place in range(count + 1)] if count else []
    means: list[float | None] = []
    for first, last in pairwise(cuts):
        known = [value for value in values[first:last] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _block(mean: float | None, low: float, high: float) -> str:
    """Return the character of a sparkline for a value between `low` and `high`."""
    if mean is None:
        return " "
    if not math.isfinite(mean):
        return "!"
    place = (mean - low) / (high - low) if high > low else 0.5
    return BLOCKS[min(len(BLOCKS) - 1, int(place * len(BLOCKS)))]


# -- the cluster -------------------------------------------------------------------------------------------------------


def cluster_lines(cluster: Cluster, now: float) -> Iterator[Text]:
    """Yield the lines about the cluster, the lower part of the screen. `now` is in Unix seconds.

    A run that has ended shows only its counts of failures and restarts.
    """
    if cluster.hub is not None and not cluster.ended:
        age = now - cluster.at
        if age > OLD_S:
            yield Text(f"the state of the cluster is {clock(age)} old", "bold yellow")
        yield Text(one_line(f"waits for {cluster.hub.doing}"), style="dim")
    for count in CLUSTER_NUMBERS:
        if not count.listed and count.holds(cluster) and (text := count.text(cluster)) not in ("", "0"):
            yield Text(f"{count.title.lower()}: {text}")
    if cluster.hub is not None and not cluster.ended:
        if engines := list(_engine_figures(engines_of(cluster))):
            yield Text(f"each engine: {', '.join(engines)}")
        missing = [node for node in cluster.hub.nodes if node.state in ("gone", "silent")]
        yield from (_missing(node, now) for node in missing[:MOST_NODES])
    for each in cluster.failures[:MOST_KINDS]:
        message = " ".join(each.message.split())
        cut = message if len(message) <= MESSAGE else f"{message[:MESSAGE]} …"
        line = f"{each.kind} failed {each.count} times, the last one {clock(now - each.last)} ago: {cut}"
        yield Text(one_line(line), style="yellow")


def _engine_figures(engines: Sequence[EngineNow]) -> Iterator[str]:
    """Yield a text for each number of the engines: its mean, with the lowest and the highest value if they differ."""
    for column in columns("engine"):
        known = [value for engine in engines if (value := column.value_in(engine.figures)) is not None]
        if known:
            low, mean, high = map(column.text, (min(known), sum(known) / len(known), max(known)))
            yield f"{column.label} {mean}" if low == high else f"{column.label} {mean} ({low} to {high})"


def _missing(node: NodeNow, now: float) -> Text:
    """Return a line about a node that is gone or silent: since when, on which machine, and why if that is known."""
    since = node.gone_at if node.gone_at is not None else node.heard_at
    when = "" if since is None else f" for {clock(now - since)}"
    host = f" ({node.status.host})" if node.status is not None else ""
    return Text(one_line(f"node {node.node}{host} is {node.state}{when}{node.why and ': '}{node.why}"), style="yellow")
