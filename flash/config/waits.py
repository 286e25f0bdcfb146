"""Waits that hold other waits: what they may take follows from `[deadlines]`, so that none ends before its parts."""

from __future__ import annotations

import math

from flash.config.tree import Config

LONG_POLL_S = 20.0
"""Seconds after which the hub answers a waiting request empty, so that the peer sees that the hub is alive."""

LONGEST_PAUSE_S = 60.0
"""Most seconds before an engine that died starts again: what killed it may pass, and a node is not idle for long."""


BEAT_S = 3.0
"""Seconds after which a trainer rank shows that its process runs: often enough that, when a collective has failed after
`deadlines.collective`, the hub knows which rank hangs."""

SILENT_S = 3 * BEAT_S
"""Seconds after which a trainer rank counts as silent."""

SECOND_LOOK_S = 1.0
"""Between the moment in which a peer seems silent and the verdict: a loop that was blocked itself has to read first."""

ECHO_S = 2.0
"""When a trainer rank is killed, the others' collectives fail, and their errors may come before the end of its own
connection is seen: for so long the hub waits for the cause, so that a restart follows and the right rank is named."""


def long_poll_s(config: Config) -> float:
    """How long the hub keeps a node waiting: well below the time that the node gives it to answer."""
    return min(LONG_POLL_S, config.deadlines.request / 3)


def news_s(config: Config) -> float:
    """How long the hub keeps a launcher waiting for news of its ranks: well below the time until that kills it."""
    return min(BEAT_S, config.deadlines.hub / 3)


def echo_s(config: Config) -> float:
    """How long the hub keeps an error for the echo of another one: well below the time that a rank gives it."""
    return min(ECHO_S, config.deadlines.request / 3)


def emptying_s(config: Config) -> float:
    """How long an engine may take to end or move its requests before it loads a version."""
    return {"drain": config.deadlines.generate, "abort": config.deadlines.swap}.get(config.rollout.swap, 0.0)


def new_version_s(config: Config) -> float:
    """How long an engine that serves may take from a version's announcement to its report of it."""
    return emptying_s(config) + config.deadlines.swap + config.deadlines.request


def first_version_s(config: Config) -> float:
    """How long an engine may take to start and to load its first version."""
    deadlines = config.deadlines
    return deadlines.env_reset + deadlines.engine_start + new_version_s(config)


def taken_s(config: Config) -> float:
    """How long a trainer rank may wait until the engines have what it has published: beyond what the hub gives them."""
    return first_version_s(config) + config.deadlines.request


def batch_s(config: Config) -> float:
    """The same until it has its shard: rank 0 may still be publishing meanwhile."""
    return taken_s(config) + new_version_s(config) + engine_return_s(config) + config.deadlines.batch


def leaving_s(config: Config) -> float:
    """Return how long a trainer rank may wait for the end of the run, once it has done all of its work.

    The rank keeps the weights during the last evaluation, in which engines may start, and die and come back.
    """
    return taken_s(config) + engine_return_s(config) + 2 * config.deadlines.step


def kept_s(config: Config) -> float:
    """How long a trainer rank may wait until the hub has written its state: beyond what the hub's stages last."""
    deadlines = config.deadlines
    return max(deadlines.batch, deadlines.step, deadlines.shutdown) + deadlines.request


def claim_s(config: Config) -> float:
    """How long the next hub waits for nodes that have outlived the one before it: they look for it once a second, and
    one that takes longer than a connection may take begins anew."""
    return config.deadlines.connect


def hang_s(config: Config) -> float:
    """How long an engine with requests may make no step: it is given up before they are."""
    return min(config.deadlines.engine_step, config.deadlines.generate / 2)


def engine_return_s(config: Config) -> float:
    """How long a node may be without engines: each restart of the last one can end in another death, up to its load."""
    once = config.deadlines.close + LONGEST_PAUSE_S + config.deadlines.engine_start + new_version_s(config)
    return config.engine.max_restarts * once


def lease_s(config: Config) -> float:
    """How long a node may take from a lease to its result: an episode, in which the node may lose all of its engines,
    its end, and the messages around it."""
    deadlines = config.deadlines
    return deadlines.episode + engine_return_s(config) + deadlines.close + 2 * deadlines.request


SHUTDOWN_MARGIN_S = 30
"""Seconds beyond deadlines.shutdown after which what has not ended is killed: a checkpoint must not be cut off."""


def grace_s(config: Config) -> int:
    """Seconds in which processes that were told to end do so."""
    return SHUTDOWN_MARGIN_S + math.ceil(config.deadlines.shutdown)
