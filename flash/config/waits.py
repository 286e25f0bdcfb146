"""Time limits and intervals that follow from `[deadlines]` or go with it. No wait ends before the waits that it
contains."""

from __future__ import annotations

import math

from flash.config.tree import Config

LONG_POLL_S = 20.0
"""Seconds after which the hub answers a waiting request with an empty reply, which shows that the hub is alive."""

ENGINE_STEP_S = 300.0
"""Largest time of an engine's step, in seconds. A step takes seconds at most, also one that compiles its graph."""

LONGEST_PAUSE_S = 60.0
"""Largest pause before a dead engine starts again, in seconds. A pause lets the cause of the death pass; the limit
keeps the node from being idle for long."""

BEAT_S = 3.0
"""Seconds between two heartbeats of a trainer rank. When a collective fails after `deadlines.collective`, missing
heartbeats show the hub which rank hangs."""

SILENT_S = 3 * BEAT_S
"""Seconds without a heartbeat after which a trainer rank counts as silent."""

SECOND_LOOK_S = 1.0
"""Seconds between the moment at which a peer seems silent and the decision. If the hub's own loop was blocked, it first
has to read the messages that have arrived meanwhile."""

ECHO_S = 2.0
"""Seconds that the hub waits for the cause of an error of a trainer rank. When a rank is killed, the collectives of
other ranks fail, and their errors may arrive before the hub sees the end of the killed rank's connection. With this
wait the hub restarts the ranks and names the right one."""


def long_poll_s(config: Config) -> float:
    """Return the seconds that the hub keeps a node's request waiting. They are well below the node's timeout for the
    reply."""
    return min(LONG_POLL_S, config.deadlines.request / 3)


def news_s(config: Config) -> float:
    """Return the seconds that the hub keeps a launcher's request for news of its ranks waiting.

    They are well below the time after which the launcher kills a hub that does not answer.
    """
    return min(BEAT_S, config.deadlines.hub / 3)


def echo_s(config: Config) -> float:
    """Return the seconds that the hub waits before it acts on an error that may be only the echo of another one.

    They are well below the timeout of the process that reported the error.
    """
    return min(ECHO_S, config.deadlines.request / 3)


def emptying_s(config: Config) -> float:
    """Return the seconds that an engine has to end or move its requests before it loads a version."""
    return {"drain": config.deadlines.generate, "abort": config.deadlines.swap}.get(config.rollout.swap, 0.0)


def new_version_s(config: Config) -> float:
    """Return the seconds that a serving engine has, from the announcement of a version to its report that the version
    is loaded."""
    return emptying_s(config) + config.deadlines.swap + config.deadlines.request


def first_version_s(config: Config) -> float:
    """Return the seconds that an engine has to start and to load its first version."""
    deadlines = config.deadlines
    return deadlines.env_reset + deadlines.engine_start + new_version_s(config)


def taken_s(config: Config) -> float:
    """Return the seconds that a trainer rank waits until the engines have loaded the version that it has published.

    They are longer than the time that the hub gives the engines.
    """
    return first_version_s(config) + config.deadlines.request


def batch_s(config: Config) -> float:
    """Return the seconds that a trainer rank waits for its shard of a batch. Rank 0 may still be publishing
    meanwhile."""
    return taken_s(config) + new_version_s(config) + engine_return_s(config) + config.deadlines.batch


def leaving_s(config: Config) -> float:
    """Return the seconds that a trainer rank waits for the end of the run, once it has done all of its work.

    The rank keeps the weights during the last evaluation, in which engines may start, die and start again.
    """
    return taken_s(config) + engine_return_s(config) + 2 * config.deadlines.step


def kept_s(config: Config) -> float:
    """Return the seconds that trainer rank 0 waits until the hub has written its state into a checkpoint.

    They are longer than any stage of the hub may take in which the ranks save a checkpoint (`flash.hub.stages`).
    """
    deadlines = config.deadlines
    return max(deadlines.batch, deadlines.step, deadlines.shutdown) + deadlines.request


def claim_s(config: Config) -> float:
    """Return the seconds that the next hub waits for nodes that have outlived the previous hub.

    Nodes look for the next hub once a second. Leases that no node has claimed by then are queued again.
    """
    return config.deadlines.request


def hang_s(config: Config) -> float:
    """Return the seconds after which an engine that has requests but makes no step is given up, before its requests
    time out."""
    return min(ENGINE_STEP_S, config.deadlines.generate / 2)


def engine_return_s(config: Config) -> float:
    """Return the seconds that a node may be without engines.

    Each restart of its last engine can end in another death, at the latest while the engine loads its weights.
    """
    once = config.deadlines.close + LONGEST_PAUSE_S + config.deadlines.engine_start + new_version_s(config)
    return config.engine.max_restarts * once


def lease_s(config: Config) -> float:
    """Return the seconds that a node has from a lease to its result.

    They cover an episode in which the node may lose all of its engines, the end of the episode, and the messages around
    it.
    """
    deadlines = config.deadlines
    return deadlines.episode + engine_return_s(config) + deadlines.close + 2 * deadlines.request


SHUTDOWN_MARGIN_S = 30
"""Seconds beyond deadlines.shutdown after which a process that has not exited is killed. The margin protects a
checkpoint that is being written."""


def grace_s(config: Config) -> int:
    """Return the seconds that a process has to exit after it was asked to."""
    return SHUTDOWN_MARGIN_S + math.ceil(config.deadlines.shutdown)
