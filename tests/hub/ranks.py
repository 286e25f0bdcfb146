"""The trainer ranks of a schedule, and what they hold."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel

from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.types import Canary, Published, Shard


class Ranks:
    """One incarnation. They train in step: a version is trained when all have their shards."""

    def __init__(self, world: int, tensor: int, version: int) -> None:
        self.world = world
        self._tensor = tensor
        self.version = version
        """Trained, and told to a hub that has said it is booked."""
        self.published = -1
        self.keeps = True
        self._shards: dict[int, Shard] = {}

    @property
    def shards(self) -> list[Shard]:
        """Of the step that they train, in order. All ranks of a tensor group have the same."""
        groups = [range(first, first + self._tensor) for first in range(0, self.world, self._tensor)]
        assert all(self._shards[rank] == self._shards[group[0]] for group in groups for rank in group)
        return [self._shards[group[0]] for group in groups]

    async def publish(self, hub: Hub) -> None:
        made = Published(self.version, "tcp", b"", Canary([0, 0], [-1.0]))
        await hub.handle(p.PublishRequest(made))
        self.published = self.version

    async def fetch(self, hub: Hub, dice: random.Random) -> bool:
        """All that lack their shard ask for it; whether there are more batches."""
        for rank in dice.sample(range(self.world), self.world):
            if rank not in self._shards:
                reply = await hub.handle(p.BatchRequest(rank, self.version, []))
                if reply.shard is None:
                    return False
                self._shards[rank], self.keeps = reply.shard, reply.keeps
                if dice.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
        return True

    async def leave(self, hub: Hub) -> None:
        """All say goodbye, and leave when nobody needs them any more."""
        async with anyio.create_task_group() as tasks:
            for rank in range(self.world):
                tasks.start_soon(hub.handle, p.Goodbye(rank, []))

    async def commit(self, hub: Hub) -> None:
        await hub.handle(p.Commit(self.version, {}))
        self.version += 1
        self._shards = {}
