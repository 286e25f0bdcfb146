"""The trainer ranks of a schedule: what they hold, and how they present it to the next hub."""

from __future__ import annotations

import random
from typing import Literal

import anyio
import anyio.lowlevel

from flash.errors import LifeOverError
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.hub.ranks.outliving import checksum
from flash.samples.slices import at_once
from flash.types import Canary, Published, Shard

Lie = Literal["does not come", "dies", "is of another version", "has another batch", "is of another life"]
LIES: tuple[Lie, ...] = ("does not come", "dies", "is of another version", "has another batch", "is of another life")


def tells_a_lie(dice: random.Random, ranks: Ranks) -> Lie | None:
    """What one of them does otherwise than it should; mostly nothing."""
    lies = [lie for lie in LIES if lie != "is of another life" or ranks.world > 1]
    return dice.choice(lies) if dice.random() < 0.35 else None


class Ranks:
    """One life. They train in step: a version is trained when all have their shards."""

    def __init__(self, world: int, life: int, version: int) -> None:
        self.world = world
        self.life = life
        self.version = version
        """Trained, and told to a hub that has said it is booked."""
        self.published = -1
        self.booked = 0
        self.keeps = True
        self.held: list[tuple[int, int | None]] = [(version, None)] * world
        """Of each rank, the step after its last shard, and the checksum of that one."""
        self._shards: dict[int, Shard] = {}

    @property
    def shards(self) -> list[Shard]:
        """Of the step that they train, of all ranks in order."""
        return [self._shards[rank] for rank in range(self.world)]

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
                self.held[rank] = (self.version + 1, at_once(checksum([reply.shard])))
                if dice.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
        return True

    async def commit(self, hub: Hub) -> None:
        await hub.handle(p.Commit(self.version, {}))
        self._trained()
        self.booked = self.version

    def _trained(self) -> None:
        self.version += 1
        self._shards = {}

    # -- the next hub ------------------------------------------------------------------------------------------------

    def fits(self, version: int) -> bool:
        """Whether they could go on with a run at this version, as far as versions tell."""
        return self.booked <= version and all(step in (version, version + 1) for step, _ in self.held)

    async def present(self, hub: Hub, dice: random.Random, lie: Lie | None) -> list[bool]:
        """Each presents itself, one of them falsely; which of them may go on. What does not come is lost later."""
        liar = dice.randrange(self.world)
        answers: dict[int, int | None] = {}
        life = hub.rank_arrives(liar)

        async def ask(rank: int) -> None:
            step, seen = self.held[rank]
            of_life, booked = self.life, self.booked if rank == 0 else 0
            if rank == liar and lie == "is of another version":
                step += dice.choice([-2, -1, 1, 2])
            if rank == liar and lie == "has another batch":
                seen = (seen or 0) + 1
            if rank == liar and lie == "is of another life":
                of_life -= 1
            try:
                answers[rank] = (await hub.handle(p.OutliveRequest(rank, 1, "", of_life, step, seen, booked))).version
            except LifeOverError:
                answers[rank] = None

        async def die() -> None:
            for _ in range(dice.randrange(3)):
                await anyio.lowlevel.checkpoint()
            if hub.life_counts(life) and liar not in answers:
                hub.peer_lost(f"trainer-{liar}")

        async with anyio.create_task_group() as tasks:
            for rank in dice.sample(range(self.world), self.world):
                if rank != liar or lie not in ("does not come", "dies"):
                    tasks.start_soon(ask, rank)
            if lie == "dies":
                tasks.start_soon(die)
        if answers.get(liar) is None and hub.life_counts(life) and None not in answers.values():
            hub.peer_lost(f"trainer-{liar}")
        told = [answers.get(rank) for rank in range(self.world)]
        assert len(set(told)) == 1, "the hub has two versions"
        if told[0] is not None and told[0] > self.version:
            assert told[0] == self.version + 1
            self._trained()
            self.booked = self.version
        return [version is not None for version in told]

    async def catch_up(self, hub: Hub) -> None:
        """What was published is published again."""
        if self.published == self.version:
            await self.publish(hub)
