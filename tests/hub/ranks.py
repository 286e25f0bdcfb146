"""The trainer ranks of a random schedule, without a model."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel

from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.types import Canary, Published, Shard


class Ranks:
    """Trainer ranks of one incarnation, which train in lockstep: a step is trained once all have their shards.

    An incarnation is the set of trainer ranks that run from one restart of the ranks to the next.

    Args:
        world: number of ranks.
        tensor: number of consecutive ranks that train the same samples (a tensor group).
        version: version of the checkpoint from which the ranks start.
    """

    def __init__(self, world: int, tensor: int, version: int) -> None:
        self.world = world
        self._tensor = tensor
        self.version = version
        """Version that the ranks hold: the hub has acknowledged its commit."""
        self.published = -1
        """Version that the ranks have published last; -1 if there is none."""
        self.may_save = True
        """True if the last reply of the hub allows a checkpoint (`BatchReply.may_save`)."""
        self._rounds: list[dict[int, Shard]] = []
        """Shards of the running step, by round and rank."""

    @property
    def shards(self) -> list[Shard]:
        """Shards of the running step, round by round, one per data rank. A tensor group has the same shard."""
        groups = [range(first, first + self._tensor) for first in range(0, self.world, self._tensor)]
        assert all(of[rank] == of[group[0]] for of in self._rounds for group in groups for rank in group)
        return [of[group[0]] for of in self._rounds for group in groups]

    async def publish(self, hub: Hub) -> None:
        """Publish the version that the ranks hold. The hub replies once the engines have the version before it."""
        made = Published(self.version, "tcp", b"", Canary([0, 0], [-1.0]))
        await hub.handle(p.PublishRequest(made))
        self.published = self.version

    async def fetch(self, hub: Hub, dice: random.Random) -> bool:
        """Let all ranks fetch the rounds of a step. Returns False if the hub has ended training."""
        while not self._rounds or not self._rounds[-1][0].round.last:
            shards: dict[int, Shard] = {}
            for rank in dice.sample(range(self.world), self.world):
                reply = await hub.handle(p.BatchRequest(rank, self.version, [], 0, len(self._rounds)))
                if reply.shard is None:
                    self._rounds, self.may_save = [], reply.may_save
                    return False
                shards[rank], self.may_save = reply.shard, reply.may_save
                if dice.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
            self._rounds.append(shards)
        return True

    async def leave(self, hub: Hub) -> None:
        """Let all ranks say goodbye, and wait until the hub lets them leave."""
        async with anyio.create_task_group() as tasks:
            for rank in range(self.world):
                tasks.start_soon(hub.handle, p.Goodbye(rank, []))

    async def commit(self, hub: Hub) -> None:
        """Commit the running step, all of whose rounds were fetched. The ranks then hold the next version."""
        await hub.handle(p.Commit(self.version, {}))
        self.version += 1
        self._rounds = []
