"""A cluster in a few numbers: the page's tiles, Prometheus, Grafana and the terminal are made from this table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flash.observe.cluster import Cluster, EngineNow, HubNow, NodeStatus
from flash.observe.columns.column import Column, capital, without_marks
from flash.observe.columns.table import columns
from flash.observe.text import short

KIND = "kind"
"""How monitoring systems call what tells the numbers of one name apart, unless there is a word for it."""


class Count(NamedTuple):
    """One number of a cluster, or several of a kind each."""

    name: str
    title: str
    means: str
    worry: str
    of: Callable[[Cluster], Mapping[str, float]]
    """By kind; under the empty one where there are none. Nothing where there is no such thing."""
    unit: str = ""
    """`share` of 1; otherwise what the title says."""
    label: str = KIND
    """Of the kinds, for monitoring systems."""
    listed: bool = False
    """Each kind is told elsewhere with more of it, so that people read the sum here."""
    of_the_run: bool = False
    """Over all of it, so that it stands when the run is over; what was true at its end would be taken for now."""

    def text(self, cluster: Cluster) -> str:
        """As people read it; empty where there is nothing."""
        values = self.of(cluster)
        if self.listed:
            return short(sum(values.values()))
        parts = (f"{short(value)} {kind}".rstrip() for kind, value in values.items() if value)
        return (", ".join(parts) or "0") if values else ""

    def holds(self, cluster: Cluster) -> bool:
        """Whether it is true now."""
        return self.of_the_run or not cluster.ended


def engines_of(cluster: Cluster) -> list[EngineNow]:
    """Those of the nodes that are there."""
    return [] if cluster.hub is None else _engines(cluster.hub)


def _of_hub(of: Callable[[HubNow], Mapping[str, float]]) -> Callable[[Cluster], Mapping[str, float]]:
    return lambda cluster: {} if cluster.hub is None else of(cluster.hub)


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


def _episodes(hub: HubNow) -> Mapping[str, float]:
    alive, asked = sum(one.episodes for one in _statuses(hub)), sum(_requests(hub).values())
    return {"alive": alive, "in the environment": max(0.0, alive - asked)}


def _sandboxes(hub: HubNow) -> Mapping[str, float]:
    stocks = [stock for status in _statuses(hub) for stock in status.stocks]
    if not stocks:
        return {}
    sums = {"in use": sum(one.in_use for one in stocks), "warm": sum(one.ready for one in stocks)}
    return sums | {"waited for": sum(one.waiting for one in stocks)}


def _restarts(cluster: Cluster) -> Mapping[str, float]:
    trainers = 0 if cluster.hub is None else cluster.hub.trainer_restarts
    engines = sum(engine.deaths for engine in engines_of(cluster))
    return {"of the run": cluster.lives - 1, "of trainers": trainers, "of engines": engines}


COUNTS = (
    Count(
        "nodes",
        "Nodes",
        "Processes that roll out samples or train, by their state; those that are gone were of the run.",
        "one is silent or gone: the cluster page says since when, and why.",
        _of_hub(lambda hub: Counter(node.state for node in hub.nodes)),
    ),
    Count(
        "engines",
        "Engines",
        "Engines of the nodes that are there, by their state.",
        "one returns again and again, or is gone; none serves: nothing is sampled.",
        _of_hub(lambda hub: Counter(engine.state for engine in _engines(hub))),
    ),
    Count(
        "trainer_ranks",
        "Trainer ranks",
        "The processes that train.",
        "one is not there: the ranks start again, and train again what was done since the last checkpoint.",
        _of_hub(_ranks),
    ),
    Count(
        "requests",
        "Requests",
        "Responses that engines sample now, and those that wait for an engine.",
        "many wait, and the trainers do as well: add engines. None run: the page says what the run waits for.",
        _of_hub(_requests),
    ),
    Count(
        "tokens_per_second",
        "Tokens per second",
        "Response tokens of all engines, over the last seconds.",
        "it falls far below the throughput of the steps: an engine is gone, or loads weights.",
        _of_hub(lambda hub: {"": sum(one.figures.get("tokens_per_second", 0.0) for one in _engines(hub))}),
    ),
    Count(
        "in_flight",
        "Samples on their way",
        "Issued, not trained or given up yet; at most 1 + train.async_ratio batches of them, redundant ones on top.",
        "it is at its bound while engines have no requests: trainers are too slow, or train.async_ratio too low.",
        _of_hub(lambda hub: {"issued": hub.flow.in_flight, "at most": hub.flow.most}),
    ),
    Count(
        "samples",
        "Samples with nodes",
        "Samples that nodes work on, that wait for one, and answers of an evaluation that are still to come.",
        "many are queued: nodes are full, or their engines are too old for them.",
        _of_hub(_samples),
    ),
    Count(
        "groups",
        "Groups ready",
        "Complete groups that wait for their step, beside those that a step takes.",
        "it stays at a few: the trainers wait. It is many times a step: the engines are ahead, and samples grow old.",
        _of_hub(lambda hub: {"ready": hub.flow.ready_groups, "make a step": hub.flow.groups_per_batch}),
    ),
    Count(
        "episodes",
        "Environment sessions",
        "Episodes alive, and those of them that do not ask for a response: their environments work, or they wait for "
        "a sandbox.",
        "most are in environments, and engines idle: environments are slow, or rollout.max_concurrent is too low.",
        _of_hub(_episodes),
    ),
    Count(
        "sandboxes",
        "Sandboxes",
        "Sandboxes of all nodes that are in use, warm, and waited for.",
        "some are waited for all the time: raise the pool's parallel, or judge less at once.",
        _of_hub(_sandboxes),
    ),
    Count(
        "failures",
        "Failures",
        "Attempts at samples, engines, nodes and trainer ranks that failed, by kind, over the whole run.",
        "one grows with each step: `flash watch` and the cluster page have the last message of each.",
        lambda cluster: {each.kind: each.count for each in cluster.failures},
        listed=True,
        of_the_run=True,
    ),
    Count(
        "restarts",
        "Restarts",
        "Of the whole run, of its trainer ranks since then, and of engines.",
        "any of them goes on growing: what dies again and again is too large for its memory, or broken.",
        _restarts,
        of_the_run=True,
    ),
)
"""In the order in which they are shown."""


def _each_engine(column: Column) -> Count:
    def of(cluster: Cluster) -> Mapping[str, float]:
        told = ((str(engine.number), column.value_in(engine.figures)) for engine in engines_of(cluster))
        return {number: value for number, value in told if value is not None}

    worry = without_marks(". ".join(filter(None, (column.worry, capital(column.helps)))))
    title, told = f"Each engine: {column.label}", f"{capital(without_marks(column.meaning))}."
    return Count(f"engine_{column.name}", title, told, worry, of, column.unit, "engine")


EACH_ENGINE = tuple(map(_each_engine, columns("engine")))
"""What each engine tells, by its number."""
