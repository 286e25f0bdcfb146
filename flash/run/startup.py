"""Regular messages about a run: its activity until the first step, and the state of its cluster until the end."""

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
"""Seconds between two lines while the activity stays the same."""


LONG_S = 30.0
"""Seconds after which a line explains why the engines take so long to start, since they seem to hang."""
NEAR = 0.5
"""Share of `deadlines.engine_start` from which the lines name this deadline."""


async def tell_beginning(hub: Hub, config: Config, tell: Callable[[str], None]) -> None:
    """Print the activity of the run and the seconds since the start, until the first step.

    Waits at most EVERY_S seconds for the next activity. Unblocked by the hub's progress. Produces lines.
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
    """Limit eval.problems to the number of held-out problems that the environment has. Returns the configuration.

    Calls `tell` with a line if the number changes.

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
    """Return an explanation for engines that have been starting for `seconds`, to be added to a line; may be empty."""
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
    """Call `tell` with an overview of the cluster at regular intervals, until cancelled. Waits only for the clock."""
    while True:
        tell(hub.overview())
        await anyio.sleep(PICTURE_S)
