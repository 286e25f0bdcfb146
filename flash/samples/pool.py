"""GroupPool: the groups of a buffer, and what is known of all of them together as each changes. Pure state.

A group waits for its members until a step trains it, whole or in parts. A step may train it while it is *ready*
(complete, and worth a place in a batch) or *expiring*: nearly complete, with members that no later step could train.

Who changes the members of a group tells by `changed`, or by the method that says what has become of it: the group is
then counted anew, member by member. So no question about all groups looks at all of them, and what is counted does not
come from the bookings that it is compared with.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from flash.samples.choice import Eligible
from flash.samples.groups import Group


class GroupPool:
    """See the module's docstring. `copy_ahead` copies `at_once` groups in one slice."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._groups: dict[int, Group] = {}
        """In the order of issue."""
        self._ready: set[int] = set()
        self._expiring: set[int] = set()
        self._in_parts: set[int] = set()
        """Those of which a part was trained."""
        self._copies: dict[int, Group] = {}
        """Made ahead of a snapshot, of groups that have not changed since."""
        self.census = Census()
        self.eligible = Eligible()
        """Those that are ready or expiring."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def get(self, group_id: int) -> Group | None:
        """A group, or None: it was trained, or has left."""
        return self._groups.get(group_id)

    def late(self) -> list[int]:
        """Groups of which a part was trained, and others have come home since."""
        return [group_id for group_id in sorted(self._in_parts) if self._groups[group_id].count("done")]

    def is_ready(self, group_id: int) -> bool:
        """Whether a group is complete, or chosen to be trained as it is."""
        return group_id in self._ready

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a step."""
        return len(self._ready)

    # -- changes -----------------------------------------------------------------------------------------------------

    def changed(self, group: Group) -> None:
        """A member has: count the group again."""
        group_id = group.group_id
        self._copies.pop(group_id, None)
        oldest = self.census.count(group).oldest
        if oldest is not None and (group_id in self._ready or group_id in self._expiring):
            self.eligible.put(group_id, oldest, group.kind)
        else:
            self.eligible.remove(group_id)
        if group.earlier:
            self._in_parts.add(group_id)

    def waits(self, group: Group, *, expiring: bool = False) -> None:
        """A group is new, or not complete, or not any more."""
        self._groups[group.group_id] = group
        self._ready.discard(group.group_id)
        self._expiring.discard(group.group_id)
        if expiring:
            self._expiring.add(group.group_id)
        self.changed(group)

    def ready(self, group: Group) -> None:
        """A group is complete, and worth a place in a batch."""
        self._expiring.discard(group.group_id)
        self._ready.add(group.group_id)
        self.changed(group)

    def chosen(self, group_ids: Iterable[int]) -> None:
        """These will be trained as they are: who comes home meanwhile is trained with the others of its group."""
        self._ready.update(group_ids)

    def take(self, group_id: int) -> Group:
        """What of a group can be trained now goes: all of it, or the members that are done."""
        group = self._groups[group_id]
        whole = group.complete and not group.earlier
        part = group if whole else group.split()
        if whole or group.pending == 0:
            self.remove(group_id)
        else:
            self.waits(group)
        return part

    def remove(self, group_id: int) -> None:
        """A group leaves."""
        del self._groups[group_id]
        for some in (self._ready, self._expiring, self._in_parts):
            some.discard(group_id)
        self.eligible.remove(group_id)
        self.census.forget(group_id)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def copy_ahead(self) -> Generator[None]:
        """Copy the groups in slices: `copies` has to copy only those that change meanwhile."""
        for number, group_id in enumerate(list(self._groups), start=1):
            if (group := self._groups.get(group_id)) is not None:
                self._copies[group_id] = group.copy()
            if number % self._at_once == 0:
                yield

    def copies(self) -> list[Group]:
        """The groups as they are now, whatever comes after."""
        copies, self._copies = self._copies, {}
        return [copies.get(group_id) or group.copy() for group_id, group in self._groups.items()]


class Counted(NamedTuple):
    """One group."""

    alive: int
    tokens: int
    """Action tokens of its finished members."""
    oldest: int | None
    """No token of it, sampled or being sampled, is older than this version. None: nothing was begun."""
    complete: bool

    @classmethod
    def of(cls, group: Group) -> Counted:
        """Look at every member of a group, once."""
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
    """What all groups have together."""

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
        new = self._groups[group.group_id] = Counted.of(group)
        self._add(new, 1)
        return new

    def forget(self, group_id: int) -> None:
        """A group is here no more."""
        if (old := self._groups.pop(group_id, None)) is not None:
            self._add(old, -1)

    def oldest(self, group_id: int) -> int | None:
        """See `Counted`."""
        return self._groups[group_id].oldest

    def _add(self, group: Counted, times: int) -> None:
        self.in_flight += times * group.alive
        self.tokens += times * group.tokens
        if group.oldest is None:
            return
        numbers = self.begun.setdefault(group.oldest, [0, 0])
        numbers[0] += times
        numbers[1] += times * (not group.complete)
        if not numbers[0]:
            del self.begun[group.oldest]
