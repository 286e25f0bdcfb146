"""Each fuzzer in short, with a seed of its own; at full length by `python -m tests.fuzz`.

What a fuzzer has found stands as a case of its own in the tests of what it was found in.
"""

from __future__ import annotations

import pytest

from tests.fuzz import config, hub, service, weights

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_the_hub_serves_its_peers_whatever_others_say_at_its_port() -> None:
    done = await hub.fuzz(1500, seed=7)
    assert done["dropped"] > 0
    assert done["steps"] > 2


@pytest.mark.virtual
async def test_what_peers_say_in_their_own_name_ends_in_typed_errors_only() -> None:
    done = await hub.insider(800, seed=7)
    assert min(done.values()) > 0


def test_the_weights_are_pulled_whatever_others_say_at_their_port() -> None:
    assert weights.fuzz(300, seed=7) == {"attackers": 300, "pulls": 12}


@pytest.mark.slow
async def test_the_sandbox_service_answers_its_clients_whatever_others_ask() -> None:
    done = await service.fuzz(400, seed=7)
    assert min(done.values()) > 0


@pytest.mark.slow
def test_a_configuration_loads_or_is_refused_by_key_whatever_is_in_it() -> None:
    assert min(config.fuzz(300, seed=7).values()) > 0
