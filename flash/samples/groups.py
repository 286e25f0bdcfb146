"""Groups of tasks from issue to training, the pool of all groups in flight, and the ledger.

A *task* is a request for one sample, and a *group* is the tasks about one problem, whose rewards are compared. A
*member* is a task of a group together with its state and result. `flash.samples.store` puts issued groups into the
`GroupPool`, changes their members, and takes groups out when a step trains them.

A member is queued, leased (assigned to a node), done, lost (given up after a failure), beaten (given up because it is
not needed) or trained. A group is *complete* when enough members are done, or when some are done and none is queued or
leased any more. Lost members make the group smaller. A group may be trained in *parts*, in several steps, if the window
of its finished members (`AgeContract.window_start`) ends before the others are done. Each part knows the rewards of the
earlier parts.

A step may take a group from the pool while it is *ready* or *expiring*. A ready group is complete, and the filter has
kept it. An expiring group is nearly complete, and has a finished member that only the next step should still train.
After each change of a group, `PoolCounts` updates its sums, so that a number over all groups never needs a loop over
all groups. `Ledger` counts the tasks and tokens that have left. `PoolCounts` and `Ledger` count independently, so that
`Ledger.check` can compare them. This module does no I/O and starts no tasks.

Conservation: `issued = trained + filtered + given_up + in_flight` and
`generated = trained_tokens + discarded_tokens + buffered_tokens` hold after every event. `Ledger.check` checks both.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from heapq import merge
from typing import Literal, NamedTuple

import msgspec

from algorithms.advantages import are_equal
from flash.errors import ContractError
from flash.types import BatchSample, Outcome, Task, Trajectory

LARGEST_MISSING_SHARE = 0.25
"""Largest share of an expiring group that may be unfinished. With fewer finished members, the mean of their rewards
would be a poor baseline for their advantages."""

MemberState = Literal["queued", "leased", "done", "lost", "beaten", "trained"]


class Member(msgspec.Struct, gc=False):
    """A task of a group, with its state and result, from its issue to its end."""

    task: Task
    state: MemberState = "queued"
    """State of the task; the module's docstring explains the states."""
    lease_id: int = -1
    """Number of the lease. It has no meaning unless the member is leased."""
    node: int = 0
    """Node that holds the lease, while leased."""
    # The encoded name is part of the format of checkpoints.
    oldest_version: int = msgspec.field(default=0, name="floor")
    """While leased: oldest policy version that a token of the sample can have, the oldest version of an engine that may
    run the task. While done: version of the oldest token."""
    avoid: tuple[int, ...] = ()
    """Nodes on which the task has failed. Other nodes are preferred for the next attempt."""
    trajectory: Trajectory | None = None
    """The finished sample, while done."""


class Group(msgspec.Struct, gc=False):
    """All members of a group, or the members of one part of it that a step takes."""

    group_id: int
    """Number of the group, from 0 in the order of issue."""
    # The encoded name is part of the format of checkpoints.
    results_needed: int = msgspec.field(name="wanted")
    """Number of finished members that make the group complete. More members may be issued. These are redundant, so that
    the group does not have to wait for its slowest members."""
    members: list[Member]
    earlier: list[BatchSample] = []
    """Facts about the members that earlier steps have trained, in parts of this group."""
    closed: bool = False
    """True if the environment of the resumed run does not have the group's problem. No member of the group is started
    any more then."""
    # The encoded name is part of the format of checkpoints.
    counted: bool = msgspec.field(default=False, name="told")
    """True if the group is counted in `Cursor.ended`, a number for the metrics."""

    @property
    def kind(self) -> str:
        """Kind of the group's problem: a name from the environment (`Task.kind`); empty if it names no kinds."""
        return self.members[0].task.kind

    @property
    def partly_trained(self) -> bool:
        """True if an earlier step has trained some members, as a part of the group."""
        return bool(self.earlier)

    @property
    def complete(self) -> bool:
        """True if enough members are done, or if some are done and none is queued or leased.

        The second condition exists because lost members are not replaced. Members that an earlier step has trained
        count towards `results_needed`. `GroupCount.of` has the same rule, for speed: change both together.
        """
        done = self.count("done")
        return done + len(self.earlier) >= self.results_needed or (done > 0 and self.pending == 0)

    def expiring(self, window_start: int) -> bool:
        """Return True if nearly all members are done, and a finished member has only tokens older than `window_start`.

        The caller passes the oldest version that may sample the first token of a sample for the step after the next
        one. So the next step is the last that should train such a member, and the finished members should not wait for
        the others.
        """
        done = self.trajectories()
        few_missing = 0 < self.pending <= self.results_needed * LARGEST_MISSING_SHARE
        # A single sample has no other reward to be compared with.
        return few_missing and len(done) > 1 and any(t.trained_tokens(window_start) == 0 for t in done)

    def split_done(self) -> Group:
        """Move the finished members into a new group, which a step trains now, and return this new group.

        `self` still has the finished members, as `trained` and without their trajectories. `self.earlier` keeps the
        facts about these members that the advantages of later parts need.
        """
        part = [msgspec.structs.replace(member) for member in self.members if member.state == "done"]
        entries = [trajectory.batch_sample() for trajectory in self.trajectories()]
        now = Group(self.group_id, self.results_needed, part, self.earlier, counted=self.counted)
        for member in self.members:
            if member.state == "done":
                member.state, member.trajectory = "trained", None
        self.earlier = [*self.earlier, *entries]
        return now

    def rejoin(self, part: Group) -> None:
        """Undo `split_done`, which returned `part`: its batch will not be trained.

        If several parts rejoin, the newest must come first, because each sets `earlier` to the value before its split.
        """
        own = {member.task.task_id: member for member in part.members}
        # If the group has left the pool, `self` is itself a later part, which does not have the members of `part`.
        self.members = [own.pop(member.task.task_id, member) for member in self.members] + list(own.values())
        self.earlier = part.earlier
        self.closed = self.closed or part.closed

    @property
    def newest_version(self) -> int:
        """Newest policy version among the tokens of finished members; -1 if there are none."""
        return max((run.version for each in self.trajectories() for run in each.versions), default=-1)

    def copy(self) -> Group:
        """Return a copy for a checkpoint, which does not change when the group or its members change."""
        return msgspec.structs.replace(self, members=list(map(copy, self.members)))

    def count(self, state: MemberState) -> int:
        """Return the number of members in a state."""
        return [member.state for member in self.members].count(state)

    @property
    def pending(self) -> int:
        """Number of members that are queued or leased."""
        return self.count("queued") + self.count("leased")

    @property
    def alive(self) -> int:
        """Number of members that may still be trained: queued, leased or done."""
        return self.pending + self.count("done")

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of the members that are done."""
        return [member.trajectory for member in self.members if member.trajectory is not None]

    def trained_tokens(self, min_version: int) -> int:
        """Return the number of action tokens of finished members that `min_version` or a newer version sampled."""
        return sum(trajectory.trained_tokens(min_version) for trajectory in self.trajectories())


class GroupFilter(msgspec.Struct, frozen=True):
    """Dynamic filtering (DAPO, arXiv 2503.14476, section 3.2): decides which complete groups are worth training.

    With the advantages that are allowed beside `drop_equal_rewards`, equal raw rewards of a group teach nothing.
    """

    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal."""
    accuracy_bounds: tuple[float, float] | None = None
    """Lowest and highest mean reward with which a group is kept. None: groups with any mean reward are kept."""

    def keeps(self, group: Group) -> bool:
        """Return True if a group with at least one finished member is worth training. Otherwise it is filtered out."""
        rewards = [trajectory.reward for trajectory in group.trajectories()]
        if self.drop_equal_rewards and are_equal(rewards):
            return False
        if self.accuracy_bounds is None:
            return True
        low, high = self.accuracy_bounds
        return low <= sum(rewards) / len(rewards) <= high


class GroupPool:
    """Pool of the groups that wait for their members or for a step.

    After a change of a member, the owner must call `recount`, or a method that calls it, so that the counts stay right.

    Args:
        slice_size: number of groups that `copy_ahead` copies before it lets other work run.
    """

    def __init__(self, slice_size: int) -> None:
        self._slice_size = slice_size
        self._groups: dict[int, Group] = {}
        """All groups by number, in the order of issue, except that groups which a step has put back are last."""
        self._ready: set[int] = set()
        """Groups that are complete and kept, and groups that a step has chosen."""
        self._expiring: set[int] = set()
        """Groups whose finished members the next step may take without the others."""
        self._in_parts: set[int] = set()
        """Groups of which a step has trained a part."""
        self._copies: dict[int, Group] = {}
        """Copies that `copy_ahead` has made, of groups that have not changed since."""
        self.counts = PoolCounts()
        """Sums over all groups of the pool."""
        self.eligible = EligibleGroups()
        """Groups that a step may take, because they are ready or expiring."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def get(self, group_id: int) -> Group | None:
        """Return a group; None if it is no longer in the pool."""
        return self._groups.get(group_id)

    def late_groups(self) -> list[int]:
        """Return the partly trained groups in which more members are finished. The next step takes them in addition."""
        return [group_id for group_id in sorted(self._in_parts) if self._groups[group_id].count("done")]

    def is_ready(self, group_id: int) -> bool:
        """Return True if a group is complete and kept by the filter, or a step has chosen to train it as it is."""
        return group_id in self._ready

    @property
    def ready_groups(self) -> int:
        """Number of groups that are ready for a step."""
        return len(self._ready)

    # -- changes -----------------------------------------------------------------------------------------------------

    def recount(self, group: Group) -> None:
        """Count a group again after a change of its members.

        Updates `counts`, `eligible` and `_in_parts`, and drops the copy that `copy_ahead` has made of the group.
        """
        group_id = group.group_id
        self._copies.pop(group_id, None)
        oldest = self.counts.count(group).oldest
        # A ready or expiring group has a finished member, so its `oldest` is a number: the check is for the type only.
        if oldest is not None and (group_id in self._ready or group_id in self._expiring):
            self.eligible.put(group_id, oldest, group.kind)
        else:
            self.eligible.remove(group_id)
        if group.partly_trained:
            self._in_parts.add(group_id)

    def put_waiting(self, group: Group, *, expiring: bool = False) -> None:
        """Let a new group, or a group of the pool, wait for members. If it was ready, it is not ready any more.

        If `expiring` is True, a step may take the finished members without the others.
        """
        self._groups[group.group_id] = group
        self._ready.discard(group.group_id)
        self._expiring.discard(group.group_id)
        if expiring:
            self._expiring.add(group.group_id)
        self.recount(group)

    def mark_ready(self, group: Group) -> None:
        """Mark a group of the pool as ready, after it is complete and the filter has kept it."""
        self._expiring.discard(group.group_id)
        self._ready.add(group.group_id)
        self.recount(group)

    def mark_chosen(self, group_ids: Iterable[int]) -> None:
        """Mark groups that a step will take as they are, complete or not. They count as ready until `take`.

        The groups are taken in slices, so more members may finish before `take`, and are trained with the others.
        """
        self._ready.update(group_ids)

    def take(self, group_id: int) -> Group:
        """Take the members that a step trains out of the pool, and return them as a group.

        The store calls this for each group of a new batch. All members are taken if the group is complete and no part
        was trained before. Otherwise the finished members are taken, and the rest of the group stays in the pool if any
        member is queued or leased.
        """
        group = self._groups[group_id]
        whole = group.complete and not group.partly_trained
        part = group if whole else group.split_done()
        if whole or group.pending == 0:
            self.remove(group_id)
        else:
            self.put_waiting(group)
        return part

    def remove(self, group_id: int) -> None:
        """Remove a group, with its counts and marks."""
        del self._groups[group_id]
        for marked in (self._ready, self._expiring, self._in_parts):
            marked.discard(group_id)
        self.eligible.remove(group_id)
        self.counts.forget(group_id)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def copy_ahead(self) -> Generator[None]:
        """Copy all groups in slices, and yield after each slice so that other work can run.

        The hub runs this before it takes a snapshot for a checkpoint. The snapshot is taken in one piece, and `copies`
        then has to copy only the groups that have changed meanwhile.
        """
        for number, group_id in enumerate(list(self._groups), start=1):
            if (group := self._groups.get(group_id)) is not None:
                self._copies[group_id] = group.copy()
            if number % self._slice_size == 0:
                yield

    def copies(self) -> list[Group]:
        """Return copies of all groups, which do not change when the groups change. Forgets the copies made ahead."""
        copies, self._copies = self._copies, {}
        # Groups that a step has put back are at the end of the pool, and belong to their place in the order of issue.
        return [copies.get(group_id) or group.copy() for group_id, group in sorted(self._groups.items())]


class GroupCount(NamedTuple):
    """Counts of one group, which `PoolCounts` sums up."""

    alive: int
    """Number of members that may still be trained: queued, leased or done."""
    tokens: int
    """Number of action tokens of finished members. The policy sampled them; the other tokens are prompts."""
    oldest: int | None
    """Oldest version that a token of a leased or finished member can have. None if there are no such members."""
    complete: bool
    """Value of `Group.complete`."""

    @classmethod
    def of(cls, group: Group) -> GroupCount:
        """Count a group.

        This runs after every change of a group. To be quick it looks at each member only once, instead of using the
        properties of `Group`, which have the same meaning.
        """
        tokens = done = pending = 0
        oldest: int | None = None
        for member in group.members:
            if member.state == "queued":
                pending += 1
                continue
            if member.state == "leased":
                pending += 1
            elif member.trajectory is not None:
                done += 1
                tokens += member.trajectory.action_count
            else:
                continue
            if oldest is None or member.oldest_version < oldest:
                oldest = member.oldest_version
        complete = done + len(group.earlier) >= group.results_needed or (done > 0 and pending == 0)
        return cls(done + pending, tokens, oldest, complete)


class PoolCounts:
    """Sums over all groups of a pool, updated with each change of a group."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Number of members that may still be trained: queued, leased or done."""
        self.tokens = 0
        """Number of action tokens of finished members."""
        self.begun: dict[int, list[int]] = {}
        """Groups that have begun, that is, with a leased or finished member. For each version: the number of groups
        whose oldest token can have this version, and how many of these groups are not complete."""
        self._groups: dict[int, GroupCount] = {}
        """Counts of each group that are contained in the sums."""

    def count(self, group: Group) -> GroupCount:
        """Count a group that is new or has changed, in place of its earlier count. Returns its count."""
        self.forget(group.group_id)
        new = self._groups[group.group_id] = GroupCount.of(group)
        self._add(new, 1)
        return new

    def forget(self, group_id: int) -> None:
        """Subtract a group from the sums, if it is counted."""
        if (old := self._groups.pop(group_id, None)) is not None:
            self._add(old, -1)

    def oldest(self, group_id: int) -> int | None:
        """Return the oldest version that a token of a group can have; None if no member is leased or done."""
        return self._groups[group_id].oldest

    def tokens_of(self, group_id: int) -> int:
        """Return the number of action tokens of a group's finished members."""
        return self._groups[group_id].tokens

    def _add(self, group: GroupCount, times: int) -> None:
        """Add the count of a group to the sums. With `times` = -1 the count is subtracted."""
        self.in_flight += times * group.alive
        self.tokens += times * group.tokens
        if group.oldest is None:
            return
        numbers = self.begun.setdefault(group.oldest, [0, 0])
        numbers[0] += times
        numbers[1] += times * (not group.complete)
        if not numbers[0]:
            del self.begun[group.oldest]


class Ledger(msgspec.Struct):
    """Counts of every task and every generated token of a run, by what has become of them.

    `flash.samples.store` counts each change here. The ledger is part of each checkpoint, so it includes the work of all
    hub processes of the run.
    """

    issued: int = 0
    """Number of tasks that were issued."""
    trained: int = 0
    """Number of tasks of which at least one token entered the loss of a committed step."""
    filtered: int = 0
    """Number of tasks with a finished trajectory whose group was filtered out."""
    given_up: dict[Outcome, int] = {}
    """Number of tasks that left untrained for another reason than a filter, by reason."""
    retried: dict[Outcome, int] = {}
    """Number of attempts that failed and were tried again, by reason. Retries do not end a task."""
    generated_tokens: int = 0
    """Number of action tokens, which the policy sampled, that were delivered or were lost with a reported failure."""
    trained_tokens: int = 0
    """Number of action tokens that entered a loss."""
    discarded_tokens: dict[Outcome, int] = {}
    """Number of action tokens that will never enter a loss, by reason."""

    def give_up(self, outcome: Outcome, count: int = 1) -> None:
        """Count tasks that leave untrained, for the reason `outcome`."""
        self.given_up[outcome] = self.given_up.get(outcome, 0) + count

    def retry(self, outcome: Outcome) -> None:
        """Count an attempt that failed, was cancelled or became too old, and will be repeated."""
        self.retried[outcome] = self.retried.get(outcome, 0) + 1

    def discard(self, outcome: Outcome, tokens: int) -> None:
        """Count generated tokens that will not be trained, for the reason `outcome`."""
        if tokens:
            self.discarded_tokens[outcome] = self.discarded_tokens.get(outcome, 0) + tokens

    def train(self, trained: int, tokens: int, times: int = 1) -> None:
        """Count a task of a committed step.

        Args:
            trained: number of the task's action tokens that entered the loss. A task without such a token counts as
                given up because it is stale, that is, too old.
            tokens: number of all action tokens of the task. Tokens that did not enter the loss count as stale.
            times: 1 counts the task. -1 undoes the count in a replay, because the run will train the step again.
        """
        self.trained_tokens += times * trained
        self.discard(Outcome.STALE, times * (tokens - trained))
        if trained:
            self.trained += times
        else:
            self.give_up(Outcome.STALE, times)

    def check(self, in_flight: int, buffered_tokens: int) -> None:
        """Compare the ledger with the independent counts of the pool and of the formed batches.

        Args:
            in_flight: number of tasks that were issued, and are neither trained, filtered out nor given up.
            buffered_tokens: number of action tokens of the finished trajectories of these tasks.

        Raises:
            ContractError: a task or a token is unaccounted for.
        """
        accounted = self.trained + self.filtered + sum(self.given_up.values()) + in_flight
        if accounted != self.issued:
            raise ContractError(f"tasks are not conserved: issued {self.issued}, accounted for {accounted}: {self}")
        tokens = self.trained_tokens + sum(self.discarded_tokens.values()) + buffered_tokens
        if tokens != self.generated_tokens:
            raise ContractError(
                f"tokens are not conserved: generated {self.generated_tokens}, accounted for {tokens}: {self}"
            )

    def totals(self, in_flight: int) -> dict[str, int]:
        """Return all counts by name as one flat dictionary, for `ledger.json`, summaries and metrics.

        `in_flight`: number of tasks in flight, which the ledger itself does not count. It becomes the entry of this
        name.
        """
        flat = {
            "issued": self.issued,
            "trained": self.trained,
            "filtered": self.filtered,
            "given_up": sum(self.given_up.values()),
            "in_flight": in_flight,
            "generated_tokens": self.generated_tokens,
            "trained_tokens": self.trained_tokens,
            "discarded_tokens": sum(self.discarded_tokens.values()),
        }
        flat |= {f"given_up_{outcome}": count for outcome, count in sorted(self.given_up.items())}
        flat |= {f"retried_{outcome}": count for outcome, count in sorted(self.retried.items())}
        flat |= {f"discarded_tokens_{outcome}": count for outcome, count in sorted(self.discarded_tokens.items())}
        return flat


class EligibleGroups:
    """Groups that a step may train, ordered by the oldest version of their tokens, then by number.

    `flash.samples.buffer.choose` takes the first ones for a step.
    """

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, list[int]]] = {}
        """Group numbers in ascending order, by oldest version of the group's tokens, then by kind."""
        self._keys: dict[int, tuple[int, str]] = {}
        """Oldest version and kind of each group: its place in `_groups`."""

    def put(self, group_id: int, oldest: int, kind: str = "") -> None:
        """Add a group whose oldest token has version `oldest`, or change the version and kind of a group."""
        if self._keys.get(group_id) == (oldest, kind):
            return
        self.remove(group_id)
        self._keys[group_id] = oldest, kind
        insort(self._groups.setdefault(oldest, {}).setdefault(kind, []), group_id)

    def remove(self, group_id: int) -> None:
        """Remove a group; nothing happens if it is not eligible."""
        if (place := self._keys.pop(group_id, None)) is None:
            return
        oldest, kind = place
        groups = self._groups[oldest][kind]
        del groups[bisect_left(groups, group_id)]
        if not groups:
            del self._groups[oldest][kind]
        if not self._groups[oldest]:
            del self._groups[oldest]

    def first(self, size: int, before: int | None, limits: Mapping[str, int] | None = None) -> dict[int, Sequence[int]]:
        """Return the numbers of the first groups, at most `size`, by the oldest version of their tokens.

        Groups with older tokens come first; among groups of one version, lower numbers come first. The result has the
        numbers by that version, the oldest first. Nothing is removed.

        Args:
            size: largest number of groups to return.
            before: only groups with a smaller number may be returned. None: groups of any number.
            limits: largest number of groups of each kind. A kind without an entry has no limit.
        """
        # There are few versions, so this loop is short. Within a version, the groups of each kind are sorted by number,
        # and at most `size` groups of each kind are merged.
        found: dict[int, Sequence[int]] = {}
        left = dict(limits or {})
        for oldest in sorted(self._groups):
            kinds: list[Sequence[int]] = []
            for kind, groups in self._groups[oldest].items():
                end = len(groups) if before is None else bisect_left(groups, before)
                kinds.append(groups[: min(end, size, left.get(kind, size))])
            if chosen := list(merge(*kinds))[:size]:
                found[oldest] = chosen
                size -= len(chosen)
                # Count the chosen groups against the limits, if there are any.
                for group_id in chosen if left else ():
                    if (kind := self._keys[group_id][1]) in left:
                        left[kind] -= 1
            if size == 0:
                break
        return found


class FormedGroup(msgspec.Struct, gc=False):
    """A group, or a part of a group, in the batch of a step."""

    step: int
    """Step whose batch has the group."""
    group: Group


class FormedBatches:
    """Groups whose batch is formed: the batch of the running step, and batches that a previous hub had formed.

    All members of these groups are done. A batch that a previous hub had formed stays as it was, because trainer ranks
    may have trained it already, and must get the same batch again.
    """

    def __init__(self, formed: Iterable[FormedGroup] = ()) -> None:
        self.step: int | None = None
        """The running step, from the choice of its first groups until its commit. None between steps."""
        self.open = False
        """True if the batch of the running step is not whole yet: the step takes more groups in later rounds."""
        self.training: dict[int, Group] = {}
        """Groups, or parts of groups, that the running step trains, by number, in the order in which they were
        taken."""
        self.formed: dict[int, dict[int, Group]] = {}
        """Groups of the batches that a previous hub had formed and that this hub has not taken yet: by step, in the
        order of steps, then by number."""
        self.in_flight = 0
        """Number of samples in all of these batches, including the running step."""
        self.tokens = 0
        """Number of action tokens of these samples."""
        for each in formed:
            self.formed.setdefault(each.step, {})[each.group.group_id] = each.group
            self._count(each.group, 1)

    @property
    def next_unformed(self) -> int:
        """First step after all steps with a formed batch; 0 if there are none."""
        return max(self.formed, default=-1) + 1

    def add_to_step(self, group: Group) -> None:
        """Add a group, or a part of a group, to the running step."""
        self.training[group.group_id] = group
        self._count(group, 1)

    def remove_from_step(self, group_id: int) -> Group:
        """Remove a group from the running step, which has trained it or puts it back untrained. Returns the group."""
        group = self.training.pop(group_id)
        self._count(group, -1)
        return group

    def take_formed(self, step: int, group_id: int) -> Group:
        """Remove a group from the batch that a previous hub had formed for a step. Returns the group."""
        group = self.formed[step].pop(group_id)
        if not self.formed[step]:
            del self.formed[step]
        self._count(group, -1)
        return group

    def all_groups(self) -> list[FormedGroup]:
        """Return the groups of all batches, for a checkpoint; the groups of the running step come first."""
        # Between two steps `training` is empty, and the number before it is not used.
        steps = [(self.step or 0, self.training), *self.formed.items()]
        return [FormedGroup(step, group) for step, groups in steps for group in groups.values()]

    def _count(self, group: Group, times: int) -> None:
        """Add the samples of a group to the sums; -1 times subtracts them."""
        for trajectory in group.trajectories():
            self.in_flight += times
            self.tokens += times * trajectory.action_count
