"""Recorder: the observer of a real run. It writes the run directory and talks to the terminal.

It takes what the hub observes in order, adds the run's wall time to each row, and at the end makes summary and plots.
Outsiders are told the same rows, and then the summary, or the error that ended the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import msgspec

from flash.config.load import dump
from flash.config.recorded import recorded
from flash.config.tree import Config
from flash.errors import AlarmError, RunDirectoryError
from flash.observe.alarms import Alarms, RaisedAlarm
from flash.observe.cluster import ClusterFile, HubNow
from flash.observe.console import Console
from flash.observe.observer import Wish
from flash.observe.rundir.batches import Batches, TokenText
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import Summary, summarise
from flash.observe.trackers.outsiders import Outsiders
from flash.types import Activity, Batch, TrainedSample
from flash.waiting import first_error


class Recorder:
    """Writes `config.run_dir`. `now` gives Unix seconds; `resume_at` is the version a resumed run continues from."""

    def __init__(
        self, config: Config, tokenizer: TokenText, *, now: Callable[[], float], resume_at: int | None, restarts: int
    ) -> None:
        self._config = config
        self._now = now
        self._restarts = restarts
        self.directory = RunDirectory.open(config.run_dir, dump(recorded(config)), resume_at)
        earlier = self.directory.read_metrics()
        # A resumed run's clock continues where its last recorded step stood.
        self._begun = now() - (float(earlier[-1].get("wall_s", 0.0)) if earlier else 0.0)
        self._console = Console(config)
        self._alarms = Alarms(config.alarms)
        self.stopped: AlarmError | None = None
        """Why the run is to end early."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self.batches = Batches(config, self.directory, tokenizer, self._writer)
        self._cluster = ClusterFile(self.directory, self._writer)
        self._outsiders = Outsiders(config, self.directory, resume_at)
        if resume_at is not None:
            self.note(f"continuing {config.run_dir} from version {resume_at}")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.batches.written()
            else:
                told = first_error(error) if isinstance(error, BaseExceptionGroup) else error
                row = {"error": type(told).__name__, "message": str(told)}
                self._cluster.end("failed", f"{row['error']}: {row['message']}")
                self._tell_last("error", row, interrupted=True)
        finally:
            self.batches.end()
            self._writer.shutdown()
            self._close_outsiders(interrupted=True)
            self._console.close()

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """Write the metrics of a committed step, with the run's wall time, and print its line; what alarms want."""
        full = {**row, "wall_s": self._now() - self._begun, **self._outsiders.lost()}
        self.directory.append_metrics(full)
        self._console.stage("training")
        self._console.step(full)
        self._tell("step", full)
        last = row["step"] + 1 >= self._config.run.steps
        return self._alarmed(self._alarms.step(full), last=last)

    def _alarmed(self, given: Sequence[RaisedAlarm], *, last: bool) -> Wish | None:
        """Tell of alarms, have the command called; what is wanted because of them. A last step ends the run anyway."""
        wanted = self._config.alarms
        wish: Wish | None = None
        for alarm in given:
            follows = ""
            if alarm.name in wanted.stop and not last:
                wish, follows = "stop", "; alarms.stop ends the run, which leaves a checkpoint"
                self.stopped = AlarmError(f"{alarm.text}; alarms.stop names `{alarm.name}`, --resume goes on")
            elif alarm.name in wanted.checkpoint and not last:
                wish, follows = wish or "checkpoint", "; alarms.checkpoint has one written after the next step"
            self._cluster.told(f"alarm: {alarm.text}{follows}")
            self._console.warn(alarm.text + follows)
            self._outsiders.alarm(alarm)
        return wish

    def _warn_all(self, texts: Sequence[str]) -> None:
        for text in texts:
            self._console.warn(text)

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, with the run's wall time, and print its line."""
        full = {**row, "wall_s": self._now() - self._begun}
        self.directory.append_evaluation(full)
        self._console.evaluation(full)
        self._tell("evaluation", full)

    def _tell(self, kind: str, row: Mapping[str, Any]) -> None:
        self._outsiders.row(kind, row)
        self._warn_all(self._outsiders.warnings())

    def _tell_last(self, kind: str, row: Mapping[str, Any], *, interrupted: bool) -> None:
        """Tell outsiders how the run ended, and wait until they have all."""
        self._outsiders.row(kind, row, last=True)
        self._close_outsiders(interrupted=interrupted)

    def _close_outsiders(self, *, interrupted: bool) -> None:
        deadlines = self._config.deadlines
        self._warn_all(self._outsiders.close(min(deadlines.sink, deadlines.close) if interrupted else deadlines.sink))

    def activities(self, rows: Sequence[Activity]) -> None:
        """Record bars of the timeline."""
        self.directory.append_spans(rows)

    def batch(self, batch: Batch) -> None:
        """Record what a step trains on. Raises what the writing of an earlier one met."""
        self.batches.begin(batch)

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Record a few samples of a committed step; as `batch`."""
        self.batches.commit(step, seen)

    def ledger(self, totals: Mapping[str, int]) -> None:
        """Write the totals: of a checkpoint, which a run that is killed leaves, or of the end."""
        self.directory.write_totals(self.directory.ledger, totals)

    def stage(self, text: str) -> None:
        """Say what the run is doing now."""
        self._console.stage(text)

    def note(self, text: str) -> None:
        """Print one line for people."""
        self._cluster.told(text)
        self._console.note(text)

    def failure(self, kind: str, message: str) -> None:
        """Count what has failed, by kind, with its last message."""
        self._cluster.failed(kind, message)

    def cluster(self, hub: HubNow) -> None:
        """Show what the cluster does now."""
        if warning := self._cluster.show(hub):
            self._console.warn(warning)

    def finish(self, ledger: Mapping[str, int], late: Mapping[str, int], *, interrupted: bool) -> None:
        """Write summary and ledger and print the closing table; an interrupted run has no time for plots.

        `late`: restarts that no row has.
        """
        self._console.stage("writing the summary")
        self.batches.written()
        self.ledger(ledger)
        error = "" if self.stopped is None else str(self.stopped)
        summary = write_summary(self.directory, self._config, ledger, self._restarts, late, error)
        if not interrupted:
            from flash.observe.plots.plots import write_plots

            try:
                write_plots(self.directory.path)
            except RunDirectoryError as problem:  # all that they are drawn from is there
                self._console.warn(f"{problem}; `flash plot {self.directory.path}` draws them at any time")
        self._cluster.end("interrupted" if interrupted else "finished")
        self._tell_last("summary", msgspec.to_builtins(summary), interrupted=interrupted)
        self._console.finish(summary)


def write_summary(
    directory: RunDirectory,
    config: Config,
    ledger: Mapping[str, Any],
    restarts: int,
    late: Mapping[str, float] | None = None,
    error: str = "",
) -> Summary:
    """Sum up a run from what is in its directory, and leave that there.

    Args:
        directory: the run's.
        config: the run.
        ledger: its totals.
        restarts: of the hub.
        late: of trainer ranks and engines, those that no row has.
        error: what ended it.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    rows, evaluations = directory.read_metrics(), directory.read_evaluations()
    undone = [*directory.read_undone(), late or {}]
    summary = summarise(config, rows, evaluations, undone=undone, ledger=ledger, restarts=restarts, error=error)
    directory.write_totals(directory.summary, summary)
    return summary
