"""Replay of training: trains a run's recorded batches again in the process of `flash replay`, without engines.

The command calls `refuse_idle`, `plan` and `replay`, in this order. Trainer, objective and optimizer are the same as in
a run, on one rank. With the run's own configuration, the resulting weights are equal to the run's weights: bit for bit
if one CPU rank with the same number of threads trained them. If several ranks trained them, sums have another order,
and the weights differ by rounding. With another objective, the replay shows the effect of that objective on the same
data, which were sampled by policies of the original run.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flash.config.check_learning import why_not_streamed
from flash.config.decode import ConfigProblem, refuse
from flash.config.load import dump, flat
from flash.config.machine import trainer_threads
from flash.config.tree import Config, ParallelConfig
from flash.errors import ConfigError
from flash.foreign.torch import single_process_group
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.samples.batches import split_into_shards, split_rounds
from flash.trainer.checkpoint_files import complete_checkpoints, damaged_checkpoints, read_manifest
from flash.types import ONLY_ROUND
from flash.waiting import run_to_end

if TYPE_CHECKING:
    from flash.trainer.step import Trainer


USED_KEYS = (
    *("algorithm.", "critic.", "lora.", "model.", "train."),
    *("rollout.max_new_tokens", "rollout.routing_replay", "run.seed", "run.steps"),
    *("cluster.gpus_per_node", "cluster.node_cpus", "cluster.trainer_cpus", "cluster.trainer_ranks"),
)
"""Keys, and beginnings of keys, that affect a replay, except for `BATCH_SIZE`."""
BATCH_SIZE = "train.batch_size"
"""Key of the batch size. It has no effect, because the batches are those of the run."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """Steps of a run that a replay trains again: found by `plan`, trained by `replay`."""

    first: int
    """Version at the start."""
    last: int
    """Version at the end."""
    checkpoint: Path | None
    """Checkpoint of the first version; None if that is the model in its own folder."""
    compared: dict[int, Path]
    """Checkpoints by version, for the versions after the first; the results are compared with them."""
    left_out: str = ""
    """Recorded steps after `last` that cannot be reached, because the batch of an earlier step is missing; empty if
    there are none, or if the user has chosen `last`."""


class Comparison(msgspec.Struct, frozen=True):
    """Difference between the replayed weights of a version and those of the run."""

    version: int
    """Version that is compared."""
    checkpoint: Path
    """Checkpoint of the run with this version."""
    largest: float
    """Largest absolute difference of any weight to the run's checkpoint; 0 only if all weights are equal bit for
    bit."""
    moved: float
    """Largest absolute difference of any weight to its value at the beginning of the replay."""


def plan(run_dir: Path, first: int | None, last: int | None) -> ReplayPlan:
    """Find batches and checkpoints with which the versions from `first` to `last` can be trained again.

    `flash replay` calls this with the values of `--from-step` and `--to-step`. If `first` or `last` is None, it is the
    first or the last possible version.

    Raises:
        ConfigError: a batch or a checkpoint is missing. The message names those that exist.
    """
    steps = set(recorded_steps(RunDirectory(run_dir).batches))
    if not steps:
        raise ConfigError(
            f"{run_dir} holds no recorded batches: its run has trained no step, or had checkpoint.batches = 'none'"
        )
    held = {read_manifest(folder).version: folder for folder in reversed(complete_checkpoints(run_dir))}
    damaged = "".join(f"; {fault}" for fault in damaged_checkpoints(run_dir))
    # A replay begins with version 0, which is the model in its own folder, or with a checkpoint. Step n trains version
    # n, so its batch must be there.
    starts = [version for version in sorted({0, *held}) if version in steps]
    if not starts:
        raise ConfigError(
            f"{run_dir}: there are batches of {_ranges(steps)}, and no checkpoint before any of them{damaged}"
        )
    first = starts[0] if first is None else first
    if first not in starts:
        known = ", ".join(map(str, starts))
        raise ConfigError(
            f"--from-step: expected a version to begin with that the run has kept ({known}); got {first}{damaged}"
        )
    newest = first  # becomes the last version that can be reached without a gap between the batches
    while newest in steps:
        newest += 1
    beyond = {step for step in steps if step >= newest} if last is None else set[int]()
    last = newest if last is None else last
    if not first < last <= newest:
        raise ConfigError(
            f"--to-step: expected {first + 1} to {newest} (there are batches of {_ranges(steps)}); got {last}"
        )
    compared = {version: folder for version, folder in held.items() if first < version <= last}
    return ReplayPlan(first, last, held.get(first), compared, _ranges(beyond) if beyond else "")


def refuse_idle(file: Path, config: Config, named: Collection[str]) -> None:
    """Refuse settings that would have no effect, because a user might take the unchanged result for an effect.

    `flash replay` calls this before any work.

    Args:
        file: configuration file of the run.
        config: configuration of the replay: that of the run, with the settings that the user has given.
        named: dotted keys that the user has given.

    Raises:
        ConfigError: a given key differs from the run's value, and has no effect.
    """
    before = dict(flat(tomllib.loads(file.read_text(encoding="utf-8"))))
    now = dict(flat(tomllib.loads(dump(config))))
    idle = [
        key
        for key in sorted(named)
        if before.get(key) != now.get(key) and (key == BATCH_SIZE or not key.startswith(USED_KEYS))
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
    planned: ReplayPlan,
    *,
    folder: Path,
    on_step: Callable[[dict[str, float]], None],
    on_comparison: Callable[[Comparison], None],
    export: Path | None = None,
) -> None:
    """Train the recorded batches of a plan again, for `flash replay`.

    Args:
        config: the run's configuration, maybe with other settings for training.
        planned: the steps to train, from `plan`.
        folder: folder of the recorded batches.
        on_step: called with the metrics of each step, by their names in metrics.jsonl, and its number as `step`.
        on_comparison: called with the difference to each checkpoint of the run.
        export: path for the last weights as a Hugging Face folder; None: do not write them.

    Raises:
        FlashError: a batch or a checkpoint is damaged, or the trainer refuses a batch.
    """
    import transformers

    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.trainer import checkpoint
    from flash.trainer.step import Trainer

    transformers.utils.logging.disable_progress_bar()
    with _one_rank(config):
        trainer = Trainer(msgspec.structs.replace(config, parallel=ParallelConfig()))
        if planned.checkpoint is not None:
            checkpoint.load(planned.checkpoint, trainer)
        first_weights = {name: weight.clone() for name, weight in _weights(trainer).items()}
        for number in range(planned.first, planned.last):
            batch = read_batch(folder, number)
            # If the steps of `config` are streamed, these are the rounds that the run has trained, so that sums have
            # the same order. Settings that need the whole batch first get it as one round.
            rounds = split_rounds(batch) if why_not_streamed(config) is None else [(batch, ONLY_ROUND)]
            for part, place in rounds:
                (shard,) = run_to_end(split_into_shards(part, shards=1, place=place))
                trainer.train_round(shard)
            on_step({"step": number, **trainer.finish_step()})
            if trainer.version in planned.compared:
                on_comparison(_compare(trainer, planned.compared[trainer.version], first_weights))
        if export is not None:
            tokenizer = HfTokenizer(config.model)
            tokenizer.add_ends(trainer.model.generation_config)
            checkpoint.export_hf(trainer.model, tokenizer.inner, export)


@contextmanager
def _one_rank(config: Config) -> Generator[None]:
    """Provide a process group of this process alone while the block runs. Sets torch's seed and number of threads to
    those of a rank of the run.

    With another number of threads, sums on the CPU have another order, and the weights differ by rounding.
    """
    import torch

    from flash.trainer.mesh import process_group_backend

    torch.manual_seed(config.run.seed)
    if config.gpus_per_node == 0:
        cpus = config.cluster.trainer_cpus or sorted(os.sched_getaffinity(0))
        torch.set_num_threads(trainer_threads(config, 0, cpus))
    backend = process_group_backend(cuda=config.gpus_per_node > 0, offloads="weights" in config.train.offload)
    with single_process_group(backend):
        yield


def _weights(trainer: Trainer) -> dict[str, Any]:
    """Return the policy's whole weights on the CPU, by name."""
    from flash.trainer.model.model import named_full_tensors

    return {name: tensor.detach().cpu() for name, tensor in named_full_tensors(trainer.model)}


def _compare(trainer: Trainer, path: Path, first_weights: dict[str, Any]) -> Comparison:
    """Compare the trainer's weights with the checkpoint `path`, and with the weights at the beginning of the replay."""
    from flash.trainer import checkpoint

    ours, theirs = _weights(trainer), checkpoint.read_weights(path, trainer)
    return Comparison(trainer.version, path, _largest_gap(ours, theirs), _largest_gap(ours, first_weights))


def _largest_gap(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest absolute difference of any weight between two models; NaN if a weight is NaN. The arguments
    are the models' tensors by name."""
    import torch

    return float(torch.stack([(weight - theirs[name]).abs().max() for name, weight in ours.items()]).max())


def _ranges(steps: set[int]) -> str:
    """Return ranges of steps as text, such as `steps 3 to 7, 12`."""
    parts: list[str] = []
    for step in sorted(steps):
        if step - 1 in steps:
            continue
        end = step
        while end + 1 in steps:
            end += 1
        parts.append(f"{step} to {end}" if end > step else str(step))
    return "steps " + ", ".join(parts)
