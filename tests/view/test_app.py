"""The server of the page: the requests that it refuses, and its answers to the others."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from flash.observe.rundir.rundir import RunDirectory
from flash.view.app import ASSETS, HEADERS, make_app
from flash.view.runs import MOST_ROWS, open_runs
from tests.observe.clusters import cluster, hub_now
from tests.observe.sample_rows import STARTED, eval_row, metrics_row
from tests.view.recorded import GROUP, append_step, record

pytestmark = pytest.mark.anyio


class Asking:
    """Client that sends requests to the application for some runs, as a browser does."""

    def __init__(self, *paths: Path) -> None:
        app = make_app(open_runs(paths), 1)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8710")

    async def get(self, path: str, **questions: Any) -> Any:
        """Return the decoded answer to a request, which must succeed."""
        answer = await self.client.get(path, params=questions)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.content)


async def test_every_file_is_served_with_the_headers_that_keep_strange_scripts_out(run: RunDirectory) -> None:
    asking = Asking(run.path)
    for path in (*ASSETS, "/plotly.js", "/api/contents", "/nothing"):
        answer = await asking.client.get(path)
        assert answer.status_code == (404 if path == "/nothing" else 200)
        told = {name: answer.headers[name] for name in HEADERS if name != "cache-control"}
        assert told == {name: text for name, text in HEADERS.items() if name != "cache-control"}
    assert "plotly.js" in (await asking.client.get("/plotly.js")).text[:400]


async def test_a_site_that_has_its_name_lead_here_is_refused(run: RunDirectory) -> None:
    answer = await Asking(run.path).client.get("/api/contents", headers={"host": "example.org"})
    assert answer.status_code == 400
    assert "recorded" not in answer.text


@pytest.mark.parametrize("path", ["/../config.toml", "/%2e%2e/config.toml", "/static/index.html", "/page.js/x"])
async def test_paths_lead_to_no_other_file(path: str, run: RunDirectory) -> None:
    assert (await Asking(run.path).client.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("path", "questions", "error"),
    [
        ("/api/rows", {"run": 1, "steps": 0, "evals": 0}, "run='1': expected a whole number below 1"),
        ("/api/rows", {"run": 0, "steps": -1, "evals": 0}, "steps='-1': expected a whole number"),
        ("/api/group", {"run": 0, "step": "../x", "group": 0}, "step='../x': expected a whole number"),
        ("/api/samples", {"run": 0, "reward_min": "much"}, "reward_min"),
        ("/api/timeline", {"run": 0, "start": "now"}, "start"),
        ("/api/timeline", {"run": 0, "start": "nan"}, "start"),
        ("/api/timeline", {"run": 0, "stop": "inf"}, "stop"),
        ("/api/group", {"run": 0, "step": 5000 * "9", "group": 0}, "expected a whole number"),
        ("/api/samples", {"run": 0, "step": 5000 * "9"}, "step"),
    ],
)
async def test_wrong_questions_are_named(path: str, questions: dict[str, Any], error: str, run: RunDirectory) -> None:
    answer = await Asking(run.path).client.get(path, params=questions)
    assert answer.status_code == 400
    assert error in answer.text


async def test_contents_name_each_run_once_and_tell_them_apart(tmp_path: Path) -> None:
    for name in ("one/a", "two/a", "b"):
        record(tmp_path / name, steps=1)
    asking = Asking(tmp_path / "one/a", tmp_path / "two/a", tmp_path / "b", tmp_path / "two/../b")
    runs = (await asking.get("/api/contents"))["runs"]
    assert [run["name"] for run in runs] == ["one/a", "two/a", "b"]
    assert [run["shown"] for run in runs] == [True, False, False]
    assert runs[0]["facts"]["model"] == "models/tiny"
    assert runs[0]["facts"]["α"] == "1.0"


async def test_a_folder_may_be_called_anything(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\n\x1b[31m\xff"))
    (run,) = (await Asking(record(folder, steps=1).path).get("/api/contents"))["runs"]
    assert run["name"] == r"a\n\x1b[31m\udcff"


async def test_a_run_that_cannot_be_read_hides_no_other(run: RunDirectory, tmp_path: Path) -> None:
    broken = RunDirectory.open(tmp_path / "broken", "")
    broken.metrics.mkdir()
    asking = Asking(broken.path, run.path)
    assert 'flash_step{run="recorded"} 29' in (await asking.client.get("/metrics")).text
    answer = await asking.client.get("/api/rows", params={"run": 0, "steps": 0, "evals": 0})
    assert (answer.status_code, "metrics.jsonl: Is a directory" in answer.text) == (500, True)


async def test_only_what_came_since_is_told(run: RunDirectory) -> None:
    asking = Asking(run.path)
    first = await asking.get("/api/rows", run=0, sequence="", steps=0, evals=0)
    assert [row["step"] for row in first["steps"]] == list(range(30))
    assert [(row["step"], "low" in row) for row in first["evals"]] == [(0, True), (10, True), (20, True)]
    assert not first["more"]
    assert not first["ended"]
    had = {"run": 0, "sequence": first["sequence"], "steps": 30, "evals": 3}
    append_step(run, 30)
    run.append_evaluation(eval_row(30, 0.8))
    then = await asking.get("/api/rows", **had)
    assert ([row["step"] for row in then["steps"]], len(then["evals"])) == ([30], 1)
    # A resumed run does some steps again: what was told of them does not count any more.
    run.metrics.write_bytes(b"".join(run.metrics.read_bytes().splitlines(keepends=True)[:20]))
    run.summary.write_text("{}")
    again = await asking.get("/api/rows", **had)
    assert again["sequence"] != first["sequence"]
    assert (len(again["steps"]), len(again["evals"]), again["ended"]) == (20, 4, True)


async def test_many_rows_come_in_parts_and_what_no_chart_draws_does_not(tmp_path: Path) -> None:
    run = record(tmp_path / "long", steps=0)
    line = msgspec.json.encode(metrics_row(0, loss=1.0, entropy=float("nan"), unknown="text")) + b"\n"
    run.metrics.write_bytes((MOST_ROWS + 1) * line)
    asking = Asking(run.path)
    part = await asking.get("/api/rows", run=0, sequence="", steps=0, evals=0)
    assert (len(part["steps"]), part["more"]) == (MOST_ROWS, True)
    assert {"step", "time", "wall_s", "reward_mean"} <= part["steps"][0].keys()
    assert not {"loss", "entropy", "unknown"} & part["steps"][0].keys()
    rest = await asking.get("/api/rows", run=0, sequence=part["sequence"], steps=MOST_ROWS, evals=0)
    assert (len(rest["steps"]), rest["more"]) == (1, False)


async def test_a_run_that_has_made_no_step_is_empty(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run\n")
    asking = Asking(tmp_path)
    assert (await asking.get("/api/contents"))["runs"][0]["facts"] == {}
    rows = await asking.get("/api/rows", run=0, sequence="", steps=0, evals=0)
    assert (rows["steps"], rows["evals"], rows["ended"]) == ([], [], False)
    found = await asking.get("/api/samples", run=0)
    assert found == {"samples": [], "searched_to": None, "newest": None}
    assert await asking.get("/api/timeline", run=0) is None
    assert (await asking.get("/api/group", run=0, step=0, group=0))["samples"] == []


async def test_the_newest_picture_of_the_cluster_is_answered_and_nonsense_is_none(run: RunDirectory) -> None:
    asking = Asking(run.path)
    assert await asking.get("/api/cluster", run=0) == {
        "picture": None,
        "now": pytest.approx(time.time(), abs=60),
        "there": False,
        "tiles": [],
        "figures": [],
        "engines": {},
    }
    picture = cluster(STARTED, hub_now(STARTED, nodes=2))
    run.cluster.write_bytes(msgspec.json.encode(picture))
    answer = await asking.get("/api/cluster", run=0)
    assert answer["picture"] == msgspec.to_builtins(picture)
    assert (answer["tiles"][0]["title"], answer["tiles"][0]["text"]) == ("Nodes", "2 here")
    assert [len(texts) for texts in answer["engines"].values()] == 2 * [len(answer["figures"])]
    for nonsense in (b"{", b'{"at": 1}', b"\xff", b"[" * 100_000):
        run.cluster.write_bytes(nonsense)
        answer = await asking.get("/api/cluster", run=0)
        assert (answer["picture"], answer["there"]) == (None, True)


async def test_samples_and_their_group_are_answered(run: RunDirectory) -> None:
    asking = Asking(run.path)
    found = await asking.get("/api/samples", run=0, outcome="truncated", step=7)
    assert [(one["step"], one["group_id"], one["sample_index"]) for one in found["samples"]] == [(7, 7, 1)]
    group = await asking.get("/api/group", run=0, step=7, group=7)
    assert (len(group["samples"]), len(group["rewards"])) == (2, GROUP)


async def test_the_timeline_of_a_part_is_answered(run: RunDirectory) -> None:
    part = await Asking(run.path).get("/api/timeline", run=0, start=STARTED + 2, stop=STARTED + 4)
    assert [lane["name"] for lane in part["lanes"]] == ["engine 0", "engine 1", "trainer 0"]
    assert part["lanes"][2]["busy"] == pytest.approx(0.75)
