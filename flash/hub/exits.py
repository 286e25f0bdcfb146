"""Exits: the ways in which tasks leave a buffer, or begin again in it, each booked in the ledger. Pure state.

Conservation: a member that leaves the pool is trained, filtered or given up, in the ledger as well; its tokens are
trained or discarded. Who leaves, and when, is decided by `flash.hub.buffer`.
"""

from __future__ import annotations

from typing import Literal

from flash.hub.admission import Admission
from flash.hub.domains import Domains
from flash.hub.groups import Group, Member
from flash.hub.leases import LeaseTable
from flash.hub.ledger import Ledger
from flash.hub.pool import GroupPool
from flash.types import Outcome

Gone = Literal["lost", "beaten"]


class Exits:
    """See the module's docstring. All of these are the buffer's, too."""

    def __init__(
        self, pool: GroupPool, leases: LeaseTable, ledger: Ledger, admission: Admission, domains: Domains
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._ledger = ledger
        self._admission = admission
        self._domains = domains

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

    def start_again(self, group: Group, oldest: int) -> None:
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

    def trained(self, group_id: int, min_version: int) -> None:
        """A group, or a part of it, was trained on its tokens of this version or newer."""
        for trajectory in self._pool.trained(group_id).trajectories():
            self._ledger.train(trajectory.trained_tokens(min_version), trajectory.action_count)

    def _drop_done(self, group: Group, state: Gone, outcome: Outcome) -> None:
        for member in group.members:
            if member.state == "done":
                self.drop(member, state, outcome)
