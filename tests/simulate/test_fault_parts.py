"""Parts of simulated runs with faults: frozen processes, the network, and errors that no process reports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import pytest

from flash.errors import DeadlineError
from flash.simulate.faults.cluster import Cluster
from flash.simulate.faults.loop import FaultLoop, Process
from flash.simulate.faults.network import LOST_S, Listener, Network, Stream
from flash.simulate.faults.play import play
from flash.simulate.faults.scenario import Fault, Scenario

SETTINGS: dict[str, Any] = {
    "run.seed": 1,
    "run.steps": 4,
    "rollout.group_size": 2,
    "train.batch_size": 4,
    "train.async_ratio": 1.0,
    "checkpoint.journal": "fsync",
    "eval.problems": 1,
}
"""A small run."""


def run(function: Callable[..., Awaitable[None]], *args: object) -> None:
    """Run an async function on the loop of simulations with faults."""
    anyio.run(function, *args, backend="asyncio", backend_options={"loop_factory": FaultLoop})


# -- frozen processes --------------------------------------------------------------------------------------------------


def test_a_callback_that_is_cancelled_while_its_process_is_frozen_never_runs() -> None:
    async def main() -> None:
        loop, process, ran = asyncio.get_running_loop(), Process("node 1", "m1"), list[str]()
        timer = loop.call_later(1.0, ran.append, "timer", context=process.context)
        process.freeze()
        soon = loop.call_soon(ran.append, "callback", context=process.context)
        await anyio.sleep(2.0)
        timer.cancel()
        soon.cancel()
        process.thaw()
        await anyio.sleep(1.0)
        assert ran == []

    run(main)


def test_a_callback_that_is_cancelled_after_its_process_goes_on_never_runs() -> None:
    async def main() -> None:
        loop, process, ran = asyncio.get_running_loop(), Process("node 1", "m1"), list[str]()
        process.freeze()
        soon = loop.call_soon(ran.append, "callback", context=process.context)
        await anyio.sleep(1.0)
        process.thaw()
        soon.cancel()
        await anyio.sleep(1.0)
        assert ran == []

    run(main)


def test_a_frozen_process_runs_no_callback_until_it_goes_on() -> None:
    async def main() -> None:
        loop, process, ran = asyncio.get_running_loop(), Process("node 1", "m1"), list[str]()
        loop.call_soon(ran.append, "ready before the freeze", context=process.context)
        process.freeze()
        loop.call_soon(ran.append, "ready after it", context=process.context)
        await anyio.sleep(1.0)
        process.thaw()
        process.freeze()
        await anyio.sleep(1.0)
        assert ran == []
        process.thaw()
        await anyio.sleep(1.0)
        assert ran == ["ready before the freeze", "ready after it"]

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine dies", "engine hangs"])
def test_an_engine_of_a_frozen_node_dies_without_an_error_of_a_callback(kind: Any) -> None:
    for at in range(4, 12):
        frozen = [Fault("hang node", float(at), 0, 8.0), Fault(kind, at + 3.0, 1)]
        assert play(Scenario(1, SETTINGS, 1, {}, frozen), with_reference=False).law == ""


# -- the network -------------------------------------------------------------------------------------------------------


async def received(stream: Stream) -> tuple[bytes, float]:
    """All bytes until the end of a connection, and the time of the end in whole seconds."""
    data = b""
    while True:
        try:
            data += await stream.receive()
        except anyio.EndOfStream:
            return data, anyio.current_time() // 1


def test_the_bytes_and_the_end_of_a_process_arrive_when_a_short_cut_is_over() -> None:
    async def main() -> None:
        network, one, other = Network(random.Random(1)), Process("one", "m1"), Process("other", "m0")
        network.add(one)
        here, there = network.join(one, other, "one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(network.cut, [("m1", "m0")], 5.0)
            await anyio.sleep(1.0)
            await here.send(b"before the end")
            one.kill()
            assert await received(there) == (b"before the end", 5.0)

    run(main)


def test_a_connection_that_is_closed_during_a_cut_ends_after_it_even_if_a_process_ends_meanwhile() -> None:
    async def main() -> None:
        network, one, other = Network(random.Random(1)), Process("one", "m1"), Process("other", "m0")
        network.add(third := Process("third", "m2"))
        here, there = network.join(one, other, "one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(network.cut, [("m1", "m0")], 5.0)
            await anyio.sleep(1.0)
            await here.aclose()
            third.kill()
            assert await received(there) == (b"", 5.0)

    run(main)


def test_a_client_that_the_hub_does_not_accept_in_time_closes_its_connection() -> None:
    async def main() -> None:
        network, one, hub = Network(random.Random(1)), Process("one", "m1"), Process("hub", "m0")
        network.hub = Listener(hub)
        with pytest.raises(DeadlineError):
            async with network.connect(one, "guest-1", 5.0):
                raise AssertionError("not reached: no hub answers")
        assert (await received(cast("Stream", await network.hub.accept())))[1] == 5.0

    run(main)


def test_the_other_end_notices_a_machine_that_vanishes_only_after_the_time_of_a_lost_connection() -> None:
    async def main() -> None:
        network, one, other = Network(random.Random(1)), Process("one", "m1"), Process("other", "m0")
        network.add(one)
        here, there = network.join(one, other, "one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(network.cut, [("m1", "m0")], 5.0)
            await anyio.sleep(1.0)
            await here.send(b"lost with the machine")
            network.vanish("m1")
            one.kill()
            assert await received(there) == (b"", 1.0 + LOST_S)

    run(main)


# -- errors that no process reports ------------------------------------------------------------------------------------


class BrokenCluster(Cluster):
    """A run in which a timer raises an error."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        asyncio.get_running_loop().call_later(1.0, [].remove, "missing")


def test_an_error_of_a_callback_is_found() -> None:
    law = play(Scenario(1, SETTINGS, 0, {}, []), make=BrokenCluster).law
    assert law.startswith("every run ends: ValueError: ")
