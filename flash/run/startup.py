"""What people are told of a run by the clock: until its first step what it does, and all the time its cluster."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
from msgspec.structs import replace

from flash.config.machine import runs_eagerly
from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.hub.hub import Hub
from flash.hub.stages import STARTING_ENGINES
from flash.observe.cluster import EVERY_S as PICTURE_S
from flash.observe.cluster import HubNow
from flash.waiting import deadline

EVERY_S = 10.0
"""Between two lines while the same goes on."""


LONG_S = 30.0
"""Seconds after which a start of engines is explained: they seem to hang."""
NEAR = 0.5
"""Share of `deadlines.engine_start` from which that is named."""


async def tell_beginning(hub: Hub, config: Config, tell: Callable[[str], None]) -> None:
    """Say what the run does, and how many seconds have passed, until its first step.

    Waits for it to do something else, at most EVERY_S. Unblocked by the hub's progress. Produces lines.
    """
    begun = anyio.current_time()
    while (now := hub.stages.startup_phase()) is not None:
        seconds = anyio.current_time() - begun
        what = f"{now.doing}, {now.done}" if now.done else now.doing
        why = start_of_engines(seconds, config) if now.doing == STARTING_ENGINES else ""
        tell(f"{what} … {seconds:.0f} s{why}")
        with anyio.move_on_after(EVERY_S):
            await hub.stages.phase_ended(now.doing)


async def with_held_out_problems(config: Config, env: LoadedEnvironment, tell: Callable[[str], None]) -> Config:
    """Return the configuration with no more held-out problems than the environment has; say so if that changes it.

    Raises:
        DeadlineError: the data set was not read within deadlines.env_reset.
    """
    if not env.is_collected:
        return config
    with deadline(config.deadlines.env_reset, "the number of held-out problems", "the environment's data set"):
        there = await anyio.to_thread.run_sync(env.held_out_problems, abandon_on_cancel=True)
    asked = config.eval.problems
    if there is None or there >= asked:
        return config
    tell(f"evaluations ask all {there} held-out problems: there are no more, and eval.problems = {asked}")
    return replace(config, eval=replace(config.eval, problems=there))


def start_of_engines(seconds: float, config: Config) -> str:
    """What is said of engines that have been starting for so long, behind the seconds."""
    most = config.deadlines.engine_start
    if seconds >= NEAR * most:
        return f"; at most {most:g} s (deadlines.engine_start)"
    if seconds < LONG_S:
        return ""
    teacher = config.algorithm.teacher
    asked = "" if teacher is None or teacher.url is None else f", or {teacher.url} does not answer yet"
    if runs_eagerly(config):
        return f"; vLLM loads the model{asked}"
    return f"; vLLM compiles, for minutes at its first start here{asked}"


async def tell_cluster(hub: Hub, tell: Callable[[HubNow], None]) -> None:
    """Show the cluster now and then. Waits for nothing but the clock. Produces pictures, until it is cancelled."""
    while True:
        tell(hub.overview())
        await anyio.sleep(PICTURE_S)
