"""What people are told between the start of a run and its first step."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from flash.hub.hub import Hub

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
