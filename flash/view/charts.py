"""The charts of the overview: what each draws of `metrics.jsonl` and `evals.jsonl`, what it means and when to worry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from flash.config.alarms import AlarmsConfig
from flash.observe.alarms import BY_ENVIRONMENT
from flash.observe.rundir.summary import number

Row = Mapping[str, Any]

LIMITS = AlarmsConfig()
"""From where on a run warns, unless its configuration says otherwise."""
ALWAYS = ("step", "wall_s", "time")
"""Of each row: where it stands on an axis."""


class Line(msgspec.Struct, frozen=True):
    """One curve of a chart."""

    key: str
    """Its column; with a star at its end, each column that begins so is a curve."""
    name: str = ""
    """Beside others; of several columns what comes before the rest of theirs."""
    dash: Literal["solid", "dot", "dash"] = "solid"
    """How it differs from the others."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One picture, for people who see it for the first time."""

    id: str
    title: str
    lines: tuple[Line, ...]
    means: str
    worry: str
    of: Literal["steps", "evals"] = "steps"
    """The rows it is drawn from."""
    unit: str = ""
    percent: bool = False
    log: bool = False
    from_zero: bool = True
    """Whether a linear axis shows 0."""
    limit: float | None = None
    """From where on to worry, as a line."""


CHARTS = (
    Chart(
        id="reward",
        title="Reward while training",
        lines=(Line("reward_mean"),),
        from_zero=False,
        means="Mean reward of the samples of each step, as the environment gave it.",
        worry="It falls over many steps, or rises while the held-out reward falls: the policy then games the reward.",
    ),
    Chart(
        id="held_out",
        title="Held-out reward",
        of="evals",
        from_zero=False,
        lines=(Line("mean_reward", "mean"), Line("best_of_k", "best of k", "dot")),
        means="Mean reward on held-out problems with its 95 % interval; an accuracy where rewards are 0 or 1.",
        worry="It stays inside the first interval: nothing was learned that carries over, or problems are too few.",
    ),
    Chart(
        id="entropy",
        title="Entropy",
        lines=(Line("entropy"),),
        unit="nats",
        limit=LIMITS.entropy,
        means="How undecided the policy is about its next token, at the sampling temperature.",
        worry="It drops towards 0 within a few steps: the policy stops exploring. It climbs and climbs: it dissolves.",
    ),
    Chart(
        id="kl",
        title="KL",
        lines=(Line("kl_reference", "from the reference"), Line("mismatch_kl", "engine from trainer", "dot")),
        unit="nats",
        means="Of the policy from the reference policy (with algorithm.kl), and of the sampling from the trained one.",
        worry="The first grows without end: it forgets what it could. The second grows: see the mismatch below.",
    ),
    Chart(
        id="grad_norm",
        title="Gradient norm",
        lines=(Line("grad_norm"),),
        means="Size of the gradient before it is clipped, mean over the updates of a step.",
        worry="It jumps, above all together with the reward's fall: look below for what moved first.",
    ),
    Chart(
        id="ages",
        title="Age of the trained tokens",
        lines=(Line("age_mean", "mean"), Line("age_max", "oldest", "dot")),
        unit="versions",
        means="How many versions the trainer was ahead of the policy that sampled them, at most ⌈train.async_ratio⌉.",
        worry="The mean sticks at the limit: samples outlast the window; see what is left out below.",
    ),
    Chart(
        id="ess",
        title="Effective sample size",
        lines=(Line("ess"),),
        percent=True,
        limit=LIMITS.ess,
        means="Share of the tokens that as many on-policy ones would be worth; 100 % is on policy.",
        worry="It falls: at 50 % half of the tokens no longer count. Lower train.async_ratio or the learning rate.",
    ),
    Chart(
        id="mismatch",
        title="Mismatch of engine and trainer",
        lines=(Line("mismatch_k3_age_0"), Line(f"{BY_ENVIRONMENT}*", dash="dot")),
        log=True,
        limit=LIMITS.mismatch,
        means="Distance of their log-probs at equal weights: mean of w − 1 − log w over tokens of age 0.",
        worry=f"It is above {LIMITS.mismatch:g}, or grows: model.dtype = float32, tis or algorithm.corrections help.",
    ),
    Chart(
        id="left_out",
        title="Tokens that do not count",
        lines=(
            Line("stale_share", "thrown away as too old"),
            Line("masked_old_share", "too old", "dot"),
            Line("masked_correction_share", "by a correction", "dash"),
            Line("masked_cap_share", "by the objective's cap", "dash"),
            Line("clip_fraction", "clipped", "dot"),
        ),
        percent=True,
        limit=LIMITS.stale,
        means="Share of the tokens that were left out of the loss, or whose gradient was cut off, by reason.",
        worry="It rises. Too old: raise train.async_ratio or shorten answers. Clipped, capped, corrected: lower it.",
    ),
    Chart(
        id="throughput",
        title="Throughput",
        lines=(Line("tokens_per_second"),),
        unit="tokens/s",
        means="Response tokens that arrived per second.",
        worry="It falls while nothing else changes: answers grew, an engine is gone, or environments became slow.",
    ),
    Chart(
        id="waits",
        title="Who waits for whom",
        lines=(Line("trainer_wait_share", "trainer waits"), Line("engine_idle_share", "engines idle", "dot")),
        percent=True,
        limit=LIMITS.trainer_waits,
        means="Share of a step that the trainer waited for a batch; share of their time that engines had no request.",
        worry="The trainer waits much: add engines or raise train.async_ratio. Engines idle: add trainers, or samples.",
    ),
    Chart(
        id="seconds",
        title="Seconds per step",
        lines=(Line("interval_s", "from step to step"), Line("trainer_step_s", "training", "dot")),
        means="Time from one step's end to the next one's, and what the training itself took of it.",
        worry="The two are far apart: somebody waits; the chart beside this one says who.",
    ),
    Chart(
        id="failures",
        title="Failures",
        lines=(Line("failures", "all"), Line("failures_*", dash="dot")),
        means="Attempts at a sample that failed since the last step, tried again or given up, by reason.",
        worry="They come at every step: the first of each kind is printed with its error in the terminal.",
    ),
    Chart(
        id="environment",
        title="What the environment measures",
        lines=(Line("env/*"),),
        means="Means of the environment's own metrics over the samples of each step.",
        worry="As the environment's author says.",
    ),
)

_WANTED = {
    of: re.compile(
        "|".join(
            re.escape(key).replace(r"\*", ".+")
            for key in (*ALWAYS, *(line.key for chart in CHARTS if chart.of == of for line in chart.lines))
        )
    )
    for of in ("steps", "evals")
}
INTERVAL = ("low", "high")
"""Of an evaluation's mean."""


def drawn(rows: Iterable[Row], of: Literal["steps", "evals"]) -> list[dict[str, float]]:
    """What the charts draw of these rows: finite numbers."""
    return [
        {
            key: value
            for key in row
            if (_WANTED[of].fullmatch(key) or (of == "evals" and key in INTERVAL))
            and (value := number(row, key)) is not None
        }
        for row in rows
    ]
