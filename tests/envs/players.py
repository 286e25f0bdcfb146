"""What plays a text game in a test, in place of the process of a node."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from envs.textworld.game import PLAYER
from envs.textworld.player import Player
from flash.environment import shared, sharing


@asynccontextmanager
async def played_by(player: Player) -> AsyncGenerator[None]:
    """The games of the block share this one."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Player]:
        yield player

    async with sharing("test"):
        await shared(PLAYER, opened)
        yield
