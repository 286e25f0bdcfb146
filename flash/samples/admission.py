"""Admission: which task may be leased to which engines, and when the next group is issued. Pure state.

`flash.samples.buffer` calls `Admission` before each lease. `flash.samples.store.SampleStore.issue` calls
`Admission.issue`, which calls `TaskSource.issue` for the tasks of a group. The rule comes from the age contract: a
sample is leased only to a node with an engine whose version is new enough. The sample must stay within the window of α,
and the next step must still be able to train its tokens.

Groups are counted by their *places*: the order of issue, without groups that left untrained. A later place needs an
equal or newer version. So if the first task of the queue has to wait for a version, no later task could run now either.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec

from flash.ages import SLACK, last_step, max_age, version_of, window
from flash.config.tree import Config
from flash.samples.groups import Member
from flash.samples.leases import LeaseTable
from flash.samples.rules import BufferRules
from flash.samples.tasks import Problem, TaskSource
from flash.types import Task


class AgeContract(msgspec.Struct, frozen=True):
    """The age contract of a run: how far sampling may be ahead of training.

    With α = async ratio and B = samples of a step, (1 + α)·B samples may be in flight. Every token trained by the step
    that makes version n+1 was sampled by a version ≥ n − ⌈α⌉, or ≥ n − `max_token_age` if that is given. With
    `max_token_age`, the early tokens of long answers can still be trained, while admission still follows α. Redundant
    samples and groups are not included in these numbers.
    """

    async_ratio: float
    """α."""
    batch_size: int
    """B: samples of a step."""
    group_size: int
    """Samples of a group, without redundant ones."""
    steps: int
    """Steps of the whole run."""
    extra_groups: int = 0
    """Number of redundant groups in flight."""
    max_token_age: int | None = None
    """Largest age of a trained token, in versions. None: ⌈α⌉."""

    @classmethod
    def of(cls, config: Config) -> AgeContract:
        """Return the contract of a run."""
        rollout, train = config.rollout, config.train
        return cls(
            train.async_ratio,
            train.batch_size,
            rollout.group_size,
            config.run.steps,
            rollout.extra_groups,
            train.max_token_age,
        )

    def min_engine_version(self, place: int, sample_index: int) -> int:
        """Return the oldest engine version that may start a sample: member `sample_index` of the group at `place`.

        The published version v admits the k-th sample of the run if k ≤ (v + 1 + α)·B. Samples of groups that left
        untrained do not count.
        """
        member = min(sample_index, self.group_size - 1)
        k = (place - self.extra_groups) * self.group_size + member + 1
        return max(0, math.ceil(k / self.batch_size - 1 - self.async_ratio - SLACK))

    def places_admitted(self, version: int, sample_index: int) -> int:
        """Return the number of places, from the first, at which a published version admits member `sample_index`."""
        member = min(sample_index, self.group_size - 1)
        samples = (version + 1 + self.async_ratio + SLACK) * self.batch_size
        return math.floor((samples - member - 1) / self.group_size) + 1 + self.extra_groups

    @property
    def max_age(self) -> int:
        """Largest age of a trained token, in versions."""
        return max_age(self.async_ratio, self.max_token_age)

    def min_token_version(self, step: int) -> int:
        """Return the oldest version whose tokens the step that trains version `step` may use."""
        return version_of(self.max_age, step)

    def window_start(self, step: int) -> int:
        """Return the oldest version that may begin a sample for a step.

        The window depends on α only, and not on `max_token_age`. At the end of this window, finished members of a group
        stop waiting for unfinished ones.
        """
        return version_of(window(self.async_ratio), step)

    def last_step(self, token_version: int) -> int:
        """Return the last step that may train a token of this version."""
        return last_step(token_version, self.max_age)

    @property
    def splits(self) -> bool:
        """True if a group may be trained in parts: at any α > 0, since its finished members have a last chance."""
        return window(self.async_ratio) >= 1

    @property
    def groups_per_batch(self) -> int:
        """Groups that one step trains."""
        return self.batch_size // self.group_size

    @property
    def last_place(self) -> int:
        """Number of places of the whole run: no group is issued at this place or a later one."""
        return self.steps * self.groups_per_batch + self.extra_groups


class Admission:
    """Decides which task may be leased to which node.

    Args:
        contract: the run's age contract.
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
        """Groups that may still be issued in this wave, if groups start in waves."""
        self.next_step = next_step
        """Step whose batch is formed next. No task is leased whose first token would be too old for this step."""
        self.openings = 0
        """Counter of events that may have made a lease possible: a task was queued again, a place was given back, or a
        wave ended. The owner compares it with an earlier value to decide whether to offer tasks to waiting nodes."""
        self._sizes = rules.sizes(contract.group_size)
        """Members of a group by domain, redundant ones included."""
        self._largest = max(self._sizes.values())
        # With on_expire = "wait" a step waits for the groups that have begun. If such a group could not go out as a
        # whole, the step would wait for members that wait for the next version, and so for the step.
        whole = rules.whole_groups or rules.on_expire == "wait"
        self._first_counted = contract.group_size - 1 if whole else 0
        """Index from which each member needs a version of its own. If groups are leased as a whole, this is the last
        index: all members need the version that the last member needs."""

    def available(self, newest: int) -> int:
        """Return the number of tasks that could be leased to nodes whose newest engine runs version `newest`.

        The number may be too high, because it counts all members of the last group. It is 0 only if no node can get a
        task.
        """
        queue = self._leases.queue
        if queue and not self.admits(queue.first, newest):
            return 0
        if not self.room_for_group(newest):
            return len(queue)
        place = self.places.of(self._source.cursor.next_group)
        places = min(self._contract.places_admitted(newest, self._first_counted), self._contract.last_place)
        groups = min(places - place, self._wave_left) if self._rules.waves else places - place
        return len(queue) + max(1, groups) * self._largest

    def admits(self, member: Member, newest: int) -> bool:
        """Return True if a queued task may be leased to a node whose newest engine runs version `newest`."""
        return self._needed(member) <= newest

    def floor(self, member: Member, versions: Sequence[int]) -> int:
        """Return the oldest version of the given engines that may run a task. No token of the sample will be older.

        At least one of the engines must be allowed to run the task (`admits`).
        """
        needed = self._needed(member)
        return min(version for version in versions if version >= needed)

    def room_for_group(self, newest: int) -> bool:
        """Return True if another group may be issued for a node whose newest engine runs version `newest`."""
        place = self.places.of(self._source.cursor.next_group)
        if place >= self._contract.last_place or self._version(place, 0) > newest:
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

    def _needed(self, member: Member) -> int:
        """Return the oldest engine version that may run a queued task."""
        task, nominal = member.task, self._contract.group_size
        size = self._sizes.get(task.kind, self._sizes[""]) - self._rules.extra_per_group
        # A group of another size counts as a group of the run's size: its members share the same range of samples.
        index = task.sample_index * nominal // size
        return self._version(self.places.of(task.group_id), index)

    def _version(self, place: int, index: int) -> int:
        """Return the version that a member needs: admitted by the contract, and of use for the next step."""
        fresh = self._contract.window_start(self.next_step)
        return max(self._contract.min_engine_version(place, max(index, self._first_counted)), fresh)


class Places(msgspec.Struct):
    """Computes the places of groups: their numbers, less the number of earlier groups that left untrained.

    Only the groups that left are stored, so that no group is renumbered when one leaves.
    """

    before: int = 0
    """Groups that left untrained and were issued before all groups in `returned`."""
    returned: list[int] = []
    """Groups that left untrained since the oldest group in flight was issued, in ascending order."""

    def of(self, group_id: int) -> int:
        """Return the place of a group, from 0. The group may be the next one to be issued."""
        return group_id - self.before - bisect_left(self.returned, group_id)

    def first_at(self, place: int) -> int:
        """Return the first group, issued or not, that has this place or a later one."""
        numbers = range(len(self.returned))
        earlier = bisect_left(numbers, place + self.before, key=lambda at: self.returned[at] - at)
        return place + self.before + earlier

    def give_back(self, group_id: int) -> None:
        """Record that a group has left untrained."""
        insort(self.returned, group_id)

    def forget(self, oldest: int) -> None:
        """Shorten the list of returned groups. No place of a group before `oldest` may be requested after this."""
        gone = bisect_left(self.returned, oldest)
        self.before += gone
        del self.returned[:gone]
