"""How a run is interrupted on its first node, and what is said of it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import anyio

from flash.config.tree import Config
from flash.hub.hub import Hub
from flash.trainer.state.stored import newest_complete


async def interrupt_on_signal(hub: Hub, config: Config, tell: Callable[[str], None]) -> None:
    """End the run in order at a signal, and say at once what it still does.

    A second Ctrl-C ends all processes; the launcher sees to that (`flash.run.processes.launch`).
    """
    told = False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for received in signals:
            if (doing := hub.interrupt()) and not told:
                again = "; Ctrl-C again ends it now" if received == signal.SIGINT else ""
                tell(f"interrupted: {doing}, for at most {config.deadlines.shutdown:g} s{again}")
                told = True


def cut_short(unfinished: str, config: Config) -> str:
    """What is said of an interrupted run that was not done in time, and what is kept of it."""
    if config.checkpoint.journal != "off" and config.checkpoint.batches != "none":
        kept = "the steps before it are kept with all samples that came in, and --resume goes on there"
    elif (newest := newest_complete(config.run_dir)) is not None:
        kept = f"{newest.name} is kept, and --resume goes on there"
    else:
        kept = "no checkpoint is there yet, and --resume begins anew"
    return f"interrupted: {unfinished} takes more than {config.deadlines.shutdown:g} s (deadlines.shutdown); {kept}"
