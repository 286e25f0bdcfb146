"""What a held-out evaluation measures."""

from __future__ import annotations

from flash.observe.columns.column import Column, ColumnGroup

EVALUATION = ColumnGroup(
    "",
    (
        Column("step", "steps made before it, so the version at which it was asked for"),
        Column("version_min", "the oldest version that sampled a token of it"),
        Column("version_max", "the newest version that sampled a token of it"),
        Column(
            "mean_reward",
            "mean reward on held-out problems, drawn with its 95 % interval",
            label="held out",
            title="eval",
            chart="held_out",
            worry="it stays inside the first interval: nothing was learned that carries over, or problems are too few",
            tracked="eval/reward",
        ),
        Column(
            "held_out_nll",
            "of `flash sft`: mean −log-prob of the tokens to learn of held-out rows",
            "nats",
            label="held out",
            title="eval",
            chart="held_out_nll",
            worry="it rises while `nll` falls: rows are learned by heart. Fewer epochs, or a lower rate",
        ),
        Column("low", "lower end of its 95 % interval", tracked="eval/reward_low"),
        Column("high", "upper end of its 95 % interval", tracked="eval/reward_high"),
        Column("k", "answers per problem"),
        Column(
            "best_of_k",
            "mean over problems of the best reward among the k answers",
            label="best of k",
            chart="held_out",
        ),
        Column(
            "binary",
            "1 where every reward was 0 or 1: `mean_reward` is then an accuracy, and `best_of_k` pass@k; the "
            "terminal calls them so only there",
        ),
        Column("problems", "problems that count"),
        Column("samples", "answers that count"),
        Column("missing", "answers that failed too often"),
        Column("env/NAME", "as of a step"),
        Column("domain/NAME/reward", "as of a step"),
        Column("domain/NAME/tokens", "as of a step", "tokens"),
        Column("time", "Unix seconds at its end", "s"),
        Column("wall_s", "time since the run began", "s"),
    ),
)
