"""A node that joins a running job from a job of its own, by the documented commands, and leaves it in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.held_env import VARIABLE, held
from tests.integration.whole_run import CONFIG, REPOSITORY, balanced, given_up
from tests.rows import written_rows
from tests.slurm.cluster import Cluster, missing
from tests.slurm.jobs import REAL_FLASH, Job, Real, StandIn, make_project

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PAGE = REPOSITORY / "docs" / "scaling.md"
COMMAND = re.compile(r"^sbatch launch\.sh (?:my\.toml|join .*?)(?= *#|$)", re.MULTILINE)
"""Those of the page that this file runs, as they stand there: first the run, then what joins it."""
STEPS = 24
BATCH = 8


class Jobs:
    """Batch jobs of one project, whose `my.toml` is a run that its environment holds back."""

    def __init__(self, folder: Path, cluster: Cluster | None, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        self._project = make_project(folder, REAL_FLASH)
        self._gate = folder / "gate"
        self._jobs: list[Job] = []
        self.run = self._project / "outputs" / "mine"
        text = CONFIG.format(folder="outputs", model=folder / "model").replace('name = "run"', 'name = "mine"')
        text = text.replace("steps = 6", f"steps = {STEPS}")
        text = text.replace("\nbatch_size = 32", f"\nbatch_size = {BATCH}").replace("every = 3", "every = 0")
        (self._project / "my.toml").write_text(held(text, self._gate))

    def submit(self, command: str, **variables: str) -> Job:
        """A documented command."""
        words = shlex.split(command)
        variables["PYTHONPATH"] = str(REPOSITORY)
        job: Job
        if self._cluster is None:
            job = self._stack.enter_context(StandIn(self._project, words, variables))
        else:
            job = self._stack.enter_context(closing(Real(self._cluster, self._project, words, variables)))
        self._jobs.append(job)
        return job

    def let(self, episodes: int) -> None:
        """So many may begin on each node, those before included."""
        self._gate.write_text(str(episodes))

    def rows(self, name: str) -> list[Any]:
        return written_rows(self.run / name)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, f"no {what}:\n" + "\n".join(job.output() for job in self._jobs)
            time.sleep(0.1)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Of a real cluster, where it is installed."""
    with ExitStack() as stack:
        real = not missing() or os.environ.get("FLASH_REQUIRE_SLURM")
        yield Jobs(tmp_path, stack.enter_context(Cluster()) if real else None, stack)


def test_a_second_jobs_node_joins_makes_samples_that_are_trained_and_leaves_when_its_job_is_cancelled(
    jobs: Jobs,
) -> None:
    train, join = COMMAND.findall(PAGE.read_text())
    jobs.let(3 * BATCH)
    first = jobs.submit(train)
    jobs.until(lambda: bool(jobs.rows("metrics.jsonl")), "step of the first job")
    second = jobs.submit(join, **{VARIABLE: "0.25"})
    jobs.until(lambda: "makes samples after" in second.output(), "samples of the second job")
    jobs.let(STEPS * BATCH // 3)

    def trained_of_second() -> int:
        return sum(0.2 < sample["reward"] % 0.5 < 0.3 for sample in jobs.rows("samples.jsonl"))

    jobs.until(lambda: trained_of_second() > 0, "sample of the second job that was trained")
    second.cancel()
    # The job's end may end the node's engine first.
    left = ("node 1 has left, and 1 of 2 engines with it", "node 1 has left, when no engine of it was ready any more")
    jobs.until(lambda: any(words in first.output() for words in left), "word that the node has left")
    assert second.end() == "cancelled"
    assert "this node takes no more work, and leaves the run" in second.output()
    jobs.let(2 * STEPS * BATCH)
    jobs.until((jobs.run / "summary.json").exists, "end of the run")
    assert first.end() == "0", first.output()

    assert "start again" not in first.output()
    summary = json.loads((jobs.run / "summary.json").read_text())
    assert (summary["restarts"], summary["trainer_restarts"]) == (0, 0)
    assert balanced(summary["ledger"]), summary["ledger"]
    assert given_up(summary["ledger"]) <= {"stale"}
    assert [row["step"] for row in jobs.rows("metrics.jsonl")] == list(range(STEPS))
    members = Counter(sample["group_id"] for sample in jobs.rows("samples.jsonl"))
    assert max(members.values()) <= 4, "a group has four members"
