"""The whole table of columns by kind of row, and the charts of `flash view`.

The columns of steps come from `training` and `speed`. The columns of evaluations and engines stand here. Everything
that shows or reports a number finds its column here, with `named`, `column_of` or `columns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from flash.observe.columns.column import Column, ColumnGroup
from flash.observe.columns.speed import SPEED
from flash.observe.columns.training import BATCH, CRITIC, LAG, LOSS, OFF_POLICY, RHYTHM, SFT

Kind = Literal["step", "evaluation", "engine"]
"""Kind of a row: a row of `metrics.jsonl`, a row of `evals.jsonl`, or the numbers of an engine in `cluster.json`."""

APART = ("step", "time")
"""Columns that trackers do not receive as values: they say where on the axes the other values are."""

EVALUATION = ColumnGroup(
    "",
    (
        Column("step", "number of steps made before the evaluation, which is the version that it was started for"),
        Column("version_min", "oldest version that sampled a token of the evaluation"),
        Column("version_max", "newest version that sampled a token of the evaluation"),
        Column(
            "mean_reward",
            "mean reward on held-out problems, drawn with its 95 % interval",
            label="held out",
            title="eval",
            chart="held_out",
            worry="it stays inside the interval of the first evaluation: the policy has learned nothing that carries "
            "over to other problems, or there are too few problems",
            helps="more steps; more problems, in training and in `eval.problems`; read the samples with the highest "
            "reward",
            tracker_name="eval/reward",
        ),
        Column(
            "held_out_nll",
            "mean −log-prob in nats of the tokens to learn in held-out rows. Only `flash sft` reports it",
            "nats",
            label="held out",
            title="eval",
            chart="held_out_nll",
            worry="it rises while `nll` falls: the policy learns the rows by heart",
            helps="train fewer epochs, or lower `train.learning_rate`",
        ),
        Column("low", "lower end of the 95 % interval", tracker_name="eval/reward_low"),
        Column("high", "upper end of the 95 % interval", tracker_name="eval/reward_high"),
        Column("k", "number of answers per problem"),
        Column(
            "best_of_k",
            "best reward among the k answers to a problem, in the mean over the problems",
            label="best of k",
            chart="held_out",
        ),
        Column(
            "binary",
            "1 if every reward was 0 or 1. `mean_reward` is then an accuracy, and `best_of_k` is pass@k; the terminal "
            "uses these names only then",
        ),
        Column("problems", "number of problems with at least one finished answer"),
        Column("samples", "number of finished answers"),
        Column("missing", "number of answers that were given up after too many failures"),
        Column("env/NAME", "same meaning as in the row of a step"),
        Column("domain/NAME/reward", "same meaning as in the row of a step"),
        Column("domain/NAME/tokens", "same meaning as in the row of a step", "tokens"),
        Column("time", "time at the end of the evaluation, in Unix seconds", "s"),
        Column("wall_s", "seconds since the run began", "s"),
    ),
)
"""Columns of an evaluation on held-out problems, a row of `evals.jsonl`."""

# A number that the engine itself reports is a field of `flash.rollout.engine.Pressure` with the same name. The numbers
# that its node counts are added in `flash.rollout.reports`.
ENGINE = ColumnGroup(
    "",
    (
        Column("requests", "number of requests that the engine holds", form=".0f", label="requests"),
        Column("limit", "number of requests that the engine may hold now", form=".0f", label="at most"),
        Column(
            "kv_used",
            "share of the engine's KV cache that is in use",
            "share",
            form=".0%",
            label="KV cache",
            worry="it is full while requests wait",
            helps="raise `engine.memory_fraction` (on CPUs `engine.kv_cache_gib`), add engines, or shorten the answers",
        ),
        Column(
            "preemptions",
            "number of sequences that the engine has preempted since its start, because its KV cache was full",
            form=".0f",
            label="preempted",
            worry="it grows all the time: preempted sequences are computed twice",
            helps="do the same as for a full KV cache (`kv_used`)",
        ),
        Column(
            "prefix_hit_share",
            "share of the prompt tokens that the engine found in its prefix cache, over the last 100 engine steps that "
            "began a request",
            "share",
            form=".0%",
            label="prefix hits",
            worry="it is small though episodes have many turns: each turn computes its whole prompt again",
        ),
        Column(
            "accepted_share",
            "share of the drafted tokens that the engine accepted, over the last 100 engine steps with drafted tokens",
            "share",
            form=".0%",
            label="drafts",
        ),
        Column(
            "tokens_per_second",
            "response tokens per second that the engine has returned since its last report",
            "tokens/s",
            label="tokens/s",
        ),
        Column("load_s", "seconds that the engine's last swap of weights took", "s", form=".2g", label="swap s"),
    ),
)
"""Numbers of an engine, reported every two seconds for the web page, Prometheus and `flash watch`."""

GROUPS: Mapping[Kind, Sequence[ColumnGroup]] = {
    "step": (BATCH, LOSS, OFF_POLICY, LAG, CRITIC, RHYTHM, SFT, SPEED),
    "evaluation": (EVALUATION,),
    "engine": (ENGINE,),
}
"""Columns of each kind of row, in the groups and the order of docs/metrics.md."""


class Chart(msgspec.Struct, frozen=True):
    """Chart of `flash view`, and panel of the dashboard in `docs/grafana.json`.

    It draws the columns that name it, and takes its texts from them.
    """

    id: str
    """Name that the columns have in `Column.chart`."""
    title: str
    """Heading on the page."""
    of: Kind = "step"
    """Kind of the rows that it draws."""
    log: bool = False
    """True if the axis is logarithmic."""
    from_zero: bool = True
    """True if a linear axis begins at 0."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that the chart draws, which all have one unit."""
        return tuple(column for column in columns(self.of) if column.chart == self.id)


CHARTS = (
    Chart("reward", "Reward while training", from_zero=False),
    Chart("held_out", "Held-out reward", "evaluation", from_zero=False),
    Chart("nll", "Loss on the training rows", from_zero=False),
    Chart("held_out_nll", "Loss on held-out rows", "evaluation", from_zero=False),
    Chart("entropy", "Entropy"),
    Chart("kl", "KL"),
    Chart("grad_norm", "Gradient norm"),
    Chart("ages", "Age of the trained tokens"),
    Chart("ess", "Effective sample size"),
    Chart("mismatch", "Mismatch of engine and trainer", log=True),
    Chart("left_out", "Tokens that do not count"),
    Chart("throughput", "Throughput"),
    Chart("waits", "Waiting trainer and idle engines"),
    Chart("seconds", "Seconds per step"),
    Chart("memory", "Memory of a trainer rank"),
    Chart("mfu", "Model FLOPs utilisation"),
    Chart("failures", "Failures"),
    Chart("domains", "Reward by domain", from_zero=False),
    Chart("domain_shares", "Share of each domain"),
    Chart("environment", "The environment's own metrics"),
)
"""All charts, in the order in which the page shows them."""


def columns(of: Kind) -> Iterable[Column]:
    """Return all columns of a kind of row."""
    return (column for group in GROUPS[of] for column in group.columns)


_NAMED: Mapping[Kind, Mapping[str, Column]] = {
    kind: {column.name: column for column in columns(kind)} for kind in GROUPS
}
"""Columns by kind of row and by name."""
_WITH_PLACEHOLDER = {
    kind: [column for column in by_name.values() if column.has_placeholder] for kind, by_name in _NAMED.items()
}
"""Columns whose names stand for several keys, by kind of row. `column_of` tries these last."""


def named(name: str, of: Kind = "step") -> Column:
    """Return the column of which this is the name in the table, with its placeholders, such as `age_N`.

    Raises KeyError if there is none. `column_of` finds the column for a key of a row, such as `age_2`.
    """
    return _NAMED[of][name]


def column_of(key: str, of: Kind) -> Column | None:
    """Return the column that a row's key belongs to; None if the table has none.

    Keys without a column are, for example, those of an objective that the user wrote.
    """
    found = _NAMED[of].get(key)
    return found or next((column for column in _WITH_PLACEHOLDER[of] if column.placeholder_text(key) is not None), None)
