"""What columns of rows are called in trackers: the one table of names.

Under `train/`, `perf/` and `eval/`, as trainers of this field write them; what stands in no table keeps its name, under
`train/` or, of an evaluation, under `eval/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from flash.observe.rundir.summary import number

Kind = Literal["step", "evaluation"]

STEPS = {
    "reward_mean": "train/reward",
    "clip_fraction": "train/clip_ratio",
    "kl_reference": "train/kl",
    "ratio_mean": "train/importance_ratio",
    "tokens_per_second": "perf/tokens_per_second",
    "interval_s": "perf/step_time",
    "trainer_step_s": "perf/train_time",
    "trainer_wait_s": "perf/wait_time",
    "trainer_wait_share": "perf/wait_share",
    "engine_idle_share": "perf/engine_idle_share",
    "engines": "perf/engines",
    "in_flight": "perf/in_flight",
    "queue_ready_groups": "perf/ready_groups",
    "wall_s": "perf/wall_time",
}
"""Columns of `metrics.jsonl`."""
EVALUATIONS = {"mean_reward": "eval/reward", "low": "eval/reward_low", "high": "eval/reward_high"}
"""Columns of `evals.jsonl`."""
APART = {"step", "time"}
"""Columns that trackers are told apart from the values."""

_STRANGE = re.compile(r"[^\w.-]")


def tracked(kind: Kind, row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, by the names that trackers have for them."""
    names, rest = (STEPS, "train/") if kind == "step" else (EVALUATIONS, "eval/")
    known = {key: value for key in row if key not in APART and (value := number(row, key)) is not None}
    return {names.get(key) or rest + _tame(key): float(value) for key, value in known.items()}


def _tame(key: str) -> str:
    """A name that every tracker takes: environments name their metrics as they like, and MLflow reads them as paths."""
    parts = (_STRANGE.sub("_", part) for part in key.split("/"))
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MOST]


MOST = 200
"""Characters of a name."""
