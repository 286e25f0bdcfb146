"""Errors that end the node loop, and errors that do not."""

from __future__ import annotations

import pytest

from flash.errors import ConfigError, EngineError, WeightsError
from flash.run.node_loop import engines_until_interrupted, naming_the_key
from tests.hub.test_hub import Driver, make_config

pytestmark = pytest.mark.anyio


async def test_an_engine_that_a_signal_ended_with_the_run_is_no_error() -> None:
    hub = Driver(make_config()).hub
    with pytest.RaisesGroup(EngineError), engines_until_interrupted(hub):
        raise EngineError("engine 0 did not start")
    hub.interrupt()
    with engines_until_interrupted(hub):
        raise ExceptionGroup("tasks", [EngineError("engine 0 did not start")])
    with pytest.RaisesGroup(WeightsError), engines_until_interrupted(hub):
        raise ExceptionGroup("tasks", [EngineError("engine 0 did not start"), WeightsError("damaged")])


async def test_a_hub_that_cannot_listen_names_the_key_to_change() -> None:
    with pytest.raises(ConfigError, match=r"^`cluster\.hub`: port 29500 is in use$"), naming_the_key():
        raise ConfigError("port 29500 is in use")
