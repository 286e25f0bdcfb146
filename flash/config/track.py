"""Which trackers a run is told to."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from flash.config.section import Section

TrackerName = Literal["trackio", "wandb", "tensorboard", "mlflow"]
"""Each is the name of a Python package too."""


class TrackConfig(Section, frozen=True):
    """Trackers that show a run beside others: [seeing a run](view.md#in-a-tracker) says what each is told."""

    to: list[TrackerName] = field(default_factory=list[TrackerName])
    """`trackio`, `wandb`, `tensorboard`, `mlflow`: each must be installed where the run's first node is."""
    project: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.-]+$")] = "flash"
    """What the run is put under: a project of trackio and Weights & Biases, an experiment of MLflow."""
