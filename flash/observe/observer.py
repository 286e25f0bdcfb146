"""What the hub tells about a run while it goes on. The fake that only remembers ships beside the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from flash.types import Activity, Batch, TrainedSample, Trajectory

Wish = Literal["checkpoint", "stop"]
"""What an observer may want after a step: a checkpoint after the next one, or an early end, which leaves one too."""


class Observer(Protocol):
    """Receives the events of a run, in order. Calls must return at once."""

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """One committed step and its metrics; what is wanted because of them."""
        ...

    def evaluation(self, row: Mapping[str, float]) -> None:
        """One finished evaluation and its metrics."""
        ...

    def activities(self, rows: Sequence[Activity]) -> None:
        """Who was busy when."""
        ...

    def batch(self, batch: Batch) -> None:
        """What a step trains on."""
        ...

    def trained(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """What a step that is committed now found at single tokens of its batch."""
        ...

    def ledger(self, totals: Mapping[str, int]) -> None:
        """The ledger's totals, as of a checkpoint."""
        ...

    def note(self, text: str) -> None:
        """One line for people."""
        ...

    def failure(self, kind: str, message: str) -> None:
        """Something has failed, and the run goes on: an attempt at a sample, or a part of the cluster."""
        ...


class MemoryObserver:
    """Remembers each kind of event in a list, for tests and where nothing is written."""

    def __init__(self) -> None:
        self.wish: Wish | None = None
        """What is wanted after each step."""
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
