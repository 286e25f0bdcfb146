"""A cluster in a few numbers, for the terminal and for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flash.observe.cluster import Cluster, EngineNow, HubNow, NodeStatus


class Count(NamedTuple):
    """One number of a cluster, or several of a kind each."""

    name: str
    title: str
    means: str
    worry: str
    of: Callable[[Cluster], Mapping[str, float]]
    """By kind; under the empty one where there are none. Nothing where there is no such thing now."""


def _now(of: Callable[[HubNow], Mapping[str, float]]) -> Callable[[Cluster], Mapping[str, float]]:
    """Of a run that goes on: the last picture of another one would be taken for it."""
    return lambda cluster: {} if cluster.hub is None or cluster.ended else of(cluster.hub)


def _statuses(hub: HubNow) -> list[NodeStatus]:
    return [node.status for node in hub.nodes if node.status is not None and node.state != "gone"]


def _engines(hub: HubNow) -> list[EngineNow]:
    return [engine for status in _statuses(hub) for engine in status.engines]


def _ranks(hub: HubNow) -> Mapping[str, float]:
    here = sum(rank.process is not None for rank in hub.ranks)
    return {"here": here, "not there": len(hub.ranks) - here}


def _requests(hub: HubNow) -> Mapping[str, float]:
    statuses = _statuses(hub)
    return {"running": sum(one.asking for one in statuses), "waiting": sum(one.waiting for one in statuses)}


def _samples(hub: HubNow) -> Mapping[str, float]:
    flow = hub.flow
    return {"worked on": flow.leased, "queued": flow.queued, "evaluating": flow.evaluating}


def _sandboxes(hub: HubNow) -> Mapping[str, float]:
    stocks = [stock for status in _statuses(hub) for stock in status.stocks]
    if not stocks:
        return {}
    sums = {"in use": sum(one.in_use for one in stocks), "warm": sum(one.ready for one in stocks)}
    return sums | {"waited for": sum(one.waiting for one in stocks)}


COUNTS = (
    Count(
        "nodes",
        "Nodes",
        "Processes that roll out samples or train, by their state; those that are gone were of the run.",
        "one is silent or gone: the cluster page says since when, and why.",
        _now(lambda hub: Counter(node.state for node in hub.nodes)),
    ),
    Count(
        "engines",
        "Engines",
        "Engines of the nodes that are there, by their state.",
        "one returns again and again, or is gone; none serves: nothing is sampled.",
        _now(lambda hub: Counter(engine.state for engine in _engines(hub))),
    ),
    Count(
        "trainer_ranks",
        "Trainer ranks",
        "The processes that train.",
        "one is not there: the ranks start again, and train again what was done since the last checkpoint.",
        _now(_ranks),
    ),
    Count(
        "requests",
        "Requests",
        "Responses that engines sample now, and those that wait for an engine.",
        "many wait, and the trainers do as well: add engines.",
        _now(_requests),
    ),
    Count(
        "samples",
        "Samples with nodes",
        "Samples that nodes work on, that wait for one, and answers of an evaluation that are still to come.",
        "many are queued: nodes are full, or their engines are too old for them.",
        _now(_samples),
    ),
    Count(
        "sandboxes",
        "Sandboxes",
        "Sandboxes of all nodes that are in use, warm, and waited for.",
        "some are waited for all the time: raise the pool's parallel, or judge less at once.",
        _now(_sandboxes),
    ),
    Count(
        "tokens_per_second",
        "Tokens per second of engines",
        "Response tokens of all engines, over the last seconds.",
        "it falls far below the throughput of the steps: an engine is gone, or loads weights.",
        _now(lambda hub: {"": sum(engine.tokens_per_second for engine in _engines(hub))}),
    ),
    Count(
        "failures",
        "Failures of the cluster",
        "Attempts at samples, engines, nodes and trainer ranks that failed, by kind, over the whole run.",
        "one grows with each step: `flash watch` and the cluster page have the last message of each.",
        lambda cluster: {each.kind: each.count for each in cluster.failures},
    ),
)
"""In the order in which they are shown."""
