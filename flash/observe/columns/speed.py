"""What a step tells of the run's speed, and of its books."""

from __future__ import annotations

from flash.observe.columns.column import Alarm, Column, ColumnGroup, Row
from flash.observe.rundir.summary import number

AFTER_RESTART = "after_restart"
"""Added to a row that tells of a restart, and to the next one: who waited then waited for that."""


def _seconds(row: Row) -> float:
    return 0.0 if row.get(AFTER_RESTART) else number(row, "interval_s") or 0.0


def _failures(row: Row) -> float:
    """Without those that a lost node, or the hub before this one, took with it."""
    return (number(row, "failures") or 0.0) - (number(row, "failures_cancelled") or 0.0)


def _attempts(row: Row) -> float:
    return _failures(row) + (number(row, "samples") or 0.0)


def _failed(row: Row) -> float:
    return _failures(row) / max(_attempts(row), 1.0)


SPEED = ColumnGroup(
    "Speed and books. Counters are totals of the run, across restarts.",
    (
        Column("time", "Unix seconds at the end of the step", "s"),
        Column("wall_s", "time since the run began", "s", tracked="perf/wall_time"),
        Column(
            "interval_s",
            "time since the last step ended",
            "s",
            label="from step to step",
            chart="seconds",
            worry="it is far above what the training takes: somebody waits",
            tracked="perf/step_time",
        ),
        Column(
            "trainer_step_s",
            "what the training itself took of it",
            "s",
            label="training",
            chart="seconds",
            tracked="perf/train_time",
        ),
        Column("trainer_wait_s", "time of it that the trainer waited for a batch", "s", tracked="perf/wait_time"),
        Column(
            "trainer_wait_share",
            "share of `interval_s` in which the trainer waited for a batch",
            "share",
            label="trainer waits",
            title="wait%",
            chart="waits",
            worry="it is large all the time",
            helps="give more of the devices to engines, or raise `train.async_ratio`; `flash simulate` says how many",
            alarm=Alarm("trainer_waits", "of its time the trainer waited for batches", weight=_seconds),
            tracked="perf/wait_share",
        ),
        Column(
            "memory_gib",
            "most memory of a trainer rank in the step, over all ranks: on a GPU the most that torch allocated, on the "
            "CPU the memory of the process at the end of the step",
            "GiB",
            label="memory of a trainer rank",
            chart="memory",
            worry="it nears the memory of the card, or it rises from step to step",
            helps="lower `train.max_tokens_per_microbatch`, or set `train.activation_checkpointing` or "
            "`train.offload`; `flash plan` computes what a layout needs",
            tracked="perf/memory_gib",
        ),
        Column(
            "mfu",
            "model FLOPs utilisation: FLOPs of the policy's forward and backward passes, over the seconds of the step "
            "times the bfloat16 peak of all trainer ranks' cards; only on cards whose peak is known",
            "share",
            label="MFU",
            chart="mfu",
            worry="it is far below that of other runs of this model",
            helps="raise `train.max_tokens_per_microbatch`; `train.profile` shows where the time of a step goes",
            tracked="perf/mfu",
        ),
        Column("version_bytes", "of the weights that the step began with, as they travel to an engine", "bytes"),
        Column("engines", "engines that the run has now", form=".0f", label="engines", tracked="perf/engines"),
        Column(
            "engine_restarts",
            "engines that died and start again, since the last step",
            form=".0f",
            label="engine restarts",
        ),
        Column(
            "trainer_restarts",
            "how often trainer ranks came back since the last step",
            form=".0f",
            label="trainer restarts",
        ),
        Column(
            "loop_blocked_s",
            "time since the last step in which a user's code blocked the event loop of a node, over all nodes",
            "s",
            label="loop blocked",
            worry="it is above 0: everything on that node waits meanwhile",
            helps="the output of the node names file and line: use plain `def`, which runs in a thread, or await",
        ),
        Column(
            "abandoned_calls",
            "calls of a user's code since the last step that went on though they were cancelled, and were abandoned",
            form=".0f",
            label="abandoned calls",
            worry="it is above 0: what such a call holds is never released",
            helps="the output of the node names file and line: let `CancelledError` pass",
        ),
        Column(
            "engine_idle_share",
            "share of their time since the last step without a request",
            "share",
            label="engines idle",
            chart="waits",
            worry="it is large all the time",
            helps="give more of the devices to the trainer, or raise `train.async_ratio` or `rollout.max_concurrent`",
            alarm=Alarm("engines_idle", "of their time the engines had no request", weight=_seconds),
            tracked="perf/engine_idle_share",
        ),
        Column(
            "draft_accepted_share",
            "share of the tokens drafted since the last step that stayed, with `speculative_config`",
            "share",
            label="drafts",
        ),
        Column(
            "tokens_per_second",
            "tokens that arrived meanwhile",
            "tokens/s",
            label="tokens/s",
            title="tok/s",
            chart="throughput",
            worry="it falls while nothing else changes: answers grew, an engine is gone, or environments became slow",
            tracked="perf/tokens_per_second",
        ),
        Column(
            "queue_ready_groups",
            "complete groups that wait",
            form=".0f",
            label="groups ready",
            tracked="perf/ready_groups",
        ),
        Column(
            "in_flight",
            "issued samples that are not trained, filtered or given up yet",
            form=".0f",
            label="samples in flight",
            tracked="perf/in_flight",
        ),
        Column("generated_tokens", "counter: sampled response tokens", "tokens"),
        Column(
            "failures",
            "attempts that failed since the last step, tried again or given up",
            form=".0f",
            label="attempts failed",
            title="fail",
            chart="failures",
            worry="they come at every step: the first of each kind is printed with its error in the terminal",
            helps="`failures_WHY` in `metrics.jsonl` counts them by reason",
            alarm=Alarm(
                "failures",
                "of the episodes failed and were tried again or given up",
                weight=_attempts,
                number=_failed,
                looks_at="`failures` but `failures_cancelled`, of all attempts at a sample",
            ),
        ),
        Column(
            "failures_WHY",
            "the same by reason (`env_error`, `env_timeout`, `reward_error`, `engine_error`, `engine_killed`, under "
            "which engines died, `too_long`, whose prompt left no room for an answer and which are not tried again, "
            "and `cancelled`, whose node was lost)",
            chart="failures",
        ),
        Column("stale_tokens", "counter: tokens thrown away as too old", "tokens"),
        Column("wasted_tokens", "counter: tokens thrown away for any reason", "tokens"),
        Column("sink_lost", "counter, with `observe.sink`: rows that it did not take since this process began"),
        Column("filtered", "counter: filtered samples", form=".0f", label="filtered"),
        Column("equal_rewards_share", "share of the groups that ended whose rewards were equal", "share"),
        Column("given_up", "counter: samples that failed too often", form=".0f", label="given up"),
    ),
)
