"""Newest numbers of runs in Prometheus's text format, and a Grafana dashboard that draws them.

`flash.view.app` answers a request of Prometheus for `/metrics` with `exposition`. `make docs` writes `dashboard` to
docs/grafana.json. Each column of the table of columns (`flash.observe.columns`) is a metric. If the name of a column
has a placeholder, as in failures by reason, its text becomes the value of a label. All metrics are gauges: a run that
goes back to a checkpoint also lowers its counters. Format: "Exposition formats", version 0.0.4, in Prometheus's
documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from flash.observe.cluster import CLUSTER_NUMBERS, ENGINE_NUMBERS, KIND, Cluster, ClusterNumber
from flash.observe.columns.column import Column, without_marks
from flash.observe.columns.table import CHARTS, Chart, Kind, column_of, columns
from flash.observe.rundir.summary import number
from flash.view.charts import DRAWN, DrawnChart

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of Prometheus's text format."""
ROWS: Sequence[Kind] = ("step", "evaluation")
"""Kinds of rows of which the last one is reported."""
PANELS_PER_ROW, WIDTH, HEIGHT = 2, 12, 8
"""Number of panels side by side, and the size of a panel in units of Grafana's grid, which has 24 columns."""
ENDED = "flash_ended"
"""Metric that is always there, also without runs: the dashboard lists the names of runs from it."""

Values = Callable[["Latest"], Iterable[tuple[str, float]]]
"""Function that returns the values of a metric for a run, as pairs (value of the metric's label, number). The first is
empty in a metric without a label."""


class Metric(NamedTuple):
    """A metric that Prometheus reads."""

    name: str
    """Name of the metric, which begins with `flash_`."""
    help: str
    """Explanation, which Prometheus shows as plain text."""
    values: Values
    label: str = KIND
    """Name of the label that distinguishes several values of one run."""


class Latest(msgspec.Struct, frozen=True):
    """Newest state of a run. `flash.view.runs` reads it from the run directory for each scrape."""

    name: str
    """Name of the run, the value of the label `run`."""
    steps: Mapping[str, float]
    """Row of the last step; empty if there is none."""
    evals: Mapping[str, float]
    """Row of the last evaluation; empty if there is none."""
    ended: bool
    """True if the run has ended."""
    cluster: Cluster | None = None
    """State of the cluster; None if it cannot be read."""


def exposition(runs: Sequence[Latest]) -> str:
    """Return the text that Prometheus reads in one scrape. A metric without values is left out, except `ENDED`."""
    lines: list[str] = []
    for metric in _metrics():
        samples: list[str] = []
        for run in runs:
            for label_value, value in metric.values(run):
                labels = f'run="{_escaped(run.name)}"'
                if label_value:
                    labels += f',{metric.label}="{_escaped(label_value)}"'
                samples.append(f"{metric.name}{{{labels}}} {value!r}")
        if samples or metric.name == ENDED:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge", *samples]
    return "\n".join([*lines, ""])  # the format demands a line break after the last line


def dashboard() -> dict[str, Any]:
    """Return a dashboard that Grafana can import. Each chart and each number of clusters and engines has a panel."""
    return {
        "title": "Flash",
        "uid": "flash-runs",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "$source"},
                    "query": f"label_values({ENDED}, run)",
                    "refresh": 2,  # Grafana reads the names again when the time range changes
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": [
            *(_chart_panel(index, *chart) for index, chart in enumerate(zip(CHARTS, DRAWN, strict=True))),
            *(
                _cluster_panel(index, cluster_number)
                for index, cluster_number in enumerate((*CLUSTER_NUMBERS, *ENGINE_NUMBERS), start=len(DRAWN))
            ),
        ],
    }


def _metrics() -> Iterator[Metric]:
    """Yield each metric of a scrape. The order is that of the text."""
    yield Metric(ENDED, "1: the run is over.", lambda run: [("", int(run.ended))])
    for row_kind in ROWS:
        for column in columns(row_kind):
            # The text format demands that backslashes are doubled.
            help_ = without_marks(column.meaning).replace("\\", r"\\")
            yield Metric(_metric_name(column, row_kind), help_, _column_values(column, row_kind))
    for cluster_number in (*CLUSTER_NUMBERS, *ENGINE_NUMBERS):
        name, help_ = f"flash_cluster_{cluster_number.name}", cluster_number.means
        yield Metric(name, help_, _cluster_values(cluster_number), cluster_number.label)
    help_ = "Unix seconds of the last failure of each kind; its message is on the page and in flash watch."
    yield Metric("flash_cluster_failed_at", help_, _failed_at)
    help_ = "Unix seconds of the last report about the cluster. time() minus this is the age of the report."
    yield Metric("flash_cluster_time", help_, _reported_at)


def _failed_at(run: Latest) -> Iterable[tuple[str, float]]:
    """Return the kind of each failure, and the time of the last one of this kind in Unix seconds."""
    return () if run.cluster is None else [(each.kind, each.last) for each in run.cluster.failures]


def _reported_at(run: Latest) -> Iterable[tuple[str, float]]:
    """Return the time of the last report about the cluster, in Unix seconds; nothing after the end of the run."""
    return () if run.cluster is None or run.cluster.ended else [("", run.cluster.at)]


def _cluster_values(cluster_number: ClusterNumber) -> Values:
    """Return the function that a metric needs to take the values of this number from a run's cluster.

    That function returns nothing without a cluster, and nothing for a momentary number after the end of the run.
    """

    def values(run: Latest) -> Iterable[tuple[str, float]]:
        """Return the values by kind, such as the number of engines in each state."""
        if run.cluster is None or not cluster_number.holds(run.cluster):
            return ()
        return cluster_number.of(run.cluster).items()

    return values


def _column_values(column: Column, row_kind: Kind) -> Values:
    """Return the function that a metric needs to take the values of a column from a run's last row of this kind."""

    def values(run: Latest) -> Iterator[tuple[str, float]]:
        """Yield the values of the column, each with the text in place of its placeholder."""
        row = run.steps if row_kind == "step" else run.evals
        for key in row if column.has_placeholder else [column.name]:
            # A key that fits the placeholder may be the name of another column, too; `column_of` decides.
            if column_of(key, row_kind) is column and (value := number(row, key)) is not None:
                yield column.placeholder_text(key) or "", value

    return values


def _metric_name(column: Column, row_kind: Kind) -> str:
    """Return the name of a column's metric, which has only characters that Prometheus accepts.

    A column such as `failures` may have the same beginning as one with a placeholder, so the latter gets a suffix.
    """
    # Capital letters are placeholders, which vanish here. Only STAT stays, since the name would say nothing without it.
    name = re.sub(r"[^a-z0-9]+", "_", re.sub("STAT", "stat", column.name)).strip("_")
    prefix = "eval_" if row_kind == "evaluation" else ""
    return f"flash_{prefix}{name}{'_by_kind' if column.has_placeholder else ''}"


def _escaped(text: str) -> str:
    """Escape the value of a label as the text format demands."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _panel_frame(index: int, title: str, means: str, worry: str) -> dict[str, Any]:
    """Return the fields that all panels of the dashboard have. `index` is the panel's number, counted from 0.

    `means` and `worry` are the sentences of its description: what is shown, and when a user should worry.
    """
    row, column = divmod(index, PANELS_PER_ROW)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "description": f"{means} When to worry: {worry}" if worry else means,
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
    }


def _cluster_panel(index: int, shown: ClusterNumber) -> dict[str, Any]:
    """Return the dashboard's panel of a number of the cluster. `index` is the panel's number, counted from 0."""
    expression = f'flash_cluster_{shown.name}{{run=~"$run"}}'
    legend = f"{{{{run}}}} {{{{{shown.label}}}}}"  # Grafana replaces names in double braces by the values of labels
    return _panel_frame(index, shown.title, shown.means, shown.worry) | {
        "fieldConfig": {"defaults": {"unit": "percentunit" if shown.unit == "share" else "none"}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def _chart_panel(index: int, chart: Chart, drawn: DrawnChart) -> dict[str, Any]:
    """Return the dashboard's panel of a chart. `index` is the panel's number, counted from 0.

    `drawn` is the same chart in the form that the page of `flash view` gets: texts and curves. Each column of the chart
    becomes a query (target) with the letter A, B, … as its name.
    """
    unit = "percentunit" if drawn.percent else "none"
    return _panel_frame(index, drawn.title, drawn.means, drawn.worry) | {
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "custom": {
                    "scaleDistribution": {"type": "log", "log": 10} if drawn.log else {"type": "linear"},
                    "thresholdsStyle": {"mode": "off" if drawn.limit is None else "dashed"},
                },
                "thresholds": {"mode": "absolute", "steps": list(_thresholds(drawn.limit))},
            },
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + letter),
                "expr": f'{_metric_name(column, chart.of)}{{run=~"$run"}}',
                "legendFormat": " ".join(
                    filter(None, ("{{run}}", line.name, f"{{{{{KIND}}}}}" if column.has_placeholder else ""))
                ),
            }
            for letter, (column, line) in enumerate(zip(chart.columns, drawn.lines, strict=True))
        ],
    }


def _thresholds(limit: float | None) -> Iterable[dict[str, Any]]:
    """Yield the steps of a panel's threshold, in Grafana's form: no colour below the limit, orange beyond it.

    Without a limit (None) there is only the first step.
    """
    yield {"color": "transparent", "value": None}
    if limit is not None:
        yield {"color": "orange", "value": limit}
