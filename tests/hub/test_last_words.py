"""The error that ends a run when several peers end at once: the cause, not its echo."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from flash.config import waits
from flash.errors import FlashError, PeerLostError
from flash.hub import protocol as p
from tests.hub.test_hub import Driver, make_config

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

ECHO = p.Fatal("CollectiveError", "trainer rank 0: a collective failed")
"""Error that a rank reports if another rank is lost during a collective: an echo of the loss."""
UNNAMED = p.Fatal("RuntimeError", "trainer rank 0 failed with RuntimeError: Connection reset")
"""An error that is no known kind of echo."""
BUG = p.Fatal("KeyError", "trainer rank 1 failed with KeyError: 'lm_head'")
"""Error of a class that Flash does not have, which is the cause itself."""
NAMED = p.Fatal("CheckpointError", "trainer rank 1: cannot write")
"""Error of Flash, which names a cause."""


async def end_of(*words: p.Fatal, killed: float | None = None) -> tuple[FlashError, float]:
    """Report these errors to a hub, and lose rank 1 after `killed` seconds. Returns the run's error and its time."""
    config = make_config()
    driver = Driver(msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, trainer_ranks=2)))
    begun = anyio.current_time()
    found: list[FlashError] = []
    async with anyio.create_task_group() as group:

        async def run() -> None:
            try:
                await driver.hub.run()
            except FlashError as error:
                found.append(error)
            group.cancel_scope.cancel()

        group.start_soon(run)
        for rank in range(2):
            driver.hub.incarnations.rank_arrived(rank)
        for one in words:
            group.start_soon(driver.hub.handle, one)
        if killed is not None:
            await anyio.sleep(killed)
            driver.hub.peer_lost("trainer-1")
    return found[0], anyio.current_time() - begun


@pytest.mark.parametrize("echo", [ECHO, UNNAMED])
async def test_a_killed_rank_is_the_cause_although_the_error_of_another_comes_first(echo: p.Fatal) -> None:
    error, _ = await end_of(echo, killed=0.1)
    assert isinstance(error, PeerLostError)
    assert not error.fatal
    assert "trainer rank 1 is gone without an error message" in str(error)


async def test_a_failed_collective_that_nothing_explains_leads_to_a_restart_too() -> None:
    error, took = await end_of(ECHO)
    assert type(error).__name__ == "CollectiveError"
    assert not error.fatal
    assert str(error) == (
        f"{ECHO.message}; the run waited for the trainer ranks to publish their first version, in which a collective "
        "may take 600 s (deadlines.collective)"
    )
    assert took == pytest.approx(waits.ECHO_S)


async def test_a_bug_of_one_rank_that_all_others_outlive_ends_the_run_for_good() -> None:
    error, _ = await end_of(BUG)
    assert error.fatal
    assert str(error) == BUG.message


async def test_an_error_with_a_name_wins_at_once_over_the_echoes_of_it() -> None:
    error, took = await end_of(ECHO, NAMED)
    assert (str(error), took) == (NAMED.message, 0.0)
