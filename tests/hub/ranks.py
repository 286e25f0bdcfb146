"""The trainer ranks of a random schedule, without a model."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel

from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.types import Canary, Published, Shard


class Ranks:
    """Trainer ranks of one incarnation, which train in lockstep: a step is trained once all have their shards."""

    def __init__(self, world: int, tensor: int, version: int) -> None:
        self.world = world
        self._tensor = tensor
        self.version = version
        """Version that the ranks hold: the hub has acknowledged its commit."""
        self.published = -1
        self.may_save = True
        self._shards: dict[int, Shard] = {}

    @property
    def shards(self) -> list[Shard]:
        """Shards of the running step, one per data rank. All ranks of a tensor group have the same shard."""
        groups = [range(first, first + self._tensor) for first in range(0, self.world, self._tensor)]
        assert all(self._shards[rank] == self._shards[group[0]] for group in groups for rank in group)
        return [self._shards[group[0]] for group in groups]

    async def publish(self, hub: Hub) -> None:
        made = Published(self.version, "tcp", b"", Canary([0, 0], [-1.0]))
        await hub.handle(p.PublishRequest(made))
        self.published = self.version

    async def fetch(self, hub: Hub, dice: random.Random) -> bool:
        """Let all ranks without a shard ask for it. Returns False if the hub has ended training."""
        for rank in dice.sample(range(self.world), self.world):
            if rank not in self._shards:
                reply = await hub.handle(p.BatchRequest(rank, self.version, []))
                if reply.shard is None:
                    return False
                self._shards[rank], self.may_save = reply.shard, reply.may_save
                if dice.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
        return True

    async def leave(self, hub: Hub) -> None:
        """Let all ranks say goodbye, and wait until the hub lets them leave."""
        async with anyio.create_task_group() as tasks:
            for rank in range(self.world):
                tasks.start_soon(hub.handle, p.Goodbye(rank, []))

    async def commit(self, hub: Hub) -> None:
        await hub.handle(p.Commit(self.version, {}))
        self.version += 1
        self._shards = {}
