"""Columns about the speed of a run, its failures and its counters of samples and tokens.

The functions compute numbers and weights of alarms (`Alarm.number`, `Alarm.weight`): `flash.observe.alarms` calls them
with the row of each step. `flash.observe.columns.table` joins this group of columns with those of `training`.
"""

from __future__ import annotations

from flash.observe.columns.column import Alarm, Column, ColumnGroup, Row
from flash.observe.rundir.summary import number

AFTER_RESTART = "after_restart"
"""Key that is true in the row of a step with a restart of engines or trainer ranks, and in the next row.

`flash.observe.alarms` adds it to its own copy of the row, so that it is in no file. The waits in these rows are waits
for the restart, and no sign of a bad configuration.
"""


def _seconds(row: Row) -> float:
    """Return the seconds of the step, its weight in alarms about waiting; 0 at a restart, so that it does not count."""
    return 0.0 if row.get(AFTER_RESTART) else number(row, "interval_s") or 0.0


def _failures(row: Row) -> float:
    """Return the number of failed attempts at a sample since the last step, without cancelled ones.

    Cancelled attempts were lost with a node or a previous hub, and are no fault of the environment.
    """
    return (number(row, "failures") or 0.0) - (number(row, "failures_cancelled") or 0.0)


def _attempts(row: Row) -> float:
    """Return the weight of a step in the alarm `failures`: its failed attempts and its samples that were trained."""
    return _failures(row) + (number(row, "samples") or 0.0)


def _failed_share(row: Row) -> float:
    """Return the share of the attempts that failed, which the alarm `failures` compares with its limit."""
    return _failures(row) / max(_attempts(row), 1.0)


SPEED = ColumnGroup(
    "These numbers describe speed, failures and the ledger. A counter is a total of the run, across restarts.",
    (
        Column("time", "time at the end of the step, in Unix seconds", "s"),
        Column("wall_s", "seconds since the run began", "s", tracker_name="perf/wall_time"),
        Column(
            "interval_s",
            "seconds since the end of the last step",
            "s",
            label="from step to step",
            chart="seconds",
            worry="it is far above `trainer_step_s`: the trainer waits for samples",
            helps="see `trainer_wait_share`",
            tracker_name="perf/step_time",
        ),
        Column(
            "trainer_step_s",
            "seconds of `interval_s` in which the trainer trained",
            "s",
            label="training",
            chart="seconds",
            tracker_name="perf/train_time",
        ),
        Column(
            "streamed_share",
            "share of `trainer_step_s` in which samples of the same batch were still being generated (`train.stream`)",
            "share",
            label="trained while sampling",
        ),
        Column(
            "trainer_wait_s",
            "seconds of `interval_s` in which the trainer waited for a batch",
            "s",
            tracker_name="perf/wait_time",
        ),
        Column(
            "trainer_wait_share",
            "share of `interval_s` in which the trainer waited for a batch",
            "share",
            label="trainer waits",
            title="wait%",
            chart="waits",
            worry="it is large in all steps",
            helps="if the engines are rarely idle (`engine_idle_share`), give them more devices: a larger "
            "`train.async_ratio` does not help. If both wait, raise `train.async_ratio`",
            alarm=Alarm("trainer_waits", 0.9, "of its time the trainer waited for batches", weight=_seconds),
            tracker_name="perf/wait_share",
        ),
        Column(
            "memory_gib",
            "largest memory of a trainer rank in the step, over all ranks. On a GPU it is the most memory that torch "
            "allocated, on a CPU the memory of the process at the end of the step",
            "GiB",
            label="memory of a trainer rank",
            chart="memory",
            worry="it comes close to the memory of the card, or it rises from step to step",
            helps="lower `train.max_tokens_per_microbatch`, or set `train.activation_checkpointing` or "
            "`train.offload`; `flash plan` computes what a layout needs",
            tracker_name="perf/memory_gib",
        ),
        Column(
            "mfu",
            "share of the cards' peak speed that the training uses (model FLOPs utilisation): the FLOPs of the "
            "policy's forward and backward passes, divided by the seconds of the step and by the bfloat16 peak of all "
            "trainer ranks' cards. It is measured only on cards whose peak is known",
            "share",
            label="MFU",
            chart="mfu",
            worry="it is far below that of other runs of this model",
            helps="raise `train.max_tokens_per_microbatch`; `train.profile` shows where the time of a step goes",
            tracker_name="perf/mfu",
        ),
        Column(
            "version_bytes",
            "size in bytes of the weights that the step began with, as they are sent to engines",
            "bytes",
        ),
        Column(
            "engines",
            "number of engines that the run has at the end of the step",
            form=".0f",
            label="engines",
            tracker_name="perf/engines",
        ),
        Column(
            "engine_restarts",
            "number of engines that died and were started again since the last step",
            form=".0f",
            label="engine restarts",
        ),
        Column(
            "trainer_restarts",
            "number of times that the trainer ranks were started again since the last step",
            form=".0f",
            label="trainer restarts",
        ),
        Column(
            "loop_blocked_s",
            "seconds since the last step in which a user's code blocked the event loop of a node, over all nodes",
            "s",
            label="loop blocked",
            worry="it is above 0: everything on that node has to wait while its loop is blocked",
            helps="find the file and line in the output of the node. Use a plain `def`, which runs in a thread, or "
            "use await",
        ),
        Column(
            "abandoned_calls",
            "number of calls of a user's code since the last step that did not end when they were cancelled. Their "
            "node no longer waits for them",
            form=".0f",
            label="abandoned calls",
            worry="it is above 0: such a call never releases the resources that it holds",
            helps="find the file and line in the output of the node, and do not catch `CancelledError` there",
        ),
        Column(
            "engine_idle_share",
            "share of their time since the last step in which the engines had no request",
            "share",
            label="engines idle",
            chart="waits",
            worry="it is large in all steps",
            helps="if the trainer rarely waits (`trainer_wait_share`), give it more devices, or lower "
            "`train.async_ratio`. If both wait, raise `train.async_ratio` or `rollout.max_concurrent`",
            alarm=Alarm("engines_idle", 0.9, "of their time the engines had no request", weight=_seconds),
            tracker_name="perf/engine_idle_share",
        ),
        Column(
            "draft_accepted_share",
            "share of the tokens drafted since the last step that were accepted, with `speculative_config`",
            "share",
            label="drafts",
        ),
        Column(
            "tokens_per_second",
            "sampled tokens that arrived at the hub since the last step, per second",
            "tokens/s",
            label="tokens/s",
            title="tok/s",
            chart="throughput",
            worry="it falls while nothing else changes: answers became longer, an engine is missing, or environments "
            "became slow",
            helps="look at `engines` and at the timeline of `flash view`",
            tracker_name="perf/tokens_per_second",
        ),
        Column(
            "queue_ready_groups",
            "number of complete groups that wait to be trained",
            form=".0f",
            label="groups ready",
            tracker_name="perf/ready_groups",
        ),
        Column(
            "in_flight",
            "number of issued samples that are not yet trained, filtered or given up",
            form=".0f",
            label="samples in flight",
            tracker_name="perf/in_flight",
        ),
        Column("generated_tokens", "counter of the sampled response tokens", "tokens"),
        Column(
            "failures",
            "number of attempts at a sample that failed since the last step, tried again or given up",
            form=".0f",
            label="attempts failed",
            title="fail",
            chart="failures",
            worry="it is above 0 in each step",
            helps="read the error in the terminal, which shows the first failure of each kind. `failures_WHY` in "
            "`metrics.jsonl` counts failures by reason",
            alarm=Alarm(
                "failures",
                0.1,
                "of the episodes failed and were tried again or given up",
                weight=_attempts,
                number=_failed_share,
                looks_at="`failures` without `failures_cancelled`, as a share of all attempts at a sample",
            ),
        ),
        Column(
            "failures_WHY",
            "number of these failures with the reason WHY: `env_error`, `env_timeout`, `reward_error`, `engine_error`, "
            "`engine_killed` (engines died while they worked on the sample), `too_long` (the prompt left no room for "
            "an answer; such a sample is not tried again) or `cancelled` (the node was lost)",
            chart="failures",
        ),
        Column("stale_tokens", "counter of the tokens that were thrown away as too old", "tokens"),
        Column("wasted_tokens", "counter of the tokens that were thrown away for any reason", "tokens"),
        Column(
            "sink_lost",
            "counter of the rows that your sinks of `track.to` failed on or had no room for, since this process began",
        ),
        Column("filtered", "counter of the samples that were filtered out", form=".0f", label="filtered"),
        Column(
            "equal_rewards_share",
            "share of the groups that ended since the last step whose rewards were all equal",
            "share",
            worry="it is above 50 %: most groups teach nothing. The alarm `equal_rewards` looks at whole batches only, "
            "and is silent with `rollout.drop_equal_rewards`",
            helps="use problems that are neither too easy nor too hard, give partial rewards, or raise "
            "`rollout.group_size`",
        ),
        Column(
            "given_up",
            "counter of the samples that were given up after too many failures",
            form=".0f",
            label="given up",
        ),
    ),
)
