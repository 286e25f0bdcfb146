"""Phases: when an episode may step its environment, and when it may request its next response.

Normally an episode never waits for another one, because episodes are independent. Two values of `rollout.barriers`
make the episodes of a node wait for each other, so that the gain of independence can be measured:

    turn    `LockStep`: no environment steps before all responses are complete, and no response is requested before all
            environments have stepped
    group   `GroupBarrier`: environments of a group step when all its responses are complete

`EpisodePlayer` reports each change of phase to `Phases` and waits there for permission. A rule decides which episodes
may continue. Rules are pure state machines without tasks or clocks: each report returns the ids of the leases that may
continue now. An episode that leaves never blocks another one.

A lease assigns one episode to this node; the id of the lease names the episode here. A group is the samples of one
problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import anyio

from flash.config.tree import Config
from flash.types import Lease

GroupKey = tuple[str, int]
"""Split (training or evaluation) and group id. The split is needed, because evaluations number their groups
separately."""


class PhaseRule(Protocol):
    """Interface of `LockStep` and `GroupBarrier`, which decide which episodes may continue.

    `Phases` calls its methods. Except for `enter`, they return the ids of the leases that may continue now.
    """

    def enter(self, lease: Lease) -> None:
        """Record that an episode begins."""
        ...

    def leave(self, lease: Lease) -> set[int]:
        """Record that an episode has ended."""
        ...

    def generated(self, lease: Lease) -> set[int]:
        """Record that a response of an episode is complete."""
        ...

    def stepped(self, lease: Lease) -> set[int]:
        """Record that the environment of an episode has reset or stepped."""
        ...


class Phases:
    """Makes the episodes of a node wait for each other. The deadline of an episode limits how long it waits.

    Args:
        rule: decides which episodes may continue; None: episodes are independent, and every call returns at once.
    """

    def __init__(self, rule: PhaseRule | None = None) -> None:
        self.rule = rule
        self._waiting: dict[int, anyio.Event] = {}
        """Event of each waiting episode, by lease id. The event is set when the episode may continue."""

    @property
    def free(self) -> bool:
        """True if no episode ever waits for another one. Only then responses may be sampled ahead."""
        return self.rule is None

    def enter(self, lease: Lease) -> None:
        """Report that an episode begins, whose environment resets next."""
        if self.rule is not None:
            self.rule.enter(lease)

    def leave(self, lease: Lease) -> None:
        """Report that an episode has ended in any way. This is called once for each `enter`."""
        if self.rule is not None:
            self._release(self.rule.leave(lease))

    async def generated(self, lease: Lease) -> None:
        """Report that a response is complete, and wait until the environment may step."""
        if self.rule is not None:
            await self._wait(lease.lease_id, self.rule.generated(lease))

    async def stepped(self, lease: Lease) -> None:
        """Report that the environment has reset or stepped, and wait until the next response may be requested."""
        if self.rule is not None:
            await self._wait(lease.lease_id, self.rule.stepped(lease))

    async def _wait(self, lease: int, released: set[int]) -> None:
        """Release the other leases, and wait until the rule releases `lease`, too, now or by a later report.

        `released`: ids of the leases that the rule has just released. If the caller is cancelled, it waits no more, but
        its lease counts for the rule until `leave`.
        """
        self._release(released - {lease})
        if lease in released:
            return
        event = self._waiting[lease] = anyio.Event()
        try:
            await event.wait()
        finally:
            del self._waiting[lease]

    def _release(self, released: Iterable[int]) -> None:
        """Let the episodes of these leases continue. A lease that does not wait is ignored."""
        for lease in released:
            # A cancelled episode does not wait any more, but the rule returns its lease until the episode has left.
            if (event := self._waiting.get(lease)) is not None:
                event.set()


def phases(config: Config) -> Phases:
    """Return the phases that the configuration asks for; the episodes of one node share them."""
    barriers = config.rollout.barriers
    if "turn" in barriers:
        # Lock-step also holds the responses of a group until all are complete, so it serves both barriers.
        return Phases(LockStep())
    return Phases(GroupBarrier()) if "group" in barriers else Phases()


class LockStep:
    """Rule for the barrier `turn`: all episodes of a node generate together, then step together.

    An episode *holds* a phase while it still has something to do in this phase. When the last holder is done, the phase
    changes: all waiting episodes are released, and all episodes that are alive hold the new phase. Invariant: while an
    episode waits, some episode holds the phase.
    """

    def __init__(self) -> None:
        self._stepping = False
        """True while environments step, False while responses are generated."""
        self._alive: set[int] = set()
        """Leases whose episodes have begun and not left."""
        self._holding: set[int] = set()
        """Leases that still have something to do in this phase."""
        self._waiting: set[int] = set()
        """Leases that have done their part of this phase and wait for the next one."""

    def enter(self, lease: Lease) -> None:
        """Add an episode. If responses are generated now, the new episode holds the phase: other episodes wait for its
        first response.

        While environments step, the other episodes do not wait for its reset. Like all episodes, it holds the next
        phase.
        """
        self._alive.add(lease.lease_id)
        if not self._stepping:
            self._holding.add(lease.lease_id)

    def leave(self, lease: Lease) -> set[int]:
        """Remove an episode. Return the leases that may continue."""
        self._alive.discard(lease.lease_id)
        self._waiting.discard(lease.lease_id)
        return self._finish(lease.lease_id)

    def generated(self, lease: Lease) -> set[int]:
        """Record a complete response. Return the leases whose environments may step."""
        self._waiting.add(lease.lease_id)
        return self._finish(lease.lease_id)

    def stepped(self, lease: Lease) -> set[int]:
        """Record that an environment has reset or stepped. Return the leases that may generate."""
        if not self._stepping:
            # Only a reset can end while responses are generated: the first response of the episode belongs to this
            # phase, which the episode holds.
            return {lease.lease_id}
        self._waiting.add(lease.lease_id)
        return self._finish(lease.lease_id)

    def _finish(self, lease: int) -> set[int]:
        """Record that an episode has done its part of the phase, or has left. Return the leases that may continue.

        If no episode holds the phase any more, the phase changes, and all waiting leases may continue.
        """
        self._holding.discard(lease)
        if self._holding:
            return set()
        self._stepping = not self._stepping
        self._holding = set(self._alive)
        released, self._waiting = self._waiting, set()
        return released


class GroupBarrier:
    """Rule for the barrier `group`: the members of a group on a node wait for each other's responses.

    A member waits before a step while another member that is alive has fewer responses. Invariant: the members with
    the fewest responses never wait.
    """

    def __init__(self) -> None:
        self._responses: dict[GroupKey, dict[int, int]] = {}
        """Number of complete responses of each member that is alive, by lease id."""
        self._waiting: dict[GroupKey, set[int]] = {}
        """Members that wait for others before their environments step."""

    def enter(self, lease: Lease) -> None:
        """Add a member without a response."""
        self._responses.setdefault(_group(lease), {})[lease.lease_id] = 0
        self._waiting.setdefault(_group(lease), set())

    def leave(self, lease: Lease) -> set[int]:
        """Remove a member. Return the leases that may continue, because they need not wait for it any more."""
        group = _group(lease)
        del self._responses[group][lease.lease_id]
        self._waiting[group].discard(lease.lease_id)
        if self._responses[group]:
            return self._release(group)
        del self._responses[group], self._waiting[group]
        return set()

    def generated(self, lease: Lease) -> set[int]:
        """Record a complete response. Return the leases whose environments may step."""
        group = _group(lease)
        self._responses[group][lease.lease_id] += 1
        self._waiting[group].add(lease.lease_id)
        return self._release(group)

    def stepped(self, lease: Lease) -> set[int]:
        """Return the lease itself: its episode may generate at once, because members wait for responses only."""
        return {lease.lease_id}

    def _release(self, group: GroupKey) -> set[int]:
        """Return the waiting members that have the fewest responses of the group. They do not wait any more."""
        responses, waiting = self._responses[group], self._waiting[group]
        fewest = min(responses.values())
        released = {lease for lease in waiting if responses[lease] <= fewest}
        waiting -= released
        return released


def _group(lease: Lease) -> GroupKey:
    """Return the key of a lease's group."""
    return lease.task.split, lease.task.group_id
