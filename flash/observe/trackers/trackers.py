"""The trackers themselves, each behind the same three calls.

They are imported where they are opened only: in a process of their own, since they start threads, write to the terminal
and wait for networks as they please.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec

from flash.config.load import flat
from flash.config.observe import TrackerName

T = TypeVar("T")

AT_ONCE = 100
"""Parameters that MLflow takes in one call; of metrics it takes more."""
PARAMETER = 500
"""Characters of an MLflow parameter."""
X_AXIS = "train/global_step"
"""The column over which Weights & Biases draws: an evaluation may come after later steps."""


class Opening(msgspec.Struct, frozen=True):
    """What a tracker is opened with."""

    name: str
    """Of the run."""
    project: str
    config: Mapping[str, Any]
    folder: Path
    """For what the tracker writes on this machine."""
    id: str | None
    """By which the tracker knows the run, where it does already."""


class Tracker(Protocol):
    """A run in a tracker. Calls may block and raise anything."""

    id: str
    """By which the tracker will know the run again."""

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Numbers of a step, measured at this moment (Unix seconds)."""
        ...

    def close(self, *, failed: bool) -> None:
        """All is told: let go of it."""
        ...


class Wandb:
    """Weights & Biases."""

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
    """trackio, which knows runs by their names."""

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
    """Event files, which TensorBoard and many others read; a folder is a run."""

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
    """A run of an MLflow experiment, at MLFLOW_TRACKING_URI."""

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
        settings = [self._entities.Param(key, str(value)[:PARAMETER]) for key, value in flat(dict(opening.config))]
        for some in _in_parts(settings, AT_ONCE):
            self._client.log_batch(self.id, params=some)

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        metrics = [self._entities.Metric(name, value, round(at * 1000), step) for name, value in values.items()]
        for some in _in_parts(metrics, AT_ONCE):
            self._client.log_batch(self.id, metrics=some)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[TrackerName, Callable[[Opening], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


def not_installed(name: str) -> str | None:
    """What to do where its package is missing; None: it is there.

    A folder of this name, as Weights & Biases leaves in the working directory, looks like a package without a file.
    """
    found = find_spec(name)
    if found is not None and found.origin is not None:
        return None
    return f"`{name}` is not installed here: `pip install {name}`, or take it out"


def _unique(name: str) -> str:
    return f"{name}-{uuid4().hex[:8]}"


def _in_parts(items: Sequence[T], most: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, most)):
        yield part
