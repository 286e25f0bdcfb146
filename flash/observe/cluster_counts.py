"""A few numbers that describe a cluster, as one table. The web page's tiles, Prometheus, Grafana and `flash watch` are
made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flash.observe.cluster import Cluster, EngineNow, HubNow, NodeStatus
from flash.observe.columns.column import Column, capital, without_marks
from flash.observe.columns.table import columns
from flash.observe.text import short

KIND = "kind"
"""Label in monitoring systems for the kinds of a number, if there is no better word."""


class Count(NamedTuple):
    """Number of a cluster, or several numbers, one of each kind."""

    name: str
    title: str
    means: str
    worry: str
    of: Callable[[Cluster], Mapping[str, float]]
    """Computes the numbers by kind. A single number has the empty kind. No entry: there is nothing to count."""
    unit: str = ""
    """`share` for a share of 1; otherwise the title names the unit."""
    label: str = KIND
    """Label of the kinds in monitoring systems."""
    listed: bool = False
    """True if people see only the sum here, since each kind is shown elsewhere with details."""
    of_the_run: bool = False
    """True if the number counts the whole run. It is then also shown after the end of the run, where a momentary number
    would be misleading."""

    def text(self, cluster: Cluster) -> str:
        """Return the numbers as people read them; empty if there is nothing to count."""
        values = self.of(cluster)
        if self.listed:
            return short(sum(values.values()))
        parts = (f"{short(value)} {kind}".rstrip() for kind, value in values.items() if value)
        return (", ".join(parts) or "0") if values else ""

    def holds(self, cluster: Cluster) -> bool:
        """Return True if the number may be shown: it counts the whole run, or the run has not ended."""
        return self.of_the_run or not cluster.ended


def engines_of(cluster: Cluster) -> list[EngineNow]:
    """Return the engines of all nodes that are not gone."""
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
        "Processes that roll out samples or train, by their state. `gone` counts nodes that have left the run.",
        "a node is silent or gone: the cluster page says since when, and why.",
        _of_hub(lambda hub: Counter(node.state for node in hub.nodes)),
    ),
    Count(
        "engines",
        "Engines",
        "Engines of all nodes that are not gone, by their state.",
        "an engine returns again and again, or is gone. If no engine serves, nothing is sampled.",
        _of_hub(lambda hub: Counter(engine.state for engine in _engines(hub))),
    ),
    Count(
        "trainer_ranks",
        "Trainer ranks",
        "The processes that train.",
        "a rank is not there: all ranks start again, and repeat the steps since the last checkpoint.",
        _of_hub(_ranks),
    ),
    Count(
        "requests",
        "Requests",
        "Responses that engines sample now, and requests that wait for an engine.",
        "many requests wait, and the trainers wait as well: add engines. If none is running, the page says what the "
        "run waits for.",
        _of_hub(_requests),
    ),
    Count(
        "tokens_per_second",
        "Tokens per second",
        "Response tokens per second of all engines, over the last seconds.",
        "it falls far below the throughput of the steps: an engine is gone, or loads weights.",
        _of_hub(lambda hub: {"": sum(one.figures.get("tokens_per_second", 0.0) for one in _engines(hub))}),
    ),
    Count(
        "in_flight",
        "Samples on their way",
        "Samples that are issued and not yet trained or given up. The limit is 1 + train.async_ratio batches, plus "
        "redundant samples.",
        "it is at its limit while engines have no requests: trainers are too slow, or train.async_ratio is too low.",
        _of_hub(lambda hub: {"issued": hub.flow.in_flight, "at most": hub.flow.most}),
    ),
    Count(
        "samples",
        "Samples with nodes",
        "Samples that nodes work on, samples that wait for a node, and unfinished answers of an evaluation.",
        "many are queued: nodes are full, or their engines are too old for them.",
        _of_hub(_samples),
    ),
    Count(
        "groups",
        "Groups ready",
        "Complete groups that wait to be trained, and the number of groups that a step takes.",
        "it stays at a few: the trainers wait. If it is many times that of a step, the engines are ahead, and samples "
        "grow old.",
        _of_hub(lambda hub: {"ready": hub.flow.ready_groups, "make a step": hub.flow.groups_per_batch}),
    ),
    Count(
        "episodes",
        "Environment sessions",
        "Live episodes, and how many of them have no request at an engine: their environment works, or they wait for a "
        "sandbox.",
        "most are in the environment while engines are idle: environments are slow, or rollout.max_concurrent is too "
        "low.",
        _of_hub(_episodes),
    ),
    Count(
        "sandboxes",
        "Sandboxes",
        "Sandboxes of all nodes: in use, warm (ready to be used), and requested but not there yet.",
        "sandboxes are waited for all the time: raise the pool's parallel, or judge fewer samples at once.",
        _of_hub(_sandboxes),
    ),
    Count(
        "failures",
        "Failures",
        "Attempts at samples, engines, nodes and trainer ranks that failed, by kind, over the whole run.",
        "a kind grows with each step: `flash watch` and the cluster page show the last message of each kind.",
        lambda cluster: {each.kind: each.count for each in cluster.failures},
        listed=True,
        of_the_run=True,
    ),
    Count(
        "restarts",
        "Restarts",
        "Restarts of the whole run, of the trainer ranks since then, and of engines.",
        "one of them keeps growing: a part that dies again and again is broken, or too large for its memory.",
        _restarts,
        of_the_run=True,
    ),
)
"""All numbers, in the order in which they are shown."""


def _each_engine(column: Column) -> Count:
    def of(cluster: Cluster) -> Mapping[str, float]:
        values = ((str(engine.number), column.value_in(engine.figures)) for engine in engines_of(cluster))
        return {number: value for number, value in values if value is not None}

    worry = without_marks(". ".join(filter(None, (column.worry, capital(column.helps)))))
    title, means = f"Each engine: {column.label}", f"{capital(without_marks(column.meaning))}."
    return Count(f"engine_{column.name}", title, means, worry, of, column.unit, "engine")


EACH_ENGINE = tuple(map(_each_engine, columns("engine")))
"""Numbers that each engine reports, with the engine's number as the kind."""
