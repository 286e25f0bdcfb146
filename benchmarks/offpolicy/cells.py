"""The cells of comparisons: what one is, what it leaves behind, where that is kept, how it is judged.

A cell is one training run: a method, an age of its data, a seed, and the setting that all cells share. Its file bears a
digest of all of that, and appears under its name only when it is whole: a cell that was interrupted has none.
Reading and judging cells needs no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from flash.config.tree import Config

RECIPE = 1
"""Part of each digest: raised when the harness makes other results from the same cell."""
FINAL_POINTS = 3
"""Last evaluations of a run whose mean is its final accuracy: a single one depends on where it happens to fall."""
COLLAPSED = 0.5
"""A run has collapsed when its final accuracy is below this share of its own best, or below where it started."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all cells of a comparison share."""

    digits: int = 2
    """Of both operands of `envs.arithmetic`."""
    operators: str = "+"
    layers: int = 3
    width: int = 128
    model_seed: int = 1
    """Of the warm-started model, which is the same for all cells."""
    warm_start_steps: int = 800
    """The most that it gets."""
    steps: int = 120
    """Policy versions that are made."""
    batch_size: int = 256
    """Samples per version."""
    group_size: int = 8
    minibatches: int = 2
    """Optimizer updates per version."""
    learning_rate: float = 4e-4
    """The same for all methods. At alpha = 0 half of it ends as well; at alpha = 8 it tells them apart."""
    warmup_steps: int = 5
    max_new_tokens: int = 6
    eval_every: int = 10
    """Versions between two evaluations."""
    problems: int = 512
    """Held-out problems of each evaluation, the same for all cells, answered greedily."""

    @property
    def model_path(self) -> str:
        """Where the warm-started model is cached."""
        return f"outputs/models/offpolicy-{self.layers}x{self.width}-{self.digits}{self.operators}-{self.model_seed}"

    @property
    def env(self) -> dict[str, Any]:
        """The task, as a configuration names it."""
        options = {"digits": self.digits, "operators": self.operators}
        return {"path": "envs.arithmetic:Arithmetic", "options": options}


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """An objective as it is compared."""

    key: str
    """Short name, unique; part of file names."""
    objective: str
    options: dict[str, Any] = {}
    """Of the objective."""
    critic: dict[str, Any] | None = None
    """Its options, for a method that needs one."""
    budget: float | None = None
    """Of `algorithm.lag`; without it steps do not know their lag."""
    max_token_age: int | None = None
    """Of `train`; without it tokens older than alpha are left out."""
    note: str = ""
    """What differs from the method as it is published."""

    def within(self, budget: float) -> Method:
        """The same, held to a budget of divergence."""
        return msgspec.structs.replace(self, key=f"{self.key}_lag_{budget:g}", budget=budget)

    def older(self, bound: int) -> Method:
        """The same, with tokens of this age."""
        return msgspec.structs.replace(self, key=f"{self.key}_age_{bound}", max_token_age=bound)

    @property
    def title(self) -> str:
        """For tables and plots."""
        return f"{self.key} ({self.note})" if self.note else self.key


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training run of the comparison: a method at an age of its data."""

    method: Method
    alpha: int
    """Age of the data in versions: step n trains tokens of version max(0, n − alpha)."""
    mixed: bool = False
    """Every batch has groups of all ages from 0 to alpha, equally many of each."""
    span: int = 0
    """Beside the groups of mixed ages, two parts of every batch are of long answers: the first token is this many
    versions old, each one after it two younger. 0: none are."""
    seed: int
    """Of the problems and of the sampling."""
    setting: Setting = Setting()

    @property
    def name(self) -> str:
        """Of its file: readable, and different for cells that differ in anything."""
        made_from = msgspec.json.encode((RECIPE, self), order="sorted")
        digest = hashlib.blake2b(made_from, digest_size=5).hexdigest()
        kind = f"l{self.span}m" if self.span else "m" if self.mixed else "a"
        return f"{self.method.key}-{kind}{self.alpha}-s{self.seed}-{digest}"

    def tables(self) -> dict[str, dict[str, Any]]:
        """The sections of a run's configuration that say what is learned, from what, and how."""
        setting, method = self.setting, self.method
        lag = None if method.budget is None else {"budget": method.budget}
        algorithm: dict[str, Any] = {"objective": method.objective, "options": method.options, "lag": lag}
        tables: dict[str, dict[str, Any]] = {} if method.critic is None else {"critic": method.critic}
        return tables | {
            "run": {"steps": setting.steps, "seed": self.seed},
            "model": {"path": setting.model_path, "dtype": "float32", "max_length": 64},
            "tiny_model": {
                "layers": setting.layers,
                "width": setting.width,
                "seed": setting.model_seed,
                "warm_start_steps": setting.warm_start_steps,
            },
            "env": setting.env,
            "rollout": {"group_size": setting.group_size, "max_new_tokens": setting.max_new_tokens},
            "train": {
                "batch_size": setting.batch_size,
                "minibatches": setting.minibatches,
                "async_ratio": float(self.alpha),
                "max_token_age": method.max_token_age,
                "learning_rate": setting.learning_rate,
                "warmup_steps": setting.warmup_steps,
                "on_nonfinite": "skip",
                "max_tokens_per_microbatch": 8192,
            },
            "algorithm": algorithm,
            "eval": {"problems": setting.problems},
        }

    def config(self) -> Config:
        """The configuration of the trainer in this process, on the CPU."""
        tables = self.tables()
        tables["run"]["name"] = self.name
        return msgspec.convert(tables | {"cluster": {"gpus_per_node": 0}}, Config)


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation, and means over the steps since the one before."""

    step: int
    """Versions made so far."""
    tokens: int
    """Action tokens trained so far."""
    accuracy: float
    """On held-out problems."""
    reward: float
    """Mean reward of the trained samples."""
    entropy: float
    """Nats per action token."""
    grad_norm: float
    clipped: float
    """Share of the tokens whose gradient the objective cut."""
    distance: float = 0.0
    """Mean (log-ratio)² before an update, of a method with a budget."""
    scale: float = 1.0
    """What its learning rate was multiplied by."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished cell measured."""

    cell: Cell
    curve: list[Point]
    """From step 0, before any training, to the last step."""
    skipped_updates: int
    """Updates left out because the gradient was not finite."""
    cpu_s: float
    """Processor time of the whole process, imports and model loading included."""

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
        """Whether the run lost what it had: see `COLLAPSED`."""
        return self.final < self.start or self.final < COLLAPSED * max(point.accuracy for point in self.curve)

    def reached(self, accuracy: float) -> Point | None:
        """The first evaluation at this accuracy or above."""
        return next((point for point in self.curve if point.accuracy >= accuracy), None)


class Folder:
    """Finished cells, one file each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def file(self, cell: Cell) -> Path:
        """Where the cell's result is, or will be."""
        return self.path / f"{cell.name}.json"

    def find(self, cell: Cell) -> Result | None:
        """The cell's result, if it is finished. A damaged file counts as none."""
        try:
            found = msgspec.json.decode(self.file(cell).read_bytes(), type=Result)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return found if found.cell == cell else None

    def save(self, result: Result) -> None:
        """Put the whole result in place at once."""
        aside = self.file(result.cell).with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(msgspec.json.encode(result))
        aside.replace(self.file(result.cell))

    def finished(self, cells: Iterable[Cell]) -> list[Result]:
        """The results there are, in the order of the cells."""
        return [result for result in map(self.find, cells) if result is not None]


def write_lines(results: Iterable[Result], file: Path) -> None:
    """All results in one file, a line each."""
    file.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in results))


def read_lines(file: Path) -> list[Result]:
    """The results of a file of `write_lines`."""
    return [msgspec.json.decode(line, type=Result) for line in file.read_bytes().splitlines()]
