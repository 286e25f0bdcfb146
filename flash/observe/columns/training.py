"""What a step measures of its training: of the batch, the loss, and how far off policy it was."""

from __future__ import annotations

from flash.observe.columns.column import LIMITS, Alarm, Column, ColumnGroup, Row, steps, tokens
from flash.observe.rundir.summary import number

SKIPPED = "skipped_steps"
"""The counter of updates that were left out for a non-finite gradient."""
SKIPPED_NOW = "skipped_now"
"""Those of this step, which alarms put into the row."""
FINITE = ("loss", "entropy", "grad_norm")
"""What every step of a run that is well has as finite numbers."""
LOWER_ALPHA = "lower `train.async_ratio` or `train.learning_rate`"


def _masked(row: Row) -> float:
    return (number(row, "masked_correction_share") or 0.0) + (number(row, "masked_cap_share") or 0.0)


def _nothing_to_learn(row: Row) -> float:
    return float(number(row, "advantage_abs_mean") == 0)


def _nonfinite(row: Row) -> float:
    bad = any(key in row and number(row, key) is None for key in FINITE)
    return float(bad or (number(row, SKIPPED_NOW) or 0.0) > 0)


def _youngest(row: Row) -> float:
    """Tokens of age 0, so that the policy's own drift is not in the mismatch."""
    return (number(row, "age_0") or 0.0) * tokens(row)


BATCH = ColumnGroup(
    "Of the batch, before it is trained. Means are over tokens or samples of all ranks.",
    (
        Column("step", "number of the step, from 0", form=".0f", title="step"),
        Column("version", "policy version that it made"),
        Column("samples", "samples of which a token was trained"),
        Column("tokens", "tokens of the batch, prompts included", "tokens"),
        Column("shared_token_share", "share computed once for several sequences", "share"),
        Column("trained_tokens", "response tokens in the loss: neither too old nor rejected", "tokens"),
        Column(
            "reward_mean",
            "mean reward of the samples, before shaping",
            label="reward",
            title="reward",
            chart="reward",
            worry="it falls over many steps, or rises while the held-out reward falls: the policy games the reward",
            tracked="train/reward",
        ),
        Column("reward_std", "standard deviation of these rewards"),
        Column(
            "advantage_abs_mean",
            "mean size of the advantage of a token; 0 when nothing can be learned from the batch",
            helps="take problems that are neither too easy nor too hard, grade the reward, raise "
            "`rollout.group_size`, or set `rollout.drop_equal_rewards`",
            alarm=Alarm(
                "equal_rewards",
                "of the steps had nothing to learn from, since the rewards of each group were equal",
                weight=steps,
                number=_nothing_to_learn,
                looks_at="steps whose `advantage_abs_mean` is 0",
            ),
        ),
        Column(
            "age_mean",
            "mean age of the trained tokens, in versions since they were sampled",
            "versions",
            label="mean age",
            title="age",
            chart="ages",
            worry="it sticks at ⌈`train.async_ratio`⌉, or near `train.max_token_age`: samples outlast the window",
            helps="lower `train.async_ratio`, or add engines",
            alarm=Alarm("age", "versions is the mean age of the trained tokens"),
        ),
        Column("age_max", "the greatest of these ages", "versions", ".0f", label="oldest", title="max", chart="ages"),
        Column("age_N", "share of the trained tokens that is N versions old", "share"),
        Column(
            "stale_share",
            "of the tokens trained or thrown away as too old since the last step, those thrown away",
            "share",
            label="thrown away as too old",
            title="old%",
            chart="left_out",
            worry="it is not small: answers outlast the window",
            helps="set `train.max_token_age`, shorten the answers (`rollout.max_new_tokens`), add engines, or set "
            "`rollout.on_expire`",
            alarm=Alarm("stale", "of the tokens were too old and not trained"),
        ),
        Column(
            "masked_old_share",
            "share of the response tokens that were too old and left out of the loss",
            "share",
            label="too old",
            chart="left_out",
        ),
        Column("branches", "[branches](agents.md) per sample; 1 where no agent branches"),
        Column("branch_token_share", "share of the response tokens that are in others than the first", "share"),
        Column(
            "env/NAME",
            "mean of the environment's own metric NAME, over the samples that have it; the last turn's counts",
            chart="environment",
            worry="as the environment's author says",
        ),
        Column("domain/NAME/reward", "of several kinds or domains: mean reward of its samples"),
        Column("domain/NAME/tokens", "response tokens of its samples", "tokens"),
        Column("domain/NAME/share", "its share of all groups trained so far", "share"),
        Column("share_drift", "how far the furthest domain is off its share, in batches"),
    ),
)
LOSS = ColumnGroup(
    "Of the loss and the update.",
    (
        Column(
            "loss",
            "what was minimised, mean over updates; its sign and size say little",
            form=".4f",
            title="loss",
            helps='lower `train.learning_rate`, or set `model.dtype = "float32"`, and look in `plots/offpolicy.png` '
            "for what moved first",
            alarm=Alarm(
                "nonfinite",
                "of the steps had a loss or a gradient that is no finite number",
                weight=steps,
                number=_nonfinite,
                looks_at="steps with a `loss`, `entropy` or `grad_norm` that is no finite number, or a new skipped "
                "update; from the first step on",
                fewest=1,
            ),
        ),
        Column(
            "entropy",
            "entropy of the policy's next-token distribution, as it is sampled from, in the mean over updates",
            "nats",
            label="entropy",
            title="entropy",
            chart="entropy",
            worry="it drops towards 0 within a few steps: the policy stops exploring. It climbs on: it dissolves",
            helps="where the reward is not high yet, lower `train.learning_rate`, raise `clip_high`, or set "
            "`algorithm.entropy_bonus`",
            alarm=Alarm("entropy", "nats is the entropy of the policy, which hardly explores any more", below=True),
        ),
        Column(
            "grad_norm",
            "norm of the gradient before it is clipped, mean over updates",
            label="gradient norm",
            title="grad",
            chart="grad_norm",
            worry="it jumps, above all together with the reward's fall",
            helps="look in `plots/offpolicy.png` for what moved first",
        ),
        Column("learning_rate", "learning rate of this step, as scheduled", form=".1e", title="lr"),
        Column(SKIPPED, "updates of the whole run that were left out for a non-finite gradient"),
        Column(
            "loss_scale",
            'with `model.dtype = "float16"`: what losses are multiplied by, halved at each non-finite gradient',
        ),
        Column(
            "clip_fraction",
            "share of tokens whose gradient the objective cut off or limited",
            "share",
            label="clipped",
            title="clip%",
            chart="left_out",
            worry="it rises from step to step; some objectives clip much from the start",
            helps="lower `train.async_ratio`, `train.learning_rate` or `train.minibatches`, or use `m2po` or `cispo`, "
            "which keep more of it",
            alarm=Alarm("clipping", "of the tokens have their gradient clipped"),
            tracked="train/clip_ratio",
        ),
        Column(
            "ratio_mean",
            "the objective's importance ratio, mean over tokens",
            title="ratio",
            tracked="train/importance_ratio",
        ),
        Column(
            "STAT_mean",
            "mean of what the objective reports per token: `ratio`, its importance ratio; `weight`, as it was used; of "
            "`asyppo` also `deviation` of what the critics expect, `learned`, 1 where the advantage counts, and "
            "`bonus`, 1 where the entropy bonus does; of one of your own its `stats`",
        ),
        Column("STAT_min", "the least of it"),
        Column("STAT_max", "the greatest of it"),
        Column(
            "kl_reference",
            "estimate of the divergence from the reference policy, with `algorithm.kl`",
            "nats",
            label="from the reference",
            chart="kl",
            worry="it grows without end: the policy forgets what it could",
            tracked="train/kl",
        ),
        Column(
            "kl_teacher",
            "mean log-prob less the teacher's, which estimates the divergence from it, with `algorithm.teacher`",
            "nats",
            label="from the teacher",
            chart="kl",
        ),
    ),
)
OFF_POLICY = ColumnGroup(
    "Off policy. w = exp(log-prob under the weights at the start of the step − log-prob as it was sampled), per token.",
    (
        Column(
            "ess",
            "Kish's effective sample size of the w, as a share of the tokens: 100 % on policy",
            "share",
            label="effective sample size",
            title="ess%",
            chart="ess",
            worry="it falls: at 50 % half of the tokens no longer count",
            helps=LOWER_ALPHA,
            alarm=Alarm(
                "ess",
                "is the effective share of the tokens, since the others have drifted too far from the policy",
                below=True,
            ),
        ),
        Column(
            "ratio_pP_age_N",
            "the P-th percentile (1, 50, 99) of w among the tokens that are N versions old",
            worry="old tokens lie far wider around 1 than young ones",
            helps="lower `train.async_ratio`, or set `algorithm.staleness`",
        ),
        Column(
            "mismatch_kl",
            "engine against trainer, mean of −log w over the tokens of age 0; where there are none over all, with the "
            "policy's own drift",
            "nats",
            ".1e",
            label="engine from trainer",
            title="kl",
            chart="kl",
            worry="it grows: engine and trainer disagree at equal weights",
        ),
        Column("mismatch_k3", "the same of w − 1 − log w", form=".1e"),
        Column("mismatch_max", r"the largest \|log w\| of them", form=".1e"),
        Column(
            "mismatch_k3_age_0",
            "engine against trainer at equal weights, mean of w − 1 − log w over the tokens of age 0 only",
            form=".1e",
            label="engine from trainer, age 0",
            chart="mismatch",
            worry=f"it grows, or is above {LIMITS.mismatch:g}",
            helps='set `model.dtype = "float32"`, use the objective `tis`, or one of `algorithm.corrections`',
            alarm=Alarm(
                "mismatch",
                "is the mismatch of engine and trainer at equal weights{} (mean of w − 1 − log w)",
                weight=_youngest,
                looks_at="`mismatch_k3_age_0`, or each `mismatch_k3_env_NAME` (`plots/mismatch.png`)",
            ),
        ),
        Column("mismatch_k3_env_NAME", "the same for one environment of a mixture", form=".1e", chart="mismatch"),
        Column(
            "masked_correction_share",
            "share of tokens to which `algorithm.corrections` or `mask_truncated` give weight 0",
            "share",
            label="correction",
            chart="left_out",
            worry="it rises: much of the batch is thrown away",
            helps=f"{LOWER_ALPHA}, or widen what masks them; with `algorithm.mask_truncated` raise "
            "`rollout.max_new_tokens`",
            alarm=Alarm(
                "masked",
                "of the tokens got weight 0 from the objective's cap, algorithm.corrections or mask_truncated",
                # A batch that is masked entirely trains no token, and counts most.
                weight=steps,
                number=_masked,
                looks_at="`masked_cap_share` + `masked_correction_share`",
            ),
        ),
        Column(
            "masked_cap_share",
            "share of tokens to which the objective gives weight 0",
            "share",
            label="cap",
            chart="left_out",
            worry="it rises: much of the batch is thrown away",
            helps=f"{LOWER_ALPHA}, or widen what masks them",
        ),
        Column(
            "canary_error",
            "mean difference of log-probs between engine and trainer over the canary's text, of the worst swap so far",
            form=".1e",
        ),
    ),
)
LAG = ColumnGroup(
    "With `algorithm.lag`, means over the updates of the step.",
    (
        Column(
            "lag_distance",
            "mean (log-prob at the start of the update − as it was sampled)²; the budget bounds it, less the next one",
        ),
        Column(
            "lag_disagreement",
            "the same over tokens of the present weights, with a running mean: what engine and trainer disagree on",
        ),
        Column(
            "lag_scale",
            "what the learning rate was multiplied by",
            "share",
            helps=f"{LOWER_ALPHA}; the steps are taken all the same, only smaller",
            alarm=Alarm(
                "lag",
                "of the learning rate is left by algorithm.lag, since the policy runs away from those that sampled",
                weight=steps,
                below=True,
            ),
        ),
    ),
)
CRITIC = ColumnGroup(
    "With a `[critic]`.",
    (
        Column("critic_loss", "its loss; of several critics, over all tokens and updates"),
        Column("critic_grad_norm", "its gradient before it is clipped; of several critics as its loss"),
        Column("value_mean", "what it expected"),
        Column("return_mean", "what came"),
        Column("explained_variance", "1 − Var(R − V) / Var(R): 1 is perfect, 0 knows only the mean, below 0 harms"),
        Column("critic_warmup", "1 in the first `critic.warmup_steps`, where only the critics learn"),
        Column("critic_skipped", "updates of this step that were left out for a non-finite gradient"),
    ),
)
RHYTHM = ColumnGroup(
    "With `[algorithm.rhythm]`; [`flash rhythm`](commands.md) shows more.",
    (
        Column("rhythm_share", "share of the trained tokens whose advantage was multiplied by more than 1", "share"),
        Column("rhythm_span_local", "tokens that the local heads look back, in the mean", "tokens"),
        Column("rhythm_span_global", "the same of the global heads", "tokens"),
    ),
)
SFT = ColumnGroup(
    "Of `flash sft`.",
    (
        Column(
            "nll",
            "mean −log-prob of the tokens that are learned",
            "nats",
            label="learned",
            title="nll",
            chart="nll",
            worry="it does not fall within an epoch, or jumps up: change `train.learning_rate`",
        ),
        Column("epoch", "passes over the rows so far", form=".2f", title="epoch"),
        Column("cut_share", "share of the rows that are cut at `model.max_length`", "share"),
    ),
)
