"""Groups: the members of one prompt, from issue to the last one home, which groups are worth training, and what steps
have of them. Pure state.

A member is queued, leased, done, lost (given up for a failure), beaten (a redundant one that came too late) or trained.
A group is complete when enough members are done, or when none is on its way. Group identity stays explicit: lost
members leave the group smaller, and a group may be trained in parts, when some members would expire while another is
still on its way; the later parts know the rewards of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Literal

import msgspec

from algorithms.advantages import are_equal
from flash.types import BatchSample, Task, Trajectory

MOST_MISSING = 0.25
"""Share of a group that may still be on its way when the others are trained: their baseline is to be a good one."""

MemberState = Literal["queued", "leased", "done", "lost", "beaten", "trained"]


class Member(msgspec.Struct, gc=False):
    """One task of a group."""

    task: Task
    state: MemberState = "queued"
    lease_id: int = -1
    """While leased."""
    node: int = 0
    """While leased: who was given it."""
    floor: int = 0
    """While leased or done: none of its tokens is older than this version."""
    avoid: tuple[int, ...] = ()
    """Nodes on which it failed."""
    trajectory: Trajectory | None = None


class Group(msgspec.Struct, gc=False):
    """All tasks of one prompt."""

    group_id: int
    wanted: int
    """Finished members that make it complete; further members are redundant."""
    members: list[Member]
    earlier: list[BatchSample] = []
    """The members that were trained in earlier steps."""
    closed: bool = False
    """Its problem is none of those that are issued now: no member of it begins any more."""
    told: bool = False
    """True if the group is counted among those that have ended (`Cursor.ended`)."""

    @property
    def kind(self) -> str:
        """What its problem is one of."""
        return self.members[0].task.kind

    @property
    def complete(self) -> bool:
        """Enough members are done, or no other is on its way."""
        done = self.count("done")
        return done + len(self.earlier) >= self.wanted or (done > 0 and self.pending == 0)

    def expiring(self, min_version: int) -> bool:
        """Whether nearly all members are done, and one of them has no token of `min_version` or newer."""
        done = self.trajectories()
        few_missing = 0 < self.pending <= self.wanted * MOST_MISSING
        return few_missing and len(done) > 1 and any(t.trained_tokens(min_version) == 0 for t in done)

    def split(self) -> Group:
        """Part with the members that are done: they form a group of their own, to be trained now."""
        part = [msgspec.structs.replace(member) for member in self.members if member.state == "done"]
        entries = [trajectory.entry() for trajectory in self.trajectories()]
        now = Group(self.group_id, self.wanted, part, self.earlier, told=self.told)
        for member in self.members:
            if member.state == "done":
                member.state, member.trajectory = "trained", None
        self.earlier = [*self.earlier, *entries]
        return now

    @property
    def newest(self) -> int:
        """The newest version of its finished members' tokens; -1: there are none."""
        return max((run.version for each in self.trajectories() for run in each.versions), default=-1)

    def rejoin(self, part: Group) -> None:
        """What was parted with is here again, as it was: the last part first."""
        own = {member.task.task_id: member for member in part.members}
        self.members = [own.pop(member.task.task_id, member) for member in self.members] + list(own.values())
        self.earlier = part.earlier
        self.closed = self.closed or part.closed

    def copy(self) -> Group:
        """The same group, which later changes do not reach."""
        return msgspec.structs.replace(self, members=list(map(copy, self.members)))

    def count(self, state: MemberState) -> int:
        """Members in a state."""
        return [member.state for member in self.members].count(state)

    @property
    def pending(self) -> int:
        """Members on their way."""
        return self.count("queued") + self.count("leased")

    @property
    def alive(self) -> int:
        """Members that may still be trained."""
        return self.pending + self.count("done")

    def trajectories(self) -> list[Trajectory]:
        """What its finished members brought home."""
        return [member.trajectory for member in self.members if member.trajectory is not None]

    def trained_tokens(self, min_version: int) -> int:
        """Action tokens of its members sampled by `min_version` or newer."""
        return sum(trajectory.trained_tokens(min_version) for trajectory in self.trajectories())


class GroupFilter(msgspec.Struct, frozen=True):
    """Dynamic filtering (DAPO, arXiv 2503.14476, section 3.2): which complete groups are worth a place in a batch."""

    drop_equal_rewards: bool = False
    accuracy_bounds: tuple[float, float] | None = None
    """Least and most mean reward, both allowed."""

    def keeps(self, group: Group) -> bool:
        """Return True if a complete group is trained."""
        rewards = [trajectory.reward for trajectory in group.trajectories()]
        if self.drop_equal_rewards and are_equal(rewards):
            return False
        if self.accuracy_bounds is None:
            return True
        low, high = self.accuracy_bounds
        return low <= sum(rewards) / len(rewards) <= high


class Formed(msgspec.Struct, gc=False):
    """What the batch of a step has of a group: all of it, or a part."""

    step: int
    group: Group


class Batches:
    """What steps have of groups: of the running step in training, of steps that were formed before to be trained again.

    All members of these are home.
    """

    def __init__(self, formed: Iterable[Formed] = ()) -> None:
        self.taken: int | None = None
        """The step of which a batch was chosen."""
        self.training: dict[int, Group] = {}
        """What the running step trains, whole groups and parts."""
        self.formed: dict[int, dict[int, Group]] = {}
        """By step, in order: what nobody has taken yet."""
        self.in_flight = 0
        self.tokens = 0
        """Action tokens of all of them."""
        for each in formed:
            self.formed.setdefault(each.step, {})[each.group.group_id] = each.group
            self._count(each.group, 1)

    @property
    def following(self) -> int:
        """The first step after all that were formed; 0 if there are none."""
        return max(self.formed, default=-1) + 1

    def train(self, group: Group) -> None:
        """A group, or a part of one, goes into training."""
        self.training[group.group_id] = group
        self._count(group, 1)

    def trained(self, group_id: int) -> Group:
        """The step of it is done."""
        group = self.training.pop(group_id)
        self._count(group, -1)
        return group

    def take(self, step: int, group_id: int) -> Group:
        """What a step was formed of leaves it."""
        group = self.formed[step].pop(group_id)
        if not self.formed[step]:
            del self.formed[step]
        self._count(group, -1)
        return group

    def left(self) -> list[Formed]:
        """All that is not trained yet: of the running step first."""
        steps = [(self.taken or 0, self.training), *self.formed.items()]
        return [Formed(step, group) for step, groups in steps for group in groups.values()]

    def _count(self, group: Group, times: int) -> None:
        for trajectory in group.trajectories():
            self.in_flight += times
            self.tokens += times * trajectory.action_count
