"""A run as a batch job of a real SLURM: what it is stopped by, it goes on from by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.whole_run import CONFIG, REPOSITORY
from tests.rows import written_rows
from tests.slurm.cluster import Cluster, missing
from tests.slurm.jobs import REAL_FLASH, make_project

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    why = missing()
    if why and not os.environ.get("FLASH_REQUIRE_SLURM"):
        pytest.skip(f"no SLURM: {why}")
    with Cluster() as started:
        yield started


@pytest.mark.parametrize("stopped_by", ["signal", "time limit"])
def test_a_job_that_is_stopped_is_requeued_and_goes_on(cluster: Cluster, tmp_path: Path, stopped_by: str) -> None:
    limited = stopped_by == "time limit"
    if limited and not os.environ.get("FLASH_REQUIRE_TIME_LIMIT"):
        pytest.skip("takes twelve minutes: set FLASH_REQUIRE_TIME_LIMIT=1")
    launch = make_project(tmp_path, REAL_FLASH) / "launch.sh"
    run, config, output = tmp_path / "run", tmp_path / "config.toml", tmp_path / "output.txt"
    config.write_text(CONFIG.format(folder=tmp_path, model=tmp_path / "model"))
    options = ["--time=5", "--signal=B:TERM@30"] if limited else []
    overrides = ("run.steps=5000", "checkpoint.every=5000", "deadlines.shutdown=25", "eval.every=0")
    command = (*options, f"--output={output}", str(launch), str(config), *overrides)
    job = cluster.submit(*command, variables={"PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path)

    def steps() -> list[int]:
        return [row["step"] for row in written_rows(run / "metrics.jsonl")]

    def newest() -> int:
        return max((int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0)

    reached = 0
    for life in (1, 2) if limited else (1,):
        wanted = (str(life), reached + 2)
        if not limited:
            cluster.until(lambda wanted=wanted: len(steps()) >= wanted[1], "two steps", seconds=300)
            cluster.call("scancel", "--batch", "--signal=TERM", job)
        cluster.until(lambda wanted=wanted: cluster.job(job)["Restarts"] == wanted[0], "the job to be requeued", 300)
        assert newest() > reached, output.read_text()
        reached = newest()
        assert steps() == list(range(reached))
        if not limited:
            cluster.begin_now(job)
        words = f"continuing {run} from version {reached}"
        cluster.until(lambda words=words: words in output.read_text(), "the job to go on", 300)
