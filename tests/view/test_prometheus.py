"""The numbers that Prometheus scrapes, read with its own client, and the dashboard that draws them."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flash.observe.cluster import CLUSTER_NUMBERS, ENGINE_NUMBERS
from flash.observe.columns.table import CHARTS
from flash.observe.rundir.rundir import RunDirectory
from flash.view.app import make_app
from flash.view.prometheus import MEDIA_TYPE, Latest, dashboard, exposition
from flash.view.runs import open_runs
from tests.observe.clusters import cluster, failure, hub_now
from tests.observe.sample_rows import eval_row, metrics_row
from tests.view.recorded import record

NOW = 1_700_000_000.0
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def scraped(text: str) -> dict[tuple[str, str, str], float]:
    """Return the numbers of a scrape by metric, run, and kind or engine (empty if there is none)."""
    return {
        (sample.name, sample.labels["run"], sample.labels.get("kind") or sample.labels.get("engine", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.anyio
async def test_the_page_tells_the_last_numbers_of_each_run(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, steps=steps).path for name, steps in (("one", 12), ("two", 3))]
    app = make_app(open_runs(runs), 1)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8710") as client:
        answer = await client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, MEDIA_TYPE)
    found = scraped(answer.text)
    assert (found["flash_step", "one", ""], found["flash_step", "two", ""]) == (11, 2)
    row = RunDirectory(runs[0]).read_metrics()[-1]
    assert found["flash_entropy", "one", ""] == row["entropy"]
    assert found["flash_env_by_kind", "one", "correct"] == row["env/correct"]
    assert found["flash_eval_step", "one", ""] == 10
    assert found["flash_ended", "two", ""] == 0


def test_names_of_runs_and_columns_are_labels_whatever_they_hold_and_only_finite_numbers_are_told() -> None:
    name = 'a "run"\\of\nmine{}'
    row = metrics_row(3, **{"env/p{x}": 0.5, 'env/"q"\\\n': 1e-30, "grad_norm": math.nan, "failures_env_error": 2})
    row |= {"loss": True}
    found = scraped(exposition([Latest(name, row, {}, ended=True)]))
    assert {run for _, run, _ in found} == {name}
    assert found["flash_env_by_kind", name, "p{x}"] == 0.5
    assert found["flash_env_by_kind", name, '"q"\\\n'] == 1e-30
    assert found["flash_failures_by_kind", name, "env_error"] == 2
    assert found["flash_ended", name, ""] == 1
    assert ("flash_grad_norm", name, "") not in found
    assert ("flash_loss", name, "") not in found


def test_a_run_without_a_row_is_told_too_and_none_is_no_error() -> None:
    assert scraped(exposition([Latest("new", {}, {}, ended=False)])) == {("flash_ended", "new", ""): 0}
    assert scraped(exposition([])) == {}


def test_the_dashboard_in_the_docs_is_this_one_and_draws_what_is_told() -> None:
    """`make docs` writes it."""
    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == dashboard()
    columns = {column.key.replace("*", "x"): 1.0 for chart in CHARTS for column in chart.columns}
    picture = cluster(1e9, hub_now(1e9), failures=[failure("env_error", 1e9, "boom")])
    latest = Latest("run", metrics_row(0) | columns, eval_row(0, 0.5) | columns, ended=False, cluster=picture)
    told = {name for name, _, _ in scraped(exposition([latest]))}
    drawn = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    assert {re.sub(r"\{.*", "", expression) for expression in drawn} <= told
    assert len(dashboard()["panels"]) == len(CHARTS) + len(CLUSTER_NUMBERS) + len(ENGINE_NUMBERS)


@pytest.mark.anyio
async def test_the_page_tells_of_nodes_engines_samples_sandboxes_and_failures(tmp_path: Path) -> None:
    run = record(tmp_path / "mine", steps=2)
    failures = [failure("env_error", NOW - 5, "boom", count=3)]
    run.cluster.write_bytes(msgspec.json.encode(cluster(NOW, hub_now(NOW, nodes=2), failures=failures)))
    found = scraped(await metrics_of(run.path))
    told = {(name.removeprefix("flash_cluster_"), kind): value for (name, _, kind), value in found.items()}
    for key, value in {
        ("nodes", "here"): 2,
        ("engines", "serving"): 2,
        ("trainer_ranks", "here"): 1,
        ("trainer_ranks", "not there"): 0,
        ("requests", "running"): 24,
        ("requests", "waiting"): 8,
        ("samples", "worked on"): 150,
        ("samples", "queued"): 10,
        ("sandboxes", "in use"): 6,
        ("tokens_per_second", ""): 600,
        ("engine_kv_used", "0"): 0.25,
        ("engine_prefix_hit_share", "1"): 0.5,
        ("engine_preemptions", "1"): 3,
        ("restarts", "of engines"): 0,
        ("failures", "env_error"): 3,
        ("failed_at", "env_error"): NOW - 5,
        ("time", ""): NOW,
    }.items():
        assert told[key] == value, key
    run.cluster.write_bytes(msgspec.json.encode(cluster(NOW, hub_now(NOW), failures=failures, ended="finished")))
    of_cluster = {name for name, _, _ in scraped(await metrics_of(run.path)) if name.startswith("flash_cluster_")}
    assert of_cluster == {"flash_cluster_failures", "flash_cluster_failed_at", "flash_cluster_restarts"}


def test_no_text_that_people_read_has_marks_of_markdown() -> None:
    picture = cluster(1e9, hub_now(1e9), failures=[failure("env_error", 1e9, "boom")])
    lines = exposition([Latest("run", metrics_row(0), eval_row(0, 0.5), ended=False, cluster=picture)]).splitlines()
    assert [line for line in lines if line.startswith("# HELP ") and "`" in line] == []
    assert [panel["title"] for panel in dashboard()["panels"] if "`" in panel["description"]] == []
    assert [each.title for each in (*CLUSTER_NUMBERS, *ENGINE_NUMBERS) if "`" in each.means + each.worry] == []


@pytest.mark.anyio
async def test_a_pipe_in_the_place_of_a_file_takes_its_run_away_and_no_other(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, steps=2) for name in ("one", "two")]
    runs[0].metrics.unlink()
    os.mkfifo(runs[0].metrics)
    assert {run for _, run, _ in scraped(await metrics_of(*(run.path for run in runs)))} == {"two"}


async def metrics_of(*runs: Path) -> str:
    """Return the answer of `flash view` to a scrape of these runs."""
    app = make_app(open_runs(runs), 1)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8710") as client:
        return (await client.get("/metrics")).text
