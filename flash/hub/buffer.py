"""SampleBuffer: every training task between its issue and the commit of its step, as a pure state machine.

- *Admission* follows the age contract (`flash.hub.contract`): a sample is handed out only to a node with an engine
  whose version leaves it room, and whose tokens the next step could still train.
- *Redundancy*: the first members of a group to finish win, the others are withdrawn at once; so are groups that miss
  their window, as far as `extra_groups` stand in for them.
- *Choice* is made by `flash.hub.choice`, filtering by `flash.hub.groups.GroupFilter`; what leaves without reaching a
  batch gives its place back.
- *Consumption*: tokens that are too old all the same are left out of the loss, and counted; or their sample is started
  again (`on_expire`). Members that would expire while another one of their group is still on its way are trained before
  it; the late ones join a later step, on top of its groups.

Conservation: every issued task is queued, leased, done, in training or booked in the ledger; `in_flight` counts them
here, independently of the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Literal

import msgspec

from flash.errors import ContractError
from flash.hub.breaker import Breaker
from flash.hub.choice import choose
from flash.hub.contract import AgeContract
from flash.hub.groups import Group, Member
from flash.hub.leases import LeaseTable, as_issued
from flash.hub.ledger import Ledger
from flash.hub.rules import BufferRules
from flash.hub.tasks import Cursor, TaskSource
from flash.types import Failure, Lease, Outcome, Trajectory

FILTER_BREAKER = 20
"""Batches' worth of groups filtered out in a row, none kept between, that stop a run which filters everything."""


class BufferState(msgspec.Struct):
    """What a checkpoint keeps of the buffer."""

    cursor: Cursor
    returned: int
    groups: list[Group]
    ledger: Ledger


class SampleBuffer:
    """See the module's docstring. `leases.withdrawn` and `notes` fill up for the owner, who empties them.

    `lease_ids` numbers the leases of the whole run, those of evaluations included.
    """

    def __init__(
        self,
        contract: AgeContract,
        source: TaskSource,
        rules: BufferRules,
        *,
        step: int = 0,
        state: BufferState | None = None,
        lease_ids: Iterator[int] | None = None,
    ) -> None:
        self._contract = contract
        self._source = source
        self._rules = rules
        self._groups: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._expiring: dict[int, Group] = {}
        self._training: dict[int, Group] = {}
        self._returned = 0
        self._next_step = step
        self._wave_left = 0
        self._breaker = Breaker(rules.breaker, rules.quarantine, FILTER_BREAKER * contract.groups_per_batch)
        self.leases = LeaseTable(lease_ids or count(), rules.retries, as_issued)
        self.ledger = Ledger()
        self.notes: list[str] = []
        """What people should know."""
        if state is not None:
            self._restore(state)

    def _restore(self, state: BufferState) -> None:
        """Continue from a checkpoint: leases of the former life are void, their tasks queue again in order."""
        self._returned = state.returned
        self.ledger = state.ledger
        for group in state.groups:
            self._groups[group.group_id] = group
            for member in group.members:
                if member.state in ("queued", "leased"):
                    self.leases.put(member)
            if group.complete and not group.earlier:
                self._ready[group.group_id] = group
        self._find_expiring()

    def snapshot(self) -> BufferState:
        """The state between two steps; call it while no batch is in training."""
        assert not self._training, "a batch in training belongs to no consistent state"
        return BufferState(self._source.cursor, self._returned, list(self._groups.values()), self.ledger)

    # -- admission ---------------------------------------------------------------------------------------------------

    def lease(self, versions: Sequence[int], node: int = 0, *, nodes: Collection[int] = ()) -> Lease | None:
        """Hand out the next task that a node may run, or None.

        Args:
            versions: what the node's engines run.
            node: its number. A task goes to another node than those it failed on, as long as there is one.
            nodes: all nodes that could take it.

        Raises:
            BreakerError: every kind of environment is quarantined.
        """
        newest = max(versions, default=-1)
        for member in self.leases.queue:
            if self._needed_version(self._group(member).slot, member.task.sample_index) > newest:
                return None
            if node not in member.avoid or all(other in member.avoid for other in nodes):
                return self._hand_out(member, versions)
        if not self._room_for_group(newest):
            return None
        return self._hand_out(self._issue_group().members[0], versions)

    def lease_rest(self, lease: Lease, versions: Sequence[int]) -> list[Lease]:
        """The queued members of the same group, which go to the same node."""
        group = self._groups[lease.task.group_id]
        return [self._hand_out(member, versions) for member in group.members if member.state == "queued"]

    def _hand_out(self, member: Member, versions: Sequence[int]) -> Lease:
        """The lease on a queued task. No token will be older than the slowest engine that admission allows."""
        needed = self._needed_version(self._group(member).slot, member.task.sample_index)
        return self.leases.grant(member, min(version for version in versions if version >= needed))

    def _needed_version(self, slot: int, index: int) -> int:
        """What admission asks for; and the first token must not be too old for the next step."""
        fresh = self._contract.min_token_version(self._next_step)
        if self._rules.on_expire == "wait":
            # Groups start as a whole: a step that waits for a begun group must not hold back the rest of the group.
            index = self._contract.group_size - 1
        return max(self._contract.min_engine_version(slot, index), fresh)

    def _room_for_group(self, newest: int) -> bool:
        slot = self._source.cursor.next_group - self._returned
        if slot >= self._contract.last_slot or self._needed_version(slot, 0) > newest:
            return False
        if not self._rules.waves:
            return True
        if not self.leases.out and not self.leases.queue:
            self._wave_left = self._contract.groups_per_batch + self._contract.extra_groups
        return self._wave_left > 0

    def _issue_group(self) -> Group:
        slot = self._source.cursor.next_group - self._returned
        tasks = self._source.issue_group()
        self._wave_left -= 1
        group = Group(tasks[0].group_id, slot, self._contract.group_size, [Member(task) for task in tasks])
        self._groups[group.group_id] = group
        for member in group.members:
            self.leases.put(member)
        self.ledger.issued += len(tasks)
        return group

    # -- results -----------------------------------------------------------------------------------------------------

    def finish(self, lease_id: int, result: Trajectory | Failure, node: int = 0) -> None:
        """Take what a lease brought home. An unknown lease (withdrawn, or of a former life) only books its tokens.

        Raises:
            BreakerError: too many tasks in a row were given up, or too many groups filtered out.
        """
        member = self.leases.ended(lease_id)
        tokens = result.tokens if isinstance(result, Failure) else result.action_count
        self.ledger.generated_tokens += tokens
        if member is None:
            self.ledger.discard(self.leases.reason(lease_id), tokens)
            return
        group = self._group(member)
        if isinstance(result, Failure):
            self.ledger.discard(result.outcome, tokens)
            self._fail(member, result, node)
        else:
            member.state, member.trajectory = "done", result
            self._breaker.finished(member.task)
        self._settle(group)

    def revoke(self, lease_id: int) -> None:
        """A lease's node is gone: its task queues again."""
        if self.leases.revoke(lease_id):
            self.ledger.retry(Outcome.CANCELLED)

    def _fail(self, member: Member, failure: Failure, node: int) -> None:
        if self.leases.again(member, failure.outcome, node):
            self.ledger.retry(failure.outcome)
            return
        self._drop(member, "lost", failure.outcome)
        if self._breaker.given_up(member.task, failure):
            self._quarantine(member.task.kind, failure)

    def _quarantine(self, kind: str, failure: Failure) -> None:
        """Give up what is on its way of a kind that keeps failing; finished members stay."""
        self._source.quarantine(kind)
        for group in list(self._groups.values()):
            if group.members[0].task.kind != kind:
                continue
            for member in group.members:
                if member.state in ("queued", "leased"):
                    self._drop(member, "lost", failure.outcome)
            self._settle(group)
        self.notes.append(
            f"environments of kind {kind!r} are in quarantine: {self._rules.quarantine} of their samples in a row were "
            f"given up; the last one ({failure.outcome}): {failure.message}"
        )

    def _drop(self, member: Member, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """A member leaves for good: on its way, its lease is withdrawn; done, its tokens are booked as waste."""
        self.leases.remove(member, outcome)
        if member.trajectory is not None:
            self.ledger.discard(outcome, member.trajectory.action_count)
            member.trajectory = None
        member.state = state
        self.ledger.give_up(outcome)

    def _settle(self, group: Group) -> None:
        """A member has come home or left: the group may be complete, filtered out, or empty."""
        if group.group_id not in self._groups or group.group_id in self._ready:
            return
        if group.complete:
            for member in group.members:
                if member.state in ("queued", "leased"):
                    self._drop(member, "beaten", Outcome.CANCELLED)
        if group.alive == 0:
            self._return(group)
        elif group.complete and not group.earlier:
            self._admit_or_filter(group)
        else:
            self._watch(group)

    def _admit_or_filter(self, group: Group) -> None:
        self._expiring.pop(group.group_id, None)
        if self._rules.filter.keeps(group):
            self._ready[group.group_id] = group
            self._breaker.kept()
            return
        self.ledger.filtered += group.alive
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.FILTERED, trajectory.action_count)
        self._return(group)
        self._breaker.filtered()

    def _return(self, group: Group) -> None:
        """A group leaves: if it reached no batch, those issued after it move up, and the last place is free again."""
        del self._groups[group.group_id]
        self._ready.pop(group.group_id, None)
        self._expiring.pop(group.group_id, None)
        if group.earlier:
            return
        self._returned += 1
        for later in self._groups.values():
            later.slot -= later.slot > group.slot

    def _group(self, member: Member) -> Group:
        return self._groups[member.task.group_id]

    # -- consumption -------------------------------------------------------------------------------------------------

    def take(self, version: int) -> list[Group] | None:
        """The groups of the step that trains version `version`, or None while there are too few."""
        self._age(version)
        chosen = choose(
            self._contract,
            version,
            self._groups.values(),
            (self._ready | self._expiring).values(),
            fifo_window=self._rules.fifo_window,
            wait=self._rules.on_expire == "wait",
        )
        if chosen is None:
            return None
        late = [group for group in self._groups.values() if group.earlier and group.count("done")]
        for group in (*chosen, *late):
            self._training[group.group_id] = self._parted(group)
        self._age(version + 1)
        return list(self._training.values())

    def _parted(self, group: Group) -> Group:
        """What of a group is trained now: all of it, or the members that are done."""
        if not group.complete or group.earlier:
            part = group.split()
            if group.pending == 0:
                self._return(group)
            self._expiring.pop(group.group_id, None)
            return part
        del self._ready[group.group_id]
        return self._groups.pop(group.group_id)

    def _watch(self, group: Group) -> None:
        """Members that no later step could train need not wait for the others of their group."""
        self._expiring.pop(group.group_id, None)
        if self._rules.on_expire != "mask" or self._contract.max_age < 1 or group.complete or group.earlier:
            return
        after_next = self._contract.min_token_version(self._next_step + 1)
        if group.expiring(after_next) and self._rules.filter.keeps(group):
            self._expiring[group.group_id] = group

    def _find_expiring(self) -> None:
        for group in self._groups.values():
            self._watch(group)

    def _age(self, step: int) -> None:
        """From now on `step` is the next one: deal with what no step can train any more as it is."""
        if step <= self._next_step:
            return
        self._next_step = step
        oldest = self._contract.min_token_version(step)
        self._cancel_losers(oldest)
        for group in list(self._groups.values()):
            if self._rules.on_expire == "requeue":
                self._start_again(group, oldest)
            if (group.group_id in self._ready or group.earlier) and group.trained_tokens(oldest) == 0:
                self._expire(group)
        self._find_expiring()

    def _cancel_losers(self, oldest: int) -> None:
        """Redundant groups make up for those that missed their window."""
        outgrown = [
            group
            for group in self._groups.values()
            if group.group_id not in self._ready
            and not group.earlier
            and any(member.state == "leased" and member.floor < oldest for member in group.members)
        ]
        for group in outgrown[: self._contract.extra_groups]:
            for member in group.members:
                if member.state in ("queued", "leased", "done"):
                    self._drop(member, "beaten", Outcome.CANCELLED)
            self._return(group)

    def _start_again(self, group: Group, oldest: int) -> None:
        """Members with a token that is too old lose all of it and queue again, in their place."""
        for member in group.members:
            if member.state == "leased" and member.floor < oldest:
                self.leases.remove(member, Outcome.STALE)
            elif member.trajectory is not None and member.trajectory.oldest_version < oldest:
                self.ledger.discard(Outcome.STALE, member.trajectory.action_count)
                member.trajectory = None
            else:
                continue
            self.ledger.retry(Outcome.STALE)
            self.leases.put(member)
            self._ready.pop(group.group_id, None)

    def _expire(self, group: Group) -> None:
        """Its finished members are of no use any more."""
        for member in group.members:
            if member.state == "done":
                self._drop(member, "lost", Outcome.STALE)
        if group.pending == 0:
            self._return(group)

    def commit(self, version: int) -> None:
        """The step that trained `version` is done: book its groups.

        Raises:
            ContractError: no batch of this step was taken.
        """
        if not self._training:
            raise ContractError(f"step {version} was committed, but no batch was handed out for it")
        min_version = self._contract.min_token_version(version)
        for group in self._training.values():
            for trajectory in group.trajectories():
                trained = trajectory.trained_tokens(min_version)
                self.ledger.trained_tokens += trained
                self.ledger.discard(Outcome.STALE, trajectory.action_count - trained)
                if trained:
                    self.ledger.trained += 1
                else:
                    self.ledger.give_up(Outcome.STALE)
        self._training.clear()
        self.check()

    def close(self) -> None:
        """The last step is committed: what redundancy left over is withdrawn and booked."""
        for group in list(self._groups.values()):
            for member in group.members:
                if member.state in ("queued", "leased", "done"):
                    self._drop(member, "beaten", Outcome.CANCELLED)
            self._return(group)

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Tasks issued and neither trained, filtered nor given up."""
        groups = (*self._groups.values(), *self._training.values())
        return sum(group.alive for group in groups)

    @property
    def buffered_tokens(self) -> int:
        """Action tokens of trajectories that wait for a step or are in one."""
        groups = (*self._groups.values(), *self._training.values())
        return sum(t.action_count for group in groups for t in group.trajectories())

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a step."""
        return len(self._ready)

    def check(self) -> None:
        """Compare the ledger with what is here. Raises ContractError."""
        self.ledger.check(self.in_flight, self.buffered_tokens)
