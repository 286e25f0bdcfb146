"""Cells of the off-policy comparison, and the file of their results.

A cell is one training run: a method, an age of its data, a seed, and the setting that all cells share. This module
needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from flash.config.tree import Config

FINAL_POINTS = 3
"""Last evaluations of a run whose mean is its final accuracy: a single one depends on where it happens to fall."""
COLLAPSED = 0.5
"""A run has collapsed when its final accuracy is below this share of its own best, or below where it started."""


DIGITS, OPERATORS = 2, "+"
"""Options of `envs.arithmetic`: the digits of both operands, and the operators."""
LAYERS, WIDTH = 3, 128
"""Shape of the model."""
MODEL_SEED, WARM_START_STEPS = 1, 800
"""Seed of the warm-started model, and the most steps of supervised training that make it."""
MODEL_PATH = f"outputs/models/offpolicy-{LAYERS}x{WIDTH}-{DIGITS}{OPERATORS}-{MODEL_SEED}"
"""Folder of that model, which is the same for all cells."""
MAX_NEW_TOKENS = 6
"""Most tokens of an answer."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting that all cells of a comparison share."""

    steps: int = 120
    """Policy versions that are made."""
    batch_size: int = 256
    """Samples per version."""
    group_size: int = 8
    """Samples of each problem, whose rewards are compared with each other."""
    learning_rate: float = 4e-4
    """Learning rate of all methods. At alpha = 0 half of it ends as well; at alpha = 8 methods differ at this one."""
    eval_every: int = 10
    """Versions between two evaluations."""
    problems: int = 512
    """Held-out problems of each evaluation, the same for all cells, answered greedily."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """An objective that is compared, with its options."""

    key: str
    """Short name, unique."""
    objective: str
    """Name of the objective, as in `algorithm.objective`."""
    options: dict[str, Any] = {}
    """Options of the objective."""
    critic: dict[str, Any] | None = None
    """Options of the critic; None for a method without one."""
    budget: float | None = None
    """Budget of `algorithm.lag`; None: off."""
    note: str = ""
    """Difference from the published method."""

    def within(self, budget: float) -> Method:
        """Return this method with the lag budget `budget`, which slows down training on tokens of old versions."""
        return msgspec.structs.replace(self, key=f"{self.key}_lag_{budget:g}", budget=budget)

    @property
    def title(self) -> str:
        """Name in tables and plots."""
        return f"{self.key} ({self.note})" if self.note else self.key


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A training run of the comparison: a method at an age of its data."""

    method: Method
    alpha: int
    """Age of the data in versions: step n trains tokens of version max(0, n − alpha)."""
    mixed: bool = False
    """True if every batch has groups of all ages from 0 to alpha, equally many of each."""
    seed: int
    """Seed of the problems and of the sampling."""
    setting: Setting = Setting()

    def config(self) -> Config:
        """Return the configuration of the trainer in the cell's process, on the CPU and without a hub.

        The model is made from it, too. `Setting.eval_every` and `mixed` set no key, because
        `benchmarks.offpolicy.harness` evaluates and chooses the ages of a batch itself.
        """
        setting, method = self.setting, self.method
        lag = None if method.budget is None else {"budget": method.budget}
        tables: dict[str, dict[str, Any]] = {} if method.critic is None else {"critic": method.critic}
        tables |= {
            "run": {"name": "offpolicy", "steps": setting.steps, "seed": self.seed},
            "model": {"path": MODEL_PATH, "dtype": "float32", "max_length": 64},
            "tiny_model": {
                "layers": LAYERS,
                "width": WIDTH,
                "seed": MODEL_SEED,
                "warm_start_steps": WARM_START_STEPS,
            },
            "env": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": DIGITS, "operators": OPERATORS}},
            "rollout": {"group_size": setting.group_size, "max_new_tokens": MAX_NEW_TOKENS},
            "train": {
                "batch_size": setting.batch_size,
                "minibatches": 2,
                "async_ratio": float(self.alpha),
                "learning_rate": setting.learning_rate,
                "warmup_steps": 5,
                "on_nonfinite": "skip",
                "max_tokens_per_microbatch": 8192,
            },
            "algorithm": {"objective": method.objective, "options": method.options, "lag": lag},
            "eval": {"problems": setting.problems},
            "cluster": {"gpus_per_node": 0},
        }
        return msgspec.convert(tables, Config)


class Point(msgspec.Struct, frozen=True, array_like=True):
    """An evaluation. Recorded cells have further values after these, which are not read."""

    step: int
    """Versions made so far."""
    tokens: int
    """Action tokens trained so far."""
    accuracy: float
    """Share of the held-out problems that were solved."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a finished cell."""

    cell: Cell
    curve: list[Point]
    """Evaluations from step 0, before any training, to the last step."""

    @property
    def start(self) -> float:
        """Accuracy on held-out problems before training."""
        return self.curve[0].accuracy

    @property
    def final(self) -> float:
        """Accuracy at the end: the mean of the last evaluations."""
        last = self.curve[-FINAL_POINTS:]
        return sum(point.accuracy for point in last) / len(last)

    @property
    def collapsed(self) -> bool:
        """True if the run has lost its accuracy: see `COLLAPSED`."""
        return self.final < self.start or self.final < COLLAPSED * max(point.accuracy for point in self.curve)


def read_results(file: Path) -> list[Result]:
    """Return the results of a file, which has one on each line; none if there is no file."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Result) for line in lines]


def append_result(file: Path, result: Result) -> None:
    """Append a line with a result to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(result) + b"\n")
