"""Breaker: notices when a run, or one kind of environment in it, only fails. A pure state machine."""

from __future__ import annotations

import msgspec

from flash.errors import BreakerError
from flash.types import Failure, Task


class Streaks(msgspec.Struct):
    """How many there were in a row, up to now."""

    given_up: int = 0
    given_up_of_kind: dict[str, int] = {}
    filtered: int = 0
    filtered_of_kind: dict[str, int] = {}


class Breaker:
    """Counts failures between successes.

    Args:
        samples: samples given up in a row, over all kinds, that stop the run.
        samples_of_kind: samples of one kind given up in a row that put the kind into quarantine.
        groups: groups filtered out in a row that stop the run.
        streaks: where it goes on; None begins anew.
    """

    def __init__(self, samples: int, samples_of_kind: int, groups: int, streaks: Streaks | None = None) -> None:
        self._samples = samples
        self._samples_of_kind = samples_of_kind
        self._groups = groups
        self.streaks = streaks or Streaks()

    def finished(self, task: Task) -> None:
        """A sample came home."""
        self.streaks.given_up = 0
        self.streaks.given_up_of_kind.pop(task.kind, None)

    def given_up(self, task: Task, failure: Failure) -> bool:
        """A sample was given up. Returns whether its kind goes into quarantine; the unnamed kind never does.

        Raises:
            BreakerError: too many in a row.
        """
        in_a_row = self.streaks.given_up_of_kind.get(task.kind, 0) + 1
        if task.kind and in_a_row >= self._samples_of_kind:
            self.streaks.given_up_of_kind.pop(task.kind, None)
            self.streaks.given_up = 0
            return True
        self.streaks.given_up_of_kind[task.kind] = in_a_row
        self.streaks.given_up += 1
        if self.streaks.given_up >= self._samples:
            raise BreakerError(
                f"{self.streaks.given_up} samples in a row were given up and none finished between; "
                f"the last one ({failure.outcome}): {failure.message}. Fix the cause, or raise rollout.breaker "
                "or rollout.retries."
            )
        return False

    def kept(self) -> None:
        """A complete group passed the filters."""
        self.streaks.filtered = 0
        self.streaks.filtered_of_kind.clear()

    def filtered(self, kind: str) -> None:
        """A complete group was filtered out.

        Raises:
            BreakerError: too many in a row.
        """
        of_kind = self.streaks.filtered_of_kind
        self.streaks.filtered += 1
        of_kind[kind] = of_kind.get(kind, 0) + 1
        if self.streaks.filtered >= self._groups:
            kinds = f" ({', '.join(f'{of_kind[name]} of {name}' for name in sorted(of_kind))})" if any(of_kind) else ""
            raise BreakerError(
                f"{self.streaks.filtered} groups in a row{kinds} were filtered out and none was kept: nothing is left "
                "to learn from. The problems are all too easy or too hard, or rollout.accuracy_bounds is too narrow."
            )
