"""What ends the node loop, and what does not."""

from __future__ import annotations

import pytest

from flash.errors import EngineError, WeightsError
from flash.run.node_loop import engines_until_interrupted
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
