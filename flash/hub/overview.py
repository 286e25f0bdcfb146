"""The cluster as the hub sees it, for people: a picture of its books, taken at once, of a size that nodes alone set."""

from __future__ import annotations

import math

from msgspec.structs import replace

from flash.ages import SLACK
from flash.config.tree import Config
from flash.hub.context import HubContext
from flash.hub.fleet import NodeRegistry
from flash.hub.nodes import Nodes
from flash.hub.trainers import TrainerRanks
from flash.observe.cluster import MOST_LEASES, Flow, HubNow, LeaseNow, NodeNow, NodeState, RankNow
from flash.samples.evaluation import Evaluations
from flash.samples.store import SampleStore


def overview(parts: HubContext, members: NodeRegistry, nodes: Nodes, trainers: TrainerRanks, doing: str) -> HubNow:
    """What all of them are doing; `doing` is what the run waits for, in words."""
    config, progress = parts.config, parts.progress
    return HubNow(
        at=parts.now(),
        doing=doing,
        version=progress.version,
        published=progress.published_version,
        nodes=[*(_node(node, parts, nodes, trainers) for node in members.numbers), *reversed(nodes.statuses.gone)],
        ranks=[
            RankNow(number, config.cluster.node_of(number), rank.process, rank.since, rank.host)
            for number, rank in enumerate(trainers.incarnations.ranks)
        ],
        trainer_restarts=trainers.incarnations.followed,
        flow=_flow(config, parts.buffer.samples, parts.evaluations),
        leases=[
            LeaseNow(node, lease.task.group_id, lease.task.sample_index, lease.task.split, lease.task.attempt, since)
            for node, lease, since in nodes.work.holders.oldest(MOST_LEASES)
        ],
    )


def _node(node: int, parts: HubContext, nodes: Nodes, trainers: TrainerRanks) -> NodeNow:
    status, holders = nodes.statuses.of(node), nodes.work.holders
    if status is not None:  # of versions the hub hears at once
        known = {engine.index: engine.version for engine in parts.fleet.engines_of(node)}
        engines = [replace(engine, version=known.get(engine.number, engine.version)) for engine in status.engines]
        status = replace(status, engines=engines)
    here = status is not None or (
        parts.config.engines_on(node) == 0
        and any(parts.config.cluster.node_of(rank) == node for rank in trainers.incarnations.present)
    )
    state: NodeState = "here" if here else "starting"
    if node in nodes.silent:
        state = "silent"
    elif node in nodes.leaving:
        state = "leaving"
    return NodeNow(
        node=node,
        state=state,
        heard_at=nodes.statuses.heard_at(node),
        status=status,
        leases=holders.held(node),
        oldest_lease=holders.oldest_of(node),
    )


def _flow(config: Config, samples: SampleStore, evaluations: Evaluations) -> Flow:
    rollout, train = config.rollout, config.train
    groups = (1 + train.async_ratio) * (train.batch_size // rollout.group_size) + rollout.extra_groups
    return Flow(
        in_flight=samples.in_flight,
        most=math.ceil(groups * (rollout.group_size + rollout.extra_per_group) - SLACK),
        queued=len(samples.leases.queue),
        leased=len(samples.leases.out),
        evaluating=evaluations.open,
        ready_groups=samples.pool.ready_groups,
        groups_per_batch=train.batch_size // rollout.group_size,
    )
