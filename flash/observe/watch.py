"""What a run is doing, on one screen of a terminal, from the files that it writes. It only reads them."""

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
from flash.observe.cluster import Cluster, EngineNow, NodeNow, read_cluster
from flash.observe.cluster_counts import COUNTS, engines_of
from flash.observe.columns.table import columns, named
from flash.observe.console import RECENT_STEPS, domain_line, evaluation_line
from flash.observe.rundir.follow import Followed, opened
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import number
from flash.observe.text import clock
from flash.text import one_line

Row = Mapping[str, Any]

QUIET_S = 60.0
"""A run that goes on has a step in this time, or the title says for how long it had none."""
SHOWN_ALARMS = 5
MEAN_OF = 20
"""Steps of the running mean."""
BAR = 24
"""Characters of a bar."""
VALUES, NARROWEST = 52, 8
"""Columns of the table before the courses, and the fewest that are worth drawing one."""
BLOCKS = "▁▂▃▄▅▆▇█"
OLD_S = 15.0
"""A run that goes on writes a picture every two seconds."""
MOST_KINDS, MOST_NODES = 5, 3
"""Kinds of failures, and nodes that are missing, that are shown, the last ones."""
MESSAGE = 160
"""Characters of a message that are shown: the page has all of it."""


HELD_OUT = named("mean_reward", "evaluation")
"""The one that evaluations have, and not steps."""
NUMBERS = (
    named("reward_mean"),
    HELD_OUT,
    *map(named, ("entropy", "grad_norm", "ess", "clip_fraction", "age_mean", "stale_share", "mismatch_k3_age_0")),
    named("tokens_per_second"),
)
WAITS = tuple(map(named, ("trainer_wait_share", "engine_idle_share")))
COUNTERS = (
    *map(named, ("engines", "in_flight", "queue_ready_groups", "failures", "given_up", "filtered")),
    *map(named, ("engine_restarts", "trainer_restarts")),
)


class Watched:
    """One run directory, followed while it is written."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._steps = Followed(directory.metrics, dict[str, Any])
        self._evals = Followed(directory.evals, dict[str, Any])
        self._life = -1
        self._facts: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        """A run that goes back writes its file anew: what was said of the old rows is forgotten."""
        try:
            with opened(self._directory.config):
                pass
            config = load([self._directory.config], []).alarms
        except (ConfigError, FileNotFoundError):  # of another version of Flash
            config = None
        self._alarms = None if config is None else Alarms(config)
        self._said: deque[str] = deque(maxlen=SHOWN_ALARMS)
        self._looked_at = 0
        self._life = self._steps.life

    def picture(self, now: float, width: int) -> Group:
        """The screen at this time (Unix seconds), for a terminal of so many columns. Raises RunDirectoryError."""
        self._facts = self._directory.facts()  # a run that goes on may have been given more steps
        self._steps.read()
        self._evals.read()
        if self._steps.life != self._life:
            self._begin()
        rows, evals = self._steps.rows, self._evals.rows
        for row in rows[self._looked_at :]:
            if self._alarms is not None:
                step = f"step {number(row, 'step') or 0:.0f}"
                self._said.extend(f"{step}: {alarm.text}" for alarm in self._alarms.step(row))
        self._looked_at = len(rows)
        cluster = read_cluster(self._directory)
        return Group(*self._parts(rows, evals, now, width), *(() if cluster is None else cluster_lines(cluster, now)))

    def _parts(self, rows: Sequence[Row], evals: Sequence[Row], now: float, width: int) -> Iterator[Table | Text]:
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
        for text in self._said:
            yield Text(one_line(f"alarm at {text}"), style="yellow")

    def _title(self, rows: Sequence[Row], now: float) -> Text:
        told = self._facts.get("steps", "")
        steps = int(told) if told.isdecimal() else 0
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
    """A line for each number that the run has: the last one, the mean of the last ones, and its course."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column(f"mean of {MEAN_OF}", justify="right", no_wrap=True)
    room = width - VALUES
    if room >= NARROWEST:
        table.add_column("so far", no_wrap=True)
    for line in NUMBERS:
        values = [line.value_in(row) for row in (evals if line is HELD_OUT else rows)]
        recent = [value for value in values[-MEAN_OF:] if value is not None]
        if not recent:
            continue
        mean = None if line is HELD_OUT else sum(recent) / len(recent)
        cells = [line.label, line.text(values[-1]), line.text(mean)]
        table.add_row(*cells, *([sparkline(values, room)] if room >= NARROWEST else []))
    return table


def waits(rows: Sequence[Row]) -> Iterator[Text]:
    """Who waits for whom, as shares of the time of these steps."""
    for column in WAITS:
        values = [value for row in rows if (value := number(row, column.name)) is not None]
        if values:
            share = sum(values) / len(values)
            yield Text(f"{column.label:14}{100 * share:4.0f} % {bar(share)}")


def counts(row: Row) -> Text:
    """The counters of the last step, but for those that are zero from the third on."""
    known = [(one, value) for one in COUNTERS if (value := number(row, one.name)) is not None]
    return Text(
        "  ".join(f"{one.label} {one.text(value)}" for place, (one, value) in enumerate(known) if value or place < 3)
    )


def bar(share: float) -> str:
    """A share of 1 as a bar."""
    full = round(BAR * min(1.0, max(0.0, share)))
    return "█" * full + "░" * (BAR - full)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The course of these values in at most so many characters: means of neighbours, from the lowest to the highest.

    A gap where there is none; `!` where one is not finite.
    """
    count = min(width, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)] if count else []
    means: list[float | None] = []
    for first, last in pairwise(cuts):
        known = [value for value in values[first:last] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _block(mean: float | None, low: float, high: float) -> str:
    if mean is None:
        return " "
    if not math.isfinite(mean):
        return "!"
    place = (mean - low) / (high - low) if high > low else 0.5
    return BLOCKS[min(len(BLOCKS) - 1, int(place * len(BLOCKS)))]


# -- the cluster -------------------------------------------------------------------------------------------------------


def cluster_lines(cluster: Cluster, now: float) -> Iterator[Text]:
    """The lines at this time, in Unix seconds."""
    if cluster.hub is not None and not cluster.ended:
        age = now - cluster.at
        if age > OLD_S:
            yield Text(f"nothing was heard of the cluster for {clock(age)}; this is how it was then", "bold yellow")
        yield Text(one_line(f"waits for {cluster.hub.doing}"), style="dim")
    for count in COUNTS:
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
        told = f"{each.kind} failed {each.count} times, the last one {clock(now - each.last)} ago: {cut}"
        yield Text(one_line(told), style="yellow")


def _engine_figures(engines: Sequence[EngineNow]) -> Iterator[str]:
    """What they tell, each figure in the mean, with the lowest and the highest where these differ."""
    for column in columns("engine"):
        known = [value for engine in engines if (value := column.value_in(engine.figures)) is not None]
        if known:
            low, mean, high = map(column.text, (min(known), sum(known) / len(known), max(known)))
            yield f"{column.label} {mean}" if low == high else f"{column.label} {mean} ({low} to {high})"


def _missing(node: NodeNow, now: float) -> Text:
    since = node.gone_at if node.gone_at is not None else node.heard_at
    when = "" if since is None else f" for {clock(now - since)}"
    host = f" ({node.status.host})" if node.status is not None else ""
    return Text(one_line(f"node {node.node}{host} is {node.state}{when}{node.why and ': '}{node.why}"), style="yellow")
