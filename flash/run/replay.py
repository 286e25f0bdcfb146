"""Replay of training: trains a run's recorded batches again in the process of `flash replay`, without engines.

The command calls `refuse_idle`, `plan` and `replay`, in this order. Trainer, objective and optimizer are the same as in
a run, on one rank. With the run's own configuration, the resulting weights are equal to the run's weights: bit for bit
if one CPU rank with the same number of threads trained them. If several ranks trained them, sums have another order,
and the weights differ by rounding. With another objective, the replay shows the effect of that objective on the same
data, which were sampled by policies of the original run.

The recorded batches are those of a run directory, or those of a bundle (`flash.run.bundle`), a file that holds steps
with all that they need. A bundle has no checkpoint to compare with, only a `TensorRecord` of each tensor.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from flash.config.check_learning import why_not_streamed
from flash.config.decode import ConfigProblem, refuse
from flash.config.load import dump, flat, read_toml
from flash.config.machine import trainer_threads
from flash.config.tree import Config, ParallelConfig
from flash.errors import ConfigError, RecordingError
from flash.foreign.torch import single_process_group
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.samples.batches import split_into_shards, split_rounds
from flash.trainer.checkpoint_files import Manifest, complete_checkpoints, damaged_checkpoints, read_manifest
from flash.types import ONLY_ROUND, Batch
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


class TensorRecord(msgspec.Struct, frozen=True):
    """Fingerprint of a whole tensor of the policy, by which a bundle knows weights that it does not hold."""

    name: str
    """Name of the parameter in the trainer's model."""
    dtype: str
    """Name of the data type, such as `float32`."""
    shape: list[int]
    """Shape of the whole tensor."""
    sha256: str
    """SHA-256 of the bytes, hexadecimal."""
    moved: float = 0.0
    """Euclidean norm of the difference to the tensor at the start of the replay. It shows how far two results are
    apart, which unequal checksums do not."""


class RecordedWeights(msgspec.Struct, frozen=True):
    """Weights of a version that a replay is compared with."""

    version: int
    """Policy version: the number of steps that were trained."""
    origin: str
    """Origin of the weights as a possessive phrase, such as `the run's (checkpoint step-000006)`."""
    tensors: list[TensorRecord]
    """Fingerprints of the trained tensors."""


class BundledStart(msgspec.Struct, frozen=True):
    """Start and expected result of a replay whose steps come from a bundle."""

    tensors: list[TensorRecord]
    """All parameters of the policy at the first version, with the frozen base of adapters."""
    origin: str
    """Origin of these weights, for the error message if the model is another one."""
    state: Path | None
    """File with the rest of the trainer's state; None if the trainer is new."""
    manifest: Manifest | None
    """Numbers of the trainer that are not tensors; None if the trainer is new."""
    threads: int
    """Number of threads of the replay that made the bundle. Another number gives another order of sums on the CPU."""
    results: list[RecordedWeights]
    """Weights after the last step. Empty while a bundle is made."""


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
    bundled: BundledStart | None = None
    """Start and expected result if the steps come from a bundle; None if they come from a run directory."""


class Comparison(msgspec.Struct, frozen=True):
    """Difference between the replayed weights of a version and other weights of the same version."""

    version: int
    """Version that is compared."""
    origin: str
    """Origin of the other weights as a possessive phrase, such as `the checkpoint's (step-000006)`."""
    tensors: int
    """Number of tensors that are compared."""
    different: int
    """Number of tensors that differ in any bit."""
    first: str
    """Name of the first of these tensors, in the order of the model; empty if all are equal."""
    largest: float | None
    """Largest absolute difference of any weight; None if only checksums of the other weights are known."""
    moved: float
    """Largest absolute difference of any weight to its value at the beginning of the replay."""
    apart: float | None = None
    """Largest relative difference, over the tensors, of the norm of the tensor's change since the beginning; None if
    the other weights themselves are known."""


def plan(run_dir: Path, first: int | None, last: int | None) -> ReplayPlan:
    """Find batches and checkpoints with which the versions from `first` to `last` can be trained again.

    `flash replay` calls this with the values of `--from-step` and `--to-step`. If `first` or `last` is None, it is the
    first or the last possible version.

    Raises:
        ConfigError: a batch or a checkpoint is missing. The message names those that exist.
        CheckpointError: the manifest of a checkpoint cannot be read.
    """
    found = _recorded(run_dir)
    first = found.starts[0] if first is None else first
    if first not in found.starts:
        known = ", ".join(map(str, found.starts))
        raise ConfigError(
            f"--from-step: expected a version to begin with that the run has kept ({known}); got {first}{found.damaged}"
        )
    newest = first  # becomes the last version that can be reached without a gap between the batches
    while newest in found.steps:
        newest += 1
    beyond = {step for step in found.steps if step >= newest} if last is None else set[int]()
    last = newest if last is None else last
    if not first < last <= newest:
        raise ConfigError(
            f"--to-step: expected {first + 1} to {newest} (there are batches of {_ranges(found.steps)}); got {last}"
        )
    compared = {version: folder for version, folder in found.held.items() if first < version <= last}
    return ReplayPlan(first, last, found.held.get(first), compared, _ranges(beyond) if beyond else "")


def plan_step(run_dir: Path, step: int) -> ReplayPlan:
    """Find the shortest replay that ends with a step, for `flash bundle`.

    It begins at the newest version up to the step whose weights the run has kept. Weights between two checkpoints are
    not kept, so the steps before `step` may have to be trained first.

    Raises:
        ConfigError: the step cannot be trained again. The message names the steps that can.
        CheckpointError: the manifest of a checkpoint cannot be read.
    """
    found = _recorded(run_dir)
    # A recorded step can be trained again from the newest start before it, unless a batch in between is missing.
    begins = {
        one: start
        for one in found.steps
        if (start := max((start for start in found.starts if start <= one), default=None)) is not None
        and found.steps.issuperset(range(start, one))
    }
    if step not in begins:
        raise ConfigError(f"--step: expected one of {_ranges(set(begins))}, got {step}{found.damaged}")
    return plan(run_dir, begins[step], step + 1)


class _Recorded(NamedTuple):
    """Records of a run from which steps can be trained again."""

    steps: set[int]
    """Steps with recorded batches."""
    held: dict[int, Path]
    """Folders of the complete checkpoints, by version."""
    starts: list[int]
    """Versions at which a replay can begin, ascending; at least one. These are 0, the model itself, and the versions of
    checkpoints. The batch of the next step is recorded for each of them."""
    damaged: str
    """Faults of damaged checkpoints, as the end of an error message; empty if there are none."""


def _recorded(run_dir: Path) -> _Recorded:
    """Find the recorded batches and the checkpoints of a run.

    Raises:
        ConfigError: there are no batches, or a replay can begin nowhere.
        CheckpointError: the manifest of a checkpoint cannot be read.
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
            f"{run_dir}: there are batches of {_ranges(steps)}, and no checkpoint before any of them{damaged}"
        )
    return _Recorded(steps, held, starts, damaged)


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
    before = dict(flat(read_toml(file)))
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
    on_end: Callable[[list[TensorRecord]], None] | None = None,
    export: Path | None = None,
) -> None:
    """Train the recorded batches of a plan again, for `flash replay` and `flash bundle`.

    Args:
        config: the run's configuration, maybe with other settings for training.
        planned: the steps to train, from `plan` or from a bundle.
        folder: folder of the recorded batches.
        on_step: called with the metrics of each step, by their names in metrics.jsonl, and its number as `step`.
        on_comparison: called with the difference to each checkpoint of the run, or to each result of the bundle.
        on_end: called with the fingerprints of the last weights, if the steps come from a bundle.
        export: path for the last weights as a Hugging Face folder; None: do not write them.

    Raises:
        ConfigError: a bundle is replayed with another model than the one that its steps began with.
        FlashError: a batch or a checkpoint is damaged, or the trainer refuses a batch.
    """
    import transformers

    from flash.trainer import checkpoint
    from flash.trainer.step import Trainer

    transformers.utils.logging.disable_progress_bar()
    bundled = planned.bundled
    with one_rank(config, None if bundled is None else bundled.threads):
        trainer = Trainer(msgspec.structs.replace(config, parallel=ParallelConfig()))
        if planned.checkpoint is not None:
            checkpoint.load(planned.checkpoint, trainer)
        if bundled is not None:
            _begin(trainer, bundled, config.model.path)
        first_weights = {name: weight.clone() for name, weight in weights_of(trainer).items()}
        for number in range(planned.first, planned.last):
            batch = read_batch(folder, number)
            if bundled is not None:
                _check_vocabulary(batch, trainer)
            # If the steps of `config` are streamed, these are the rounds that the run has trained, so that sums have
            # the same order. Settings that need the whole batch first get it as one round.
            rounds = split_rounds(batch) if why_not_streamed(config) is None else [(batch, ONLY_ROUND)]
            for part, place in rounds:
                (shard,) = run_to_end(split_into_shards(part, shards=1, place=place))
                trainer.train_round(shard)
            on_step({"step": number, **trainer.finish_step()})
            if trainer.version in planned.compared:
                on_comparison(_compare(trainer, planned.compared[trainer.version], first_weights))
        if bundled is not None:
            ours = weights_of(trainer)
            records, moved = record_tensors(ours, first_weights), _largest_gap(ours, first_weights)
            for result in bundled.results:
                on_comparison(_compare_records(records, result, moved))
            if on_end is not None:
                on_end(records)
        if export is not None:
            from flash.rollout.episode.tokenizer import HfTokenizer

            tokenizer = HfTokenizer(config.model)
            tokenizer.add_ends(trainer.model.generation_config)
            checkpoint.export_hf(trainer.model, tokenizer.inner, export)


def threads_of(config: Config) -> int:
    """Return the number of threads with which a replay trains on this machine's CPU: as many as a rank of the run."""
    return trainer_threads(config, 0, config.cluster.trainer_cpus or sorted(os.sched_getaffinity(0)))


@contextmanager
def one_rank(config: Config, threads: int | None = None) -> Generator[None]:
    """Provide a process group of this process alone while the block runs, and set seed and threads as a rank does.

    The seed and the number of threads stay set after the block. With another number of threads, sums on the CPU have
    another order, and the weights differ by rounding. A bundle states the number; for a run directory `threads` is
    None, and the number is computed.
    """
    import torch

    from flash.trainer.mesh import process_group_backend

    torch.manual_seed(config.run.seed)
    if config.gpus_per_node == 0:
        torch.set_num_threads(threads or threads_of(config))
    backend = process_group_backend(cuda=config.gpus_per_node > 0, offloads="weights" in config.train.offload)
    with single_process_group(backend):
        yield


def weights_of(trainer: Trainer, *, frozen: bool = False) -> dict[str, Any]:
    """Return the policy's whole weights on the CPU, by name. `frozen`: also the base of adapters.

    The tensors may be the model's own memory, so a later step changes them: clone what must stay.
    """
    from torch.distributed.tensor import DTensor

    from flash.trainer.mesh import gather_full
    from flash.trainer.model.model import published_parameters

    named = trainer.model.named_parameters() if frozen else published_parameters(trainer.model)
    parts = ((name, parameter.detach()) for name, parameter in named)
    return {name: (gather_full(part) if isinstance(part, DTensor) else part).cpu() for name, part in parts}


def record_tensors(tensors: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[TensorRecord]:
    """Return the fingerprint of each tensor, in the same order.

    `tensors` is a dict from parameter names to tensors. `before` has the tensors at the start of the replay, by the
    same names; None if `tensors` are these, so that `moved` is 0.
    """
    from flash.weights.image import dtype_name, tensor_bytes

    return [
        TensorRecord(
            name,
            dtype_name(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(tensor_bytes(tensor.contiguous())).hexdigest(),
            0.0 if before is None else float((tensor.double() - before[name].double()).norm()),
        )
        for name, tensor in tensors.items()
    ]


def _begin(trainer: Trainer, bundled: BundledStart, path: str) -> None:
    """Bring a new trainer to the start of a bundle, and check that the weights of its model are the recorded ones.

    Args:
        trainer: trainer that was made from the model at `path`.
        bundled: the start.
        path: the model, for the error message.

    Raises:
        ConfigError: the model has other weights than the bundle's steps began with.
        CheckpointError: the state in the bundle does not fit.
    """
    from flash.trainer import checkpoint

    adapters = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    wanted = {record.name: record for record in bundled.tensors}

    def check(*, loaded: bool) -> None:
        """Compare the trainer's weights with the recorded ones. `loaded`: True if the bundle's state, which has the
        adapters, is loaded already. Raises ConfigError if a tensor differs."""
        # `base_fingerprint` is empty unless adapters are trained. Adapters are part of the state, so they are compared
        # after it is loaded. The adapters of a new trainer follow from the settings, which a user may have changed
        # (`lora.rank`, `run.seed`), so they are not compared. All other weights come from the model's folder. They are
        # compared before, because loading the state into another model would fail with a less clear message.
        held = {record.name: record for record in record_tensors(weights_of(trainer, frozen=True))}
        late = adapters if trainer.base_fingerprint and not loaded else set[str]()
        names = [name for name in dict.fromkeys((*wanted, *held)) if name not in late]
        if wrong := [name for name in names if wanted.get(name) != held.get(name)]:
            raise ConfigError(
                f"the model in {path} is not the one that the steps began with: {len(wrong)} of {len(names)} tensors "
                f"differ, the first is {wrong[0]}; expected {bundled.origin}"
            )

    check(loaded=False)
    if bundled.state is not None and bundled.manifest is not None:
        checkpoint.load_state(bundled.state, bundled.manifest, trainer)
        if trainer.base_fingerprint:
            check(loaded=True)


def _check_vocabulary(batch: Batch, trainer: Trainer) -> None:
    """Raise RecordingError if a batch of a bundle has a token that the model does not have.

    A bundle may come from anybody. torch's own error would name no token, and on a GPU it would end the process.
    """
    model: Any = trainer.model
    size = int(model.get_input_embeddings().weight.shape[0])
    largest = max((int(one.tokens().max()) for one in batch.trajectories), default=0)
    if largest >= size:
        raise RecordingError(f"the batch of step {batch.step} has the token {largest}, and the model has {size} tokens")


def _compare(trainer: Trainer, path: Path, first_weights: dict[str, Any]) -> Comparison:
    """Compare the trainer's weights with the weights of the run in the checkpoint `path`.

    `first_weights` are the weights at the beginning of the replay, by name, for `Comparison.moved`. Raises
    CheckpointError if the checkpoint is damaged.
    """
    import torch

    from flash.trainer import checkpoint

    ours, theirs = weights_of(trainer), checkpoint.read_weights(path, trainer)
    different = [name for name, weight in ours.items() if not torch.equal(weight, theirs[name])]
    return Comparison(
        trainer.version,
        f"the checkpoint's ({path.name})",
        len(ours),
        len(different),
        different[0] if different else "",
        _largest_gap(ours, theirs),
        _largest_gap(ours, first_weights),
    )


def _compare_records(ours: list[TensorRecord], result: RecordedWeights, moved: float) -> Comparison:
    """Compare replayed weights (`ours`) with a result of which only fingerprints are known. `moved`: as in
    `Comparison`."""
    theirs = {record.name: record for record in result.tensors}
    different: list[str] = []
    apart = 0.0
    for record in ours:
        other = theirs.get(record.name)
        if other is None or other.sha256 != record.sha256:
            different.append(record.name)
            # The norms of both changes from the common start are all that is known of the difference. It is relative to
            # the larger norm; two tensors that have not moved are not apart.
            known = 0.0 if other is None else other.moved
            apart = max(apart, abs(record.moved - known) / (max(record.moved, known) or 1.0))
    first = different[0] if different else ""
    return Comparison(result.version, result.origin, len(ours), len(different), first, None, moved, apart)


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
