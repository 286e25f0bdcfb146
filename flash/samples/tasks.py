"""TaskSource: chooses the problem of the next group and makes the group's tasks. Pure state.

A *task* asks for one sample of a problem: the environment shows the problem for the task's seed. `flash.samples.buffer`
requests the next problem when admission has room for another group, and records it in the journal. Then
`Admission.issue` calls `TaskSource.issue`, which makes the tasks. `held_out_tasks` makes the tasks of an evaluation.

Training problems are numbered from 0. The seed of problem p is `run seed · 2^20 + p`, modulo `HELD_OUT`. Seeds from
`HELD_OUT` on belong to *held-out* problems, which are used for evaluations only. Neighbouring problems have
neighbouring seeds, so an environment over a data set can use each row once before it repeats any.

The *cursor* holds the number of the next problem. Each number is issued once, to one group, and a restart continues at
the stored cursor. Problems of a *quarantined* kind are skipped: too many of its tasks have failed in a row. A *kind* is
a name that an environment gives to some of its problems. A *domain* is a kind that has a share of the groups.
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
"""Distance between the first problems of neighbouring run seeds. Runs with such seeds share no problem until a run has
issued this many."""
PLAIN_FOR_ALL: Mapping[str, Sampling] = MappingProxyType({"": PLAIN})
"""Sampling settings of a run in which all responses are sampled from the policy's own distribution."""
SEARCH = 10_000
"""Largest number of problems that are tried to find a problem of the wanted kind. Each try is a call of the
environment's `kind_of`."""


class Cursor(msgspec.Struct):
    """Position of a `TaskSource`, which a checkpoint keeps. All numbers count from 0."""

    next_group: int = 0
    """Number of the next group."""
    next_task: int = 0
    """Number of the first task of the next group."""
    next_problem: int = 0
    """Number of the next problem, where problems are taken in their order."""
    next_of: dict[str, int] = {}
    """Number of the next problem to look at for each domain, if the run has domains. All domains search the same
    problems, each for those of its kind."""
    quarantined: list[str] = []
    """Kinds in quarantine: no more problems of them are issued, because too many of their tasks were given up."""
    ended: int = 0
    """Number of groups that have become complete, or of which a part was trained. The store counts them here."""
    equal: int = 0
    """Number of groups among `ended` whose rewards were all equal."""


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The problem that the next group is about. The journal keeps it, so a replay does not ask the environment."""

    next_number: int
    """Number of the problem after this one. `issue` moves the cursor there."""
    seed: int
    """Seed with which the environment shows the problem."""
    kind: str
    """Kind of the problem; empty if the environment has no kinds."""
    of_domain: bool = False
    """True if the problem was requested for a domain. `issue` then moves the cursor of this domain."""


class TaskSource:
    """Source of the tasks of training groups: chooses problems, and makes the tasks of a group.

    Args:
        run_seed: the run's seed.
        members: number of tasks of a group, including redundant tasks. A mapping gives the number by kind. Its entry
            under the empty name is for all other kinds.
        kind_of: returns the kind of the problem with a seed. By default all problems are of one unnamed kind.
        cursor: position at which an earlier hub of the run stopped; None in a new run.
        samplings: sampling settings by kind. The entry under the empty name is for all other kinds.
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
        """Return the next problem of a domain. If `domain` is None, its kind may be any that is not in quarantine.

        The cursor does not move. Choosing and issuing are two steps, so that the journal can record the problem before
        `issue` moves the cursor.

        Raises:
            BreakerError: every kind of environment is in quarantine.
            ContractError: none of the next `SEARCH` problems is of the domain.
        """
        start = self.cursor.next_problem if domain is None else self.cursor.next_of.get(domain, 0)
        for number in range(start, start + SEARCH):
            seed = (self._run_seed * SEED_STRIDE + number) % HELD_OUT
            kind = self._kind_of(seed)
            if kind == domain or (domain is None and kind not in self.cursor.quarantined):
                return Problem(number + 1, seed, kind, domain is not None)
        if domain is not None:
            raise ContractError(
                f"the domain {domain!r} has a weight, but none of the next {SEARCH} problems is of this kind; expected "
                "`kind_of` to return it for some seeds"
            )
        raise BreakerError(
            f"every kind of environment keeps failing ({', '.join(sorted(self.cursor.quarantined))}), so there is "
            "nothing to train on. The notes above say why each kind was given up. Repair the cause; --resume tries all "
            "kinds again"
        )

    def issue(self, problem: Problem) -> list[Task]:
        """Issue the next group for `problem`, which `next_problem` has chosen, and return its tasks.

        Moves the cursor beyond the problem. All tasks have the problem's seed, and therefore the same prompt.
        """
        if problem.of_domain:
            self.cursor.next_of[problem.kind] = problem.next_number
        else:
            self.cursor.next_problem = problem.next_number
        group_id = self.cursor.next_group
        self.cursor.next_group += 1
        first, members = self.cursor.next_task, self._members.get(problem.kind, self._members[""])
        self.cursor.next_task += members
        kind, sampling = problem.kind, self._samplings.get(problem.kind, self._samplings[""])
        return [Task(first + i, group_id, i, problem.seed, kind=kind, sampling=sampling) for i in range(members)]

    def quarantine(self, kind: str) -> None:
        """Put a kind into quarantine: problems of this kind are skipped until `end_quarantine`."""
        if kind not in self.cursor.quarantined:
            self.cursor.quarantined.append(kind)

    def end_quarantine(self) -> list[str]:
        """Issue problems of all kinds again, after the user may have repaired the environment and resumed the run.

        Returns the kinds that were in quarantine.
        """
        kinds, self.cursor.quarantined = self.cursor.quarantined, []
        return kinds


def held_out_tasks(
    problems: int,
    samples: int,
    kind_of: Callable[[int], str] = lambda seed: "",
    samplings: Mapping[str, Sampling] = PLAIN_FOR_ALL,
) -> list[Task]:
    """Return the tasks of one evaluation: `samples` tasks for each of the first `problems` held-out problems.

    All evaluations of a run have the same tasks. Numbers of tasks and groups begin at 0, like those of training tasks;
    `Task.split` tells them apart. `kind_of` and `samplings` are as in `TaskSource`.
    """
    tasks: list[Task] = []
    for problem, seed in enumerate(range(HELD_OUT, HELD_OUT + problems)):
        kind = kind_of(seed)
        sampling = samplings.get(kind, samplings[""])
        tasks += [
            Task(problem * samples + sample, problem, sample, seed, split="eval", kind=kind, sampling=sampling)
            for sample in range(samples)
        ]
    return tasks
