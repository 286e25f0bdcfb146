"""What the hub tells about a run while it goes on. The fake that only remembers ships beside the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flash.types import Activity, Trajectory


class Observer(Protocol):
    """Receives the events of a run, in order. Calls must return at once."""

    def step(self, row: Mapping[str, float]) -> None:
        """One committed step and its metrics."""
        ...

    def evaluation(self, row: Mapping[str, float]) -> None:
        """One finished evaluation and its metrics."""
        ...

    def activities(self, rows: Sequence[Activity]) -> None:
        """Who was busy when."""
        ...

    def trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """The samples a step trains on."""
        ...

    def note(self, text: str) -> None:
        """One line for people."""
        ...


class MemoryObserver:
    """Remembers each kind of event in a list, for tests and where nothing is written."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.bars: list[Activity] = []
        self.samples: dict[int, list[Trajectory]] = {}
        self.notes: list[str] = []

    def step(self, row: Mapping[str, float]) -> None:
        self.steps.append(dict(row))

    def evaluation(self, row: Mapping[str, float]) -> None:
        self.evaluations.append(dict(row))

    def activities(self, rows: Sequence[Activity]) -> None:
        self.bars.extend(rows)

    def trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        self.samples[step] = list(trajectories)

    def note(self, text: str) -> None:
        self.notes.append(text)
