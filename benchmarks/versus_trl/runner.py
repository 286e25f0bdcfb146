"""Program of TRL's half of the comparison. It trains on a Flash configuration with TRL's GRPOTrainer.

    python -m benchmarks.versus_trl.runner OUT CHOICES CONFIG.toml [KEY=VALUE …]

`benchmarks.versus_trl.run` starts it with the Python of TRL's environment. It writes into the folder
OUT, which must be empty or missing: `weights/step-000010.safetensors` and so on, every `checkpoint.every` steps and
after the last one, and `steps.json` at the end.

The clock starts at the first rollout and stops while weights are written. Before the clock starts, a batch of held-out
prompts is answered, as in Flash's first evaluation, because the first forward passes of a process are slower.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]: TRL's environment has it
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]: as above

from benchmarks.episodes import held_out_seeds, prompts, rewards, training_seeds
from benchmarks.versus_trl.evaluate import generate
from benchmarks.versus_trl.settings import TrlChoices, adamw_arguments, grpo_arguments
from flash.config.load import load
from flash.config.tree import Config
from flash.trainer.optimizer import learning_rate

SOFTWARE = ("trl", "transformers", "torch", "accelerate")
"""Packages whose versions are written into the result."""


class Scorer:
    """Reward function of TRL that returns the environment's rewards.

    A generation has the samples of a batch. TRL scores all of them at once.
    """

    __name__ = "environment"

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reward = 0.0
        """Mean reward of the newest generation."""

    def __call__(self, *, completions: list[Any], seed: list[int], **_: Any) -> Any:
        """Return the reward of each completion, which is a text or, where prompts are messages, a list of one message.

        `seed` has the problem of each completion: the column of the data set that TRL passes on. Keeps the mean reward.
        """
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        given = rewards(self._config, seed, texts)
        self.reward = sum(given) / len(given)
        return given


class TimedSaves(TrainerCallback):
    """Callback that measures the seconds of the steps, and saves weights at some of them.

    Args:
        weights: folder of the saved weights.
        config: names the steps after which weights are saved.
        scorer: has the mean reward of the newest generation, which is printed.
    """

    def __init__(self, weights: Path, config: Config, scorer: Scorer) -> None:
        self._weights = weights
        self._every = config.checkpoint.every
        self._steps = config.run.steps
        self._scorer = scorer
        self._start: float | None = None
        self._saving_s = 0.0
        """Seconds that saving has taken so far. They do not count as time of the steps."""
        self.seconds: list[float] = []
        """Seconds from the first rollout to the end of each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock: the first step's rollout begins after this call."""
        self._start = time.perf_counter() if self._start is None else self._start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time after a step of the optimizer, and save weights if they are due."""
        assert self._start is not None, "a step begins before it ends"
        now = time.perf_counter()
        self.seconds.append(now - self._start - self._saving_s)
        step = int(state.global_step)
        if step % self._every == 0 or step == self._steps:
            tensors = {name: parameter.detach().contiguous() for name, parameter in kwargs["model"].named_parameters()}
            save_file(tensors, self._weights / f"step-{step:06d}.safetensors")
            done = f"step {step} of {self._steps}, {self.seconds[-1]:.1f} s"
            print(f"TRL: {done}, reward {self._scorer.reward:.3f}", flush=True)
            self._saving_s += time.perf_counter() - now


def train(out: Path, choices: TrlChoices, config: Config) -> None:
    """Train, and write weights and the report into the folder `out`. Raises FileExistsError if it has weights."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    (out / "weights").mkdir(parents=True)
    scorer = Scorer(config)
    clock = TimedSaves(out / "weights", config, scorer)
    # As in Flash: master weights in float32, whatever the precision of the passes.
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    seeds = training_seeds(config)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_arguments(config.train))
    # Flash's own learning rate: the linear warm-up of transformers has a rate of 0 at the first step.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(config.train, config.run.steps, step) / config.train.learning_rate
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(config.model.path),
        reward_funcs=scorer,
        args=GRPOConfig(output_dir=str(out / "trainer"), **grpo_arguments(config, choices)),
        train_dataset=Dataset.from_dict({"prompt": prompts(config, seeds), "seed": seeds}),
        callbacks=[clock],
        optimizers=(optimizer, schedule),
    )
    # The first forward passes of a process are slower. Flash makes its first evaluation before its clock starts, too.
    warm_up = (held_out_seeds(config) * config.train.batch_size)[: config.train.batch_size]
    generate(config, model, trainer.processing_class, prompts(config, warm_up))
    trainer.train()
    report = {"seconds": clock.seconds, "software": {name: metadata.version(name) for name in SOFTWARE}}
    (out / "steps.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    folder, chosen, file, *overrides = sys.argv[1:]
    train(Path(folder), msgspec.json.decode(chosen, type=TrlChoices), load([Path(file)], overrides))
