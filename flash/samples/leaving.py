"""How tasks leave a buffer, or begin again in it, and what becomes of groups as they age. Pure state.

Conservation: a member that leaves the pool is trained, filtered or given up, in the ledger as well; its tokens are
trained or discarded. What no step can train any more as it is leaves, or starts again; what would expire while another
member of its group is on its way may be trained before that one comes.
"""

from __future__ import annotations

from typing import Literal

from flash.samples.admission import Admission
from flash.samples.domains import DomainShares
from flash.samples.groups import Group, Member
from flash.samples.leases import LeaseTable
from flash.samples.ledger import Ledger
from flash.samples.pool import GroupPool
from flash.samples.rules import AgeContract, BufferRules
from flash.samples.slices import Backlog
from flash.types import Outcome

Gone = Literal["lost", "beaten"]


class Departures:
    """See the module's docstring. All of these are the buffer's, too."""

    def __init__(
        self,
        contract: AgeContract,
        rules: BufferRules,
        pool: GroupPool,
        leases: LeaseTable,
        ledger: Ledger,
        admission: Admission,
        domains: DomainShares,
        backlog: Backlog,
    ) -> None:
        self._contract = contract
        self._rules = rules
        self._pool = pool
        self._leases = leases
        self._ledger = ledger
        self._admission = admission
        self._domains = domains
        self._backlog = backlog
        self._losers = 0
        """Groups that may still be withdrawn for having missed their window."""

    # -- members -----------------------------------------------------------------------------------------------------

    def drop(self, member: Member, state: Gone, outcome: Outcome) -> None:
        """A member leaves for good: on its way, its lease is withdrawn; done, its tokens are booked as waste."""
        self._leases.remove(member, outcome)
        if member.trajectory is not None:
            self._ledger.discard(outcome, member.trajectory.action_count)
            member.trajectory = None
        member.state = state
        self._ledger.give_up(outcome)

    def drop_rest(self, group: Group, state: Gone, outcome: Outcome) -> None:
        """The members of a group that are on their way leave."""
        for member in group.members:
            if member.state in ("queued", "leased"):
                self.drop(member, state, outcome)

    def _drop_done(self, group: Group, state: Gone, outcome: Outcome) -> None:
        for member in group.members:
            if member.state == "done":
                self.drop(member, state, outcome)

    def _start_again(self, group: Group, oldest: int) -> None:
        """Members with a token older than this version lose all of theirs and queue again, in their place."""
        old = [member for member in group.members if member.state in ("leased", "done") and member.floor < oldest]
        for member in old:
            if member.trajectory is not None:
                self._ledger.discard(Outcome.STALE, member.trajectory.action_count)
                member.trajectory = None
            else:
                self._leases.remove(member, Outcome.STALE)
            self._ledger.retry(Outcome.STALE)
            self._leases.put(member)
            self._admission.openings += 1
        if old:
            self._pool.waits(group)

    # -- groups ------------------------------------------------------------------------------------------------------

    def leave(self, group: Group) -> None:
        """A group leaves of which nobody is left: if it reached no batch, its place is free again."""
        self._pool.remove(group.group_id)
        if not group.earlier:
            self._admission.give_back(group.group_id)
            self._domains.left(group.kind)

    def filtered(self, group: Group) -> None:
        """A complete group leaves that is not worth a place in a batch."""
        self._ledger.filtered += group.alive
        for trajectory in group.trajectories():
            self._ledger.discard(Outcome.FILTERED, trajectory.action_count)
        self.leave(group)

    def withdraw(self, group: Group) -> None:
        """A whole group is of no use any more."""
        self.drop_rest(group, "beaten", Outcome.CANCELLED)
        self._drop_done(group, "beaten", Outcome.CANCELLED)
        self.leave(group)

    def expire(self, group: Group) -> None:
        """The finished members of a group are of no use any more."""
        self._drop_done(group, "lost", Outcome.STALE)
        if group.pending == 0:
            self.leave(group)
        else:
            self._pool.changed(group)

    # -- age ---------------------------------------------------------------------------------------------------------

    def watch(self, group: Group) -> None:
        """Members whose window ends with the next step need not wait for the others of their group."""
        expiring = False
        if self._rules.on_expire == "mask" and self._contract.splits and not group.complete and not group.earlier:
            step = self._admission.next_step
            expiring = group.expiring(self._contract.window_start(step + 1))
            expiring = expiring and group.trained_tokens(self._contract.min_token_version(step)) > 0
            expiring = expiring and self._rules.filter_of(group.kind).keeps(group)
        self._pool.waits(group, expiring=expiring)

    def useless(self, group: Group) -> bool:
        """Whether a group waits for nobody, or was trained in part, and all of it is too old for the next step."""
        if not (group.complete or group.earlier):
            return False
        return group.trained_tokens(self._contract.min_token_version(self._admission.next_step)) == 0

    def next_is(self, step: int) -> None:
        """From now on `step` is the next one: deal with what no step can train any more as it is."""
        if step > self._admission.next_step:
            self._admission.next_step = step
            self._losers = self._contract.extra_groups
            self.begins()

    def begins(self) -> None:
        """Deal with what is too old for the step that is the next one."""
        if (oldest := next(iter(self._pool), None)) is not None:
            self._admission.places.forget(oldest)
        self._backlog.add(self._grow_old, self._pool)

    def _grow_old(self, group_id: int) -> None:
        """The next step is another one: a group may have become too old for it, or for the one after it."""
        group = self._pool.get(group_id)
        if group is None:
            return
        begun, step = self._pool.census.oldest(group_id), self._admission.next_step
        if begun is None or begun >= self._contract.window_start(step + 1):
            return
        oldest = self._contract.min_token_version(step)
        if self._losers and self._outgrown(group, oldest):
            # Redundant groups make up for those that missed their window.
            self._losers -= 1
            self.withdraw(group)
            return
        if self._rules.on_expire == "requeue":
            if group.closed and begun < oldest:
                self.expire(group)
                return
            self._start_again(group, oldest)
        if self.useless(group):
            self.expire(group)
        elif not self._pool.is_ready(group_id):
            self.watch(group)

    def _outgrown(self, group: Group, oldest: int) -> bool:
        """Whether a group that is on its way cannot be trained without stale tokens any more."""
        if self._pool.is_ready(group.group_id) or group.earlier:
            return False
        return any(member.state == "leased" and member.floor < oldest for member in group.members)
