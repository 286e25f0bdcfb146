"""Admission: which task may go out to which engines, and when the next group is issued. Pure state.

The rule is the age contract's (`flash.samples.rules`): a sample is handed out only to a node with an engine whose
version leaves it room, and whose tokens the next step could still train. Later tasks need newer versions, or the same:
what waits for one holds back nothing that could run now. Groups are counted by their places, among those that were
issued and not given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec

from flash.samples.groups import Member
from flash.samples.leases import LeaseTable
from flash.samples.rules import AgeContract, BufferRules
from flash.samples.tasks import Problem, TaskSource
from flash.types import Task


class Admission:
    """See the module's docstring.

    Args:
        contract: the run's age contract.
        rules: what of the configuration concerns samples.
        source: gives the tasks of the next group.
        places: the places of the groups.
        leases: the tasks that wait or are out.
        next_step: the step that is formed next.
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
        """Groups that may still be issued in this wave."""
        self.next_step = next_step
        """No task goes out whose first token would be too old for this step."""
        self.openings = 0
        """Counts what may have made a lease possible that was not: a task put back, a place given back, a wave over."""
        # Groups start as a whole: a step that waits for a begun group must not hold back the rest of the group.
        whole = rules.whole_groups or rules.on_expire == "wait"
        self._sizes = rules.sizes(contract.group_size)
        self._largest = max(self._sizes.values())
        self._first_counted = contract.group_size - 1 if whole else 0
        """The member of a group with which admission begins."""

    def at_hand(self, newest: int) -> int:
        """Tasks that could go out to nodes whose newest engine runs this version.

        0 only if there is none for any node; of the last group some members too many may be counted."""
        queue = self._leases.queue
        if queue and not self.admits(queue.first, newest):
            return 0
        if not self.room_for_group(newest):
            return len(queue)
        slot = self.places.of(self._source.cursor.next_group)
        slots = min(self._contract.slots_admitted(newest, self._first_counted), self._contract.last_slot)
        groups = min(slots - slot, self._wave_left) if self._rules.waves else slots - slot
        return len(queue) + max(1, groups) * self._largest

    def admits(self, member: Member, newest: int) -> bool:
        """Whether a waiting task may go out to a node whose newest engine runs this version."""
        return self._needed(member) <= newest

    def floor(self, member: Member, versions: Sequence[int]) -> int:
        """The version of the slowest engine that may run a task: no token of it is older. One of them has to be."""
        needed = self._needed(member)
        return min(version for version in versions if version >= needed)

    def room_for_group(self, newest: int) -> bool:
        """Whether another group may be issued for a node whose newest engine runs this version."""
        slot = self.places.of(self._source.cursor.next_group)
        if slot >= self._contract.last_slot or self._version(slot, 0) > newest:
            return False
        if not self._rules.waves:
            return True
        if not self._leases.out and not self._leases.queue:
            self._wave_left = self._contract.groups_per_batch + self._contract.extra_groups
        return self._wave_left > 0

    def issue(self, problem: Problem) -> list[Task]:
        """The tasks of another group, for which there has to be room."""
        self._wave_left -= 1
        return self._source.issue(problem)

    def give_back(self, group_id: int) -> None:
        """A group leaves that reached no batch: those issued after it move up, and the last place is free again."""
        self.places.give_back(group_id)
        self.openings += 1

    def _needed(self, member: Member) -> int:
        task, nominal = member.task, self._contract.group_size
        size = self._sizes.get(task.kind, self._sizes[""]) - self._rules.extra_per_group
        # A group of another size counts as one of the run's: its members begin in the same stretch of samples.
        index = task.sample_index * nominal // size
        return self._version(self.places.of(task.group_id), index)

    def _version(self, slot: int, index: int) -> int:
        """The version that a member of a group at this place needs; its first token has to be of use, too."""
        fresh = self._contract.window_start(self.next_step)
        return max(self._contract.min_engine_version(slot, max(index, self._first_counted)), fresh)


class Places(msgspec.Struct):
    """A group that is returned moves all later ones up by one: only the returned are kept, nobody is renumbered."""

    before: int = 0
    """Groups returned that were issued before all in `returned`."""
    returned: list[int] = []
    """Groups returned since the oldest in flight was issued, in order of issue."""

    def of(self, group_id: int) -> int:
        """The place of a group, from 0; of the next one to be issued, too."""
        return group_id - self.before - bisect_left(self.returned, group_id)

    def first_at(self, place: int) -> int:
        """The first group, issued or not, that has this place or a later one."""
        numbers = range(len(self.returned))
        earlier = bisect_left(numbers, place + self.before, key=lambda at: self.returned[at] - at)
        return place + self.before + earlier

    def give_back(self, group_id: int) -> None:
        """A group leaves without having been trained."""
        insort(self.returned, group_id)

    def forget(self, oldest: int) -> None:
        """No group before this one will be asked for any more."""
        gone = bisect_left(self.returned, oldest)
        self.before += gone
        del self.returned[:gone]
