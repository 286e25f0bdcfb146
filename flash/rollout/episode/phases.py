"""Phases: when an episode may step its environment, and when it may generate again.

Normally at once: environments are independent of each other. Two switches of `[rollout]` tie the episodes of a node
together, so that what independence gains can be measured:

    env_async = false          `LockStep`: no environment steps before all responses are there, and none is asked for
                               a next one before all environments have stepped
    replicate_prompts = false  `GroupBarrier`: the responses of a group come home together

Who may go on is decided by pure rules, which return the leases that they release; who leaves holds
nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import anyio

from flash.config.tree import Config
from flash.types import Lease

GroupKey = tuple[str, int]
"""Split and group id: evaluations count their groups on their own."""


class FreePhases:
    """Every episode on its own: nothing is kept, and nobody waits."""

    free = True
    """Whether nobody ever waits."""

    def enter(self, lease: Lease) -> None:
        """An episode begins; its environment resets."""

    def leave(self, lease: Lease) -> None:
        """It ended, in whatever way; called once for each `enter`."""

    async def generated(self, lease: Lease) -> None:
        """Its response is complete. Returns when its environment may step."""

    async def stepped(self, lease: Lease) -> None:
        """Its environment has reset or stepped. Returns when it may generate."""


class PhaseRule(Protocol):
    """Decides who may go on, as pure state; each answer is the leases that go on now."""

    def enter(self, lease: Lease) -> None: ...

    def leave(self, lease: Lease) -> set[int]: ...

    def generated(self, lease: Lease) -> set[int]: ...

    def stepped(self, lease: Lease) -> set[int]: ...


class RuledPhases(FreePhases):
    """Who waits does so until the rule lets it go on, when others do or leave; the episode's deadline bounds it."""

    free = False

    def __init__(self, rule: PhaseRule) -> None:
        self.rule = rule
        self._waiting: dict[int, anyio.Event] = {}

    def enter(self, lease: Lease) -> None:
        """See `FreePhases`."""
        self.rule.enter(lease)

    def leave(self, lease: Lease) -> None:
        """See `FreePhases`. It holds nobody any more."""
        self._open(self.rule.leave(lease))

    async def generated(self, lease: Lease) -> None:
        """See `FreePhases`."""
        await self._arrive(lease.lease_id, self.rule.generated(lease))

    async def stepped(self, lease: Lease) -> None:
        """See `FreePhases`."""
        await self._arrive(lease.lease_id, self.rule.stepped(lease))

    async def _arrive(self, lease: int, released: set[int]) -> None:
        """Open for the others, and wait unless the lease itself is among the released."""
        self._open(released - {lease})
        if lease in released:
            return
        event = self._waiting[lease] = anyio.Event()
        try:
            await event.wait()
        finally:
            del self._waiting[lease]

    def _open(self, released: Iterable[int]) -> None:
        """Let them go on. One that was cancelled waits no more, and is released until it has left."""
        for lease in released:
            if (event := self._waiting.get(lease)) is not None:
                event.set()


def phases(config: Config) -> FreePhases:
    """The phases of one node. Lock-step holds a group's responses until all are there, so it serves both switches."""
    if not config.rollout.env_async:
        return RuledPhases(LockStep())
    return FreePhases() if config.rollout.replicate_prompts else RuledPhases(GroupBarrier())


class LockStep:
    """All episodes of a node generate together, then step together.

    Invariant: whoever waits, waits for someone who holds the phase, that is, has something left to do in it. When the
    last holder is done the phase changes, all who waited are released, and all that are alive hold the new phase.
    """

    def __init__(self) -> None:
        self._stepping = False
        self._alive: set[int] = set()
        self._holding: set[int] = set()
        self._waiting: set[int] = set()

    def enter(self, lease: Lease) -> None:
        """One more. While environments step it holds nobody: it will generate in the next phase."""
        self._alive.add(lease.lease_id)
        if not self._stepping:
            self._holding.add(lease.lease_id)

    def leave(self, lease: Lease) -> set[int]:
        """One fewer. Returns whom that releases."""
        self._alive.discard(lease.lease_id)
        self._waiting.discard(lease.lease_id)
        return self._done(lease.lease_id)

    def generated(self, lease: Lease) -> set[int]:
        """A response is complete. Returns who may step."""
        self._waiting.add(lease.lease_id)
        return self._done(lease.lease_id)

    def stepped(self, lease: Lease) -> set[int]:
        """An environment has reset or stepped. Returns who may generate."""
        if not self._stepping:
            return {lease.lease_id}
        self._waiting.add(lease.lease_id)
        return self._done(lease.lease_id)

    def _done(self, lease: int) -> set[int]:
        self._holding.discard(lease)
        if self._holding:
            return set()
        self._stepping = not self._stepping
        self._holding = set(self._alive)
        released, self._waiting = self._waiting, set()
        return released


class GroupBarrier:
    """The members of a group on a node wait for each other's responses: while another one alive has fewer.

    Invariant: the members with the fewest responses never wait.
    """

    def __init__(self) -> None:
        self._responses: dict[GroupKey, dict[int, int]] = {}
        self._waiting: dict[GroupKey, set[int]] = {}

    def enter(self, lease: Lease) -> None:
        """One more member, without a response yet."""
        self._responses.setdefault(_group(lease), {})[lease.lease_id] = 0
        self._waiting.setdefault(_group(lease), set())

    def leave(self, lease: Lease) -> set[int]:
        """One member fewer. Returns whom that releases."""
        group = _group(lease)
        del self._responses[group][lease.lease_id]
        self._waiting[group].discard(lease.lease_id)
        if self._responses[group]:
            return self._released(group)
        del self._responses[group], self._waiting[group]
        return set()

    def generated(self, lease: Lease) -> set[int]:
        """A response is complete. Returns who may step."""
        group = _group(lease)
        self._responses[group][lease.lease_id] += 1
        self._waiting[group].add(lease.lease_id)
        return self._released(group)

    def stepped(self, lease: Lease) -> set[int]:
        """It may generate at once: only responses are waited for."""
        return {lease.lease_id}

    def _released(self, group: GroupKey) -> set[int]:
        responses, waiting = self._responses[group], self._waiting[group]
        fewest = min(responses.values())
        released = {lease for lease in waiting if responses[lease] <= fewest}
        waiting -= released
        return released


def _group(lease: Lease) -> GroupKey:
    return lease.task.split, lease.task.group_id
