"""Time limits and intervals that follow from `[deadlines]` or go with it, all in seconds.

A wait must not end before the waits that it contains, because its error would then name the wrong culprit. So the limit
of an outer wait is at least the sum of the limits of the inner ones. For the same reason a request that the hub lets
wait is answered well before its sender gives up.

The *hub* is the process that coordinates the run. A *node* plays samples on its engines: with a *lease* the hub orders
one sample from it. A *trainer rank* trains its *shard*, the part of a batch that belongs to it. A batch is trained in
one or several *rounds*, as its groups are complete. The weights after each step are a *version*, which rank 0 announces
to the hub, and which every engine loads.
"""

from __future__ import annotations

import math

from flash.config.tree import Config

LONG_POLL_S = 20.0
"""Largest number of seconds that a node's request for news waits in the hub. Then the hub sends an empty reply, which
shows that it is alive; `long_poll_s` may return a shorter time."""

ENGINE_STEP_S = 300.0
"""Largest time of an engine's step, in seconds. A healthy step takes a few seconds at most, also one that compiles its
graph."""

LONGEST_PAUSE_S = 60.0
"""Largest pause before a dead engine starts again, in seconds. A pause lets the cause of the death pass; the limit
keeps the node from being idle for long."""

BEAT_S = 3.0
"""Seconds between two heartbeats of a trainer rank: the hub holds back its reply to a heartbeat for this time. When a
collective fails after `deadlines.collective`, missing heartbeats show the hub which rank hangs."""

SILENT_S = 3 * BEAT_S
"""Seconds without a heartbeat after which a trainer rank counts as silent. Also the seconds without a request after
which a new connection may replace the connection of a peer with the same name."""

SECOND_LOOK_S = 1.0
"""Seconds between the moment at which a node or a rank seems silent to the hub and the second look, which decides. If
the hub's own event loop was blocked, it first has to read the messages that have arrived meanwhile."""

ECHO_S = 2.0
"""Seconds that the hub waits for the cause of an error of a trainer rank or of an engine. When a rank is killed, the
collectives of other ranks and the loads of engines fail, and their errors may arrive before the hub sees the end of the
killed rank's connection. With this wait the hub restarts the ranks and names the right one."""


def long_poll_s(config: Config) -> float:
    """Return the largest time, in seconds, that the hub lets a node's request for leases, cancels or versions wait for
    news before it sends an empty reply."""
    # The node gives up a request after deadlines.request, so an empty reply must arrive long before that.
    return min(LONG_POLL_S, config.deadlines.request / 3)


def news_s(config: Config) -> float:
    """Return the largest time, in seconds, that the hub lets a launcher's request for news of its ranks wait before it
    replies that nothing has changed."""
    # The launcher kills a hub that has not answered for deadlines.hub.
    return min(BEAT_S, config.deadlines.hub / 3)


def echo_s(config: Config) -> float:
    """Return the seconds that the hub waits before it acts on a reported error that may be only the consequence (the
    echo) of the loss of a trainer rank."""
    # The process that reported the error waits for the reply for at most deadlines.request.
    return min(ECHO_S, config.deadlines.request / 3)


def emptying_s(config: Config) -> float:
    """Return the seconds that an engine has to get rid of its requests before it loads a version.

    0 for `recompute` and `keep`, with which the requests stay in the engine during the load.
    """
    match config.rollout.swap:
        case "drain":  # each request ends within its own limit
            return config.deadlines.generate
        case "abort":  # the requests move to other engines
            return config.deadlines.swap
        case _:
            return 0.0


def new_version_s(config: Config) -> float:
    """Return the seconds from the hub's announcement of a version until a node must have reported that an engine has
    loaded it. The engine samples already, so its start is not included."""
    # The last summand is the time for the report.
    return emptying_s(config) + config.deadlines.swap + config.deadlines.request


def first_version_s(config: Config) -> float:
    """Return the seconds from the start of a node until one of its engines has loaded its first version."""
    deadlines = config.deadlines
    # Before a node starts its engines, it waits for `prepare` of the environment, for at most deadlines.env_step.
    return deadlines.env_step + deadlines.engine_start + new_version_s(config)


def taken_s(config: Config) -> float:
    """Return the seconds that trainer rank 0 waits for the hub's reply when it announces a version.

    The hub replies once every engine has loaded the version before this one.
    """
    # The hub gives a slow engine at most `first_version_s`, and then ends the run. Its error must arrive before this
    # timeout, which would blame the hub.
    return first_version_s(config) + config.deadlines.request


def batch_s(config: Config) -> float:
    """Return the seconds that a trainer rank waits for the hub's reply with its shard of a round."""
    # All other ranks ask at once, while rank 0 may still wait for the reply to its announcement (`taken_s`). Then the
    # engines load the version, may all die and come back, and sample the batch.
    return taken_s(config) + new_version_s(config) + engine_return_s(config) + config.deadlines.step


def leaving_s(config: Config) -> float:
    """Return the seconds that a trainer rank waits for the hub's reply to its `Goodbye`, when it has done all of its
    work.

    The hub replies at the end of the last evaluation. The rank keeps the weights until then, because engines may start,
    die and start again during the evaluation.
    """
    # The other ranks may wait here while rank 0 announces the last version, or saves and exports (deadlines.step).
    # The last evaluation has deadlines.step, too (`flash.hub.stages.Stage.EVALUATING`).
    return taken_s(config) + engine_return_s(config) + 2 * config.deadlines.step


def kept_s(config: Config) -> float:
    """Return the seconds that trainer rank 0 waits until the hub has written its state into the checkpoint that the
    ranks are saving."""
    # While the ranks save, the run may be in a stage (`flash.hub.stages`) with either of these limits. The error of
    # the stage must come before this timeout, which would blame the hub.
    deadlines = config.deadlines
    return max(deadlines.step, deadlines.shutdown) + deadlines.request


def claim_s(config: Config) -> float:
    """Return the seconds that a restarted hub waits for nodes to claim the leases that the previous hub granted.

    The tasks of leases that no node has claimed by then are queued again.
    """
    return config.deadlines.request  # ample: a node that has lost its hub looks for the next one once a second


def hang_s(config: Config) -> float:
    """Return the seconds after which an engine that has requests but makes no step counts as dead."""
    # Half of the limit for a response: the requests must have time left to end on another engine.
    return min(ENGINE_STEP_S, config.deadlines.generate / 2)


def engine_return_s(config: Config) -> float:
    """Return the seconds that a node may be without an engine that samples, from the death of its last one.

    Each of the `cluster.max_restarts` restarts can end in another death, at the latest while the engine loads its
    weights.
    """
    # One restart: end the dead engine, pause, start, and load the newest version.
    once = config.deadlines.close + LONGEST_PAUSE_S + config.deadlines.engine_start + new_version_s(config)
    return config.cluster.max_restarts * once


def lease_s(config: Config) -> float:
    """Return the seconds that a node has from a lease to its result. The hub takes back a lease that lasts longer, and
    queues its sample again."""
    deadlines = config.deadlines
    # The episode, which may wait for engines to come back; the end of its environment; and the messages with the lease
    # and with the result.
    return deadlines.episode + engine_return_s(config) + deadlines.close + 2 * deadlines.request


SHUTDOWN_MARGIN_S = 30
"""Seconds beyond deadlines.shutdown that a process has to exit. The margin protects a checkpoint that is being
written."""


def grace_s(config: Config) -> int:
    """Return the seconds that a process of the run has to exit after it was asked to; then it is killed.

    A new launch waits as long for the processes of an earlier launch of the same run to release the run directory.
    """
    return SHUTDOWN_MARGIN_S + math.ceil(config.deadlines.shutdown)
