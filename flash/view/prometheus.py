"""Newest numbers of runs in Prometheus's text format, and a Grafana dashboard that draws them.

`flash.view.app` answers a request of Prometheus for `/metrics` with `exposition`. `make docs` writes `dashboard` to
docs/grafana.json. Each column of the table of columns is a metric. If the name of a column contains a kind, as in
failures by reason, the kind becomes a label of one metric. All metrics are gauges: a run that goes back to a checkpoint
also lowers its counters. Format: "Exposition formats", version 0.0.4, in Prometheus's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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

Values = Callable[["Latest"], Iterable[tuple[str, float]]]
"""Function that returns the values of a metric for a run, each with its kind. The kind is empty if the metric has
none."""


class Latest(msgspec.Struct, frozen=True):
    """Newest state of a run."""

    name: str
    steps: Mapping[str, float]
    """Row of the last step."""
    evals: Mapping[str, float]
    """Row of the last evaluation."""
    ended: bool
    """True if the run has ended."""
    cluster: Cluster | None = None
    """State of the cluster; None if it cannot be read."""


def exposition(runs: Sequence[Latest]) -> str:
    """Return the text that Prometheus reads in one scrape."""
    lines: list[str] = []
    for metric, help_, values, label in _metrics():
        samples = [
            f'{metric}{{run="{_escaped(run.name)}"{_labelled(label, kind)}}} {value!r}'
            for run in runs
            for kind, value in values(run)
        ]
        if samples or metric == ENDED:
            lines += [f"# HELP {metric} {help_}", f"# TYPE {metric} gauge", *samples]
    return "\n".join([*lines, ""])


def dashboard() -> dict[str, Any]:
    """Return a dashboard that Grafana can import: a panel for each chart, for all runs or for selected ones."""
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
                    "query": "label_values(flash_ended, run)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": [
            *(_panel(place, *chart) for place, chart in enumerate(zip(CHARTS, DRAWN, strict=True))),
            *(
                _cluster_panel(len(DRAWN) + place, count)
                for place, count in enumerate((*CLUSTER_NUMBERS, *ENGINE_NUMBERS))
            ),
        ],
    }


ENDED = "flash_ended"
"""Metric that is always there, also without runs: the dashboard lists the names of runs from it."""


def _metrics() -> Iterator[tuple[str, str, Values, str]]:
    """Yield each metric: its name, its help text, its values, and the label that distinguishes the values."""
    yield ENDED, "1: the run is over.", lambda run: [("", int(run.ended))], KIND
    for of in ROWS:
        for column in columns(of):
            help_ = without_marks(column.meaning).replace("\\", r"\\")
            yield _metric(column, of), help_, _of_column(column, of), KIND
    for count in (*CLUSTER_NUMBERS, *ENGINE_NUMBERS):
        yield f"flash_cluster_{count.name}", count.means, _of_cluster(count), count.label
    help_ = "Unix seconds of the last failure of each kind; its message is on the page and in `flash watch`."
    yield "flash_cluster_failed_at", help_, _failed_at, KIND
    help_ = "Unix seconds of the last report about the cluster. time() minus this is the age of the report."
    yield "flash_cluster_time", help_, _reported_at, KIND


def _failed_at(run: Latest) -> Iterable[tuple[str, float]]:
    """Return the time of the last failure of each kind, in Unix seconds."""
    return () if run.cluster is None else [(each.kind, each.last) for each in run.cluster.failures]


def _reported_at(run: Latest) -> Iterable[tuple[str, float]]:
    """Return the time of the last report about the cluster, in Unix seconds; nothing after the end of the run."""
    return () if run.cluster is None or run.cluster.ended else [("", run.cluster.at)]


def _of_cluster(count: ClusterNumber) -> Values:
    """Return a function that takes the values of a number from a run's cluster.

    It returns none without a cluster, and none for a momentary number after the end of the run.
    """
    return lambda run: () if run.cluster is None or not count.holds(run.cluster) else count.of(run.cluster).items()


def _of_column(column: Column, of: Kind) -> Values:
    """Return a function that takes the values of a column from a run's last row of this kind."""

    def values(run: Latest) -> Iterator[tuple[str, float]]:
        """Yield the values of the column, each with the text in place of its placeholder."""
        row = run.steps if of == "step" else run.evals
        for key in row if column.has_placeholder else [column.name]:
            if column_of(key, of) is column and (value := number(row, key)) is not None:
                yield column.placeholder_text(key) or "", value

    return values


def _metric(column: Column, of: Kind) -> str:
    """Return the name of a column's metric, which Prometheus accepts.

    A column such as `failures` may have the same beginning as columns by kind, so those get a suffix.
    """
    name = re.sub(r"[^a-z0-9]+", "_", re.sub("STAT", "stat", column.name)).strip("_")
    return f"flash_{'eval_' if of == 'evaluation' else ''}{name}{'_by_kind' if column.has_placeholder else ''}"


def _labelled(label: str, kind: str) -> str:
    """Return the label of a value's kind, after a comma; empty if the value has no kind."""
    return f',{label}="{_escaped(kind)}"' if kind else ""


def _escaped(label: str) -> str:
    """Escape the value of a label as the text format demands."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _frame(place: int, title: str, means: str, worry: str) -> dict[str, Any]:
    """Return the fields that all panels have. `place` is the place of the panel, counted from 0."""
    row, column = divmod(place, PANELS_PER_ROW)
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "description": f"{means} When to worry: {worry}" if worry else means,
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
    }


def _cluster_panel(place: int, count: ClusterNumber) -> dict[str, Any]:
    """Return the dashboard's panel of a number of the cluster, at a place counted from 0."""
    expression = f'flash_cluster_{count.name}{{run=~"$run"}}'
    legend = f"{{{{run}}}} {{{{{count.label}}}}}"
    return _frame(place, count.title, count.means, count.worry) | {
        "fieldConfig": {"defaults": {"unit": "percentunit" if count.unit == "share" else "none"}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def _panel(place: int, chart: Chart, drawn: DrawnChart) -> dict[str, Any]:
    """Return the dashboard's panel of a chart, at a place counted from 0."""
    unit = "percentunit" if drawn.percent else "none"
    return _frame(place, drawn.title, drawn.means, drawn.worry) | {
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
                "refId": chr(ord("A") + place),
                "expr": f'{_metric(column, chart.of)}{{run=~"$run"}}',
                "legendFormat": " ".join(
                    filter(None, ("{{run}}", line.name, f"{{{{{KIND}}}}}" if column.has_placeholder else ""))
                ),
            }
            for place, (column, line) in enumerate(zip(chart.columns, drawn.lines, strict=True))
        ],
    }


def _thresholds(limit: float | None) -> Iterable[dict[str, Any]]:
    """Yield the steps of a panel's threshold: no colour below the limit, orange beyond it."""
    yield {"color": "transparent", "value": None}
    if limit is not None:
        yield {"color": "orange", "value": limit}
