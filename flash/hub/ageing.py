"""Ageing: what becomes of groups when the next step is another one. Pure state.

What no step can train any more as it is leaves, or starts again; what would expire while another member of its group is
on its way may be trained before that one comes.
"""

from __future__ import annotations

from flash.hub.admission import Admission
from flash.hub.chores import Chores
from flash.hub.contract import AgeContract
from flash.hub.exits import Exits
from flash.hub.groups import Group
from flash.hub.places import Places
from flash.hub.pool import GroupPool
from flash.hub.rules import BufferRules


class Ageing:
    """See the module's docstring. All of these are the buffer's, too."""

    def __init__(
        self,
        contract: AgeContract,
        rules: BufferRules,
        pool: GroupPool,
        exits: Exits,
        admission: Admission,
        places: Places,
        chores: Chores,
    ) -> None:
        self._contract = contract
        self._rules = rules
        self._pool = pool
        self._exits = exits
        self._admission = admission
        self._places = places
        self._chores = chores
        self._losers = 0
        """Groups that may still be withdrawn for having missed their window."""

    def watch(self, group: Group) -> None:
        """Members that no later step could train need not wait for the others of their group."""
        expiring = False
        if self._rules.on_expire == "mask" and self._contract.max_age >= 1 and not group.complete and not group.earlier:
            step = self._admission.next_step
            expiring = group.expiring(self._contract.min_token_version(step + 1))
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
        if step <= self._admission.next_step:
            return
        self._admission.next_step = step
        self._losers = self._contract.extra_groups
        self.begins()

    def begins(self) -> None:
        """Deal with what is too old for the step that is the next one."""
        if (oldest := next(iter(self._pool), None)) is not None:
            self._places.forget(oldest)
        self._chores.add(self._grow_old, self._pool)

    def _grow_old(self, group_id: int) -> None:
        """The next step is another one: a group may have become too old for it, or for the one after it."""
        group = self._pool.get(group_id)
        if group is None:
            return
        begun, step = self._pool.census.oldest(group_id), self._admission.next_step
        if begun is None or begun >= self._contract.min_token_version(step + 1):
            return
        oldest = self._contract.min_token_version(step)
        if self._losers and self._outgrown(group, oldest):
            # Redundant groups make up for those that missed their window.
            self._losers -= 1
            self._exits.withdraw(group)
            return
        if self._rules.on_expire == "requeue":
            if group.closed and begun < oldest:
                self._exits.expire(group)
                return
            self._exits.start_again(group, oldest)
        if self.useless(group):
            self._exits.expire(group)
        elif not self._pool.is_ready(group_id):
            self.watch(group)

    def _outgrown(self, group: Group, oldest: int) -> bool:
        """Whether a group that is on its way cannot be trained without stale tokens any more."""
        if self._pool.is_ready(group.group_id) or group.earlier:
            return False
        return any(member.state == "leased" and member.floor < oldest for member in group.members)
