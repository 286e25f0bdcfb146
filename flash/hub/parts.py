"""What all parts of the hub are given: the run, and what of it each asks or tells the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flash.config.tree import Config
from flash.hub.metrics import StepMetrics
from flash.hub.progress import Progress
from flash.observe.observer import Observer
from flash.samples.buffer import SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.samples.rules import AgeContract


class Parts(NamedTuple):
    """See the module's docstring."""

    config: Config
    observer: Observer
    """Is told of everything."""
    now: Callable[[], float]
    """Gives Unix seconds on the loop's clock."""
    progress: Progress
    """How far the run has come."""
    contract: AgeContract
    buffer: SampleBuffer
    """The training tasks."""
    evaluations: Evaluations
    """The others."""
    metrics: StepMetrics
