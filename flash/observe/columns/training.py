"""Columns about training: the batch of a step, its loss and updates, and how far off policy it was.

Each `ColumnGroup` is a table of docs/metrics.md; `flash.observe.columns.table` joins the groups. The functions compute
numbers and weights of alarms (`Alarm.number`, `Alarm.weight`): `flash.observe.alarms` calls them with the row of each
step.
"""

from __future__ import annotations

from flash.observe.columns.column import Alarm, Column, ColumnGroup, Row, by_tokens, equally
from flash.observe.rundir.summary import number

SKIPPED = "skipped_steps"
"""Column with the number of updates in the whole run that were skipped because of a non-finite gradient."""
SKIPPED_NOW = "skipped_now"
"""Key with the number of updates skipped in this step. `flash.observe.alarms` computes it, and adds it to its own copy
of the row, so that it is in no file."""
FINITE = ("loss", "entropy", "grad_norm")
"""Columns that must be finite numbers in each step of a healthy run."""
MISMATCH = 0.01
"""Largest healthy mismatch between engine and trainer. bfloat16 causes 1e-4 to 3e-3 in dense models, and runs were seen
to collapse above about 0.01 (Liu, Li et al. 2025, "When Speed Kills Stability")."""
LOWER_ALPHA = "lower `train.async_ratio` or `train.learning_rate`"
"""Advice for a batch that is too far off policy. α is the documents' letter for `train.async_ratio`."""


def _masked(row: Row) -> float:
    """Return the share of tokens that corrections and caps take out of the loss, for the alarm `masked`."""
    return (number(row, "masked_correction_share") or 0.0) + (number(row, "masked_cap_share") or 0.0)


def _nothing_to_learn(row: Row) -> float:
    """Return 1 for a step in which every advantage is 0, else 0.

    The mean of these numbers is the share of such steps, which the alarm `equal_rewards` compares with its limit.
    """
    return float(number(row, "advantage_abs_mean") == 0)


def _nonfinite(row: Row) -> float:
    """Return 1 for a step with a number that is not finite or with a skipped update, else 0.

    The mean of these numbers is the share of such steps, which the alarm `nonfinite` compares with its limit.
    """
    # The key is there, but `number` returns None: the value is not finite.
    bad = any(key in row and number(row, key) is None for key in FINITE)
    return float(bad or (number(row, SKIPPED_NOW) or 0.0) > 0)


def _age_0_tokens(row: Row) -> float:
    """Return the number of trained tokens of age 0, the weight of a step in the alarm `mismatch`.

    These tokens were sampled with the weights that the step trains. For older tokens, the log-probs of engine and
    trainer also differ because the policy has changed.
    """
    return (number(row, "age_0") or 0.0) * by_tokens(row)


BATCH = ColumnGroup(
    "These numbers describe the batch before it is trained. Means are over the tokens or samples of all ranks.",
    (
        Column("step", "number of the step, counted from 0", form=".0f", title="step"),
        Column("version", "policy version that the step made: the number of the step + 1"),
        Column("samples", "number of samples of which at least one token was trained"),
        Column("tokens", "number of tokens of the batch, prompts included", "tokens"),
        Column(
            "shared_token_share",
            "share of the batch's tokens that are not computed again, since another sequence in the same micro-batch "
            "begins with the same tokens",
            "share",
        ),
        Column(
            "trained_tokens",
            "number of response tokens in the loss: tokens that are neither too old nor rejected",
            "tokens",
        ),
        Column(
            "reward_mean",
            "mean reward of the samples, before rewards are shaped",
            label="reward",
            title="reward",
            chart="reward",
            worry="it falls over many steps, or it rises while the held-out reward falls: the policy exploits faults "
            "of the reward",
            helps="read the samples with the highest reward in `flash view`, and make the reward stricter; if the "
            "reward falls, lower `train.learning_rate`",
            tracker_name="train/reward",
        ),
        Column("reward_std", "standard deviation of the samples' rewards, before rewards are shaped"),
        Column(
            "advantage_abs_mean",
            "mean absolute advantage of a token. It is 0 if nothing can be learned from the batch",
            helps="use problems that are neither too easy nor too hard, give partial rewards, raise "
            "`rollout.group_size`, or set `rollout.drop_equal_rewards`",
            alarm=Alarm(
                "equal_rewards",
                0.5,
                "of the steps had nothing to learn from, since the rewards of each group were equal",
                weight=equally,
                number=_nothing_to_learn,
                looks_at="share of the steps whose `advantage_abs_mean` is 0",
            ),
        ),
        Column(
            "age_mean",
            "mean age of the trained tokens, in versions since they were sampled",
            "versions",
            label="mean age",
            title="age",
            chart="ages",
            worry="it stays above ⌈`train.async_ratio`⌉: samples take several versions. With `train.async_ratio = 1`, "
            "a mean age near 1 is normal",
            helps="shorten the answers, add engines, or lower `train.async_ratio`",
        ),
        Column(
            "age_max",
            "age of the oldest trained token, in versions since it was sampled",
            "versions",
            ".0f",
            label="oldest",
            title="max",
            chart="ages",
        ),
        Column("age_N", "share of the trained tokens that are N versions old", "share"),
        Column(
            "stale_share",
            "share of tokens that were thrown away as too old, among all tokens that were trained or thrown away as "
            "too old since the last step",
            "share",
            label="thrown away as too old",
            title="old%",
            chart="left_out",
            worry="it is above 5 %: answers take longer than the allowed age",
            helps="shorten the answers (`rollout.max_new_tokens`), add engines, or raise `train.max_token_age`, whose "
            "default is 4·⌈`train.async_ratio`⌉. `rollout.on_expire` has other ways to treat such samples",
            alarm=Alarm("stale", 0.1, "of the tokens were too old and not trained"),
        ),
        Column(
            "masked_old_share",
            "share of the batch's response tokens that are left out of the loss since they are too old",
            "share",
            label="too old",
            chart="left_out",
        ),
        Column("branches", "mean number of [branches](agents.md) per sample. It is 1 if no agent branches"),
        Column(
            "branch_token_share",
            "share of the sampled tokens that are in other branches than the first branch of their sample",
            "share",
        ),
        Column(
            "env/NAME",
            "mean of the environment's own metric NAME over the samples that have it. If several turns report it, the "
            "last turn counts",
            chart="environment",
            worry="the environment's author says so",
        ),
        Column(
            "domain/NAME/reward",
            "mean reward of the samples of the domain NAME; only if a run has several domains or environments",
            chart="domains",
            worry="the reward of one domain falls while that of others rises",
        ),
        Column("domain/NAME/tokens", "mean number of response tokens of the domain's samples", "tokens"),
        Column(
            "domain/NAME/share",
            "share of the domain among all groups that the run has trained so far",
            "share",
            chart="domain_shares",
            worry="the share of a domain is far below its weight: the domain is too slow for its weight",
        ),
        Column(
            "share_drift",
            "distance between the number of trained groups that a domain has and the number that its weight asks for, "
            "in batches, of the domain where it is largest",
        ),
    ),
)
LOSS = ColumnGroup(
    "These numbers describe the loss and the updates of the step.",
    (
        Column(
            "loss",
            "minimised value, in the mean over the updates. Its sign and size say little",
            form=".4f",
            title="loss",
            helps='lower `train.learning_rate`, or set `model.dtype = "float32"`, and look in `plots/offpolicy.png` '
            "for the curve that moved first",
            alarm=Alarm(
                "nonfinite",
                0.0,
                "of the steps had a loss or a gradient that is no finite number",
                weight=equally,
                number=_nonfinite,
                looks_at="share of the steps with a `loss`, `entropy` or `grad_norm` that is no finite number, or with "
                "a new skipped update; from the first step on",
                min_steps=1,
            ),
        ),
        Column(
            "entropy",
            "entropy of the distribution that the policy samples a token from, in nats, in the mean over the trained "
            "tokens and the updates",
            "nats",
            label="entropy",
            title="entropy",
            chart="entropy",
            worry="it drops towards 0 within a few steps: the policy stops exploring. It also should not rise without "
            "end: the answers then become random",
            helps="if the reward is not high yet, lower `train.learning_rate`, raise "
            "`algorithm.options.clip_high` (for example to 0.28), or set `algorithm.entropy_bonus` (at most 0.01)",
            alarm=Alarm(
                "entropy", 0.02, "nats is the entropy of the policy, which hardly explores any more", below=True
            ),
        ),
        Column(
            "grad_norm",
            "norm of the gradient before it is clipped, in the mean over the updates",
            label="gradient norm",
            title="grad",
            chart="grad_norm",
            worry="it jumps, above all if the reward falls at the same time",
            helps="look in `plots/offpolicy.png` for the curve that moved first",
        ),
        Column(
            "learning_rate",
            "learning rate of this step, after the schedule and before `lag_scale`",
            form=".1e",
            title="lr",
        ),
        Column(SKIPPED, "number of updates in the whole run that were skipped because of a non-finite gradient"),
        Column(
            "loss_scale",
            'factor by which losses are multiplied with `model.dtype = "float16"`. Each non-finite gradient halves it',
        ),
        Column(
            "clip_fraction",
            "share of the tokens whose gradient the objective cut off or limited",
            "share",
            label="clipped",
            title="clip%",
            chart="left_out",
            worry="it rises from step to step. Some objectives clip much from the start",
            helps="lower `train.async_ratio`, `train.learning_rate` or `train.minibatches`, or use `m2po` or `cispo`, "
            "which keep more of the gradient",
            alarm=Alarm("clipping", 0.5, "of the tokens have their gradient clipped"),
            tracker_name="train/clip_ratio",
        ),
        Column(
            "ratio_mean",
            "mean importance ratio of the objective over the tokens",
            title="ratio",
            tracker_name="train/importance_ratio",
        ),
        Column(
            "STAT_mean",
            "mean over the tokens of a statistic that the objective reports. `ratio` is its importance ratio, and "
            "`weight` the ratio that it used. `asyppo` also reports `deviation`, the standard deviation of the "
            "critics' values; `learned`, which is 1 if the token's advantage counts; and `bonus`, which is 1 if its "
            "entropy bonus counts. An objective of your own reports its `stats`",
        ),
        Column("STAT_min", "smallest value of the statistic over the tokens"),
        Column("STAT_max", "largest value of the statistic over the tokens"),
        Column(
            "kl_reference",
            "estimated KL divergence in nats from the reference policy, with `algorithm.kl`",
            "nats",
            label="from the reference",
            chart="kl",
            worry="it grows without end: the policy loses abilities that it had",
            helps="raise `algorithm.kl.coefficient`, or lower `train.learning_rate`",
            tracker_name="train/kl",
        ),
        Column(
            "kl_teacher",
            "mean of the policy's log-prob minus the teacher's log-prob in nats, with `algorithm.teacher`. It "
            "estimates the KL divergence from the teacher",
            "nats",
            label="from the teacher",
            chart="kl",
        ),
    ),
)
OFF_POLICY = ColumnGroup(
    "These numbers say how far the batch is off policy. For each token, w = exp(log-prob under the weights at the "
    "start of the step − log-prob when the token was sampled).",
    (
        Column(
            "ess",
            "Kish's effective sample size of the weights w, as a share of the tokens. It is near 100 % on policy",
            "share",
            label="effective sample size",
            title="ess%",
            chart="ess",
            worry="it falls: at 50 % half of the tokens no longer count",
            helps=LOWER_ALPHA,
            alarm=Alarm(
                "ess",
                0.5,
                "is the effective share of the tokens, since the other tokens are too far from the policy",
                below=True,
            ),
        ),
        Column(
            "ratio_pP_age_N",
            "P-th percentile (1, 50 or 99) of w over the tokens that are N versions old",
            worry="the percentiles of old tokens are much farther from 1 than those of young tokens",
            helps="lower `train.async_ratio` or `train.max_token_age`, or set `algorithm.staleness`",
        ),
        Column(
            "mismatch_kl",
            "mean difference between engine and trainer in nats, which may be negative: the mean of −log w over the "
            "tokens of age 0. If there are no such tokens, the mean is over all tokens, and the policy's own change "
            "counts too",
            "nats",
            ".1e",
            label="engine-trainer difference",
            title="kl",
            chart="kl",
            worry="it grows: engine and trainer may compute different log-probs with equal weights. Without tokens of "
            "age 0 it also contains the change of the policy",
            helps="look at `mismatch_k3_age_0` and `canary_error`, or at a short run with `train.async_ratio = 0`",
        ),
        Column("mismatch_k3", "mean of w − 1 − log w over the tokens that `mismatch_kl` is about", form=".1e"),
        Column("mismatch_max", r"largest \|log w\| of the tokens that `mismatch_kl` is about", form=".1e"),
        Column(
            "mismatch_k3_age_0",
            "difference between engine and trainer with equal weights: the mean of w − 1 − log w over the tokens of "
            "age 0 only",
            form=".1e",
            label="engine-trainer difference, equal weights",
            chart="mismatch",
            worry=f"it grows, or is above {MISMATCH:g}",
            helps='set `model.dtype = "float32"`, use the objective `tis`, or a filter of `algorithm.corrections` '
            "(`geometric`, `sequence_mask`), which goes with every objective",
            alarm=Alarm(
                "mismatch",
                MISMATCH,
                "is the mismatch of engine and trainer at equal weights{} (mean of w − 1 − log w)",
                weight=_age_0_tokens,
                looks_at="`mismatch_k3_age_0`, or each `mismatch_k3_env_NAME`",
            ),
        ),
        Column(
            "mismatch_k3_env_NAME",
            "`mismatch_k3_age_0` of the environment NAME, in a run with several environments",
            form=".1e",
            chart="mismatch",
        ),
        Column(
            "masked_correction_share",
            "share of the tokens to which `algorithm.corrections` or `mask_truncated` give weight 0",
            "share",
            label="correction",
            chart="left_out",
            worry="it rises: much of the batch is thrown away",
            helps=f"{LOWER_ALPHA}, or widen the limits of the corrections. With `algorithm.mask_truncated`, raise "
            "`rollout.max_new_tokens`",
            alarm=Alarm(
                "masked",
                0.1,
                "of the tokens got weight 0 from the objective's cap, algorithm.corrections or mask_truncated",
                # A batch that is masked entirely trains no token, and yet it must count in full.
                weight=equally,
                number=_masked,
                looks_at="`masked_cap_share` + `masked_correction_share`",
            ),
        ),
        Column(
            "masked_cap_share",
            "share of the tokens to which the objective gives weight 0",
            "share",
            label="cap",
            chart="left_out",
            worry="it rises: much of the batch is thrown away",
            helps=f"{LOWER_ALPHA}, or raise the objective's cap (a key of `algorithm.options`)",
        ),
        Column(
            "canary_error",
            "mean absolute difference in nats between the log-probs of engine and trainer on the canary's text. The "
            "value is that of the worst weight swap of any engine so far",
            "nats",
            form=".1e",
        ),
    ),
)
LAG = ColumnGroup(
    "With `algorithm.lag` there are these means over the updates of the step.",
    (
        Column(
            "lag_distance",
            "mean over the trained tokens of (log-prob at the start of the update − log-prob when sampled)². "
            "`algorithm.lag` keeps it, less `lag_disagreement`, near or below its budget",
        ),
        Column(
            "lag_disagreement",
            "mean over the tokens that the present weights sampled of (log-prob at the start of the step − log-prob "
            "when sampled)², as a running mean over steps: the difference between engine and trainer",
        ),
        Column(
            "lag_scale",
            "share of the learning rate that `algorithm.lag` leaves",
            "share",
            helps=f"{LOWER_ALPHA}. The run goes on with smaller updates",
            alarm=Alarm(
                "lag",
                0.5,
                "of the learning rate is left by algorithm.lag, since the policy moves too far from the policies that "
                "sampled",
                weight=equally,
                below=True,
            ),
        ),
    ),
)
CRITIC = ColumnGroup(
    "With a `[critic]` there are these numbers. V is the critic's value before a token at the start of the step, and R "
    "the token's return. Each token counts with the critic that learns from it.",
    (
        Column("critic_loss", "loss of the critic, in the mean over the tokens and updates of all critics"),
        Column(
            "critic_grad_norm",
            "norm of the critic's gradient before it is clipped, in the mean over the updates of all critics",
        ),
        Column("value_mean", "mean V over the trained tokens"),
        Column("return_mean", "mean R over the trained tokens"),
        Column(
            "explained_variance",
            "1 − Var(R − V) / Var(R). It is 1 for a perfect critic, 0 for one that knows only the mean, and below 0 "
            "for a critic that does harm",
        ),
        Column(
            "critic_warmup", "1 in the first `critic.warmup_steps` steps, in which only the critics learn, afterwards 0"
        ),
        Column("critic_skipped", "number of updates in this step that were skipped because of a non-finite gradient"),
    ),
)
RHYTHM = ColumnGroup(
    "With `[algorithm.rhythm]` there are these numbers. [`flash rhythm`](commands.md) shows more.",
    (
        Column("rhythm_share", "share of the trained tokens whose advantage was multiplied by more than 1", "share"),
        Column("rhythm_span_local", "mean number of tokens over which the local attention heads look back", "tokens"),
        Column("rhythm_span_global", "mean number of tokens over which the global attention heads look back", "tokens"),
    ),
)
SFT = ColumnGroup(
    "Only `flash sft` reports these numbers.",
    (
        Column(
            "nll",
            "mean −log-prob of the tokens that are learned, in nats",
            "nats",
            label="loss on rows",
            title="nll",
            chart="nll",
            worry="it does not fall within an epoch, or it jumps up",
            helps="change `train.learning_rate`",
        ),
        Column("epoch", "number of passes over the rows so far", form=".2f", title="epoch"),
        Column("cut_share", "share of the step's rows that are cut at `model.max_length`", "share"),
    ),
)
