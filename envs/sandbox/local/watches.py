"""What is watched while a sandbox is in use. Each ends it, with the reason, when it has to be."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from envs.sandbox.api import State
from envs.sandbox.engines.backend import Containers
from envs.sandbox.engines.profiles import MIB
from envs.sandbox.local.channel import Channel
from flash.errors import SandboxError, SandboxTimeoutError

End = Callable[[State, str], None]
"""Ends the sandbox, in this state and for this reason."""


async def heart(channel: Channel, heartbeat: float, silence: float, end: End) -> None:
    """Break the channel off when the agent is silent although it is asked."""
    while True:
        heard = False
        with anyio.move_on_after(heartbeat):
            await channel.heard.wait()
            heard = True
        if heard:
            await anyio.sleep(heartbeat)
            continue
        try:
            await channel.ask("ping", None, int, silence)
        except SandboxTimeoutError:
            end("lost", f"its agent did not answer for {silence:g} s")
        except SandboxError:
            return


async def lifetime(left: float, deadline_s: float, end: End) -> None:
    """Close it when its life is over, of which so many seconds are left."""
    await anyio.sleep(max(0.0, left))
    end("closed", f"its deadline of {deadline_s:g} s was over")


async def idle(idle_s: float, use: Callable[[], tuple[int, bool]], end: End) -> None:
    """Close it when nobody has used it for so long. `use`: how often it was, and whether it is now."""
    while True:
        before, _ = use()
        await anyio.sleep(idle_s)
        if use() == (before, False):
            end("closed", f"it was idle for {idle_s:g} s")


async def disk(containers: Containers, container_id: str, disk_mib: int, look_s: float, end: End) -> None:
    """Close it when its layer, looked at so often, is over its limit: engines can seldom enforce that themselves."""
    while True:
        await anyio.sleep(look_s)
        try:
            found = await containers.inspect(container_id, size=True)
        except SandboxError:
            continue  # The link says whether the sandbox is gone.
        if found is not None and (found.layer_size or 0) > disk_mib * MIB:
            end("closed", f"it wrote more than {disk_mib} MiB")
