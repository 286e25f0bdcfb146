"""The cluster as the hub sees it, for people: a picture of its books, taken at once, of a size that nodes alone set."""

from __future__ import annotations

import math

from msgspec.structs import replace

from flash.ages import SLACK
from flash.config.tree import Config
from flash.hub.nodes.members import Members
from flash.hub.nodes.nodes import Nodes
from flash.hub.progress import RunProgress
from flash.hub.ranks.trainers import Trainers
from flash.observe.cluster import MOST_LEASES, Flow, HubNow, LeaseNow, NodeNow, NodeState, RankNow
from flash.samples.evaluation import Evaluations
from flash.samples.state import Samples


def overview(
    config: Config,
    members: Members,
    nodes: Nodes,
    trainers: Trainers,
    samples: Samples,
    evaluations: Evaluations,
    progress: RunProgress,
    *,
    doing: str,
    now: float,
) -> HubNow:
    """What all of them are doing; `doing` is what the run waits for, in words, `now` Unix seconds."""
    gone = nodes.statuses.gone
    oldest = nodes.holders.oldest(MOST_LEASES)
    return HubNow(
        at=now,
        doing=doing,
        version=progress.version,
        published=progress.published.version if progress.published is not None else -1,
        nodes=[*(_node(node, config, nodes, trainers) for node in members.numbers), *reversed(gone)],
        ranks=[
            RankNow(
                rank,
                trainers.node_of(rank),
                trainers.incarnations.processes.get(rank),
                trainers.begun.get(rank),
                trainers.hosts.get(rank, ""),
            )
            for rank in range(config.trainer_world_size)
        ],
        trainer_restarts=trainers.incarnations.followed,
        flow=_flow(config, samples, evaluations),
        leases=[
            LeaseNow(
                node,
                lease.task.group_id,
                lease.task.sample_index,
                lease.task.split,
                lease.task.attempt,
                since,
            )
            for node, lease, since in oldest
        ],
    )


def _node(node: int, config: Config, nodes: Nodes, trainers: Trainers) -> NodeNow:
    status = nodes.statuses.of(node)
    if status is not None:  # of versions the hub hears at once
        known = {engine.index: engine.version for engine in nodes.fleet.engines_of(node)}
        engines = [replace(engine, version=known.get(engine.number, engine.version)) for engine in status.engines]
        status = replace(status, engines=engines)
    oldest = nodes.holders.oldest_of(node)
    trains = config.engines_on(node) == 0 and any(
        trainers.node_of(rank) == node for rank in trainers.incarnations.present
    )
    state: NodeState = "here" if status is not None or trains else "starting"
    if node in nodes.silent:
        state = "silent"
    elif node in nodes.leaving:
        state = "leaving"
    return NodeNow(
        node=node,
        state=state,
        heard_at=nodes.statuses.heard_at(node),
        status=status,
        leases=nodes.holders.held(node),
        oldest_lease=oldest,
    )


def _flow(config: Config, samples: Samples, evaluations: Evaluations) -> Flow:
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
