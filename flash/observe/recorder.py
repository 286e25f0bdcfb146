"""Recorder: the observer of a real run. It writes the run directory and talks to the terminal.

It takes what the hub observes in order, adds the run's wall time to each row, and at the end makes summary and plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from flash.config.load import dump
from flash.config.tree import Config
from flash.observe.console import Console
from flash.observe.rundir import RunDirectory, readable, sample_times
from flash.observe.summary import summarise
from flash.types import Activity, Trajectory


class TokenText(Protocol):
    """Text of single tokens, for readable samples."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token."""
        ...


class Recorder:
    """Writes `config.run_dir`. `now` gives Unix seconds; `resume_at` is the version a resumed run continues from."""

    def __init__(
        self,
        config: Config,
        tokenizer: TokenText,
        *,
        now: Callable[[], float],
        resume_at: int | None,
        restarts: int,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._now = now
        self._restarts = restarts
        self.directory = RunDirectory.open(config.run_dir, dump(config), resume_at)
        earlier = self.directory.read_metrics()
        # A resumed run's clock continues where its last recorded step stood.
        self._begun = now() - (float(earlier[-1].get("wall_s", 0.0)) if earlier else 0.0)
        self._console = Console(config)
        self._canary = 0.0
        if resume_at is not None:
            self._console.note(f"continuing {config.run_dir} from version {resume_at}")
        self._console.stage("starting engines and trainers")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._console.close()

    def step(self, row: Mapping[str, float]) -> None:
        """Write the metrics of a committed step, with the run's wall time, and print its line."""
        full = {**row, "wall_s": self._now() - self._begun}
        canary = row.get("canary_max", 0.0)
        self._canary = max(self._canary, 0.0 if math.isnan(canary) else canary)
        self.directory.append_metrics(full)
        self._console.step(full)

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, with the run's wall time, and print its line."""
        full = {**row, "wall_s": self._now() - self._begun}
        self.directory.append_evaluation(full)
        self._console.evaluation(full)
        self._console.stage("training")

    def activities(self, rows: Sequence[Activity]) -> None:
        """Record bars of the timeline."""
        self.directory.append_spans(rows)

    def trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Record the samples a step trains on: all of them in numbers, a few of them readably."""
        self.directory.append_samples(sample_times(t, step) for t in trajectories)
        chosen = trajectories[: self._config.run.log_samples]
        if chosen:
            samples = [readable(t, step, self._tokenizer.token_texts(t.tokens().tolist())) for t in chosen]
            self.directory.write_trajectories(step, samples)

    def note(self, text: str) -> None:
        """Print one line for people."""
        self._console.note(text)

    def finish(self, ledger: Mapping[str, int], *, interrupted: bool) -> None:
        """Write summary and ledger and print the closing table; an interrupted run has no time for plots."""
        self._console.stage("writing the summary")
        self.directory.write_ledger(ledger)
        summary = summarise(
            self._config,
            self.directory.read_metrics(),
            self.directory.read_evaluations(),
            ledger=ledger,
            restarts=self._restarts,
            canary_max=self._canary,
        )
        self.directory.write_summary(summary)
        if not interrupted:
            from flash.observe.plots import write_plots

            write_plots(self.directory.path)
        self._console.finish(summary)
