"""Snapshots of a cluster, as hubs make them."""

from __future__ import annotations

from typing import Any

from flash.observe.cluster import (
    Cluster,
    EngineNow,
    Event,
    FailureKind,
    Flow,
    HubNow,
    LeaseNow,
    NodeNow,
    NodeStatus,
    RankNow,
)
from flash.types import Stock

FIGURES = {
    "requests": 12,
    "limit": 64,
    "kv_used": 0.25,
    "preemptions": 3,
    "prefix_hit_share": 0.5,
    "accepted_share": 0.75,
    "tokens_per_second": 300.0,
    "load_s": 0.5,
}


def engine_now(number: int, at: float, **changes: Any) -> EngineNow:
    """Return an engine that serves."""
    values: dict[str, Any] = {
        "number": number,
        "state": "serving",
        "version": 7,
        "loaded_at": at - 20,
        "figures": FIGURES,
    }
    return EngineNow(**values | changes)


def status_of(node: int, at: float, engines: int = 1, **changes: Any) -> NodeStatus:
    """Return the status that a node reports."""
    made = [engine_now(node * engines + place, at, **changes) for place in range(engines)]
    stocks = [Stock("sandboxes", 3, 2, 1, 6, 40)]
    return NodeStatus(f"host-{node}", 1000 + node, at - 600, made, 20, 12, 4, stocks)


def hub_now(at: float, nodes: int = 1, **changes: Any) -> HubNow:
    """Return a hub with `nodes` nodes, of which the first has the only trainer rank."""
    told = [
        NodeNow(
            node=node, state="here", heard_at=at - 1, status=status_of(node, at), leases=20, oldest_lease=at - 30 - node
        )
        for node in range(nodes)
    ]
    values: dict[str, Any] = {
        "at": at,
        "doing": "a batch for step 8 (3 of 16 groups are complete)",
        "version": 8,
        "published": 8,
        "nodes": told,
        "ranks": [RankNow(0, 0, 4321, at - 590)],
        "trainer_restarts": 0,
        "flow": Flow(in_flight=200, most=256, queued=10, leased=150, evaluating=0, ready_groups=3, groups_per_batch=16),
        "leases": [LeaseNow(0, 17, 3, "train", 0, at - 30)],
    }
    return HubNow(**values | changes)


def cluster(at: float, hub: HubNow | None, **changes: Any) -> Cluster:
    """Return the contents of the cluster file."""
    values: dict[str, Any] = {
        "at": at,
        "hub": hub,
        "host": "host-0",
        "process": 999,
        "since": at - 610,
        "lives": 1,
        "failures": [],
        "events": [Event(at - 100, "node 1 joins with 1 engine")],
    }
    return Cluster(**values | changes)


def failure(kind: str, at: float, message: str, count: int = 1) -> FailureKind:
    """Return the failures of one kind."""
    return FailureKind(kind, count, at - 60, at, message)
