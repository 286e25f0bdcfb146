"""Groups: the members of one prompt from issue to training, and the pool of all groups in flight. Pure state.

`flash.samples.store` puts issued groups into the pool, records what happens to their members, and takes groups out
when a step trains them.

A member is queued, leased, done, lost (given up after a failure), beaten (redundant, and too late) or trained. A group
is complete when enough members are done, or when some are done and none is on its way. Lost members leave the group
smaller. A group may be trained in parts, when some members would become too old while another one is still on its way.
Later parts know the rewards of the earlier ones.

A step may take a group from the pool while it is *ready* (complete, and worth a place in a batch) or *expiring*
(nearly complete, with members that no later step could train). After a change of its members the group is counted
again, alone, so that no question about all groups has to look at all of them. These counts do not come from the
ledger, so that the two can be compared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from heapq import merge
from typing import Literal, NamedTuple

import msgspec

from algorithms.advantages import are_equal
from flash.types import BatchSample, Task, Trajectory

MOST_MISSING = 0.25
"""Largest share of a group that may still be on its way when the others are trained. With fewer finished members the
rewards would make a poor baseline."""

MemberState = Literal["queued", "leased", "done", "lost", "beaten", "trained"]


class Member(msgspec.Struct, gc=False):
    """A task of a group, from its issue to its end."""

    task: Task
    state: MemberState = "queued"
    """State of the task; the module's docstring explains them."""
    lease_id: int = -1
    """Number of the lease, while leased."""
    node: int = 0
    """Node that holds the lease, while leased."""
    floor: int = 0
    """Oldest policy version that a token may have, while leased or done."""
    avoid: tuple[int, ...] = ()
    """Nodes on which the task has failed."""
    trajectory: Trajectory | None = None
    """The finished sample, while done."""


class Group(msgspec.Struct, gc=False):
    """All tasks of one prompt."""

    group_id: int
    """Number of the group, from 0 in the order of issue."""
    wanted: int
    """Number of finished members that make the group complete. Members beyond this number are redundant."""
    members: list[Member]
    earlier: list[BatchSample] = []
    """Members that earlier steps have trained, in parts of this group."""
    closed: bool = False
    """True if the group's problem is not one of the present run, so that no member of it is started."""
    # The encoded name is part of the format of checkpoints.
    counted: bool = msgspec.field(default=False, name="told")
    """True if `Cursor.ended` has counted the group."""

    @property
    def kind(self) -> str:
        """Kind of the group's problem."""
        return self.members[0].task.kind

    @property
    def complete(self) -> bool:
        """True if enough members are done, or some are done and none is on its way."""
        done = self.count("done")
        return done + len(self.earlier) >= self.wanted or (done > 0 and self.pending == 0)

    def expiring(self, min_version: int) -> bool:
        """Return True if nearly all members are done, and one of them has no token of `min_version` or newer."""
        done = self.trajectories()
        few_missing = 0 < self.pending <= self.wanted * MOST_MISSING
        return few_missing and len(done) > 1 and any(t.trained_tokens(min_version) == 0 for t in done)

    def split_done(self) -> Group:
        """Separate the members that are done. Returns them as a group of their own, to be trained now."""
        part = [msgspec.structs.replace(member) for member in self.members if member.state == "done"]
        entries = [trajectory.entry() for trajectory in self.trajectories()]
        now = Group(self.group_id, self.wanted, part, self.earlier, counted=self.counted)
        for member in self.members:
            if member.state == "done":
                member.state, member.trajectory = "trained", None
        self.earlier = [*self.earlier, *entries]
        return now

    def rejoin(self, part: Group) -> None:
        """Undo `split_done`. Parts have to come back in the reverse order: the last one first."""
        own = {member.task.task_id: member for member in part.members}
        self.members = [own.pop(member.task.task_id, member) for member in self.members] + list(own.values())
        self.earlier = part.earlier
        self.closed = self.closed or part.closed

    @property
    def newest(self) -> int:
        """Newest policy version among the tokens of finished members; -1 if there are none."""
        return max((run.version for each in self.trajectories() for run in each.versions), default=-1)

    def copy(self) -> Group:
        """Return a copy that later changes do not reach."""
        return msgspec.structs.replace(self, members=list(map(copy, self.members)))

    def count(self, state: MemberState) -> int:
        """Return the number of members in a state."""
        return [member.state for member in self.members].count(state)

    @property
    def pending(self) -> int:
        """Number of members on their way: queued or leased."""
        return self.count("queued") + self.count("leased")

    @property
    def alive(self) -> int:
        """Number of members that may still be trained: queued, leased or done."""
        return self.pending + self.count("done")

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of the members that are done."""
        return [member.trajectory for member in self.members if member.trajectory is not None]

    def trained_tokens(self, min_version: int) -> int:
        """Return the number of action tokens that `min_version` or a newer version sampled."""
        return sum(trajectory.trained_tokens(min_version) for trajectory in self.trajectories())


class GroupFilter(msgspec.Struct, frozen=True):
    """Dynamic filtering (DAPO, arXiv 2503.14476, section 3.2): decides which complete groups are worth training."""

    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal."""
    accuracy_bounds: tuple[float, float] | None = None
    """Lowest and highest mean reward of a group that is kept. None: any."""

    def keeps(self, group: Group) -> bool:
        """Return True if a complete group is trained."""
        rewards = [trajectory.reward for trajectory in group.trajectories()]
        if self.drop_equal_rewards and are_equal(rewards):
            return False
        if self.accuracy_bounds is None:
            return True
        low, high = self.accuracy_bounds
        return low <= sum(rewards) / len(rewards) <= high


class GroupPool:
    """The groups that wait for their members or for a step.

    Args:
        slice_size: groups that `copy_ahead` copies in one slice.
    """

    def __init__(self, slice_size: int) -> None:
        self._slice_size = slice_size
        self._groups: dict[int, Group] = {}
        """All groups by number, in the order of issue."""
        self._ready: set[int] = set()
        self._expiring: set[int] = set()
        self._in_parts: set[int] = set()
        """Groups of which a part was trained."""
        self._copies: dict[int, Group] = {}
        """Copies made ahead of a snapshot, of groups that have not changed since."""
        self.census = Census()
        self.eligible = EligibleGroups()
        """Groups that are ready or expiring."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def get(self, group_id: int) -> Group | None:
        """Return a group, or None if it was trained or has left."""
        return self._groups.get(group_id)

    def late_groups(self) -> list[int]:
        """Return the groups of which a part was trained, and other members have finished since."""
        return [group_id for group_id in sorted(self._in_parts) if self._groups[group_id].count("done")]

    def is_ready(self, group_id: int) -> bool:
        """Return True if a group is complete and kept, or chosen to be trained as it is."""
        return group_id in self._ready

    @property
    def ready_groups(self) -> int:
        """Number of complete groups that wait for a step."""
        return len(self._ready)

    # -- changes -----------------------------------------------------------------------------------------------------

    def recount(self, group: Group) -> None:
        """Count a group again after one of its members has changed."""
        group_id = group.group_id
        self._copies.pop(group_id, None)
        oldest = self.census.count(group).oldest
        if oldest is not None and (group_id in self._ready or group_id in self._expiring):
            self.eligible.put(group_id, oldest, group.kind)
        else:
            self.eligible.remove(group_id)
        if group.earlier:
            self._in_parts.add(group_id)

    def put_waiting(self, group: Group, *, expiring: bool = False) -> None:
        """Put a group that is new, or that waits for members. An expiring one may be trained without them."""
        self._groups[group.group_id] = group
        self._ready.discard(group.group_id)
        self._expiring.discard(group.group_id)
        if expiring:
            self._expiring.add(group.group_id)
        self.recount(group)

    def put_ready(self, group: Group) -> None:
        """Mark a group of the pool as complete and worth a place in a batch."""
        self._expiring.discard(group.group_id)
        self._ready.add(group.group_id)
        self.recount(group)

    def put_chosen(self, group_ids: Iterable[int]) -> None:
        """Mark groups that a step will take as they are. Members that finish before `take` are trained with them."""
        self._ready.update(group_ids)

    def take(self, group_id: int) -> Group:
        """Take out what can be trained now, and return it: the whole group, or the members that are done."""
        group = self._groups[group_id]
        whole = group.complete and not group.earlier
        part = group if whole else group.split_done()
        if whole or group.pending == 0:
            self.remove(group_id)
        else:
            self.put_waiting(group)
        return part

    def remove(self, group_id: int) -> None:
        """Remove a group."""
        del self._groups[group_id]
        for marked in (self._ready, self._expiring, self._in_parts):
            marked.discard(group_id)
        self.eligible.remove(group_id)
        self.census.forget(group_id)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def copy_ahead(self) -> Generator[None]:
        """Copy the groups in slices, ahead of `copies`, which then copies only the groups that change meanwhile."""
        for number, group_id in enumerate(list(self._groups), start=1):
            if (group := self._groups.get(group_id)) is not None:
                self._copies[group_id] = group.copy()
            if number % self._slice_size == 0:
                yield

    def copies(self) -> list[Group]:
        """Return copies of all groups, which later changes do not reach."""
        copies, self._copies = self._copies, {}
        return [copies.get(group_id) or group.copy() for group_id, group in self._groups.items()]


class GroupCount(NamedTuple):
    """Counts of one group, which `Census` sums up."""

    alive: int
    """Members that may still be trained."""
    tokens: int
    """Action tokens of finished members."""
    oldest: int | None
    """Oldest version that a token may have, of members that are leased or done. None: there are no such members."""
    complete: bool
    """Equal to `Group.complete`."""

    @classmethod
    def of(cls, group: Group) -> GroupCount:
        """Count a group, looking at each member once: this runs after every change, and has to be quick."""
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
            if oldest is None or member.floor < oldest:
                oldest = member.floor
        complete = done + len(group.earlier) >= group.wanted or (done > 0 and pending == 0)
        return cls(done + pending, tokens, oldest, complete)


class Census:
    """Counts over all groups of a pool, kept up to date group by group."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Members that may still be trained."""
        self.tokens = 0
        """Action tokens of finished members."""
        self.begun: dict[int, list[int]] = {}
        """For each oldest version of a group's tokens: the number of groups, and how many of them are not complete."""
        self._groups: dict[int, GroupCount] = {}

    def count(self, group: Group) -> GroupCount:
        """Count a group that is new or has changed. Returns its count."""
        self.forget(group.group_id)
        new = self._groups[group.group_id] = GroupCount.of(group)
        self._add(new, 1)
        return new

    def forget(self, group_id: int) -> None:
        """Count a group no more."""
        if (old := self._groups.pop(group_id, None)) is not None:
            self._add(old, -1)

    def oldest(self, group_id: int) -> int | None:
        """Return the oldest version that a token of a group may have; None if no member was started."""
        return self._groups[group_id].oldest

    def _add(self, group: GroupCount, times: int) -> None:
        """Add the count of a group to the sums; -1 times subtracts it."""
        self.in_flight += times * group.alive
        self.tokens += times * group.tokens
        if group.oldest is None:
            return
        numbers = self.begun.setdefault(group.oldest, [0, 0])
        numbers[0] += times
        numbers[1] += times * (not group.complete)
        if not numbers[0]:
            del self.begun[group.oldest]


class EligibleGroups:
    """The groups that a step may train, ordered by the oldest version of their tokens, then by number."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, list[int]]] = {}
        """Group numbers in ascending order, by oldest version and kind."""
        self._places: dict[int, tuple[int, str]] = {}
        """Oldest version and kind of each group."""

    def put(self, group_id: int, oldest: int, kind: str = "") -> None:
        """Add a group whose oldest token is of version `oldest`, or move it there."""
        if self._places.get(group_id) == (oldest, kind):
            return
        self.remove(group_id)
        self._places[group_id] = oldest, kind
        insort(self._groups.setdefault(oldest, {}).setdefault(kind, []), group_id)

    def remove(self, group_id: int) -> None:
        """Remove a group, if it is here."""
        if (place := self._places.pop(group_id, None)) is None:
            return
        oldest, kind = place
        groups = self._groups[oldest][kind]
        del groups[bisect_left(groups, group_id)]
        if not groups:
            del self._groups[oldest][kind]
        if not self._groups[oldest]:
            del self._groups[oldest]

    def first(
        self, size: int, before: int | None, limits: Mapping[str, int] | None = None
    ) -> dict[int, Sequence[int]] | None:
        """Return the first `size` groups, by their oldest version; None if there are fewer.

        Args:
            size: groups to return.
            before: only groups with a smaller number are returned. None: all.
            limits: the most groups of a kind; kinds without an entry have no limit.
        """
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
                for group_id in chosen if left else ():
                    if (kind := self._places[group_id][1]) in left:
                        left[kind] -= 1
            if size == 0:
                return found
        return None


class FormedGroup(msgspec.Struct, gc=False):
    """A group, or a part of one, in the batch of a step."""

    step: int
    group: Group


class FormedBatches:
    """The groups in batches of steps: of the running step, and of steps that a previous hub had formed.

    All members of these groups are done. Formed batches are trained again as they were.
    """

    def __init__(self, formed: Iterable[FormedGroup] = ()) -> None:
        self.step: int | None = None
        """The running step, once its batch was chosen. None between steps."""
        self.training: dict[int, Group] = {}
        """Groups, whole or in part, that the running step trains."""
        self.formed: dict[int, dict[int, Group]] = {}
        """Groups of batches that were formed before and are not taken yet, by step, in the order of steps."""
        self.in_flight = 0
        """Samples in all of these batches."""
        self.tokens = 0
        """Action tokens of these samples."""
        for each in formed:
            self.formed.setdefault(each.step, {})[each.group.group_id] = each.group
            self._count(each.group, 1)

    @property
    def next_unformed(self) -> int:
        """The first step after all formed ones; 0 if there are none."""
        return max(self.formed, default=-1) + 1

    def train(self, group: Group) -> None:
        """Add a group, or a part of one, to the running step."""
        self.training[group.group_id] = group
        self._count(group, 1)

    def trained(self, group_id: int) -> Group:
        """Remove a group from the running step, which is committed. Returns it."""
        group = self.training.pop(group_id)
        self._count(group, -1)
        return group

    def take(self, step: int, group_id: int) -> Group:
        """Remove a group from a formed batch. Returns it."""
        group = self.formed[step].pop(group_id)
        if not self.formed[step]:
            del self.formed[step]
        self._count(group, -1)
        return group

    def left(self) -> list[FormedGroup]:
        """Return all groups that are not trained yet, those of the running step first."""
        steps = [(self.step or 0, self.training), *self.formed.items()]
        return [FormedGroup(step, group) for step, groups in steps for group in groups.values()]

    def _count(self, group: Group, times: int) -> None:
        """Add the samples of a group to the sums; -1 times subtracts them."""
        for trajectory in group.trajectories():
            self.in_flight += times
            self.tokens += times * trajectory.action_count
