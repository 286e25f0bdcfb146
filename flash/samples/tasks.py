"""TaskSource: which prompt comes next.

Training problems are numbered in the order of issue; the environment's seed of problem p is `run seed · 2^20 + p`,
below `HELD_OUT`, so that an environment over a data set can walk it without replacement. Every problem is issued once,
to one group; a restart continues at the stored cursor. Problems of a quarantined kind are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from flash.environment.interface import HELD_OUT
from flash.errors import BreakerError, ContractError
from flash.sampling import PLAIN, Sampling
from flash.types import Task

SEED_STRIDE = 1 << 20
"""Problems per run seed before two seeds share some."""
PLAIN_FOR_ALL: Mapping[str, Sampling] = MappingProxyType({"": PLAIN})
"""Of problems that are all sampled alike."""
SEARCH = 10_000
"""Problems looked at for one whose kind is not quarantined."""


class Cursor(msgspec.Struct):
    """What a checkpoint keeps of the source."""

    next_group: int = 0
    next_task: int = 0
    next_problem: int = 0
    next_of: dict[str, int] = {}
    """The same for each domain, where problems are asked for by domain."""
    quarantined: list[str] = []


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the next group is about."""

    following: int
    """The number of the problem after it."""
    seed: int
    kind: str
    of_domain: bool = False
    """Whether it was asked for by its kind."""


class TaskSource:
    """The cursor over the training problems.

    Args:
        run_seed: the run's seed.
        members: tasks per group, redundant ones included; of several kinds by name, of any other under the empty one.
        kind_of: the kind of the problem with this seed; one kind for all by default.
        cursor: where a former incarnation stopped.
        samplings: how they are sampled; by kind as `members`.
    """

    def __init__(
        self,
        run_seed: int,
        members: int | Mapping[str, int],
        kind_of: Callable[[int], str] = lambda seed: "",
        cursor: Cursor | None = None,
        samplings: Mapping[str, Sampling] = PLAIN_FOR_ALL,
    ) -> None:
        self._run_seed = run_seed
        self._members: Mapping[str, int] = {"": members} if isinstance(members, int) else members
        self._kind_of = kind_of
        self._samplings = samplings
        self.cursor = cursor or Cursor()

    def next_problem(self, domain: str | None = None) -> Problem:
        """What the next group will be about: the next problem of a domain, or of any kind.

        Raises:
            BreakerError: every kind of environment is quarantined.
            ContractError: the domain has no problems.
        """
        start = self.cursor.next_problem if domain is None else self.cursor.next_of.get(domain, 0)
        for number in range(start, start + SEARCH):
            seed = (self._run_seed * SEED_STRIDE + number) % HELD_OUT
            kind = self._kind_of(seed)
            if kind == domain or (domain is None and kind not in self.cursor.quarantined):
                return Problem(number + 1, seed, kind, domain is not None)
        if domain is not None:
            raise ContractError(f"of {SEARCH} problems in a row none is of the kind {domain!r}, which has a weight")
        raise BreakerError(
            f"every kind of environment keeps failing ({', '.join(sorted(self.cursor.quarantined))}): nothing is "
            "left to train on. The notes above say why each was given up; mend it, and --resume tries all again"
        )

    def issue_group(self) -> list[Task]:
        """The tasks of the next group. Raises BreakerError as `next_problem`."""
        return self.issue(self.next_problem())

    def issue(self, problem: Problem) -> list[Task]:
        """The tasks of the next group, which is about this problem; they share the seed and so the prompt."""
        if problem.of_domain:
            self.cursor.next_of[problem.kind] = problem.following
        else:
            self.cursor.next_problem = problem.following
        group_id = self.cursor.next_group
        self.cursor.next_group += 1
        first, members = self.cursor.next_task, self._members.get(problem.kind, self._members[""])
        self.cursor.next_task += members
        kind, sampling = problem.kind, self._samplings.get(problem.kind, self._samplings[""])
        return [Task(first + i, group_id, i, problem.seed, kind=kind, sampling=sampling) for i in range(members)]

    def quarantine(self, kind: str) -> None:
        """Issue no more problems of this kind."""
        if kind not in self.cursor.quarantined:
            self.cursor.quarantined.append(kind)

    def end_quarantine(self) -> list[str]:
        """Issue problems of all kinds again. Returns those that were left out."""
        kinds, self.cursor.quarantined = self.cursor.quarantined, []
        return kinds


def held_out_tasks(
    problems: int,
    samples: int,
    kind_of: Callable[[int], str] = lambda seed: "",
    samplings: Mapping[str, Sampling] = PLAIN_FOR_ALL,
) -> list[Task]:
    """The tasks of one evaluation: always the same problems, each with `samples` members."""
    tasks: list[Task] = []
    for problem, seed in enumerate(range(HELD_OUT, HELD_OUT + problems)):
        kind = kind_of(seed)
        sampling = samplings.get(kind, samplings[""])
        tasks += [
            Task(problem * samples + sample, problem, sample, seed, split="eval", kind=kind, sampling=sampling)
            for sample in range(samples)
        ]
    return tasks
