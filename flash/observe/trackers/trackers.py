"""Trackers of `track.to`, and the sending of a run's rows to them: during the run, after its end, and after a resume.

    track/NAME.json    the run's id in the tracker, and the last step and evaluation that the tracker has received
    track/NAME.lock    held by the process that sends
    track/NAME.log     output of the tracker

`Tracking` sends the rows that the tracker does not have yet. `flash track` uses it directly, after the run. In a run,
`TrackerProcess` starts a process for each tracker, which calls `run_tracker`. That process only reads the run's files,
so a tracker that hangs or crashes cannot harm the run. The package of a tracker is imported in no other process of the
run, because trackers start threads, write to the terminal, and wait for networks.

Law: a step is sent once, also if a resumed run makes it again, unless the process is killed between sending the step
and writing that down. Nothing is dropped: rows that were not sent stay in the run's own files.

An *event* is a notification from the run's process to a tracker's process that the run's files have a new row. Its
*kind* is `step` or `evaluation`, or one of `LAST_EVENTS`.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO, cast
from uuid import uuid4

import msgspec

from flash.config.load import flat, read_toml
from flash.config.tree import TrackConfig, TrackerName
from flash.errors import DECODE_ERRORS, FlashError, RunDirectoryError
from flash.foreign.forking import python_command
from flash.observe.columns.table import APART, Kind, column_of
from flash.observe.rundir.rundir import Followed, RunDirectory, write_atomically, writing
from flash.observe.rundir.summary import number
from flash.observe.trackers.feed import Receiver, ReceiverError, kill_group
from flash.text import one_line

BATCH = 100
"""Largest number of parameters or metrics that MLflow gets in one call. It accepts 100 parameters, and more metrics."""
PARAMETER_LENGTH = 500
"""Largest number of characters of an MLflow parameter."""
X_AXIS = "train/global_step"
"""Value that Weights & Biases uses as x axis. Its own step counter does not fit: it only grows, but an evaluation may
be sent after later steps."""
NAME_LENGTH = 200
"""Largest number of characters that the part of a value's name after `train/` or `eval/` has in trackers."""
ALIVE_CHECK_S = 0.5
"""Seconds between two checks of the tracker's process that the run's process still lives."""
RETRY_S = 1.0
"""Seconds until a tracker that fails at the end of the run is tried again."""
LAST_EVENTS = ("summary", "error")
"""Kinds of a run's last event: `summary` if the run ended in order, also early by a signal or an alarm; `error` if it
failed."""
KILLED = "killed"
"""Kind that `_next_event` returns if the run died without a last event. No run sends it."""
ERROR_LENGTH = 500
"""Largest number of characters of an error that is reported to the run."""
_INVALID = re.compile(r"[^\w.-]")
"""Characters of a name that not all trackers accept."""


class RunDescription(msgspec.Struct, frozen=True):
    """Everything that a tracker needs to open a run."""

    name: str
    """Name of the run."""
    project: str
    """Name of the project or experiment that the run belongs to."""
    config: Mapping[str, Any]
    """Configuration of the run: tables of settings."""
    folder: Path
    """Folder for files that the tracker writes on this machine: `track/` in the run directory."""
    id: str | None
    """Id of the run in the tracker; None if the tracker does not know the run yet."""


class Tracker(Protocol):
    """An open run in a tracker. `Tracking` makes it from `TRACKERS`, and calls its methods.

    The constructor opens the run: a new one, or the one of `RunDescription.id`. It imports the tracker's package. The
    constructor and the methods may block and raise anything.
    """

    id: str
    """Id by which the tracker finds the run again."""

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Send numbers by their names in trackers. `at` is the time when they were measured, in Unix seconds.

        `step` is the step that they belong to, or before which the evaluation was made.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """Close the run, as failed or as finished. Nothing is sent after it."""
        ...


class Wandb:
    """A run in Weights & Biases."""

    def __init__(self, run: RunDescription) -> None:
        wandb = import_module("wandb")
        self.id = run.id or _unique_id(run.name)
        self._run = wandb.init(
            project=run.project,
            id=self.id,
            name=run.name,
            resume="allow",  # continue the run of this id if there is one
            config=dict(run.config),
            dir=str(run.folder),
            settings=wandb.Settings(silent=True),
        )
        # Draw all values (`*`) over X_AXIS instead of the calls' own numbers.
        self._run.define_metric(X_AXIS)
        self._run.define_metric("*", step_metric=X_AXIS)

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Send numbers of a step. Weights & Biases records the time of the call, and not `at`."""
        self._run.log({**values, X_AXIS: step})

    def close(self, *, failed: bool) -> None:
        """Close the run, as failed or as finished."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run in trackio. The name of a run is its id there."""

    def __init__(self, run: RunDescription) -> None:
        trackio = import_module("trackio")
        self.id = run.id or _unique_id(run.name)
        self._run = trackio.init(
            project=run.project,
            name=self.id,
            config=dict(run.config),
            resume="allow",  # continue the run of this name if there is one
            # No page for a notebook, and no numbers about the machine: Flash sends its own.
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Send numbers of a step. Trackio records the time of the call, and not `at`."""
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Close the run. Trackio does not distinguish failed runs."""
        self._run.finish()


class TensorBoard:
    """Event files for TensorBoard, which many other programs read too. A folder is a run."""

    def __init__(self, run: RunDescription) -> None:
        summary = import_module("tensorboard.summary")
        # If somebody removed `track/tensorboard.json`, all rows are sent again. They need another folder then.
        first = not (run.folder / "tensorboard").exists()
        self.id = run.id or ("tensorboard" if first else _unique_id("tensorboard"))
        self._writer = summary.Writer(str(run.folder / self.id))

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Write numbers of a step with their time."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=at)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file. TensorBoard does not distinguish failed runs."""
        self._writer.close()


class MLflow:
    """A run of an MLflow experiment, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: RunDescription) -> None:
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        if run.id is not None:
            # The run exists with its configuration. It was closed if the tracker's process ended in order.
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if found is None else found.experiment_id
        self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
        config = flat(dict(run.config))
        settings = [self._entities.Param(key, str(value)[:PARAMETER_LENGTH]) for key, value in config]
        try:
            for start in range(0, len(settings), BATCH):
                self._client.log_batch(self.id, params=settings[start : start + BATCH])
        except BaseException:
            # `Tracking` does not know the id of this run yet, and makes another one at the next event of the run. If
            # the server refused the settings each time, each event would leave a run without numbers there.
            with suppress(Exception):
                self._client.delete_run(self.id)
            raise

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Send numbers of a step with their time, BATCH of them in each call."""
        metrics = [self._entities.Metric(name, value, round(at * 1000), step) for name, value in values.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self.id, metrics=metrics[start : start + BATCH])

    def close(self, *, failed: bool) -> None:
        """Close the run, as failed or as finished."""
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[TrackerName, Callable[[RunDescription], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}
"""Trackers by the names of `track.to`. Each name is also that of the Python package."""


def not_installed(name: str) -> str | None:
    """Return an error message if the package of the tracker `name` is missing; None if it is installed."""
    found = find_spec(name)
    # A folder with the name of the package is no proof: Weights & Biases leaves such a folder in the working directory.
    # Python finds it as a package without a file (`origin`).
    if found is not None and found.origin is not None:
        return None
    return f"`{name}` is not installed here: `pip install {name}`, or take it out"


def _unique_id(name: str) -> str:
    """Return an id for a new run in a tracker: `name` and random digits, since another run may have the name."""
    return f"{name}-{uuid4().hex[:8]}"


class TrackerPlace(msgspec.Struct, frozen=True):
    """Last rows of a run that a tracker has received: the content of `track/NAME.json`."""

    id: str | None = None
    """Id of the run in the tracker; None if the tracker does not know the run yet."""
    step: int = -1
    """Step of the last row of `metrics.jsonl` that the tracker has."""
    evaluation: int = -1
    """Step of the last row of `evals.jsonl` that the tracker has."""


class Tracking:
    """Sends the rows of one run to one tracker.

    `run_tracker` has one during the run, and `flash track` makes one after it. Only the process that holds the lock of
    `tracker_lock` may call `send`. `unsent` only reads, so it needs no lock.
    """

    def __init__(self, directory: RunDirectory, name: TrackerName) -> None:
        self._directory = directory
        self._name: TrackerName = name
        self._file = folder_of(directory) / f"{name}.json"
        self._place = _read_place(self._file)
        """Last rows that the tracker has received, equal to the content of the file."""
        self._steps = Followed(directory.metrics, dict[str, Any])
        """Rows of the steps in the run's files. `_unsent_rows` reads the new ones."""
        self._evals = Followed(directory.evals, dict[str, Any])
        """Rows of the evaluations in the run's files."""
        self._tracker: Tracker | None = None
        """Open run in the tracker; None before the first call of `send`, and after one that failed."""

    def send(self, project: str | None = None) -> None:
        """Send all rows that the tracker does not have, and write down after each row that it was sent.

        The first call opens the run in the tracker. `project` replaces the setting `track.project`. Raises whatever the
        tracker raises; rows that were sent before are not sent again.
        """
        tracker = self._tracker or self._open(project)
        # If the tracker raises below, it stays None, and the next call opens it again: it may be in a broken state.
        self._tracker = None
        for kind, step, row in self._unsent_rows():
            tracker.log(tracked(kind, row), step, number(row, "time") or 0.0)
            change = {"step": step} if kind == "step" else {"evaluation": step}
            self._save_place(msgspec.structs.replace(self._place, **change))
        self._tracker = tracker

    def unsent(self) -> int:
        """Return the number of rows that the tracker does not have."""
        return sum(1 for _ in self._unsent_rows())

    def close(self, *, failed: bool) -> None:
        """Close the tracker's run, as failed or as finished, if it is open. Raises whatever the tracker raises."""
        if self._tracker is not None:
            self._tracker.close(failed=failed)

    def _open(self, project: str | None) -> Tracker:
        """Open the run in the tracker, and return it. Writes its id down, so that a later process continues this run.

        `project` replaces the setting `track.project`.
        """
        config = settings(self._directory)
        track = config.get("track", {})
        run = RunDescription(
            name=config.get("run", {}).get("name") or self._directory.path.resolve().name,
            project=project or track.get("project") or TrackConfig().project,
            config=config,
            folder=self._file.parent,
            id=self._place.id,
        )
        tracker = TRACKERS[self._name](run)
        self._save_place(msgspec.structs.replace(self._place, id=tracker.id))
        return tracker

    def _unsent_rows(self) -> Iterator[tuple[Kind, int, dict[str, Any]]]:
        """Yield the kind, step and content of each row that the tracker does not have, steps before evaluations."""
        self._steps.read()
        self._evals.read()
        streams: tuple[tuple[Kind, Followed[dict[str, Any]], int], ...] = (
            ("step", self._steps, self._place.step),
            ("evaluation", self._evals, self._place.evaluation),
        )
        # `sent` is the step of the last row of this kind that the tracker has.
        for kind, followed, sent in streams:
            for row in followed.rows:
                step = number(row, "step")
                # A resumed run makes steps again: their rows have steps that were sent before.
                if step is not None and step > sent:
                    sent = int(step)
                    yield kind, sent, row

    def _save_place(self, place: TrackerPlace) -> None:
        """Write `track/NAME.json`, so that a later process does not send the rows again."""
        self._place = place
        write_atomically(self._file, msgspec.json.encode(place))


def folder_of(directory: RunDirectory) -> Path:
    """Return the folder with the files of a run's trackers."""
    return directory.path / "track"


def settings(directory: RunDirectory) -> dict[str, Any]:
    """Return the run's configuration as it is recorded in its directory: tables of settings.

    A tracker's process and `flash track` read it without checking it, so that the rows of a run of another version of
    Flash can be sent too.

    Raises:
        ConfigError: the file cannot be read.
    """
    return read_toml(directory.config)


@contextmanager
def tracker_lock(directory: RunDirectory, name: TrackerName, *, wait: bool = False) -> Generator[bool]:
    """Hold the lock of the tracker `name` inside the block, so that no other process sends the same rows.

    The file of the lock is `track/NAME.lock`. Yields True if this process holds the lock. If another process holds it,
    the function yields False, or with `wait` waits until that process releases the lock.
    """
    folder = folder_of(directory)
    with writing(folder):
        folder.mkdir(exist_ok=True)
        lock = (folder / f"{name}.lock").open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _read_place(file: Path) -> TrackerPlace:
    """Return the content of `track/NAME.json`; if there is no such file, the place before the first row.

    Raises:
        RunDirectoryError: the file cannot be read or is damaged.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrackerPlace)
    except FileNotFoundError:
        return TrackerPlace()
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file}: {error.strerror or error}") from error
    except DECODE_ERRORS as error:
        raise RunDirectoryError(
            f"{file} is damaged: {error}; remove it to send all rows again, as another run of the tracker"
        ) from error


def tracked(kind: Kind, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row under their names in trackers."""
    known = {key: value for key in row if key not in APART and (value := number(row, key)) is not None}
    return {_tracked_name(kind, key): float(value) for key, value in known.items()}


def _tracked_name(kind: Kind, key: str) -> str:
    """Return the name in trackers for the key of a row: that of its column, or else one that every tracker accepts."""
    if (column := column_of(key, kind)) is not None and column.tracker_name:
        return column.tracker_name
    # Environments may give their metrics any name, and MLflow reads a name as a path.
    parts = (_INVALID.sub("_", part) for part in key.split("/"))
    name = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return f"{'train' if kind == 'step' else 'eval'}/{name[:NAME_LENGTH]}"


# -- the process that a run starts for each tracker --------------------------------------------------------------------


class TrackerProcess(Receiver):
    """Starts the process of a tracker, and notifies it when the run's files have new rows.

    `flash.observe.trackers.receivers` makes one for each tracker of `track.to`, with a `Feed`, whose thread calls
    `open`, `send` and `close`. Protocol: each event is a line with its kind, on the standard input of the process. The
    process answers with a line that has an error message, or an empty line. It answers a last event when the tracker's
    run is closed. The output of the tracker goes to its log.
    """

    catches_up = True  # at one event the process sends all new rows

    def __init__(self, directory: RunDirectory, tracker: TrackerName) -> None:
        super().__init__(f"the tracker {tracker}")
        self._directory = directory
        self._tracker: TrackerName = tracker
        command = shlex.join(["flash", "track", str(directory.path), "--to", tracker])
        self._command_sends = f"`{command}` sends"
        """Beginning of a clause in warnings: the command that sends rows by hand. The clause goes on with the rows."""
        self.consequence = f"; the run goes on, and {self._command_sends} the missing rows later"
        self._log = folder_of(directory) / f"{tracker}.log"
        self._process: subprocess.Popen[bytes] | None = None
        """Process of the tracker; None before `open`, and if it could not be started."""

    def open(self) -> None:
        """Start the process of the tracker.

        Raises:
            RunDirectoryError: the folder `track/` cannot be written.
        """
        with writing(self._log.parent):
            self._log.parent.mkdir(exist_ok=True)
            log = self._log.open("ab")
        with log:
            code = f"from {__name__} import run_tracker; run_tracker(*sys.argv[1:])"
            command = [*python_command(code), str(self._directory.path), self._tracker]
            pipe = subprocess.PIPE
            # The process has a session of its own, so that Ctrl-C reaches only the run. The run then sends the last
            # event, and the tracker can end in order.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, bufsize=0, start_new_session=True
            )

    def send(self, kind: str, row: dict[str, Any]) -> None:
        """Notify the process of an event, and wait for its answer. The process reads `row` from the run's files.

        Raises:
            ReceiverError: the process was not started or has ended, or the tracker failed.
        """
        process = self._process
        if process is None:
            raise ReceiverError("was not started")
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended, which the missing answer shows below
            process.stdin.write(f"{kind}\n".encode())
        answer = process.stdout.readline().decode("utf-8", "replace")
        if not answer:
            raise ReceiverError(f"ended with code {process.wait()}: see {self._log}")
        if error := answer.strip():
            raise ReceiverError(f"failed: {error}; it is tried again")

    def close(self) -> None:
        """Close the input of the process, which ends it, and wait for its end."""
        if self._process is not None:
            with self._process as process:
                assert process.stdin is not None
                process.stdin.close()
                process.wait()

    def kill(self) -> None:
        """Kill the process and all processes of its group, if it runs."""
        kill_group(self._process)

    def missed(self, given: int, failed: int, dropped: int) -> str:
        """Return a sentence about the rows that the tracker does not have; empty if it has all.

        The rows are counted in the run's files. The counts of events do not matter, because one event makes up for all
        events before it.
        """
        try:
            left = Tracking(self._directory, self._tracker).unsent()
        except FlashError as error:
            return f"{self.name}: {error}"
        return f"{self.name} has not received {left} rows: {self._command_sends} them" if left else ""


def run_tracker(run_dir: str, name: str) -> None:
    """Run the tracker's process: send new rows at each event of the run, and the rest at its end.

    `TrackerProcess` starts it. Events come from standard input, one line each, and answers go to standard output. A
    tracker that fails at the end is tried again until the run kills this process, after at most
    `flash.observe.recorder.RECEIVERS_S` seconds. If the run dies without a last event, nothing is tried again, and the
    tracker's run is closed as failed.

    Args:
        run_dir: path of the run directory.
        name: name of the tracker, a key of TRACKERS.
    """
    os.nice(5)  # The run's own processes come first.
    # Answers go to the pipe that is stdout now. Afterwards stdout is the log, since trackers print there.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    parent, tracker = os.getppid(), cast("TrackerName", name)
    with tracker_lock(RunDirectory(Path(run_dir)), tracker, wait=True):
        tracking = Tracking(RunDirectory(Path(run_dir)), tracker)
        kind = error = ""
        while kind not in (*LAST_EVENTS, KILLED):
            kind = _next_event(parent)
            error = _error_of(tracking.send)
            if kind not in LAST_EVENTS:
                _reply(answers, error)
        while error and kind != KILLED:  # the run kills this process when the deadline is over
            time.sleep(RETRY_S)
            error = _error_of(tracking.send)
        _reply(answers, _error_of(lambda: tracking.close(failed=kind != "summary")))


def _next_event(parent: int) -> str:
    """Wait for the run's next event, and return its kind, or KILLED if the run has died.

    `parent` is the number of the run's process, which started this one. The call is unblocked by a line or the end of
    standard input, or by the death of the parent.
    """
    while not select.select([0], [], [], ALIVE_CHECK_S)[0]:
        # The end of the input would also show the death, but another process of the run may hold the input open. A
        # process whose parent has died gets another parent.
        if os.getppid() != parent:
            return KILLED
    # One read is one event: the run writes an event only after the answer to the one before. Empty: end of the input.
    return os.read(0, 100).decode().strip() or KILLED


def _error_of(call: Callable[[], None]) -> str:
    """Return the error message of a call, on one line; empty if it raised nothing."""
    try:
        call()
    except Exception as error:  # foreign code: whatever it raises is its failure, and not the run's
        return one_line(f"{type(error).__name__}: {error}")[:ERROR_LENGTH]
    return ""


def _reply(answers: TextIO, error: str) -> None:
    """Answer an event of the run with an error message, or with an empty line."""
    with suppress(OSError):  # The run has died.
        answers.write(f"{error}\n")
