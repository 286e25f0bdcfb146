"""Shared resources: each is opened once for all callers of a node, and closed with the node."""

from contextlib import asynccontextmanager

import anyio
import pytest

from flash.environment.shared import OPEN_S, run_name, shared, sharing, stocks
from flash.errors import EnvError, SandboxStartError
from flash.types import Stock

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


class Opener:
    """Opens resources, and counts them: opened so far, open now, and the most that were open at once.

    Args:
        seconds: seconds that opening takes.
        fails: number of first openings that fail.
    """

    def __init__(self, seconds: float = 0.0, fails: int = 0) -> None:
        self.opened = 0
        self.open_now = 0
        self.most = 0
        self._seconds = seconds
        self._fails = fails

    @asynccontextmanager
    async def __call__(self):
        """Open a resource, whose value is its number from 1."""
        await anyio.sleep(self._seconds)
        if self._fails:
            self._fails -= 1
            raise SandboxStartError("the engine is down")
        self.opened += 1
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        try:
            yield self.opened
        finally:
            await anyio.sleep(1)  # closing takes time too
            self.open_now -= 1


async def test_a_shared_resource_is_opened_once_and_closed_with_the_node():
    opener, got = Opener(1.0), []

    async def ask():
        got.append(await shared("pool", opener))

    async with sharing("my run"):
        assert run_name() == "my run"
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
        assert opener.open_now == 1
        assert await shared("other", Opener()) == 1
    assert got == [1] * 5
    assert (opener.opened, opener.open_now) == (1, 0)


async def test_a_cancelled_caller_does_not_stop_the_opening_for_other_callers():
    opener = Opener(5.0)
    async with sharing("run"):
        with anyio.move_on_after(1) as scope:
            await shared("pool", opener)
        assert scope.cancelled_caught
        assert await shared("pool", opener) == 1
    assert (opener.opened, opener.open_now) == (1, 0)


async def test_all_waiting_callers_get_the_error_of_an_opening_and_the_next_call_tries_again():
    opener, errors = Opener(1.0, fails=1), []

    async def ask():
        with pytest.raises(SandboxStartError, match="the engine is down") as caught:
            await shared("pool", opener)
        errors.append(caught.value)

    async with sharing("run"):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
        assert len(errors) == 3
        assert await shared("pool", opener) == 1


async def test_an_opening_that_hangs_ends_with_an_error_that_names_it():
    async with sharing("run"):
        with pytest.raises(EnvError, match=f"'pool' cannot be opened: it took longer than {OPEN_S:g} s"):
            await shared("pool", Opener(1e9))


async def test_the_end_of_the_node_does_not_wait_for_a_resource_that_is_being_opened():
    opener, told = Opener(50.0), []

    async def ask():
        try:
            await shared("pool", opener)
        except EnvError as error:
            told.append(str(error))

    async with anyio.create_task_group() as tasks, sharing("run"):
        tasks.start_soon(ask)
        await anyio.sleep(1)
    assert told == ["'pool' cannot be opened: the node is ending"]
    assert anyio.current_time() < 10
    assert opener.opened == 0


async def test_a_shared_resource_is_closed_also_when_the_node_is_cancelled():
    opener = Opener()
    with anyio.move_on_after(1):
        async with sharing("run"):
            await shared("pool", opener)
            await anyio.sleep_forever()
    assert (opener.opened, opener.open_now) == (1, 0)


async def test_an_error_of_the_node_is_raised_unchanged():
    opener = Opener()

    async def node():
        async with sharing("run"):
            await shared("pool", opener)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await node()
    assert opener.open_now == 0


async def test_outside_of_a_node_nothing_is_shared():
    with pytest.raises(EnvError, match="nothing is shared here"):
        await shared("pool", Opener())


class Pool:
    """A resource that reports its stock."""

    def stock(self) -> Stock:
        return Stock("sandboxes", 1, 2, 3, 4, 5)


async def test_open_resources_report_their_stocks():
    @asynccontextmanager
    async def open_pool():
        yield Pool()

    assert stocks() == []
    async with sharing("run"):
        assert stocks() == []
        await shared("pool", open_pool)
        await shared("number", Opener())
        assert stocks() == [Stock("sandboxes", 1, 2, 3, 4, 5)]
