"""The cluster's part of `flash watch`: what is there, what is missing, and what has failed with its last words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from flash.observe.cluster import Cluster, EngineNow, NodeNow
from flash.observe.cluster_counts import COUNTS, engines_of
from flash.observe.columns.table import columns
from flash.observe.text import clean, clock

OLD_S = 15.0
"""A run that goes on writes a picture every two seconds."""
MOST_KINDS, MOST_NODES = 5, 3
"""Kinds of failures, and nodes that are missing, that are shown, the last ones."""
MESSAGE = 160
"""Characters of a message that are shown: the page has all of it."""


def cluster_lines(cluster: Cluster, now: float) -> Iterator[Text]:
    """The lines at this time, in Unix seconds."""
    if cluster.hub is not None and not cluster.ended:
        age = now - cluster.at
        if age > OLD_S:
            yield Text(f"nothing was heard of the cluster for {clock(age)}; this is how it was then", "bold yellow")
        yield Text(clean(f"waits for {cluster.hub.doing}"), style="dim")
    for count in COUNTS:
        if not count.listed and count.holds(cluster) and (text := count.text(cluster)) not in ("", "0"):
            yield Text(f"{count.title.lower()}: {text}")
    if cluster.hub is not None and not cluster.ended:
        if engines := list(_engine_figures(engines_of(cluster))):
            yield Text(f"each engine: {', '.join(engines)}")
        missing = [node for node in cluster.hub.nodes if node.state in ("gone", "silent")]
        yield from (_missing(node, now) for node in missing[:MOST_NODES])
    for each in cluster.failures[:MOST_KINDS]:
        message = " ".join(each.message.split())
        cut = message if len(message) <= MESSAGE else f"{message[:MESSAGE]} …"
        told = f"{each.kind} failed {each.count} times, the last one {clock(now - each.last)} ago: {cut}"
        yield Text(clean(told), style="yellow")


def _engine_figures(engines: Sequence[EngineNow]) -> Iterator[str]:
    """What they tell, each figure in the mean, with the lowest and the highest where these differ."""
    for column in columns("engine"):
        known = [value for engine in engines if (value := column.of(engine.figures)) is not None]
        if known:
            low, mean, high = map(column.text, (min(known), sum(known) / len(known), max(known)))
            yield f"{column.label} {mean}" if low == high else f"{column.label} {mean} ({low} to {high})"


def _missing(node: NodeNow, now: float) -> Text:
    since = node.gone_at if node.gone_at is not None else node.heard_at
    when = "" if since is None else f" for {clock(now - since)}"
    host = f" ({node.status.host})" if node.status is not None else ""
    return Text(clean(f"node {node.node}{host} is {node.state}{when}{node.why and ': '}{node.why}"), style="yellow")
