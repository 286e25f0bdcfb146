"""Tasks until they are leased: the problem of the next task, the queue, and the rule which task may start. Pure state.

A *task* is a request for one sample of a problem. All tasks of a *group* have the same problem. A *lease* assigns one
task to one node. `SampleBuffer.lease` takes the next task in this order:

- `TaskQueue` has the tasks that wait for a node: tasks that are new, and tasks that are tried again.
- `Admission` decides whether the task may start now. If no task waits, it decides whether another group may be issued.
- `TaskSource` chooses the problem of the next group, and makes the group's tasks.
- `LeaseTable` records the task as *out*: a node holds its lease. `flash.hub.work.Holders` records which node.

Invariant: each unfinished task is either in the queue or out on exactly one lease. `flash.samples.store.SampleStore`
owns all of this for training tasks. `flash.samples.evaluation` owns a second `LeaseTable` for the tasks of evaluations,
which `held_out_tasks` makes.

A *kind* is a name that an environment gives to some of its problems. A *domain* is a kind that has a share of the
groups. A kind is in *quarantine* if too many of its tasks have failed in a row: no more of its tasks are issued. α is
the asynchronous ratio (`train.async_ratio`). If version v sampled the first token of a sample, the steps v to v + ⌈α⌉
are the *window* of the sample: one of them should train it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

import msgspec

from flash.environment.interface import HELD_OUT
from flash.errors import BreakerError, ContractError
from flash.samples.groups import Member
from flash.samples.rules import AgeContract, BufferRules
from flash.sampling import PLAIN, Sampling
from flash.types import RETRIED, Lease, Outcome, Task

QueueKey = tuple[int, ...]
"""Sort key of a task in the queue. The waiting task with the lowest key is leased first."""
SEED_STRIDE = 1 << 20
"""Distance between the first problems of neighbouring run seeds. Runs with such seeds share no problem until one has
issued this number of problems."""
PLAIN_FOR_ALL: Mapping[str, Sampling] = MappingProxyType({"": PLAIN})
"""Sampling settings of a run in which all responses are sampled from the policy's own distribution."""
SEARCH = 10_000
"""Largest number of problems that are tried to find a problem of the wanted kind. Each try is a call of the
environment's `kind_of`."""


# -- problems and their tasks ------------------------------------------------------------------------------------------


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
    sequence of problems, each for problems of its kind."""
    quarantined: list[str] = []
    """Kinds in quarantine: no more problems of them are issued, because too many of their tasks were given up."""
    ended: int = 0
    """Number of groups that have become complete, or of which a part was trained. The store counts them here."""
    equal: int = 0
    """Number of groups among `ended` whose rewards were all equal."""


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The problem that the next group is about. The journal keeps it, so a replay does not ask the environment."""

    next_number: int
    """Number of the problem after this one, to which `issue` moves the cursor."""
    seed: int
    """Seed with which the environment shows the problem."""
    kind: str
    """Kind of the problem; empty if the environment has no kinds."""
    of_domain: bool = False
    """True if the problem was requested for a domain. `issue` then moves the cursor of this domain."""


class TaskSource:
    """Source of the tasks of training groups: chooses problems, and makes the tasks of a group.

    Training problems are numbered from 0. The seed of problem p is `run seed · 2^20 + p`, modulo `HELD_OUT`. Seeds from
    `HELD_OUT` on belong to *held-out* problems, which are used for evaluations only. Neighbouring problems have
    neighbouring seeds, so an environment over a data set can use each row once before it repeats any.

    The cursor has the number of the next problem. Each number is issued once, to one group, and a restart continues at
    the stored cursor. Problems of a kind in quarantine are skipped.

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
            BreakerError: all of the next `SEARCH` problems are of kinds in quarantine.
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

    All evaluations of a run have the same tasks. Numbers of tasks and groups begin at 0, as in training; `Task.split`
    tells the two apart. `kind_of` returns the kind of the problem with a seed. `samplings` has the sampling settings by
    kind; the entry under the empty name is for all other kinds.
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


# -- queue and leases --------------------------------------------------------------------------------------------------


def by_issue(task: Task) -> QueueKey:
    """Return the key of a training task: the order of issue. A task that is queued again comes before newer tasks."""
    return task.group_id, task.sample_index


def by_attempt(task: Task) -> QueueKey:
    """Return the key of an evaluation task: the order of issue, but tasks that have failed come last."""
    return task.attempt, task.group_id, task.sample_index


class LeaseTable:
    """Table of the unfinished tasks, each of which is queued or leased.

    A lease ends in one of three ways. Its result is delivered: the owner takes the member out of `out`. Or the lease is
    *withdrawn* (`remove`), because the sample is not needed any more. Or it is *revoked* (`revoke`), because its node
    is lost: then the task is queued again.

    Args:
        ids: numbers of new leases. Training and evaluation share them, so that a number names one lease of the run.
        retries: number of further attempts at a task that has failed because of the infrastructure.
        key_of: returns the sort key of a task in the queue.
    """

    def __init__(self, ids: Iterator[int], retries: int, key_of: Callable[[Task], QueueKey]) -> None:
        self.ids = ids
        self._retries = retries
        self.queue = TaskQueue(key_of)
        """Tasks that wait for a node."""
        self.out: dict[int, Member] = {}
        """Tasks that nodes are working on, by the number of the lease."""
        self.withdrawal_reasons: dict[int, Outcome] = {}
        """Reason of each withdrawn lease, by the number of the lease, until its node has reported the number of
        generated tokens. The ledger counts these tokens under the reason."""
        self.to_cancel: list[int] = []
        """Numbers of the withdrawn leases that nodes have to cancel. The hub passes them on and empties this list."""

    def put(self, member: Member) -> None:
        """Queue a task, behind all tasks with a lower key."""
        member.state = "queued"
        self.queue.put(member)

    def grant(self, member: Member, oldest_version: int, number: int) -> Lease:
        """Lease a queued task as lease `number`: it leaves the queue and is out. Returns the lease.

        `oldest_version`: oldest version that a token of the sample may have.
        """
        self.queue.take(member)
        self.out[number] = member
        member.state, member.lease_id, member.oldest_version = "leased", number, oldest_version
        return Lease(number, member.task, oldest_version)

    def retry(self, member: Member, outcome: Outcome, node: int) -> bool:
        """Queue a task again that has failed on a node. Returns False if the caller has to give it up instead.

        A task that a node has cancelled is always queued again: the task itself has not failed. A task that failed
        because of the infrastructure is queued again while it has attempts left, and avoids this node then. All other
        failures would happen again.
        """
        if outcome is not Outcome.CANCELLED:
            if outcome not in RETRIED or member.task.attempt >= self._retries:
                return False
            member.task = msgspec.structs.replace(member.task, attempt=member.task.attempt + 1)
            member.avoid += (node,)
        self.put(member)
        return True

    def revoke(self, lease_id: int) -> Member | None:
        """Queue the task of a lease again, because its node is lost, or has not claimed it after a restart of the hub.

        Returns the task. If the lease was withdrawn before, nothing is queued and the result is None. The reason of the
        withdrawal is then forgotten, because the node will not report any more.
        """
        if (member := self.out.pop(lease_id, None)) is None:
            self.take_reason(lease_id)
            return None
        self.put(member)
        return member

    def remove(self, member: Member, reason: Outcome) -> None:
        """Remove a task from the queue, or withdraw its lease. The caller then changes the state of the member.

        Nothing happens if the task is neither queued nor out: it has finished, or its result was just delivered.
        `reason` is the outcome under which the ledger counts the tokens that the node has generated for the lease.
        """
        if member.state == "queued":
            self.queue.take(member)
        # A member whose result was just delivered still has the state `leased`, but its lease has left `out`.
        elif member.state == "leased" and self.out.pop(member.lease_id, None) is not None:
            self.withdrawal_reasons[member.lease_id] = reason
            self.to_cancel.append(member.lease_id)

    def take_reason(self, lease_id: int) -> Outcome:
        """Return the reason why a lease was withdrawn, and forget it, because a node reports once per lease.

        Returns CANCELLED for an unknown lease: its node seemed lost and delivers a result after all.
        """
        return self.withdrawal_reasons.pop(lease_id, Outcome.CANCELLED)


class TaskQueue:
    """Queue of the tasks that wait for a node.

    The queue has one line for each set of nodes on which tasks have failed. To find a task that a node may run, only
    the first task of each line is looked at. There are few lines, but there may be a hundred thousand tasks.
    `Member.avoid`, which decides the line, must not change while a task waits.

    Args:
        key_of: returns the sort key of a task. No two tasks have the same key.
    """

    def __init__(self, key_of: Callable[[Task], QueueKey]) -> None:
        self._key_of = key_of
        self._lines: dict[frozenset[int], _Line] = {}
        """Lines that are not empty, by the nodes on which their tasks have failed."""

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @property
    def first(self) -> Member:
        """Task with the lowest key. The queue must not be empty."""
        return min(line.first for line in self._lines.values())[1]

    def first_for(self, node: int, nodes: Collection[int]) -> Member | None:
        """Return the next task for a node; None if there is no such task. The task stays in the queue until `take`.

        A task that has failed on the node is returned only if it has failed on all `nodes`: then no other node would
        do better. If `nodes` is empty, earlier failures do not matter.
        """
        lines = (line for failed, line in self._lines.items() if node not in failed or failed.issuperset(nodes))
        return min((line.first for line in lines), default=(None, None))[1]

    def put(self, member: Member) -> None:
        """Add a task to the line of the nodes on which it has failed."""
        line, key = self._lines.setdefault(frozenset(member.avoid), _Line()), self._key_of(member.task)
        line.waiting[key] = member
        heappush(line.keys, key)

    def take(self, member: Member) -> None:
        """Remove a waiting task, wherever it is in its line."""
        failed = frozenset(member.avoid)
        line = self._lines[failed]
        taken = line.waiting.pop(self._key_of(member.task), None)
        assert taken is member, "a queued member is in the queue"
        if not line.waiting:
            del self._lines[failed]


class _Line:
    """Waiting tasks that have failed on the same nodes."""

    def __init__(self) -> None:
        self.waiting: dict[QueueKey, Member] = {}
        """Tasks that wait, by key."""
        self.keys: list[QueueKey] = []
        """Heap of keys. The key of a task that was taken stays in the heap until it reaches the top, because a heap can
        remove only its first entry quickly."""

    @property
    def first(self) -> tuple[QueueKey, Member]:
        """Lowest key of a waiting task, and the task. Removes keys of taken tasks from the top of the heap."""
        while self.keys[0] not in self.waiting:
            heappop(self.keys)
        return self.keys[0], self.waiting[self.keys[0]]


# -- admission ---------------------------------------------------------------------------------------------------------


class Admission:
    """Decides which training task may be leased to which node, and whether another group may be issued.

    The rule follows from the age contract, which bounds how far sampling may be ahead of training: a task is leased
    only to a node with an engine whose version is new enough. The rule counts groups by their places: the order of
    issue, without groups that left untrained. A later place needs an equal or newer version. So if the first task of
    the queue has to wait for a version, no later task could run now either.

    Args:
        contract: the run's age contract, which bounds how far sampling may be ahead of training.
        rules: settings of the buffer.
        source: gives the tasks of the next group.
        places: the places of the groups.
        leases: the tasks that wait or are leased.
        next_step: the step whose batch is formed next.
    """

    def __init__(
        self,
        contract: AgeContract,
        rules: BufferRules,
        source: TaskSource,
        places: Places,
        leases: LeaseTable,
        next_step: int,
    ) -> None:
        self._contract = contract
        self._rules = rules
        self._source = source
        self.places = places
        self._leases = leases
        self._wave_left = 0
        """Number of groups that may still be issued in this wave; not used without waves (`rules.waves`). A wave is the
        groups of one batch, and redundant groups. The next wave begins when all tasks of the wave have ended."""
        self.next_step = next_step
        """Step whose batch is formed next. No task is leased whose first token would be more than ⌈α⌉ versions old in
        this step."""
        self.openings = 0
        """Counter of events that may have made a lease possible: a task was queued again, a place was given back, or a
        wave ended. If it has changed after a delivery, the hub offers tasks to the waiting nodes."""
        self._sizes = rules.sizes(contract.group_size)
        """Number of members of a group, including redundant members, by domain. The entry under the empty name is for
        all other kinds."""
        self._largest = max(self._sizes.values())
        # With on_expire = "wait" a step waits for the groups that have begun. So no member of such a group may have to
        # wait for the next version: the step that makes this version would wait for the member, without end.
        whole = rules.whole_groups or rules.on_expire == "wait"
        self._lowest_index = contract.group_size - 1 if whole else 0
        """Members with a lower index need the version that the member with this index needs. If all members of a group
        must be able to start together, this is the last index; otherwise 0."""

    def available(self, newest: int) -> int:
        """Return the number of tasks that could be leased to nodes whose newest engine runs version `newest`.

        The hub divides this number among its nodes. It may be too high, because it counts all members of the last
        group. It is 0 only if no node can get a task.
        """
        queue = self._leases.queue
        if queue and not self.admits(queue.first, newest):
            return 0  # Later tasks of the queue, and new groups, need an equal or newer version.
        if not self.room_for_group(newest):
            return len(queue)
        place = self.places.of(self._source.cursor.next_group)
        places = min(self._contract.places_admitted(newest, self._lowest_index), self._contract.place_count)
        groups = min(places - place, self._wave_left) if self._rules.waves else places - place
        # At least one group can be issued, as `room_for_group` says, even if rounding has made `places` too small.
        return len(queue) + max(1, groups) * self._largest

    def admits(self, member: Member, newest: int) -> bool:
        """Return True if a queued task may be leased to a node whose newest engine runs version `newest`."""
        return self._version_needed(member) <= newest

    def oldest_version(self, member: Member, versions: Sequence[int]) -> int:
        """Return the oldest of the engine versions `versions` that may run a task.

        The result becomes `Lease.min_version`: no token of the sample will be older. At least one of the versions must
        be allowed to run the task (`admits`).
        """
        needed = self._version_needed(member)
        return min(version for version in versions if version >= needed)

    def room_for_group(self, newest: int) -> bool:
        """Return True if another group may be issued for a node whose newest engine runs version `newest`.

        If groups start in waves, this begins the next wave when all tasks of the last wave have ended.
        """
        place = self.places.of(self._source.cursor.next_group)
        if place >= self._contract.place_count or self._version_for(place, 0) > newest:
            return False
        if not self._rules.waves:
            return True
        if not self._leases.out and not self._leases.queue:
            self._wave_left = self._contract.groups_per_batch + self._contract.extra_groups
        return self._wave_left > 0

    def issue(self, problem: Problem) -> list[Task]:
        """Issue another group, for which there must be room. Returns its tasks."""
        self._wave_left -= 1
        return self._source.issue(problem)

    def give_back(self, group_id: int) -> None:
        """Free the place of a group that left untrained: groups that were issued after it move up by one."""
        self.places.give_back(group_id)
        self.openings += 1

    def _version_needed(self, member: Member) -> int:
        """Return the oldest engine version that may run a queued task."""
        task, run_size = member.task, self._contract.group_size
        size = self._sizes.get(task.kind, self._sizes[""]) - self._rules.extra_per_group
        # The contract counts samples as if all groups had the run's size. The indices of a group of another size are
        # spread over the same range.
        index = task.sample_index * run_size // size
        return self._version_for(self.places.of(task.group_id), index)

    def _version_for(self, place: int, index: int) -> int:
        """Return the oldest engine version that may run member `index` of the group at `place`.

        The contract must admit the member under this version, and the next step must be in the member's window
        (`AgeContract.window_start`).
        """
        oldest_in_window = self._contract.window_start(self.next_step)
        return max(self._contract.min_engine_version(place, max(index, self._lowest_index)), oldest_in_window)


class Places(msgspec.Struct):
    """Computes the place of each group: its number, less the number of earlier groups that left untrained.

    A group that leaves untrained is replaced, so it must not count for the limit on groups in flight. Only the groups
    that left are stored, so that no group is renumbered when one leaves.
    """

    before: int = 0
    """Number of groups that left untrained and are not in `returned` any more (`forget`)."""
    returned: list[int] = []
    """Numbers of the other groups that left untrained, in ascending order."""

    def of(self, group_id: int) -> int:
        """Return the place of a group, from 0. The group may be the next one to be issued."""
        return group_id - self.before - bisect_left(self.returned, group_id)

    def first_at(self, place: int) -> int:
        """Return the number of the first group, issued or not, that has this place or a later place.

        The buffer calls this for `rollout.fifo_window`, which limits a step to the groups before some place.
        """
        numbers = range(len(self.returned))
        # Without the groups that left before it, group `returned[at]` is number `returned[at] - at`. These numbers
        # ascend, so a binary search finds how many groups have left before the wanted place.
        earlier = bisect_left(numbers, place + self.before, key=lambda at: self.returned[at] - at)
        return place + self.before + earlier

    def give_back(self, group_id: int) -> None:
        """Record that a group has left untrained: the places of all later groups become lower by one."""
        insort(self.returned, group_id)

    def forget(self, oldest: int) -> None:
        """Shorten `returned`: remove the groups before `oldest`, the oldest group in flight, and only count them.

        No place of a group before `oldest` may be requested after this.
        """
        gone = bisect_left(self.returned, oldest)
        self.before += gone
        del self.returned[:gone]
