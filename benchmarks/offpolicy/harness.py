"""Training of one cell of the comparison of objectives on data of an exact age, in one process, on one core.

A *cell* is one training run: a method, an age of its data, a seed, and the setting that all cells share. The results of
cells are the lines of a file. The trainer is Flash's own (`flash.trainer.step.Trainer`, one rank). There are no engines
and no hub: a sampler in this process keeps the weights of the last versions, and samples each token of a batch with the
version that has the age of the cell.

`benchmarks.offpolicy.run` calls `train_cell` in a process for each cell.

Shape legend: N = prompts, C = answers per prompt, P = tokens of a prompt, V = vocabulary, R = answers of all prompts, T
= tokens of an answer.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import msgspec
import torch
import transformers
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast

from benchmarks.episodes import held_out_seeds, make_shard, make_trajectory, prompts, rewards
from flash.config.tree import Config
from flash.errors import ContractError
from flash.foreign.torch import single_process_group
from flash.trainer.model.canary import canary_logprobs
from flash.trainer.model.model import named_full_tensors
from flash.trainer.step import Trainer
from flash.types import Outcome, Task, Trajectory

FINAL_POINTS = 3
"""Last evaluations of a run whose mean is its final accuracy: a single one depends on where it happens to fall."""
COLLAPSED = 0.5
"""A run has collapsed when its final accuracy is below this share of its own best, or below where it started."""


DIGITS, OPERATORS = 2, "+"
"""Options of `envs.arithmetic`: the digits of both operands, and the operators."""
LAYERS, WIDTH = 3, 128
"""Shape of the model."""
WARM_START_STEPS = 800
"""Most steps of supervised training that make the warm-started model."""
MODEL_PATH = f"outputs/models/offpolicy-{LAYERS}x{WIDTH}-{DIGITS}{OPERATORS}"
"""Folder of that model, which is the same for all cells."""
MAX_NEW_TOKENS = 6
"""Most tokens of an answer."""
USUAL_TOKENS = 4
"""Tokens of most answers: three digits and the end of the text."""


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
    max_token_age: int | None = None
    """`train.max_token_age`; None: ⌈α⌉, so that older tokens are left out of the loss."""
    note: str = ""
    """Difference from the published method."""

    def within(self, budget: float, age: int) -> Method:
        """Return this method with a lag budget, and with training on tokens of up to `age` versions.

        A budget of 0 is none, and an age of 0 is the age of the cell. The key of the new method names both.
        """
        key = self.key + (f"_lag_{budget:g}" if budget else "") + (f"_age_{age}" if age else "")
        return msgspec.structs.replace(self, key=key, budget=budget or None, max_token_age=age or None)

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
    span: int = 0
    """Versions during which a long answer is sampled; then a third of every batch are long answers, and `mixed` is true
    of the rest. 0: no answer is long."""
    seed: int
    """Seed of the problems and of the sampling."""
    setting: Setting = Setting()

    @property
    def ages(self) -> list[tuple[int, ...]]:
        """Ages of the tokens of an answer, for the first groups of a batch. Later groups have them again, in turn.

        A long answer begins `span` versions before its batch. Its usual tokens are sampled evenly until the batch.
        """
        short = [(age,) * MAX_NEW_TOKENS for age in (range(self.alpha + 1) if self.mixed else [self.alpha])]
        long = tuple(max(0, self.span - self.span * place // USUAL_TOKENS) for place in range(MAX_NEW_TOKENS))
        return [*short, *short, *[long] * len(short)] if self.span else short

    def config(self) -> Config:
        """Return the configuration of the trainer in the cell's process, on the CPU and without a hub.

        The model is made from it, too. `Setting.eval_every`, `mixed` and `span` set no key, because `run` evaluates and
        chooses the ages of a batch itself.
        """
        setting, method = self.setting, self.method
        lag = None if method.budget is None else {"budget": method.budget}
        tables: dict[str, dict[str, Any]] = {} if method.critic is None else {"critic": method.critic}
        tables |= {
            "run": {"name": "offpolicy", "steps": setting.steps, "seed": self.seed},
            "model": {"path": MODEL_PATH, "dtype": "float32", "max_length": 64},
            "tiny_model": {"layers": LAYERS, "width": WIDTH, "warm_start_steps": WARM_START_STEPS},
            "env": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": DIGITS, "operators": OPERATORS}},
            "rollout": {"group_size": setting.group_size, "max_new_tokens": MAX_NEW_TOKENS},
            "train": {
                "batch_size": setting.batch_size,
                "minibatches": 2,  # updates of the weights for each version
                "async_ratio": float(self.alpha),
                "max_token_age": method.max_token_age or self.alpha or None,
                "learning_rate": setting.learning_rate,
                "warmup_steps": 5,
                "on_nonfinite": "skip",  # a method that diverges is measured to the end, too
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
    masked: float = 0.0
    """Share of the sampled tokens that were too old to be trained."""

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
    """Append a line with a result to a file, which is made if it is missing. Only one process may write to it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(result) + b"\n")


SEED_STRIDE = 1 << 20
"""Number of problems that one seed may use; the problems of the next seed begin after them."""
PARITY = 1e-4
"""Largest difference of log-probs between the sampler and the trainer at equal weights."""


class Answer(NamedTuple):
    """A sampled answer, with the values that training needs."""

    prompt: list[int]
    """Token ids."""
    tokens: list[int]
    """Token ids, the end-of-text token included."""
    logp: list[float]
    """Log-prob of each token under the policy that sampled it."""
    text: str
    """The text, without the end-of-text token."""
    truncated: bool
    """True if the limit came before the end-of-text token."""


class Sampler:
    """Policies that sample many answers at once, and are not trained: copies of the trainer's last versions.

    The trainer's own policy is sharded and runs packed sequences only. Prompts of one call have equal length, so
    nothing is padded; a finished answer is decoded on with the others and cut off afterwards.
    """

    def __init__(self, path: str, oldest: int = 0) -> None:
        """Load the model folder at `path` in float32, as version 0. Versions older than `oldest` are forgotten."""
        self.tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path))
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        # The last versions, the newest last.
        self._versions: deque[dict[str, Tensor]] = deque([dict(self.model.named_parameters())], oldest + 1)
        self._end = cast("int", self.tokenizer.eos_token_id)

    def add_version(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add the next version, with a copy of all tensors by name, and forget the oldest one if there are too many.

        A missing name is an error of the program.
        """
        version = {name: tensor.clone() for name, tensor in tensors}
        missing = self._versions[-1].keys() - version.keys()
        assert not missing, f"no new weights for {sorted(missing)}"
        self._versions.append(version)

    @torch.inference_mode()
    def sample(
        self, prompts: list[str], *, copies: int, ages: Sequence[int], generator: torch.Generator | None
    ) -> list[Answer]:
        """Sample `copies` answers to each prompt; the answers to one prompt stand in a row.

        `ages` has the age of the version that samples each token, and so the most tokens of an answer. Version 0 also
        samples for earlier versions, which do not exist. As in an engine that recomputes its cache, a version that goes
        on with an answer reads all of it again. The temperature is 1. Without a generator each token is the most likely
        one.
        """
        prompt_ids: list[list[int]] = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        ids_RT = torch.tensor(prompt_ids).repeat_interleave(copies, dim=0)  # prompts, and tokens sampled so far
        cache, reader = DynamicCache(), ages[0]  # `reader` is the age of the version that filled the cache
        # Log-probs of the tokens that were chosen in each turn of the loop, one for each of the R answers.
        logp: list[Tensor] = []
        ended = torch.zeros(len(ids_RT), dtype=torch.bool)
        for age in ages:
            if age != reader:
                cache, reader = DynamicCache(), age
            version = self._versions[max(0, len(self._versions) - 1 - age)]
            unread = ids_RT[:, cache.get_seq_length() :]
            options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            all_logp = functional_call(self.model, version, (unread,), options).logits[:, -1].log_softmax(-1)
            if generator is None:
                chosen = all_logp.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(all_logp.exp(), 1, generator=generator)
            ids_RT = torch.cat([ids_RT, chosen], 1)
            logp.append(all_logp.gather(-1, chosen)[:, 0])
            ended |= chosen[:, 0] == self._end
            if bool(ended.all()):
                break
        columns = ids_RT[:, len(prompt_ids[0]) :].tolist(), torch.stack(logp, 1).tolist()
        rows = zip(*columns, strict=True)
        return [self._answer(prompt_ids[row // copies], *columns) for row, columns in enumerate(rows)]

    def _answer(self, prompt: list[int], tokens: list[int], logp: list[float]) -> Answer:
        """Return the answer of one row, up to and including the end token. `logp` are the log-probs of `tokens`."""
        truncated = self._end not in tokens
        count = len(tokens) if truncated else tokens.index(self._end) + 1
        text = "".join(self.tokenizer.convert_ids_to_tokens(tokens[: count if truncated else count - 1]))
        return Answer(prompt, tokens[:count], logp[:count], text, truncated)


class Rollouts:
    """Samples batches and evaluates, with the versions that the sampler holds."""

    def __init__(self, cell: Cell, sampler: Sampler) -> None:
        self._cell, self._sampler, self._config = cell, sampler, cell.config()
        self._held_out = held_out_seeds(self._config)

    def batch(self, step: int) -> list[Trajectory]:
        """Sample the batch of a step, whose tokens have the ages of the cell. The sampler's newest version is `step`.

        The problems depend on the seed and the step only, so all methods see the same ones.
        """
        size, dealt = self._cell.setting.group_size, self._cell.ages
        groups = self._cell.setting.batch_size // size
        first = self._cell.seed * SEED_STRIDE + step * groups
        batch: list[Trajectory] = []
        for ages in dict.fromkeys(dealt):
            # Seeds of the problems. A problem's seed is also the number of its group.
            seeds = [first + group for group in range(groups) if dealt[group % len(dealt)] == ages]
            shown = [str(prompt) for prompt in prompts(self._config, seeds)]
            generator = torch.Generator().manual_seed(seeds[0])
            answers = self._sampler.sample(shown, copies=size, ages=ages, generator=generator)
            tasks = [Task((seed - first) * size + index, seed, index, seed) for seed in seeds for index in range(size)]
            given = rewards(self._config, [task.seed for task in tasks], [answer.text for answer in answers])
            batch += [
                make_trajectory(
                    task,
                    answer.prompt,
                    answer.tokens,
                    answer.logp,
                    reward=reward,
                    versions=[max(0, step - age) for age in ages[: len(answer.tokens)]],
                    outcome=Outcome.TRUNCATED if answer.truncated else Outcome.OK,
                    text=answer.text,
                )
                for task, answer, reward in zip(tasks, answers, given, strict=True)
            ]
        # The trainer expects the samples of a group beside each other.
        return sorted(batch, key=lambda one: one.task.task_id)

    def accuracy(self) -> tuple[float, Answer]:
        """Return the share of held-out problems that are answered correctly, and the first answer."""
        shown = [str(prompt) for prompt in prompts(self._config, self._held_out)]
        answers = self._sampler.sample(shown, copies=1, ages=[0] * MAX_NEW_TOKENS, generator=None)
        return fmean(rewards(self._config, self._held_out, [answer.text for answer in answers])), answers[0]


def run(cell: Cell) -> Result:
    """Train the cell, and return its learning curve.

    Raises:
        ConfigError: the trainer refuses the cell's configuration.
        ContractError: the age of a batch, or the sampler's log-probs, are not what they should be.
    """
    config = cell.config()
    trainer = Trainer(config)
    sampler = Sampler(MODEL_PATH, max(map(max, cell.ages)))
    rollouts = Rollouts(cell, sampler)
    curve = [evaluate(rollouts, trainer, 0)]
    tokens = sampled = 0  # tokens trained and sampled so far
    for step in range(cell.setting.steps):
        batch = rollouts.batch(step)
        shard = make_shard(batch, step, config.train.max_age)
        trainer.train_step(shard)
        tokens += shard.total_tokens
        sampled += sum(one.trained_tokens(0) for one in batch)
        sampler.add_version(named_full_tensors(trainer.model))
        if trainer.version == cell.setting.steps or trainer.version % cell.setting.eval_every == 0:
            curve.append(evaluate(rollouts, trainer, tokens))
    return Result(cell=cell, curve=curve, masked=1 - tokens / sampled)


def evaluate(rollouts: Rollouts, trainer: Trainer, tokens: int) -> Point:
    """Measure the held-out accuracy of the trainer's version, which has trained `tokens` tokens.

    Raises:
        ContractError: the sampler and the trainer do not compute the same log-probs for an answer.
    """
    accuracy, answer = rollouts.accuracy()
    expected = canary_logprobs(trainer.model, [*answer.prompt, *answer.tokens])[-len(answer.logp) :]
    gap = max(abs(one - other) for one, other in zip(expected, answer.logp, strict=True))
    if not gap <= PARITY:
        raise ContractError(
            f"version {trainer.version}: the log-probs of the sampler and the trainer differ by {gap:.2g}, "
            f"expected at most {PARITY:g}"
        )
    return Point(trainer.version, tokens, accuracy)


def train_cell(cell: Cell) -> tuple[Cell, Result | str]:
    """Train a cell on one core, in a process that does nothing else.

    Returns the cell with its result, or with the traceback of its error, so that the other cells go on.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with single_process_group("gloo"):
        try:
            return cell, run(cell)
        except Exception:
            return cell, traceback.format_exc()
