"""What people are told of a run by the clock: until its first step what it does, and all the time its cluster."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from flash.hub.hub import Hub
from flash.observe.cluster import EVERY_S as PICTURE_S
from flash.observe.cluster import HubNow

EVERY_S = 10.0
"""Between two lines while the same goes on."""


async def tell_beginning(hub: Hub, tell: Callable[[str], None]) -> None:
    """Say what the run does, and how many seconds have passed, until its first step.

    Waits for it to do something else, at most EVERY_S. Unblocked by the hub's progress. Produces lines.
    """
    begun = anyio.current_time()
    while (now := hub.beginning()) is not None:
        what = f"{now.doing}, {now.done}" if now.done else now.doing
        tell(f"{what} … {anyio.current_time() - begun:.0f} s")
        with anyio.move_on_after(EVERY_S):
            await hub.past(now.doing)


async def tell_cluster(hub: Hub, tell: Callable[[HubNow], None]) -> None:
    """Show the cluster now and then. Waits for nothing but the clock. Produces pictures, until it is cancelled."""
    while True:
        tell(hub.picture())
        await anyio.sleep(PICTURE_S)
