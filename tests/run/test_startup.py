"""What is told of a run before its first step."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.run.startup import start_of_engines, tell_beginning
from tests.hub.test_hub import Driver, make_config
from tests.hub.test_stages import version


def config_of(*, eager: bool = False) -> Config:
    """On a GPU: whether this machine has a compiler is not the question here."""
    config, change = make_config(), msgspec.structs.replace
    engine, cluster = change(config.engine, enforce_eager=eager), change(config.cluster, gpus_per_node=1)
    return change(config, engine=engine, cluster=cluster)


@pytest.mark.parametrize(
    ("seconds", "eager", "said"),
    [
        (10.0, False, ""),
        (40.0, False, "; vLLM compiles, for minutes at its first start here"),
        (40.0, True, "; vLLM loads the model"),
        (460.0, False, "; at most 900 s (deadlines.engine_start)"),
    ],
)
def test_engines_that_start_for_long_are_explained(seconds: float, eager: bool, said: str) -> None:
    assert start_of_engines(seconds, config_of(eager=eager)) == said


@pytest.mark.anyio
@pytest.mark.virtual
async def test_what_is_waited_for_is_told_with_its_seconds_and_its_reason() -> None:
    driver, said = Driver(make_config()), list[str]()
    with anyio.move_on_after(50):
        async with anyio.create_task_group() as group:
            group.start_soon(tell_beginning, driver.hub, config_of(), said.append)
            await anyio.sleep(25)
            await driver.hub.handle(version(0))
            await anyio.sleep_forever()
    assert said == [
        "starting engines and trainers … 0 s",
        "starting engines and trainers … 10 s",
        "starting engines and trainers … 20 s",
        "starting engines … 25 s",
        "starting engines … 35 s; vLLM compiles, for minutes at its first start here",
        "starting engines … 45 s; vLLM compiles, for minutes at its first start here",
    ]
