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
from flash.samples.groups import Group, Member


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
        self._in_training = Census()
        self._copies: dict[int, Group] = {}
        """Made ahead of a snapshot, of groups that have not changed since."""
        self.census = Census()
        """Counts those that are not in training."""
        self.eligible = Eligible()
        """Those that are ready or expiring."""
        self.training: dict[int, Group] = {}
        """What the running step trains, whole groups and parts."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def get(self, group_id: int) -> Group | None:
        """A group, or None: it was trained, or has left."""
        return self._groups.get(group_id)

    def of(self, member: Member) -> Group:
        """The group of a member."""
        return self._groups[member.task.group_id]

    def late(self) -> list[int]:
        """Groups of which a part was trained, and others have come home since."""
        return [group_id for group_id in sorted(self._in_parts) if self._groups[group_id].count("done")]

    def is_ready(self, group_id: int) -> bool:
        """Whether a group is complete, or chosen to be trained as it is."""
        return group_id in self._ready

    # -- changes -----------------------------------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """A group is new."""
        self._groups[group.group_id] = group
        self.changed(group)

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
        """A group is not complete, or not any more."""
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

    def train(self, group_id: int) -> None:
        """Put into training what of a group can be trained now: all of it, or the members that are done."""
        group = self._groups[group_id]
        self._ready.discard(group_id)
        self._expiring.discard(group_id)
        whole = group.complete and not group.earlier
        part = group if whole else group.split()
        if whole or group.pending == 0:
            self.remove(group_id)
        else:
            self.changed(group)
        self.train_part(part)

    def train_part(self, part: Group) -> None:
        """Put a group, or a part of one, into training as it is."""
        self.training[part.group_id] = part
        self._in_training.count(part)

    def trained(self, group_id: int) -> Group:
        """The step of a group, or of a part of it, is done: it leaves."""
        self._in_training.forget(group_id)
        return self.training.pop(group_id)

    def remove(self, group_id: int) -> None:
        """A group leaves."""
        del self._groups[group_id]
        self._ready.discard(group_id)
        self._expiring.discard(group_id)
        self._in_parts.discard(group_id)
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

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Members that may still be trained, or are in training."""
        return self.census.in_flight + self._in_training.in_flight

    @property
    def tokens(self) -> int:
        """Action tokens of finished members."""
        return self.census.tokens + self._in_training.tokens

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a step."""
        return len(self._ready)


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
