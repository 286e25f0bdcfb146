"""Events that the hub reports while a run goes on.

The hub calls an `Observer` at each event, so that it needs no file, terminal or tracker itself. In a real run the
observer is a `flash.observe.recorder.Recorder`. In tests and simulations it is a `MemoryObserver`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from flash.types import Activity, Batch, TrainedSample, Trajectory

Wish = Literal["checkpoint", "stop"]
"""Wish of an observer after a step: a checkpoint after the next step, or an early end of the run with a checkpoint."""


class Observer(Protocol):
    """Receives the events of a run, in order. Calls must return at once, because the hub's event loop makes them.

    A *row* has numbers by the names of their columns (`flash.observe.columns`). In `flash sft` there is no hub: the
    first trainer rank calls the recorder.
    """

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """Receive the row of a committed step, one whose training has ended. Return a wish or None."""
        ...

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Receive the row of a finished evaluation on held-out problems."""
        ...

    def activities(self, rows: Sequence[Activity]) -> None:
        """Receive activities of workers (engines, trainer ranks) with their times, when a worker reports them."""
        ...

    def batch(self, batch: Batch) -> None:
        """Receive the whole batch of a step, when its last round is formed, and so before the step is committed."""
        ...

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Receive the trainer's values of single tokens of some samples (`seen`), when the step is committed."""
        ...

    def ledger(self, totals: Mapping[str, int]) -> None:
        """Receive the totals of the ledger, which counts the fate of each sample and token, at a checkpoint."""
        ...

    def note(self, text: str) -> None:
        """Receive a line for people, about an event such as a node that has joined."""
        ...

    def failure(self, kind: str, message: str) -> None:
        """Receive a failure after which the run goes on: of an attempt at a sample, or of a part of the cluster.

        `kind` is a short name, such as `env_error`, by which failures are counted.
        """
        ...


class MemoryObserver:
    """Observer that keeps each kind of event in a list, for tests and simulations, which write no files.

    The methods have the meaning that `Observer` describes.
    """

    def __init__(self) -> None:
        self.wish: Wish | None = None
        """Wish that `step` returns."""
        self.steps: list[dict[str, float]] = []
        """Metrics of the steps."""
        self.evaluations: list[dict[str, float]] = []
        """Metrics of the evaluations."""
        self.bars: list[Activity] = []
        """Activities of workers."""
        self.samples: dict[int, list[Trajectory]] = {}
        """Samples of each batch, by step."""
        self.seen: dict[int, list[TrainedSample]] = {}
        """The trainer's values of single tokens of some samples, by step."""
        self.ledgers: list[dict[str, int]] = []
        """Totals of the ledger, one for each call."""
        self.notes: list[str] = []
        """Lines for people."""
        self.failures: list[tuple[str, str]] = []
        """Kind and message of each failure."""

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """Keep the metrics of a step, and return `wish`."""
        self.steps.append(dict(row))
        return self.wish

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation."""
        self.evaluations.append(dict(row))

    def activities(self, rows: Sequence[Activity]) -> None:
        """Keep activities."""
        self.bars.extend(rows)

    def batch(self, batch: Batch) -> None:
        """Keep the samples of a batch."""
        self.samples[batch.step] = list(batch.trajectories)

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Keep the trainer's values of a step."""
        self.seen[step] = list(seen)

    def ledger(self, totals: Mapping[str, int]) -> None:
        """Keep the totals of the ledger."""
        self.ledgers.append(dict(totals))

    def note(self, text: str) -> None:
        """Keep a line for people."""
        self.notes.append(text)

    def failure(self, kind: str, message: str) -> None:
        """Keep a failure."""
        self.failures.append((kind, message))
