"""Which trackers a run is told to."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from flash.config.section import Section

TrackerName = Literal["trackio", "wandb", "tensorboard", "mlflow"]
"""Each is the name of a Python package too."""


class TrackConfig(Section, frozen=True):
    """[Trackers](view.md#in-a-tracker) that show a run beside others."""

    to: list[TrackerName] = field(default_factory=list[TrackerName])
    """Each must be installed on the first node."""
    project: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.-]+$")] = "flash"
    """Project of trackio and Weights & Biases, experiment of MLflow."""
