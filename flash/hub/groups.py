"""Group assembly: the members of one prompt, from issue to the last one home.

A member is queued, leased, done or lost. A group is complete when no member is queued or leased, and ready when it is
complete and at least one member is done. Lost members leave the group smaller; group identity stays explicit.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from flash.types import Task, Trajectory

MemberState = Literal["queued", "leased", "done", "lost"]


class Member(msgspec.Struct):
    """One task of a group."""

    task: Task
    state: MemberState = "queued"
    trajectory: Trajectory | None = None


class Group(msgspec.Struct):
    """All tasks of one prompt."""

    group_id: int
    slot: int
    """Its place, from 0, among the groups issued and not returned: what admission counts."""
    members: list[Member]

    @property
    def complete(self) -> bool:
        """No member is still on its way."""
        return all(member.state in ("done", "lost") for member in self.members)

    def trajectories(self) -> list[Trajectory]:
        """What its finished members brought home."""
        return [member.trajectory for member in self.members if member.trajectory is not None]

    @property
    def alive(self) -> int:
        """Members that are not lost."""
        return sum(member.state != "lost" for member in self.members)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among its tokens."""
        return min(trajectory.oldest_version for trajectory in self.trajectories())

    def trained_tokens(self, min_version: int) -> int:
        """Action tokens of its members sampled by `min_version` or newer."""
        return sum(trajectory.trained_tokens(min_version) for trajectory in self.trajectories())
