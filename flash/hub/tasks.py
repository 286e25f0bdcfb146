"""TaskSource: which prompt comes next.

Training problems are numbered by group; the environment's seed of group g is `run seed · 2^20 + g`, below `HELD_OUT`,
so that an environment over a data set can walk it without replacement. Every group is issued once; a restart
continues at the stored cursor.
"""

from __future__ import annotations

from envs.base import HELD_OUT
from flash.types import Task

SEED_STRIDE = 1 << 20
"""Groups per run seed before two seeds share problems."""


class TaskSource:
    """The cursor over the training problems."""

    def __init__(self, run_seed: int, group_size: int, next_group: int = 0) -> None:
        self._run_seed = run_seed
        self._group_size = group_size
        self.next_group = next_group

    def issue_group(self) -> list[Task]:
        """The tasks of the next group; they share the seed and so the prompt."""
        group_id = self.next_group
        self.next_group += 1
        seed = (self._run_seed * SEED_STRIDE + group_id) % HELD_OUT
        first = group_id * self._group_size
        return [Task(first + i, group_id, i, seed) for i in range(self._group_size)]


def held_out_tasks(problems: int, samples: int) -> list[Task]:
    """The tasks of one evaluation: always the same problems, each with `samples` members."""
    return [
        Task(problem * samples + sample, problem, sample, HELD_OUT + problem, split="eval")
        for problem in range(problems)
        for sample in range(samples)
    ]
