"""A student and its teacher: samples to an accuracy by rewards alone, by a teacher alone, and by both.

The student is the warm-started model of `benchmarks.offpolicy`, which answers a third of the two-digit sums. Its
teacher is the same model after `flash sft` on solved ones, and answers nearly all. Each way trains the student on its
own samples, as many per step, at α = 0, with the system's own trainer in this process, and at that one of `RATES` with
which it gets furthest on problems of a seed that then does not count. `speedup` is the samples that rewards alone take
to `TARGET`, over those that the way takes; means over seeds, infinite where one never comes there.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import Args, Row, main, run_command
from benchmarks.offpolicy.cells import Cell, Method, Result, Setting
from flash.config.objects import check_options, load_object
from flash.config.tree import Config

TARGET = 0.6
"""Accuracy, between those of student and teacher."""
RATES = (2e-4, 4e-4, 8e-4)
GRPO = Method(key="grpo", objective="grpo")
SETTING = Setting(steps=100, eval_every=5, minibatches=1)
QUICK = msgspec.structs.replace(SETTING, steps=20, problems=128)
SEEDS, QUICK_SEEDS = 3, 1
WAYS: dict[str, dict[str, Any]] = {"rewards": {}, "teacher": {"reward": False}, "both": {"reward": True}}
"""What stands in `algorithm.teacher` beside its path."""
LESSONS = 20_000
"""Solved examples for the teacher, which a tenth of them would leave at 0.46."""
SFT_TIMEOUT_S = 1200


class Lesson(Cell, frozen=True, kw_only=True):
    """A cell that may have a teacher."""

    teacher: dict[str, Any]

    def tables(self) -> dict[str, dict[str, Any]]:
        """As of `Cell`."""
        tables = super().tables()
        if self.teacher:
            tables["algorithm"]["teacher"] = self.teacher
        return tables


def make_student(setting: Setting) -> Config:
    """The warm-started model, unless it is there."""
    from flash.run.models.models import make_missing_model

    config = Cell(method=GRPO, alpha=0, seed=0, setting=setting).config()
    make_missing_model(config)
    return config


def make_teacher(student: Config, folder: Path) -> Path:
    """What `flash sft` makes of the student; the folder of the model."""
    kind = load_object(student.env.path)
    env: Any = kind(**check_options(kind, student.env.options, "env.options"))
    solved = env.solved_examples(LESSONS, 1)
    rows = ({"prompt": one.prompt, "completion": one.answer} for one in solved)
    (folder / "solved.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "run.name": "teacher",
        "run.output_dir": folder,
        "model.path": student.model.path,
        "model.dtype": "float32",
        "model.max_length": student.model.max_length,
        "sft.data": folder / "solved.jsonl",
        "train.batch_size": 64,
        "train.learning_rate": 2e-3,
        "train.decay": "cosine",
        "run.log_samples": 0,
        "checkpoint.every": 1_000_000,
        "cluster.gpus_per_node": 0,
    }
    file = folder / "sft.toml"
    file.write_text("")
    given = [f"{key}={value}" for key, value in settings.items()]
    run_command([sys.executable, "-m", "flash", "sft", str(file), *given], SFT_TIMEOUT_S)
    return folder / "teacher" / "model"


def measure(args: Args) -> list[Row]:
    """Make the teacher, and train the student in each way and with each seed."""
    import torch
    import transformers

    from benchmarks.offpolicy.harness import Rollouts, run
    from benchmarks.offpolicy.sampler import Sampler
    from flash.foreign.torch import single_process_group

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    setting, seeds = (QUICK, QUICK_SEEDS) if args.quick else (SETTING, SEEDS)
    with tempfile.TemporaryDirectory(prefix="flash-teacher-") as name, single_process_group("gloo"):
        teacher = make_teacher(make_student(setting), Path(name))

        def trained(way: str, rate: float, seed: int) -> Result:
            asked = {"path": str(teacher), **WAYS[way]} if WAYS[way] else {}
            at_rate = msgspec.structs.replace(setting, learning_rate=rate)
            one = run(Lesson(method=GRPO, alpha=0, seed=seed, setting=at_rate, teacher=asked))
            print(f"{way}, {rate:g}, seed {seed}: {[round(point.accuracy, 3) for point in one.curve]}", flush=True)
            return one

        rates = {
            way: max(RATES, key=lambda rate, way=way: trained(way, rate, seeds).final)
            for way in ([] if args.quick else WAYS)
        }
        found = {
            way: [trained(way, rates.get(way, setting.learning_rate), seed) for seed in range(seeds)] for way in WAYS
        }
        plain = Lesson(method=GRPO, alpha=0, seed=0, setting=setting, teacher={})
        taught = Rollouts(plain, Sampler(str(teacher))).accuracy()[0]
    tuned = [Row(way, "rate", "1", rate) for way, rate in rates.items()]
    return [Row("teacher", "accuracy", "share", taught), *tuned, *compared(found, setting)]


def compared(found: dict[str, list[Result]], setting: Setting) -> list[Row]:
    """The ways beside each other."""
    samples = {
        way: [
            point.step * setting.batch_size if (point := one.reached(TARGET)) is not None else float("inf")
            for one in results
        ]
        for way, results in found.items()
    }
    rows: list[Row] = []
    for way, results in found.items():
        rows += [
            Row(way, "first_accuracy", "share", statistics.fmean(one.start for one in results)),
            Row(way, "final_accuracy", "share", statistics.fmean(one.final for one in results)),
            Row(way, "samples_to_target", "samples", statistics.fmean(samples[way])),
        ]
        if way != "rewards":
            speedup = statistics.fmean(samples["rewards"]) / statistics.fmean(samples[way])
            rows.append(Row(way, "speedup", "x", speedup, goal=1.0))
    return rows


if __name__ == "__main__":
    main("distillation", __doc__ or "", measure)
