"""Events that the hub reports while a run goes on.

The hub calls an `Observer` at each event and knows no file, terminal or tracker.

`flash.observe.recorder.Recorder` observes a real run. `MemoryObserver` is for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from flash.types import Activity, Batch, TrainedSample, Trajectory

Wish = Literal["checkpoint", "stop"]
"""Wish of an observer after a step: a checkpoint after the next step, or an early end of the run with a checkpoint."""


class Observer(Protocol):
    """Receives the events of a run, in order. Calls must return at once, because the hub's event loop makes them."""

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """Receive the metrics of a committed step, and return a wish or None."""
        ...

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Receive the metrics of a finished evaluation."""
        ...

    def activities(self, rows: Sequence[Activity]) -> None:
        """Receive activities of workers with their times."""
        ...

    def batch(self, batch: Batch) -> None:
        """Receive the batch that a step trains on."""
        ...

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Receive the trainer's values of single tokens of some samples, when the step is committed."""
        ...

    def ledger(self, totals: Mapping[str, int]) -> None:
        """Receive the totals of the ledger, which counts the fate of each sample and token, at a checkpoint."""
        ...

    def note(self, text: str) -> None:
        """Receive a line for people."""
        ...

    def failure(self, kind: str, message: str) -> None:
        """Receive a failure after which the run goes on: of an attempt at a sample, or of a part of the cluster."""
        ...


class MemoryObserver:
    """Remembers each kind of event in a list, for tests and where nothing is written."""

    def __init__(self) -> None:
        self.wish: Wish | None = None
        """Wish that `step` returns."""
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.bars: list[Activity] = []
        self.samples: dict[int, list[Trajectory]] = {}
        self.seen: dict[int, list[TrainedSample]] = {}
        self.ledgers: list[dict[str, int]] = []
        self.notes: list[str] = []
        self.failures: list[tuple[str, str]] = []

    def step(self, row: Mapping[str, float]) -> Wish | None:
        self.steps.append(dict(row))
        return self.wish

    def evaluation(self, row: Mapping[str, float]) -> None:
        self.evaluations.append(dict(row))

    def activities(self, rows: Sequence[Activity]) -> None:
        self.bars.extend(rows)

    def batch(self, batch: Batch) -> None:
        self.samples[batch.step] = list(batch.trajectories)

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        self.seen[step] = list(seen)

    def ledger(self, totals: Mapping[str, int]) -> None:
        self.ledgers.append(dict(totals))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def failure(self, kind: str, message: str) -> None:
        self.failures.append((kind, message))
