"""Recorder: the observer of a real run. It writes the run directory and prints to the terminal.

The process of the hub (`flash.run.node_loop`) makes it before the run and closes it after the run; in `flash sft` the
first trainer rank does. This process calls it with each event, in order. The recorder adds the run's wall time to each
row, raises alarms, and writes summary and plots at the end. Receivers (trackers, sink, alarm command) get the same
rows, and at last the summary or the error that ended the run.

The *ledger* is the hub's count of each task, sample and token of the run by its fate, such as `trained`. Its totals are
a dict from the name of the fate to the number.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import msgspec

from flash.config.load import dump, recorded
from flash.config.shipping import shipped_modules
from flash.config.tree import Config
from flash.errors import AlarmError, RunDirectoryError, encodable
from flash.observe.alarms import Alarms, RaisedAlarm
from flash.observe.cluster import EVENT_TEXT, ClusterFile, HubNow, shortened
from flash.observe.console import Console
from flash.observe.observer import Wish
from flash.observe.rundir.batches import Batches, TokenText
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.observe.rundir.summary import Summary, number, summarise
from flash.observe.trackers.receivers import Receivers
from flash.types import Activity, Batch, TrainedSample
from flash.waiting import first_error

RECEIVERS_S = 60.0
"""Time limit, in seconds, for trackers, the sink and the alarm command to take the remaining rows at the end of the
run. `flash track` can send later what a tracker has missed."""


class Recorder:
    """Writes the run directory `config.run_dir`, and reports to the terminal and to receivers.

    It is an `Observer` (`flash.observe.observer`): the hub calls those methods, with each event of the run. The process
    that owns the recorder calls the others. Use it as a context manager around the run: an error that leaves the block
    is recorded as the end of the run.
    """

    def __init__(
        self, config: Config, tokenizer: TokenText, *, now: Callable[[], float], resume_at: int | None, restarts: int
    ) -> None:
        """Prepare the run directory, and start the terminal's live line and the receivers.

        A new run renames the directory of an earlier run of this name. A resumed run moves later rows away.

        Args:
            config: the run.
            tokenizer: decodes the tokens of the samples that are written.
            now: gives Unix seconds.
            resume_at: version that a resumed run goes on from; None for a new run.
            restarts: number of times that this process, which owns the recorder, was started again.
        """
        self._config = config
        self._now = now
        self._restarts = restarts
        # `recorded` makes the paths in the configuration absolute, so that another process can use the file.
        text = dump(recorded(config))
        modules = shipped_modules(text)  # read now: a new run may move the directory in which they lie
        self.directory = RunDirectory.open(config.run_dir, text, resume_at)
        """Directory of the run. The owner also reads evaluations and hub numbers from it."""
        for name, content in modules.items():
            write_atomically(self.directory.path / name, content)
        kept_rows = self.directory.read_metrics()
        self._run_start = now() - ((number(kept_rows[-1], "wall_s") or 0.0) if kept_rows else 0.0)
        """Time at which the run would have begun without interruptions, in Unix seconds; `wall_s` counts from it."""
        self._console = Console(config)
        self._alarms = Alarms(config.alarms.off)
        self._last_failure = ""
        """Kind and message of the newest failure; empty if there is none."""
        self.stopped: AlarmError | None = None
        """Alarm that ends the run early; None if there is none. The process of the run raises it after `finish`."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        """Thread that writes batches, readable samples and `cluster.json`, one after the other."""
        self.batches = Batches(config, self.directory, tokenizer, self._writer)
        """Batches of the run. The owner waits for their files before it writes a checkpoint."""
        self._cluster = ClusterFile(self.directory, self._writer)
        self._receivers = Receivers(config, self.directory, resume_at)
        if resume_at is not None:
            self.note(f"continuing {config.run_dir} from version {resume_at}")

    def __enter__(self) -> Recorder:
        """Return the recorder."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what is left, and close the receivers and the terminal. An error is recorded as the end of the run.

        Without an error, or after the alarm that `finish` has recorded, an earlier failed write of samples is raised.
        """
        try:
            if error is None or error is self.stopped:  # `finish` has recorded the alarm as the end of the run
                self.batches.written()
            else:
                cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
                # JSON cannot hold lone surrogates. A message may have some from the name of a file, and an error here
                # would hide the one that has ended the run.
                row = {"error": type(cause).__name__, "message": encodable(str(cause))}
                self._cluster.end("failed", f"{row['error']}: {row['message']}")
                self._send_last("error", row, interrupted=True)
        finally:
            self.batches.end()
            self._writer.shutdown()
            self._close_receivers(interrupted=True)
            self._console.close()

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """Write, print and send the row of a committed step, and return the wish of the alarms that it raises.

        Returns None if no alarm with a reaction is raised. Adds to the row the wall time, and the number of earlier
        rows that each tracker has lost. Raises RunDirectoryError if the row cannot be written.
        """
        full = {**row, "wall_s": self._now() - self._run_start, **self._receivers.lost()}
        self.directory.append_metrics(full)
        self._console.stage("training")
        self._console.step(full)
        self._send("step", full)
        last = row["step"] + 1 >= self._config.run.steps
        return self._report_alarms(self._alarms.step(full), last=last)

    def _report_alarms(self, alarms: Sequence[RaisedAlarm], *, last: bool) -> Wish | None:
        """Print the alarms of a step, start the alarm command, and return the wish that `alarms.reactions` names for
        them.

        `stop` is stronger than `checkpoint`. After the last step (`last`) there is no wish, since the run ends anyway.
        """
        wish: Wish | None = None
        for alarm in alarms:
            reaction, follows = self._config.alarms.reactions.get(alarm.name), ""
            if reaction == "stop" and not last:
                wish, follows = "stop", "; alarms.reactions ends the run, which leaves a checkpoint"
                self.stopped = AlarmError(f"{alarm.text}; alarms.reactions.{alarm.name} is stop, --resume goes on")
            elif reaction == "checkpoint" and not last:
                wish, follows = wish or "checkpoint", "; alarms.reactions has a checkpoint written after the next step"
            self._cluster.event(f"alarm: {alarm.text}{follows}")
            self._console.warn(alarm.text + follows)
            self._receivers.alarm(alarm)
        return wish

    def _warn_all(self, texts: Sequence[str]) -> None:
        """Print warnings, which come from the receivers, each as a line."""
        for text in texts:
            self._console.warn(text)

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Write, print and send the row of a finished evaluation. Raises RunDirectoryError if it cannot be written.

        Adds the wall time to the row. If answers are missing, the last failure of the run is printed, too.
        """
        full = {**row, "wall_s": self._now() - self._run_start}
        self.directory.append_evaluation(full)
        self._console.evaluation(full)
        if full.get("missing") and self._last_failure:
            self._console.warn(f"answers of the evaluation are missing; the last failure is {self._last_failure}")
        self._send("evaluation", full)

    def _send(self, kind: str, row: Mapping[str, Any]) -> None:
        """Pass a row to all receivers, without waiting, and print their warnings so far.

        `kind` is `step` or `evaluation`.
        """
        self._receivers.row(kind, row)
        self._warn_all(self._receivers.warnings())

    def _send_last(self, kind: str, row: Mapping[str, Any], *, interrupted: bool) -> None:
        """Send receivers the end of the run, and wait until they have all rows or the time limit is over.

        `kind` is `summary`, with the summary as `row`, or `error`, with the error's type and message. For
        `interrupted`, see `_close_receivers`.
        """
        self._receivers.row(kind, row, last=True)
        self._close_receivers(interrupted=interrupted)

    def _close_receivers(self, *, interrupted: bool) -> None:
        """Wait for the receivers at most RECEIVERS_S, and close them.

        `interrupted`: True if a signal, an alarm or an error ended the run. Then the wait is at most `deadlines.close`.
        """
        # After a signal the launcher kills this process in `flash.config.waits.grace_s` seconds, and the last step and
        # its checkpoint may have used most of them. After an error the user reads the error only after this wait.
        seconds = min(RECEIVERS_S, self._config.deadlines.close) if interrupted else RECEIVERS_S
        self._warn_all(self._receivers.close(seconds))

    def written(self) -> None:
        """Block until all batches and rows so far are on the disk. Raises the error of a write.

        The process of the hub calls this in a thread before each checkpoint, because a run that continues from the
        checkpoint, perhaps after a failure of the machine, does not make the earlier rows again.
        """
        self.batches.written()
        self.directory.sync_rows()

    def activities(self, rows: Sequence[Activity]) -> None:
        """Write activities of workers, the bars of the timeline. Raises RunDirectoryError if they cannot be written."""
        self.directory.append_spans(rows)

    def batch(self, batch: Batch) -> None:
        """Start to write the batch of a step, in a thread, so that the hub does not wait for the disk.

        Raises the error of an earlier write, which ends the run.
        """
        self.batches.begin(batch)

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Write token values of some samples of a committed step, in a thread. Raises the error of an earlier write."""
        self.batches.commit(step, seen)

    def ledger(self, totals: Mapping[str, int]) -> None:
        """Write the ledger's totals: at each checkpoint, for a run that is killed later, and at the end.

        Raises RunDirectoryError if they cannot be written.
        """
        self.directory.write_ledger(totals)

    def stage(self, text: str) -> None:
        """Show in the terminal what the run is doing now."""
        self._console.stage(text)

    def note(self, text: str) -> None:
        """Print a line for people, and keep it as an event for `cluster.json`."""
        self._cluster.event(text)
        self._console.note(text)

    def failure(self, kind: str, message: str) -> None:
        """Count a failure of this kind for `cluster.json`, and keep its message as the last one of the kind."""
        self._cluster.failed(kind, message)
        self._last_failure = shortened(f"{kind}: {message}", EVENT_TEXT)

    def cluster(self, hub: HubNow) -> None:
        """Start to write a state of the cluster. One comes every `flash.observe.cluster.EVERY_S` seconds.

        The first error of such a write is printed as a warning, when a later state comes.
        """
        if warning := self._cluster.show(hub):
            self._console.warn(warning)

    def finish(self, ledger: Mapping[str, int], late: Mapping[str, int], *, interrupted: bool) -> None:
        """Write the files that describe the whole run, send the receivers the summary, and print the closing table.

        In this order: wait for the batches; write ledger, summary, plots and the end of `cluster.json`; send the
        summary; print. The hub's process calls it in a thread, while its event loop still runs; the first trainer rank
        of `flash sft` calls it directly.

        Args:
            ledger: totals of the ledger.
            late: numbers of restarts after the last step, which no row of `metrics.jsonl` has, by `engine_restarts` and
                `trainer_restarts`. A missing name counts as 0.
            interrupted: True if a signal or an alarm ended the run early. There is then no time for plots.

        Raises:
            RunDirectoryError: a file cannot be written, or an earlier write of samples has failed; then none of these
                files is written.
        """
        self._console.stage("writing the summary")
        self.batches.written()
        self.ledger(ledger)
        error = "" if self.stopped is None else str(self.stopped)
        summary = write_summary(self.directory, self._config, ledger, self._restarts, late, error)
        if not interrupted:
            from flash.observe.plots import write_plots

            try:
                write_plots(self.directory.path)
            except RunDirectoryError as problem:  # not fatal: the files that plots are drawn from are complete
                command = shlex.join(["flash", "plot", str(self.directory.path)])
                self._console.warn(f"{problem}; `{command}` draws them at any time")
        self._cluster.end("interrupted" if interrupted else "finished")
        self._send_last("summary", msgspec.to_builtins(summary), interrupted=interrupted)
        self._console.finish(summary)


def write_summary(
    directory: RunDirectory,
    config: Config,
    ledger: Mapping[str, Any],
    restarts: int,
    late: Mapping[str, float] | None = None,
    error: str = "",
) -> Summary:
    """Compute the summary of a run from the files in its directory, and write it there.

    The recorder calls it at the end of a run. The launcher calls it if an error or a signal has ended the run earlier.

    Args:
        directory: directory of the run.
        config: configuration of the run.
        ledger: totals of the ledger; empty if the run has written none yet.
        restarts: number of restarts of the hub.
        late: as for `Recorder.finish`; None if these numbers are lost, since the hub has not ended in order.
        error: message of the error that ended the run; empty if none did.

    Raises:
        RunDirectoryError: the summary cannot be written.
    """
    rows, evaluations = directory.read_metrics(), directory.read_evaluations()
    # Restarts count even if a resumed run has moved their rows away, to make the steps again. `late` is one row more.
    undone = [*directory.read_earlier_metrics(), late or {}]
    summary = summarise(config, rows, evaluations, undone=undone, ledger=ledger, restarts=restarts, error=error)
    directory.write_summary(summary)
    return summary
