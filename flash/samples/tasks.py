"""TaskSource: which prompt comes next.

Training problems are numbered in the order of issue; the environment's seed of problem p is `run seed · 2^20 + p`,
below `HELD_OUT`, so that an environment over a data set can walk it without replacement. Every number is issued once,
to one group; a restart continues at the stored cursor. Problems of a quarantined kind are skipped.

Where problems come again, in another epoch, those whose groups are expected to have equal rewards may be passed over
(`Selection`), after GRESO (arXiv 2506.02177). Whether one is follows from the run's seed, its number, and the groups
that had ended before the next step's version was made: the order in which groups end within a step decides nothing.

No starvation: with a floor f a problem is passed over at most ⌈1/f⌉ - 1 times in a row.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from algorithms.advantages import are_equal
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
PASSED_OVER = 1000
"""Problems passed over in a row after which one is issued, whatever is expected of it."""
HALF_LIFE = 64
"""Versions after which what a group has shown of its problem counts for half: the policy is another one."""
KNOWN = 1 << 17
"""Problems of which something is known; beyond, those whose last group ended longest ago are forgotten."""
PRIOR = 0.5
"""What is supposed to have been seen of either outcome before anything was: Jeffreys' prior."""


class Cursor(msgspec.Struct):
    """What a checkpoint keeps of the source."""

    next_group: int = 0
    next_task: int = 0
    next_problem: int = 0
    next_of: dict[str, int] = {}
    """The same for each domain, where problems are asked for by domain."""
    quarantined: list[str] = []
    passed_over: int = 0
    """Problems that were not issued, since their rewards were expected to be equal."""
    ended: int = 0
    """Groups that came home complete."""
    equal: int = 0
    """Those of them whose rewards were all equal."""


class Shown(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What groups have shown of their problem."""

    passed: float = 0.0
    """Samples with a reward above 0."""
    failed: float = 0.0
    differed: float = 0.0
    """Groups of which not all rewards were equal."""
    equal: float = 0.0

    def and_then(self, versions: int, later: Shown) -> Shown:
        """With what others have shown so many versions later."""
        kept = 0.5 ** (versions / HALF_LIFE)
        return Shown(
            self.passed * kept + later.passed,
            self.failed * kept + later.failed,
            self.differed * kept + later.differed,
            self.equal * kept + later.equal,
        )


NOTHING = Shown()


class Tried(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of a problem."""

    name: str
    version: int
    """The next step when the last of its groups ended."""
    now: Shown
    """By the groups that ended under this version; it counts from the next one on."""
    before: Shown = NOTHING
    """By older ones, as of this version."""
    graded: bool = False
    """Its rewards tell more than pass from fail."""
    passed_over: int = 0
    """How often in a row."""

    def chance(self, size: int, version: int) -> float:
        """That not all rewards of its next group, of so many samples, are equal; `version`: the next step.

        With p, the pass rate, of a Beta distribution: 1 - E[p^size] - E[(1 - p)^size].
        """
        older = max(0, version - self.version)
        shown = self.before.and_then(older, self.now.and_then(older, NOTHING) if older > 0 else NOTHING)
        if self.graded:
            return (PRIOR + shown.differed) / (2 * PRIOR + shown.differed + shown.equal)
        passed, failed = PRIOR + shown.passed, PRIOR + shown.failed
        return 1 - _all_alike(passed, failed, size) - _all_alike(failed, passed, size)


def _all_alike(a: float, b: float, size: int) -> float:
    """E[p^size] where p is of Beta(a, b)."""
    return math.exp(math.lgamma(a + size) - math.lgamma(a) + math.lgamma(a + b) - math.lgamma(a + b + size))


class Tries:
    """What is known of problems, by their names; of `most`."""

    def __init__(self, most: int = KNOWN) -> None:
        self._most = most
        self.known: dict[str, Tried] = {}
        """Whose last group ended longest ago first."""

    def restore(self, known: Iterable[Tried]) -> None:
        """What a checkpoint kept."""
        self.known = {each.name: each for each in known}

    def ended(self, name: str, rewards: Collection[float], version: int) -> None:
        """A group of a problem has come home; `version` is the next step."""
        passed, differ = sum(reward > 0 for reward in rewards), max(rewards) != min(rewards)
        graded = differ and (len({*rewards}) > 2 or passed == len(rewards) or not passed)
        shown = Shown(passed, len(rewards) - passed, float(differ), float(not differ))
        was = self.known.pop(name, None) or Tried(name, version, NOTHING)
        older, version = version - was.version, max(version, was.version)
        if older > 0:
            before = was.before.and_then(older, was.now.and_then(older, NOTHING))
        else:
            before, shown = was.before, was.now.and_then(0, shown)
        self.known[name] = Tried(name, version, shown, before, graded or was.graded, was.passed_over)
        if len(self.known) > self._most:
            del self.known[next(iter(self.known))]

    def turns(self, issued: str, passed_over: Iterable[str]) -> None:
        """A problem was issued, and others were passed over before it."""
        for name, times in [*Counter(passed_over).items(), (issued, 0)]:
            if (tried := self.known.get(name)) is not None:
                in_a_row = tried.passed_over + times if times else 0
                self.known[name] = msgspec.structs.replace(tried, passed_over=in_a_row)


class Selection(NamedTuple):
    """Problems are issued with the chance that the rewards of their group differ."""

    problem_of: Callable[[int], str | None]
    """The name of the problem of a seed; None: it has none, and is always issued."""
    floor: float
    """The least chance, above 0."""
    redundant: int = 0
    """Members of a group beyond those that make it complete."""

    def takes(self, tried: Tried, members: int, version: int, passed_over: int, coin: float) -> bool:
        """Whether a problem is issued that was passed over so often in a row, by a number drawn from [0, 1)."""
        if (passed_over + 1) * self.floor >= 1:
            return True
        return coin < max(self.floor, tried.chance(members - self.redundant, version))


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the next group is about."""

    following: int
    """The number of the problem after it."""
    seed: int
    kind: str
    of_domain: bool = False
    """Whether it was asked for by its kind."""
    name: str = ""
    """What is known of it is kept under; empty: nothing is."""
    passed_over: tuple[str, ...] = ()
    """The names of those before it that were not issued."""


class TaskSource:
    """The cursor over the training problems.

    Args:
        run_seed: the run's seed.
        members: tasks per group, redundant ones included; of several kinds by name, of any other under the empty one.
        kind_of: the kind of the problem with this seed; one kind for all by default.
        cursor: where a former incarnation stopped.
        samplings: how they are sampled; by kind as `members`.
        selection: which of them are passed over; None: none.
    """

    def __init__(
        self,
        run_seed: int,
        members: int | Mapping[str, int],
        kind_of: Callable[[int], str] = lambda seed: "",
        cursor: Cursor | None = None,
        samplings: Mapping[str, Sampling] = PLAIN_FOR_ALL,
        selection: Selection | None = None,
    ) -> None:
        self._run_seed = run_seed
        self._members: Mapping[str, int] = {"": members} if isinstance(members, int) else members
        self._kind_of = kind_of
        self._samplings = samplings
        self._selection = selection
        self.cursor = cursor or Cursor()
        self.tries = Tries()

    def next_problem(self, domain: str | None = None, version: int = 0) -> Problem:
        """What the next group will be about: the next problem of a domain, or of any kind, that is not passed over.

        `version` is the next step.

        Raises:
            BreakerError: every kind of environment is quarantined.
            ContractError: the domain has no problems.
        """
        start = self.cursor.next_problem if domain is None else self.cursor.next_of.get(domain, 0)
        over: list[str] = []
        last: Problem | None = None
        for number in range(start, start + SEARCH):
            seed = (self._run_seed * SEED_STRIDE + number) % HELD_OUT
            kind = self._kind_of(seed)
            if kind == domain or (domain is None and kind not in self.cursor.quarantined):
                name = self._name(seed, kind)
                last = Problem(number + 1, seed, kind, domain is not None, name, tuple(over))
                if len(over) == PASSED_OVER or self._takes(last, number, version):
                    return last
                over.append(name)
        if last is not None:
            return last
        if domain is not None:
            raise ContractError(f"of {SEARCH} problems in a row none is of the kind {domain!r}, which has a weight")
        raise BreakerError(
            f"every kind of environment keeps failing ({', '.join(sorted(self.cursor.quarantined))}): nothing is "
            "left to train on. The notes above say why each was given up; mend it, and --resume tries all again"
        )

    def _name(self, seed: int, kind: str) -> str:
        """Under which a problem is known; of those that have no name, none."""
        name = None if self._selection is None else self._selection.problem_of(seed)
        return "" if name is None else f"{kind}/{name}" if kind else name

    def _takes(self, problem: Problem, number: int, version: int) -> bool:
        """Whether a problem is issued, and not passed over: one of which nothing is known always is."""
        tried = self.tries.known.get(problem.name)
        if self._selection is None or tried is None or (tried.version >= version and tried.before == NOTHING):
            return True
        digest = hashlib.blake2b(f"{self._run_seed} {number}".encode(), digest_size=8).digest()
        in_a_row = tried.passed_over + problem.passed_over.count(problem.name)
        members = self._members.get(problem.kind, self._members[""])
        return self._selection.takes(tried, members, version, in_a_row, int.from_bytes(digest) / 2**64)

    def issue_group(self) -> list[Task]:
        """The tasks of the next group. Raises BreakerError as `next_problem`."""
        return self.issue(self.next_problem())

    def issue(self, problem: Problem) -> list[Task]:
        """The tasks of the next group, which is about this problem; they share the seed and so the prompt."""
        if problem.of_domain:
            self.cursor.next_of[problem.kind] = problem.following
        else:
            self.cursor.next_problem = problem.following
        self.cursor.passed_over += len(problem.passed_over)
        self.tries.turns(problem.name, problem.passed_over)
        group_id = self.cursor.next_group
        self.cursor.next_group += 1
        first, members = self.cursor.next_task, self._members.get(problem.kind, self._members[""])
        self.cursor.next_task += members
        kind, sampling = problem.kind, self._samplings.get(problem.kind, self._samplings[""])
        return [Task(first + i, group_id, i, problem.seed, kind=kind, sampling=sampling) for i in range(members)]

    def ended(self, name: str, rewards: Collection[float], version: int) -> None:
        """A group of the problem of this name, if it has one, has come home; `version` is the next step."""
        self.cursor.ended += 1
        self.cursor.equal += are_equal(rewards)
        if name:
            self.tries.ended(name, rewards, version)

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
