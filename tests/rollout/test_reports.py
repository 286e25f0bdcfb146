"""Status reports of a node: its engines, the requests that wait, and how engines died."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flash.observe.cluster import HubNow, NodeStatus
from tests.rollout.test_node import World
from tests.rollout.test_node_restarts import START_S, nothing_is_lost, run_with, world

EVERY_S = 2.0


def looks(one: World, *at: float) -> tuple[list[HubNow], list[tuple[float, Callable[[], object]]]]:
    """Return a list for the hub's pictures of the cluster, and the events for `run_with` that add one each."""
    seen: list[HubNow] = []
    return seen, [(seconds, lambda: seen.append(one.hub.overview())) for seconds in at]


def status(picture: HubNow) -> NodeStatus:
    """Return the status of the only node in a picture of the hub."""
    (node,) = picture.nodes
    assert node.status is not None
    return node.status


@pytest.mark.parametrize("engines", [1, 3])
def test_engines_are_shown_from_their_start_on_with_what_they_do(engines: int) -> None:
    one = world(engines)
    one.status_s = EVERY_S
    seen, events = looks(one, START_S - 1, 10.0, 30.0)
    nothing_is_lost(one, run_with(one, *events))
    starting, serving, later = map(status, seen)
    assert [engine.state for engine in starting.engines] == ["starting"] * engines
    assert starting.since == 0.0
    for now in (serving, later):
        assert [engine.number for engine in now.engines] == list(range(engines))
        assert {engine.state for engine in now.engines} <= {"serving", "loading"}
        assert all(engine.loaded_at is not None and engine.figures["load_s"] > 0 for engine in now.engines)
        assert now.asking == sum(engine.figures["requests"] for engine in now.engines)
        assert now.asking + now.waiting <= now.episodes
    assert max(engine.version for engine in later.engines) > min(engine.version for engine in serving.engines)
    assert sum(engine.figures["tokens_per_second"] for engine in serving.engines) > 0


def test_a_death_is_shown_with_when_and_why_and_counted_once() -> None:
    one = world(2)
    one.status_s = EVERY_S
    seen, events = looks(one, 2.5, START_S + 30)
    nothing_is_lost(one, run_with(one, (START_S + 15.2, lambda: one.engines[0].kill()), *events))
    dead, back = (status(picture).engines[0] for picture in seen)
    assert (dead.state, dead.version, dead.deaths) == ("returning", -1, 1)
    assert dead.died_at == START_S + 15.2
    assert dead.why.startswith("the fake engine was killed. It starts again in 1 s")
    assert back.state in ("serving", "loading")
    assert (back.deaths, back.died_at, back.why) == (1, dead.died_at, dead.why)
    assert [kind for kind, _ in one.observer.failures] == ["engine_died"]


def test_a_node_at_which_nobody_looks_tells_nothing() -> None:
    one = world(1)
    seen, events = looks(one, 20.0)
    nothing_is_lost(one, run_with(one, *events))
    assert [node.status for node in seen[0].nodes] == [None]
