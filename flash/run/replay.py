"""Training again, in this process, what a run has trained: from its recorded batches, without engines.

The trainer, its objective and its optimizer are those of a run, on one rank. With the run's own configuration the
weights come out as they were: bit for bit on one CPU rank with as many threads; where several ranks trained, sums are
taken in another order, and they differ by rounding. With another objective it shows what that would have made of the
same data, which other policies than its own have sampled.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flash.config.decode import ConfigProblem, refuse
from flash.config.load import dump, flat
from flash.config.machine import trainer_threads
from flash.config.tree import Config, ParallelConfig
from flash.errors import ConfigError
from flash.foreign.torch import alone
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.samples.batches import deal
from flash.trainer.checkpoint_files import complete_checkpoints, damaged_checkpoints, read_manifest
from flash.waiting import run_to_end

if TYPE_CHECKING:
    from flash.trainer.step import Trainer


USED = (
    *("algorithm.", "critic.", "lora.", "model.", "train."),
    *("rollout.max_new_tokens", "rollout.routing_replay", "run.seed", "run.steps"),
    *("cluster.gpus_per_node", "cluster.node_cpus", "cluster.trainer_cpus", "cluster.trainer_ranks"),
)
"""Keys, or how they begin, that a replay follows, except for `BATCHES`."""
BATCHES = "train.batch_size"
"""The batches are those of the run."""


class Course(msgspec.Struct, frozen=True):
    """What is trained again."""

    first: int
    """The version it begins with."""
    last: int
    """The version it ends with."""
    checkpoint: Path | None
    """Holds the first version; None: the model's own folder does."""
    compared: dict[int, Path]
    """Checkpoints of versions on the way."""
    left_out: str = ""
    """Steps that nobody asked to end before, and that cannot be reached: one before them has no batch."""


class Comparison(msgspec.Struct, frozen=True):
    """The weights of a version beside those that the run had."""

    version: int
    checkpoint: Path
    largest: float
    """Largest absolute difference of any weight; 0 only if all are equal bit for bit."""
    moved: float
    """Largest absolute difference of any weight to what it was at the beginning of the replay."""


def plan(run_dir: Path, first: int | None, last: int | None) -> Course:
    """Find batches and checkpoints for the versions from `first` to `last`; None: as many as there are.

    Raises:
        ConfigError: some are missing; it says which there are.
    """
    steps = set(recorded_steps(RunDirectory(run_dir).batches))
    if not steps:
        raise ConfigError(
            f"{run_dir} holds no recorded batches: its run has trained no step, or had checkpoint.batches = 'none'"
        )
    held = {read_manifest(folder).version: folder for folder in reversed(complete_checkpoints(run_dir))}
    damaged = "".join(f"; {fault}" for fault in damaged_checkpoints(run_dir))
    starts = [version for version in sorted({0, *held}) if version in steps]
    if not starts:
        raise ConfigError(
            f"{run_dir}: there are batches of {_runs(steps)}, and no checkpoint before any of them{damaged}"
        )
    first = starts[0] if first is None else first
    if first not in starts:
        known = ", ".join(map(str, starts))
        raise ConfigError(
            f"--from-step: expected a version to begin with that the run has kept ({known}); got {first}{damaged}"
        )
    newest = first
    while newest in steps:
        newest += 1
    beyond = {step for step in steps if step >= newest} if last is None else set[int]()
    last = newest if last is None else last
    if not first < last <= newest:
        raise ConfigError(
            f"--to-step: expected {first + 1} to {newest} (there are batches of {_runs(steps)}); got {last}"
        )
    compared = {version: folder for version, folder in held.items() if first < version <= last}
    return Course(first, last, held.get(first), compared, _runs(beyond) if beyond else "")


def refuse_idle(file: Path, config: Config, named: Collection[str]) -> None:
    """Refuse settings that would change nothing.

    Args:
        file: the run's own configuration.
        config: what it is to be trained again with.
        named: the keys that were given.

    Raises:
        ConfigError: some of them have another value than in the run, and no effect.
    """
    before, now = dict(flat(tomllib.loads(file.read_text()))), dict(flat(tomllib.loads(dump(config))))
    idle = [
        key for key in sorted(named) if before.get(key) != now.get(key) and (key == BATCHES or not key.startswith(USED))
    ]
    if idle:
        raise refuse(
            [
                ConfigProblem(key, "has no effect on a replay, whose batches are those of the run: leave it out")
                for key in idle
            ]
        )


def replay(
    config: Config,
    course: Course,
    *,
    folder: Path,
    step: Callable[[dict[str, float]], None],
    comparison: Callable[[Comparison], None],
    export: Path | None = None,
) -> None:
    """Train the recorded batches again.

    Args:
        config: of the run, or with other settings of training.
        course: from `plan`.
        folder: holds the recorded batches.
        step: given the metrics of each step, with the step's number, as in metrics.jsonl.
        comparison: given what came out beside the run's checkpoints.
        export: where the last weights are to be written as a Hugging Face folder.

    Raises:
        FlashError: a batch or a checkpoint is damaged, or the trainer refuses what it is given.
    """
    import transformers

    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.trainer import checkpoint
    from flash.trainer.step import Trainer

    transformers.utils.logging.disable_progress_bar()
    with _one_rank(config):
        trainer = Trainer(msgspec.structs.replace(config, parallel=ParallelConfig()))
        if course.checkpoint is not None:
            checkpoint.load(course.checkpoint, trainer)
        begun = {name: weight.clone() for name, weight in _weights(trainer).items()}
        for number in range(course.first, course.last):
            (shard,) = run_to_end(deal(read_batch(folder, number), shards=1))
            step({"step": number, **trainer.train_step(shard)})
            if trainer.version in course.compared:
                comparison(_compare(trainer, course.compared[trainer.version], begun))
        if export is not None:
            tokenizer = HfTokenizer(config.model)
            tokenizer.add_ends(trainer.model.generation_config)
            checkpoint.export_hf(trainer.model, tokenizer.inner, export)


@contextmanager
def _one_rank(config: Config) -> Generator[None]:
    """A process group of this process alone, seeded and with as many threads as a rank of the run."""
    import torch

    from flash.trainer.mesh import process_group_backend

    torch.manual_seed(config.run.seed)
    if config.gpus_per_node == 0:
        cpus = config.cluster.trainer_cpus or sorted(os.sched_getaffinity(0))
        torch.set_num_threads(trainer_threads(config, 0, cpus))
    with alone(process_group_backend(cuda=config.gpus_per_node > 0, offloads="weights" in config.train.offload)):
        yield


def _weights(trainer: Trainer) -> dict[str, Any]:
    from flash.trainer.model.model import named_full_tensors

    return {name: tensor.detach().cpu() for name, tensor in named_full_tensors(trainer.model)}


def _compare(trainer: Trainer, path: Path, begun: dict[str, Any]) -> Comparison:
    from flash.trainer import checkpoint

    ours, theirs = _weights(trainer), checkpoint.read_weights(path, trainer)
    return Comparison(trainer.version, path, _largest_gap(ours, theirs), _largest_gap(ours, begun))


def _largest_gap(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """NaN where one is."""
    import torch

    return float(torch.stack([(weight - theirs[name]).abs().max() for name, weight in ours.items()]).max())


def _runs(steps: set[int]) -> str:
    """`steps 3 to 7, 12`."""
    parts: list[str] = []
    for step in sorted(steps):
        if step - 1 in steps:
            continue
        end = step
        while end + 1 in steps:
            end += 1
        parts.append(f"{step} to {end}" if end > step else str(step))
    return "steps " + ", ".join(parts)
