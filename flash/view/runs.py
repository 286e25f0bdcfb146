"""Runs that the page shows, read continuously while they are in progress.

`flash view` opens the runs once with `open_runs`. `flash.view.app` reads them, in threads, whenever the page asks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from flash.observe.cluster import read_cluster
from flash.observe.rundir.rundir import Followed, RunDirectory
from flash.text import one_line
from flash.types import Activity
from flash.view.charts import values
from flash.view.prometheus import Latest

MOST_ROWS = 5000
"""Largest number of rows in one response. The page requests the rest with further requests."""


class Rows(msgspec.Struct, frozen=True):
    """Rows of a run that are new since the last request of the page."""

    sequence: str
    """Identifies the sequence of rows. If it differs from that of the request, the page must drop all earlier rows:
    these rows are then the first ones."""
    steps: list[dict[str, float]]
    """New rows of `metrics.jsonl`, reduced to the numbers that charts draw."""
    evals: list[dict[str, float]]
    """New rows of `evals.jsonl`, reduced to the numbers that charts draw."""
    more: bool
    """True if there are more rows that can be requested now."""
    ended: bool
    """True if the run has written its summary."""
    gone: bool
    """True if the run directory was moved or removed."""


class ViewedRun:
    """Run directory that is read continuously. Its methods may be called from several threads.

    Args:
        path: the run directory, which need not exist any more.
        name: name of the run on the page. The name of a folder may contain any character, so it is escaped.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = one_line(name)
        self.directory = RunDirectory(path)
        self._steps = Followed(self.directory.metrics, dict[str, Any])
        """Rows of the steps so far."""
        self._evals = Followed(self.directory.evals, dict[str, Any])
        """Rows of the evaluations so far."""
        self._spans = Followed(self.directory.spans, Activity)
        """Activities of the workers so far."""
        self._lock = threading.Lock()
        """Guards the three above: two threads that read one of them at once would add rows twice."""
        self._born = uuid4().hex
        """Part of `Rows.sequence` that differs between servers: a page may still have the rows of an earlier server."""

    def facts(self) -> dict[str, str]:
        """Return the main settings of the run, under names for people (`RunDirectory.facts`)."""
        return self.directory.facts()

    def rows(self, sequence: str, steps: int, evals: int) -> Rows:
        """Return the rows that are new for a page that has `steps` rows of steps and `evals` of evaluations.

        `sequence` is `Rows.sequence` of the rows that the page has.

        The page asks for them every few seconds. All rows are sent again if `sequence` is not the current sequence, for
        example because a resumed run has replaced the rows of some steps. Raises RunDirectoryError if a file cannot be
        read.
        """
        with self._lock:
            self._steps.read()
            self._evals.read()
            # `restarts` counts how often a file was replaced instead of extended, so that earlier rows are invalid.
            current = f"{self._born}-{self._steps.restarts}-{self._evals.restarts}"
            if sequence != current:
                steps = evals = 0
            new_steps, new_evals = self._steps.rows[steps:], self._evals.rows[evals:]
        return Rows(
            sequence=current,
            steps=values(new_steps[:MOST_ROWS], "step"),
            evals=values(new_evals[:MOST_ROWS], "evaluation"),
            more=max(len(new_steps), len(new_evals)) > MOST_ROWS,
            ended=self.directory.has_ended(),
            gone=not self.directory.path.exists(),
        )

    def latest(self) -> Latest:
        """Return the last row of each kind and the state of the cluster, for Prometheus.

        Raises RunDirectoryError if a file cannot be read.
        """
        with self._lock:
            self._steps.read()
            self._evals.read()
            steps, evals = ((file.rows or [{}])[-1] for file in (self._steps, self._evals))
        return Latest(self.name, steps, evals, self.directory.has_ended(), read_cluster(self.directory))

    def spans(self) -> Sequence[Activity]:
        """Return all activities of the timeline so far, as a copy, because other threads may read further ones.

        Raises RunDirectoryError if the file cannot be read.
        """
        with self._lock:
            self._spans.read()
            return list(self._spans.rows)


def open_runs(paths: Sequence[Path]) -> list[ViewedRun]:
    """Return the runs in these directories, each once, under the shortest names that distinguish them."""
    resolved = list(dict.fromkeys(path.resolve() for path in paths))
    return [ViewedRun(path, _name(path, resolved)) for path in resolved]


def _name(path: Path, among: Sequence[Path]) -> str:
    """Return the shortest end of `path` that no other path of `among` has; the whole path if there is none."""
    for parts in range(1, len(path.parts)):
        end = path.parts[-parts:]
        if sum(other.parts[-parts:] == end for other in among) == 1:
            return "/".join(end)
    return str(path)
