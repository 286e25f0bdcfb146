"""Census: what is known of all groups together, kept up to date group by group. Pure state.

A group is counted anew, member by member, after each of its changes: so no question about all groups looks at all of
them, and what is counted does not come from the bookings that it is compared with.
"""

from __future__ import annotations

from typing import NamedTuple

from flash.hub.groups import Group


class Counted(NamedTuple):
    """One group."""

    alive: int
    tokens: int
    """Action tokens of its finished members."""
    oldest: int | None
    """No token of it, sampled or being sampled, is older than this version. None: nothing was begun."""
    complete: bool


def counted(group: Group) -> Counted:
    """Look at every member of a group, once."""
    alive = tokens = done = pending = 0
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
    alive = done + pending
    return Counted(alive, tokens, oldest, done + len(group.earlier) >= group.wanted or (done > 0 and pending == 0))


class Census:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Members that may still be trained."""
        self.tokens = 0
        """Action tokens of finished members."""
        self.begun: dict[int, list[int]] = {}
        """By their oldest version: how many groups there are, and how many of them are not complete."""
        self._groups: dict[int, Counted] = {}

    def count(self, group: Group) -> Counted:
        """A group is new, or has changed."""
        self.forget(group.group_id)
        new = self._groups[group.group_id] = counted(group)
        self.in_flight += new.alive
        self.tokens += new.tokens
        self._begin(new, 1)
        return new

    def forget(self, group_id: int) -> None:
        """A group is here no more."""
        if (old := self._groups.pop(group_id, None)) is None:
            return
        self.in_flight -= old.alive
        self.tokens -= old.tokens
        self._begin(old, -1)

    def oldest(self, group_id: int) -> int | None:
        """See `Counted`."""
        return self._groups[group_id].oldest

    def _begin(self, group: Counted, change: int) -> None:
        if group.oldest is None:
            return
        numbers = self.begun.setdefault(group.oldest, [0, 0])
        numbers[0] += change
        numbers[1] += change * (not group.complete)
        if not numbers[0]:
            del self.begun[group.oldest]
