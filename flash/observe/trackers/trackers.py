"""The four trackers, each behind the same small interface.

`flash.observe.trackers.tracking` opens them in a process of their own, and only there their packages are imported:
trackers start threads, write to the terminal, and wait for networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from flash.config.load import flat
from flash.config.tree import TrackerName

BATCH = 100
"""Largest number of parameters that MLflow accepts in one call. It would accept more metrics."""
PARAMETER_LENGTH = 500
"""Largest number of characters of an MLflow parameter."""
X_AXIS = "train/global_step"
"""Value that Weights & Biases uses as x axis. Its own step counter does not fit: it only grows, but an evaluation may
be sent after later steps."""


class Opening(msgspec.Struct, frozen=True):
    """Everything that a tracker needs to open a run."""

    name: str
    """Name of the run."""
    project: str
    """Name of the project or experiment that the run belongs to."""
    config: Mapping[str, Any]
    """Configuration of the run."""
    folder: Path
    """Folder for files that the tracker writes on this machine."""
    id: str | None
    """Id of the run in the tracker; None if the tracker does not know the run yet."""


class Tracker(Protocol):
    """An open run in a tracker. Its methods may block and raise anything."""

    id: str
    """Id by which the tracker finds the run again."""

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Send numbers of a step. `at` is the time when they were measured, in Unix seconds."""
        ...

    def close(self, *, failed: bool) -> None:
        """Close the run, as failed or as finished. Nothing is sent after it."""
        ...


class Wandb:
    """A run in Weights & Biases."""

    def __init__(self, opening: Opening) -> None:
        wandb = import_module("wandb")
        self.id = opening.id or _unique(opening.name)
        self._run = wandb.init(
            project=opening.project,
            id=self.id,
            name=opening.name,
            resume="allow",
            config=dict(opening.config),
            dir=str(opening.folder),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric(X_AXIS)
        self._run.define_metric("*", step_metric=X_AXIS)

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._run.log({**values, X_AXIS: step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run in trackio. The name of a run is its id there."""

    def __init__(self, opening: Opening) -> None:
        trackio = import_module("trackio")
        self.id = opening.id or _unique(opening.name)
        self._run = trackio.init(
            project=opening.project,
            name=self.id,
            config=dict(opening.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


class TensorBoard:
    """Event files for TensorBoard, which many other programs read too. A folder is a run."""

    def __init__(self, opening: Opening) -> None:
        summary = import_module("tensorboard.summary")
        self.id = opening.id or "tensorboard"
        self._writer = summary.Writer(str(opening.folder / self.id))

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=at)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of an MLflow experiment, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, opening: Opening) -> None:
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        if opening.id is not None:
            self.id = opening.id
            self._client.update_run(self.id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(opening.project)
        experiment = self._client.create_experiment(opening.project) if found is None else found.experiment_id
        self.id = self._client.create_run(experiment, run_name=opening.name).info.run_id
        config = flat(dict(opening.config))
        settings = [self._entities.Param(key, str(value)[:PARAMETER_LENGTH]) for key, value in config]
        for start in range(0, len(settings), BATCH):
            self._client.log_batch(self.id, params=settings[start : start + BATCH])

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        metrics = [self._entities.Metric(name, value, round(at * 1000), step) for name, value in values.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self.id, metrics=metrics[start : start + BATCH])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[TrackerName, Callable[[Opening], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}
"""Trackers by the names of `track.to`. Each name is also that of the Python package."""


def not_installed(name: str) -> str | None:
    """Return what to do about a tracker's missing package; None if the package is installed.

    A folder with the name of the package is no proof: Weights & Biases leaves such a folder in the working directory.
    Python finds it as a package without a file.
    """
    found = find_spec(name)
    if found is not None and found.origin is not None:
        return None
    return f"`{name}` is not installed here: `pip install {name}`, or take it out"


def _unique(name: str) -> str:
    return f"{name}-{uuid4().hex[:8]}"
