"""Phases: when an episode may step its environment, and when it may generate again.

Normally at once: environments are independent of each other. Two switches of `[rollout]` tie the episodes of a node
together, so that what independence gains can be measured:

    env_async = false          `LockStep`: no environment steps before all responses are there, and none is asked for
                               a next one before all environments have stepped
    replicate_prompts = false  `GroupBarrier`: the responses of a group come home together

Who may go on is decided by pure rules, which return the leases that they release; a gate lets those wait. An episode
that leaves never holds the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import anyio

from flash.config.tree import Config
from flash.types import Lease

GroupKey = tuple[str, int]
"""Split and group id: evaluations count their groups on their own."""


class Phases(Protocol):
    """What an episode tells and asks. The waits end when others go on or leave; the episode's deadline bounds them."""

    def enter(self, lease: Lease) -> None:
        """An episode begins; its environment resets."""
        ...

    def leave(self, lease: Lease) -> None:
        """It ended, in whatever way; called once for each `enter`."""
        ...

    async def generated(self, lease: Lease) -> None:
        """Its response is complete. Returns when its environment may step."""
        ...

    async def stepped(self, lease: Lease) -> None:
        """Its environment has reset or stepped. Returns when it may generate."""
        ...


def phases(config: Config) -> Phases:
    """The phases of one node. Lock-step holds a group's responses until all are there, so it serves both switches."""
    if not config.rollout.env_async:
        return LockStep()
    return FreePhases() if config.rollout.replicate_prompts else GroupBarrier()


class FreePhases:
    """Every episode on its own: nothing is kept, and nobody waits."""

    def enter(self, lease: Lease) -> None:
        """Keep nothing of it."""

    def leave(self, lease: Lease) -> None:
        """Release nobody: nobody waits."""

    async def generated(self, lease: Lease) -> None:
        """Let its environment step at once."""

    async def stepped(self, lease: Lease) -> None:
        """Let it generate at once."""


class LockStep:
    """All episodes of a node generate together, then step together."""

    def __init__(self) -> None:
        self._rule = LockStepRule()
        self._gate = _Gate()

    def enter(self, lease: Lease) -> None:
        """Join the phase of generation that goes on, or the next one."""
        self._rule.enter(lease.lease_id)

    def leave(self, lease: Lease) -> None:
        """Hold nobody any more."""
        self._gate.open(self._rule.leave(lease.lease_id))

    async def generated(self, lease: Lease) -> None:
        """Wait until every episode alive has its response."""
        await self._gate.arrive(lease.lease_id, self._rule.generated(lease.lease_id))

    async def stepped(self, lease: Lease) -> None:
        """Wait until every environment has stepped; after a reset, only while others step."""
        await self._gate.arrive(lease.lease_id, self._rule.stepped(lease.lease_id))


class GroupBarrier:
    """The members of a group on a node wait for each other's responses, turn by turn."""

    def __init__(self) -> None:
        self._rule = GroupBarrierRule()
        self._gate = _Gate()

    def enter(self, lease: Lease) -> None:
        """The group has one more member here."""
        self._rule.enter(_group(lease), lease.lease_id)

    def leave(self, lease: Lease) -> None:
        """Hold nobody any more."""
        self._gate.open(self._rule.leave(_group(lease), lease.lease_id))

    async def generated(self, lease: Lease) -> None:
        """Wait until every member has as many responses."""
        await self._gate.arrive(lease.lease_id, self._rule.generated(_group(lease), lease.lease_id))

    async def stepped(self, lease: Lease) -> None:
        """Let it generate at once: only responses are waited for."""


class LockStepRule:
    """The decisions of `LockStep`; pure.

    Invariant: whoever waits, waits for someone who holds the phase, that is, has something left to do in it. When the
    last holder is done the phase changes, all who waited are released, and all that are alive hold the new phase.
    """

    def __init__(self) -> None:
        self._stepping = False
        self._alive: set[int] = set()
        self._holding: set[int] = set()
        self._waiting: set[int] = set()

    def enter(self, lease: int) -> None:
        """One more. While environments step it holds nobody: it will generate in the next phase."""
        self._alive.add(lease)
        if not self._stepping:
            self._holding.add(lease)

    def leave(self, lease: int) -> set[int]:
        """One fewer. Returns whom that releases."""
        self._alive.discard(lease)
        self._waiting.discard(lease)
        return self._done(lease)

    def generated(self, lease: int) -> set[int]:
        """A response is complete. Returns who may step."""
        self._waiting.add(lease)
        return self._done(lease)

    def stepped(self, lease: int) -> set[int]:
        """An environment has reset or stepped. Returns who may generate."""
        if not self._stepping:
            return {lease}
        self._waiting.add(lease)
        return self._done(lease)

    def _done(self, lease: int) -> set[int]:
        self._holding.discard(lease)
        if self._holding:
            return set()
        self._stepping = not self._stepping
        self._holding = set(self._alive)
        released, self._waiting = self._waiting, set()
        return released


class GroupBarrierRule:
    """The decisions of `GroupBarrier`; pure. A member waits while another one alive has fewer responses.

    Invariant: the members with the fewest responses never wait.
    """

    def __init__(self) -> None:
        self._responses: dict[GroupKey, dict[int, int]] = {}
        self._waiting: dict[GroupKey, set[int]] = {}

    def enter(self, group: GroupKey, lease: int) -> None:
        """One more member, without a response yet."""
        self._responses.setdefault(group, {})[lease] = 0
        self._waiting.setdefault(group, set())

    def leave(self, group: GroupKey, lease: int) -> set[int]:
        """One member fewer. Returns whom that releases."""
        del self._responses[group][lease]
        self._waiting[group].discard(lease)
        if self._responses[group]:
            return self._released(group)
        del self._responses[group], self._waiting[group]
        return set()

    def generated(self, group: GroupKey, lease: int) -> set[int]:
        """A response is complete. Returns who may step."""
        self._responses[group][lease] += 1
        self._waiting[group].add(lease)
        return self._released(group)

    def _released(self, group: GroupKey) -> set[int]:
        responses, waiting = self._responses[group], self._waiting[group]
        fewest = min(responses.values())
        released = {lease for lease in waiting if responses[lease] <= fewest}
        waiting -= released
        return released


class _Gate:
    """Lets leases wait until a rule releases them."""

    def __init__(self) -> None:
        self._waiting: dict[int, anyio.Event] = {}

    async def arrive(self, lease: int, released: set[int]) -> None:
        """Open for the others, and wait unless the lease itself is among the released."""
        self.open(released - {lease})
        if lease in released:
            return
        event = self._waiting[lease] = anyio.Event()
        try:
            await event.wait()
        finally:
            del self._waiting[lease]

    def open(self, released: Iterable[int]) -> None:
        """Let them go on. One that was cancelled waits no more, and is released until it has left."""
        for lease in released:
            if (event := self._waiting.get(lease)) is not None:
                event.set()


def _group(lease: Lease) -> GroupKey:
    return lease.task.split, lease.task.group_id
