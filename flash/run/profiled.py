"""The first node's part of `flash profile`: the run ends when all is written."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from flash.config.tree import Config
from flash.hub.hub import Hub
from flash.profile.order import ProfileOrder

POLL_S = 0.1
"""Between two looks at the version of the run."""
WRITE_S = 120.0
"""How long the run goes on for the files of engines and trainer ranks, after the last step that is profiled."""


async def profile_node(order: ProfileOrder, hub: Hub, config: Config) -> None:
    """End the run after the steps that are ordered.

    Waits for the last of them, then for what others write, at most WRITE_S. The run's stages bound the first: it is
    cancelled when the run ends, however it does.
    """
    await _until(lambda: hub.progress.version >= order.stop)
    with anyio.move_on_after(WRITE_S):
        await _until(lambda: all(order.file(name).exists() for name in _expected(config)))
    # A run that has trained everything still evaluates.
    if hub.progress.version < config.run.steps:
        hub.interrupt()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of a profile
        await anyio.sleep(POLL_S)


def _expected(config: Config) -> list[str]:
    """What the processes of this node are called."""
    ranks = [f"trainer-{rank}" for rank in range(config.cluster.trainer_ranks_on(0))]
    return ranks + [f"engine-{number}" for number in range(config.engines_on(0))]
