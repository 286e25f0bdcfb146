"""The last numbers of runs in Prometheus's text format, and a Grafana dashboard that draws them.

The columns are those of the charts. A chart's curve over several columns, as failures by reason, is one metric with a
label. Format: "Exposition formats", version 0.0.4, in Prometheus's documentation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flash.observe.cluster import Cluster
from flash.observe.cluster_counts import COUNTS, Count
from flash.observe.rundir.summary import number
from flash.view.charts import CHARTS, Chart, Line

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STANDING = {
    "step": "Number of the last step that was trained.",
    "version": "Policy version that it made.",
    "time": "Unix seconds of its end; time() minus this is how long the run has been silent.",
}
"""Columns of steps that no chart draws."""
EVALUATED = ("step", "low", "high")
"""The same of evaluations."""
KIND = "kind"
"""The label of what a curve over several columns has behind their common name."""
PANELS_PER_ROW, WIDTH, HEIGHT = 2, 12, 8
"""Grafana's grid has 24 columns."""


class Latest(msgspec.Struct, frozen=True):
    """What a run has to tell now."""

    name: str
    steps: Mapping[str, float]
    """The last step's row."""
    evals: Mapping[str, float]
    ended: bool
    cluster: Cluster | None = None


def exposition(runs: Sequence[Latest]) -> str:
    """One answer to a scrape."""
    lines = ["# HELP flash_ended 1: the run is over.", "# TYPE flash_ended gauge"]
    lines += [f'flash_ended{{run="{_escaped(run.name)}"}} {int(run.ended)}' for run in runs]
    for metric, help_, column, of in _metrics():
        samples = [sample for run in runs for sample in _samples(metric, column, run, of)]
        if samples:
            lines += [f"# HELP {metric} {help_}", f"# TYPE {metric} gauge", *samples]
    for metric, help_, values in _of_clusters():
        samples = [
            f'{metric}{{run="{_escaped(run.name)}"{_of_kind(kind)}}} {value!r}'
            for run in runs
            if run.cluster is not None
            for kind, value in values(run.cluster).items()
        ]
        if samples:
            lines += [f"# HELP {metric} {help_}", f"# TYPE {metric} gauge", *samples]
    return "\n".join([*lines, ""])


def dashboard() -> dict[str, Any]:
    """For Grafana's import: a panel for each chart, for all runs or those that are picked."""
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
            *(_panel(place, chart) for place, chart in enumerate(CHARTS)),
            *(_cluster_panel(len(CHARTS) + place, count) for place, count in enumerate(COUNTS)),
        ],
    }


def _metrics() -> Iterator[tuple[str, str, str, str]]:
    """Of each metric: its name, its help, its column with a star where it is several, the rows it is in."""
    for column, help_ in STANDING.items():
        yield f"flash_{column}", help_, column, "steps"
    for column in EVALUATED:
        yield f"flash_eval_{column}", f"Of the last evaluation: `{column}`.", column, "evals"
    told: set[str] = set()
    for chart in CHARTS:
        for line in chart.lines:
            metric = _metric(chart, line)
            if metric not in told:
                told.add(metric)
                yield metric, chart.means.replace("\n", " "), line.key, chart.of


def _of_clusters() -> Iterator[tuple[str, str, Callable[[Cluster], Mapping[str, float]]]]:
    """Of each metric of clusters: its name, its help, and its values by kind."""
    for count in COUNTS:
        yield f"flash_cluster_{count.name}", count.means, count.of
    help_ = "Unix seconds of the last failure of each kind; its message is on the page and in `flash watch`."
    yield "flash_cluster_failed_at", help_, lambda it: {each.kind: each.last for each in it.failures}
    help_ = "Unix seconds of the cluster's picture; time() minus this is how long nothing was heard of it."
    yield "flash_cluster_time", help_, lambda it: {} if it.ended else {"": it.at}


def _of_kind(kind: str) -> str:
    return f',{KIND}="{_escaped(kind)}"' if kind else ""


def _metric(chart: Chart, line: Line) -> str:
    """A valid name; where a column is one and also begins several, as `failures`, the several are told apart."""
    name = re.sub(r"[^a-zA-Z0-9_]+", "_", line.key.removesuffix("*")).strip("_")
    part = "eval_" if chart.of == "evals" else ""
    return f"flash_{part}{name}{'_by_kind' if line.key.endswith('*') else ''}"


def _samples(metric: str, column: str, run: Latest, of: str) -> Iterator[str]:
    row = run.steps if of == "steps" else run.evals
    name = _escaped(run.name)
    if not column.endswith("*"):
        if (value := number(row, column)) is not None:
            yield f'{metric}{{run="{name}"}} {value!r}'
        return
    begin = column.removesuffix("*")
    for key in row:
        if key.startswith(begin) and (value := number(row, key)) is not None:
            yield f'{metric}{{run="{name}",{KIND}="{_escaped(key.removeprefix(begin))}"}} {value!r}'


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _frame(place: int, title: str, means: str, worry: str) -> dict[str, Any]:
    """What all panels have."""
    row, column = divmod(place, PANELS_PER_ROW)
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "description": f"{means} When to worry: {worry}",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
    }


def _cluster_panel(place: int, count: Count) -> dict[str, Any]:
    expression = f'flash_cluster_{count.name}{{run=~"$run"}}'
    legend = f"{{{{run}}}} {{{{{KIND}}}}}"
    return _frame(place, count.title, count.means, count.worry) | {
        "fieldConfig": {"defaults": {"unit": "none"}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def _panel(place: int, chart: Chart) -> dict[str, Any]:
    unit = "percentunit" if chart.percent else "none"
    return _frame(place, chart.title, chart.means, chart.worry) | {
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "custom": {
                    "scaleDistribution": {"type": "log", "log": 10} if chart.log else {"type": "linear"},
                    "thresholdsStyle": {"mode": "off" if chart.limit is None else "dashed"},
                },
                "thresholds": {"mode": "absolute", "steps": list(_thresholds(chart))},
            },
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + number_),
                "expr": f'{_metric(chart, line)}{{run=~"$run"}}',
                "legendFormat": _legend(line),
            }
            for number_, line in enumerate(chart.lines)
        ],
    }


def _thresholds(chart: Chart) -> Iterable[dict[str, Any]]:
    yield {"color": "transparent", "value": None}
    if chart.limit is not None:
        yield {"color": "orange", "value": chart.limit}


def _legend(line: Line) -> str:
    several = f"{{{{{KIND}}}}}" if line.key.endswith("*") else ""
    return " ".join(part for part in ("{{run}}", line.name, several) if part)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(dashboard())).decode() + "\n")
