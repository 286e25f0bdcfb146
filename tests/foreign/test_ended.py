"""Of the processes that have failed, those are told that torchrun did not end itself."""

from __future__ import annotations

from typing import NamedTuple

from flash.foreign.torch import unprompted


class Failed(NamedTuple):
    """As torchrun lists it."""

    local_rank: int
    exitcode: int
    timestamp: int = 100

    @property
    def pid(self) -> int:
        return 1000 + self.local_rank


def told(*failures: Failed) -> list[tuple[int, int]]:
    return [(ended.local, ended.exit_code) for ended in unprompted(failures)]


def test_what_torchrun_killed_since_another_was_gone_is_not_told() -> None:
    assert told(Failed(1, -9), Failed(0, 1), Failed(2, -9, 130)) == [(1, -9), (0, 1)]
    assert told(Failed(1, -11), Failed(2, -15)) == [(1, -11)]


def test_processes_that_somebody_killed_together_are_all_told() -> None:
    assert told(Failed(1, -9), Failed(2, -9, 101)) == [(1, -9), (2, -9)]
    assert told(Failed(1, -15)) == [(1, -15)]
