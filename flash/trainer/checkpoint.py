"""Writes and loads checkpoints, and writes the Hugging Face export.

`flash.trainer.loop` calls `save` and `export_hf`; `flash.run.trainer_rank` calls `load` when a run resumes.
`flash.run.sft_rank` calls all of these for supervised training, and `flash.run.replay` reads checkpoints.
`flash.run.bundling` calls `write_state`, and `flash.run.replay` calls `load_state`, which know one rank and one file.

A checkpoint is written to a temporary folder, whose name begins with `.tmp-`, beside its final folder. It holds:
- the model, the optimizer and the other tensors that the trainer keeps (critics, the average of the weights).
  torch.distributed.checkpoint writes these tensors, so that any number of ranks can load them;
- the random states of each data shard (the ranks that train the same samples);
- the state of the hub, which holds the samples and the progress of the run;
- a manifest with size and CRC of every file, which is written last.
Then the folder is renamed. Whatever happens before the renaming, the previous checkpoint stays the newest one.

All public functions except these two are collectives (all ranks must call them in the same order), and a failure on one
rank is raised on all ranks. The trainer ranks share the run directory.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from flash.errors import CheckpointError, TransportError
from flash.foreign.peft import config_in
from flash.foreign.transformers import make_weights_readable
from flash.trainer.checkpoint_files import (
    EXTRAS,
    HUB_STATE,
    MANIFEST,
    STATE,
    TMP,
    FileEntry,
    Manifest,
    alpha_mismatch,
    check_files,
    extras_mismatch,
    file_entry,
    make_empty,
    move_into_place,
    prune,
    read_manifest,
    step_folder,
    sync_to_disk,
    temporary_of,
)
from flash.trainer.critic import Critic
from flash.trainer.mesh import TrainerMesh
from flash.trainer.model.adapters import write_adapters
from flash.trainer.model.model import kept_buffers, named_full_tensors, published_parameters
from flash.trainer.optimizer import LossScale

if TYPE_CHECKING:
    from flash.trainer.step import Trainer

T = TypeVar("T")

WriteHubState = Callable[[Path], FileEntry]
"""Function that makes the hub write its state to a file, and returns the file's manifest entry. Supervised training,
which has no hub, passes a function that writes its own state to this file."""

EXPORTED_BYTES = 5 * 10**9
"""Largest file of an export in bytes, unless a single tensor is larger. Rank 0 holds one file's tensors at a time."""
_RNG = "random"
"""Beginning of the names of random states in a file of `write_state`."""
NOT_WRITABLE = "check that you may write there, and that its disk is not mounted read-only"
"""Advice of an error message about a folder that this process must not write to."""


def save(run_dir: Path, trainer: Trainer, write_hub_state: WriteHubState, *, keep: int) -> Path:
    """Write the checkpoint of the trainer's version, and return its folder. A collective.

    Older checkpoints are deleted, except of the `keep` newest versions. A checkpoint of the same version is replaced.

    Args:
        run_dir: the run directory.
        trainer: the state to write.
        write_hub_state: called on rank 0 while the checkpoint's temporary folder exists. It must write the file that it
            is given.
        keep: number of versions, the newest ones, whose checkpoints are kept.

    Raises:
        CheckpointError: on every rank, if any rank or the hub could not write. The previous checkpoint is untouched.
        TransportError: on rank 0 alone, if the hub did not answer. All ranks end when the hub ends.
    """
    rank = dist.get_rank()
    folder = step_folder(run_dir, trainer.version)
    aside = temporary_of(folder)
    with _removed_on_failure(aside, lambda fault: f"cannot write {folder}: {fault}; {_remedy(folder, trainer)}"):
        # The folder must exist before any rank writes into it, and each file must be complete before the manifest
        # describes the file. So all ranks wait for each other after each of these calls, also after work of rank 0
        # alone.
        _on_all_ranks(lambda: make_empty(aside, aside.parent.glob(TMP + "*")) if rank == 0 else None, aside)
        _on_all_ranks(lambda: _write_rng(aside, trainer.mesh.data_shard) if trainer.mesh.leads_shard else None, aside)
        try:
            dcp_saver.save(_state(trainer), checkpoint_id=aside / STATE)
        except CheckpointException as error:
            # torch gathers the failures of all ranks and raises this error on every rank. The class does not derive
            # from Exception.
            raise CheckpointError(_reason(error)) from error
        hub_state = _on_all_ranks(lambda: [write_hub_state(aside / HUB_STATE)] if rank == 0 else [], aside)[0]
        # Each rank reads its own files again, to compute their checksums.
        own_files = _on_all_ranks(lambda: _seal(aside, rank, trainer.mesh), aside)
        files = [entry for entries in (hub_state, *own_files) for entry in entries]
        manifest = _describe(trainer, sorted(files, key=lambda entry: entry.path))
        _on_all_ranks(lambda: _commit(aside, folder, manifest) if rank == 0 else None, aside)
    if rank == 0:
        prune(run_dir, keep)
    return folder


def load(path: Path, trainer: Trainer) -> None:
    """Load a checkpoint into the trainer, on any number of ranks. A collective.

    If reading the tensors fails, some of the trainer's tensors may have been changed.

    Raises:
        CheckpointError: on every rank, if a file is damaged, the checkpoint is of another model, or it has other extras
            (parts beside the policy) than the trainer.
    """
    # The tensors of `state` share memory with the trainer's, so reading into them already loads a part.
    state = _state(trainer)
    manifest = _read(path, state, _extras(trainer))
    _check_adapters(path, manifest, trainer)
    _restore(trainer, state, manifest)
    _on_all_ranks(lambda: _read_rng(path, trainer.mesh.data_shard), path)


def write_state(file: Path, trainer: Trainer) -> Manifest:
    """Write the state of a trainer of one rank to a safetensors file, except for the weights of a whole policy.

    `flash bundle` writes this file, because a checkpoint's index is a pickle, which must not be read if it comes from
    somebody else. The policy is beside it as a model folder. Adapters are part of the state.

    Returns:
        The numbers of the trainer that are not tensors. The manifest lists no files.
    """
    tensors = {name: _local(tensor).detach().cpu().contiguous() for name, tensor in _bundled(trainer).items()}
    save_file(tensors | {f"{_RNG}/{name}": state for name, state in _random_states().items()}, file)
    return _describe(trainer, [])


def load_state(file: Path, manifest: Manifest, trainer: Trainer) -> None:
    """Load a file of `write_state` into a trainer of one rank, whose policy has the weights of that state already.

    Raises:
        CheckpointError: the file is damaged, or the trainer has other parts, tensors or shapes than the file.
    """
    if fault := extras_mismatch(file, manifest.extras, _extras(trainer)):
        raise CheckpointError(fault)
    _check_adapters(file, manifest, trainer)
    state = _state(trainer)
    wanted = {name: _local(tensor) for name, tensor in _bundled(trainer, state).items()}
    try:
        held = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    random = {name: held.pop(f"{_RNG}/{name}") for name in ("cpu", "cuda") if f"{_RNG}/{name}" in held}
    for name in sorted(held.keys() | wanted.keys()):
        there, here = held.get(name), wanted.get(name)
        if there is None or here is None or (there.shape, there.dtype) != (here.shape, here.dtype):
            got, expected = ("nothing" if one is None else f"{one.dtype} {list(one.shape)}" for one in (there, here))
            raise CheckpointError(f"{file} does not fit the configuration: {name} is {got}, expected {expected}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(held[name])
    _restore(trainer, state, manifest)
    try:
        _set_random_states(random)
    except (RuntimeError, TypeError) as error:  # torch refuses bytes that are no state
        raise CheckpointError(f"{file} is damaged: its random state cannot be used: {error}") from error


def _bundled(trainer: Trainer, state: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the tensors of `state` by their paths, such as `optimizer/state/lm_head.weight/exp_avg`.

    The weights of a whole policy are left out. None: the trainer's own state.
    """
    flat: dict[str, Tensor] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            flat[path] = value
        elif isinstance(value, dict):
            for name, inner in cast("dict[str, Any]", value).items():
                add(f"{path}/{name}", inner)

    for name, part in (_state(trainer) if state is None else state).items():
        # "model" is the policy. Only a trainer of adapters has a fingerprint of its base.
        if name != "model" or trainer.base_fingerprint:
            add(name, part)
    return flat


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory. On one rank the part is the whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(trainer: Trainer, files: list[FileEntry]) -> Manifest:
    """Return the manifest of the trainer's state, with these files."""
    lag = trainer.lag
    return Manifest(
        version=trainer.version,
        skipped_steps=trainer.skipped_steps,
        files=files,
        extras=_extras(trainer),
        # The learning rates of the last versions.
        rates={} if lag is None else lag.rates,
        # The loss scales of float16.
        scales=tuple((scale.value, scale.finite_in_a_row) for scale in _scales(trainer)),
        # The disagreement of the engines with the trainer.
        apart=(0.0, 0.0) if lag is None else lag.disagreement_sums,
        # The weights that adapters were trained on.
        base=trainer.base_fingerprint,
        alpha=trainer.lora_alpha,
    )


def _check_adapters(path: Path, manifest: Manifest, trainer: Trainer) -> None:
    """Raise CheckpointError if the adapters at `path` were trained on another base or with another `lora.alpha`."""
    if manifest.base != trainer.base_fingerprint:
        raise CheckpointError(
            f"{path} holds adapters of another model than model.path names now: set it to the model that they were "
            "trained on, or start a new run"
        )
    if fault := alpha_mismatch(path, manifest, trainer.lora_alpha):
        raise CheckpointError(fault)


def _restore(trainer: Trainer, state: dict[str, Any], manifest: Manifest) -> None:
    """Put loaded tensors and the numbers of their manifest into the trainer."""
    _put_state(trainer.model, trainer.optimizer, state)
    for name, critic in _critics(trainer).items():
        _put_state(critic.model, critic.optimizer, state[name])
    trainer.version = manifest.version
    trainer.skipped_steps = manifest.skipped_steps
    if trainer.lag is not None:
        trainer.lag.rates, trainer.lag.disagreement_sums = dict(manifest.rates), manifest.apart
    # Only float16 has an active scale; in other dtypes the factor stays 1, whatever the checkpoint has. If the manifest
    # has no scales, the scales keep their first values.
    if trainer.scale.active:
        for scale, (value, finite) in zip(_scales(trainer), manifest.scales, strict=False):
            scale.value, scale.finite_in_a_row = value, finite


def read_weights(path: Path, trainer: Trainer) -> dict[str, Tensor]:
    """Return the policy's weights in a checkpoint by parameter name, as full tensors on the CPU. A collective.

    `flash replay` compares them with the weights that it has trained again. The trainer does not change, and the other
    parts of the checkpoint are not loaded.

    Raises:
        CheckpointError: on every rank, if a file is damaged, or the checkpoint is of another model.
    """
    held = _without_frozen(trainer.model, get_model_state_dict(trainer.model))
    weights = {name: torch.zeros_like(value) for name, value in held.items()}
    _read(path, {"model": weights})
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu() for name, value in weights.items()
    }


def _read(path: Path, state: dict[str, Any], extras: tuple[str, ...] | None = None) -> Manifest:
    """Fill the tensors of `state` from a checkpoint, and return the checkpoint's manifest. A collective.

    First the ranks check all files; each file is read by one rank.

    Args:
        path: folder of the checkpoint.
        state: tensors by their names in a checkpoint, as `_state` returns them. A name that the checkpoint lacks is an
            error; other tensors of the checkpoint are not read.
        extras: names of the parts beside the policy that the checkpoint must have; None does not check them.

    Raises:
        CheckpointError: on every rank, if a file is damaged, the tensors do not fit, or `extras` is given and differs.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    manifest = _on_all_ranks(lambda: read_manifest(path), path)[rank]
    if extras is not None and (fault := extras_mismatch(path, manifest.extras, extras)):
        raise CheckpointError(fault)
    _on_all_ranks(lambda: check_files(path, manifest.files[rank::world]), path)
    try:
        dcp_loader.load(state, checkpoint_id=path / STATE)
    except CheckpointException as error:
        raise CheckpointError(f"cannot load {path}: {_reason(error)}") from error
    return manifest


def export_hf(model: PreTrainedModel, tokenizer: Any, folder: Path, most_bytes: int = EXPORTED_BYTES) -> None:
    """Write a Hugging Face folder (config, safetensors, tokenizer), completely or not at all. A collective.

    For a model with adapters, the folder holds only the adapters, in peft's format.

    Args:
        model: the sharded policy.
        tokenizer: tokenizer of transformers.
        folder: folder to write; an earlier folder of this name is replaced.
        most_bytes: largest size of a file with weights, unless a single tensor is larger.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write. An earlier export is untouched.
    """
    if (adapters := config_in(model)) is not None:
        _export_adapters(model, adapters, tokenizer, folder)
        return
    first, aside = dist.get_rank() == 0, temporary_of(folder)
    # `kept_buffers` are tensors that are not trained but belong to the model's files. A sharded tensor counts with its
    # whole size here.
    named: chain[tuple[str, Tensor]] = chain(published_parameters(model), kept_buffers(model))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in named}
    files = _weight_files(sizes, most_bytes)
    tensors = chain(named_full_tensors(model), kept_buffers(model))

    # Rank 0 calls `write` for each file of weights, and then `finish` once.
    def write(file: str, held: dict[str, Tensor]) -> None:
        # transformers expects this entry in the metadata of each file.
        save_file(held, aside / file, metadata={"format": "pt"})

    def finish() -> None:
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(aside)
        if len(files) > 1:
            weights = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights}
            (aside / "model.safetensors.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
        make_weights_readable(aside)
        for file in _files(aside):
            sync_to_disk(file)
        move_into_place(aside, folder)

    with _removed_on_failure(aside, partial(_export_fault, "model", folder)):
        _on_all_ranks(lambda: make_empty(aside) if first else None, folder)
        for file, names in files.items():
            # Every rank takes part in gathering each tensor. Only rank 0 keeps tensors, on the CPU, one file at a time.
            held = {name: tensor.cpu().contiguous() for name, tensor in islice(tensors, len(names)) if first}
            _on_all_ranks(partial(write, file, held) if first else lambda: None, folder)
            del held  # before the tensors of the next file are gathered
        _on_all_ranks(lambda: finish() if first else None, folder)


def _weight_files(sizes: dict[str, int], most_bytes: int) -> dict[str, list[str]]:
    """Divide tensors into weight files of at most `most_bytes` bytes, and return the names of each file's tensors.

    The order of the tensors does not change. Files have the names that transformers expects.

    Args:
        sizes: bytes of each tensor, by name.
        most_bytes: largest size of a file, unless a single tensor is larger.
    """
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = most_bytes
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{at:05d}-of-{len(parts):05d}.safetensors": names for at, names in enumerate(parts, 1)}


def _export_adapters(model: PreTrainedModel, described: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder with adapters and tokenizer, completely or not at all. A collective.

    `described` is peft's configuration of the adapters.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write.
    """
    rank, aside = dist.get_rank(), temporary_of(folder)
    tensors = {name: tensor.cpu() for name, tensor in named_full_tensors(model) if rank == 0}

    def write() -> None:
        make_empty(aside)
        tokenizer.save_pretrained(aside)
        write_adapters(aside, described, tensors)
        for file in _files(aside):
            sync_to_disk(file)
        move_into_place(aside, folder)

    with _removed_on_failure(aside, partial(_export_fault, "adapters", folder)):
        _on_all_ranks(lambda: write() if rank == 0 else None, folder)


def _export_fault(exported: str, folder: Path, fault: str) -> str:
    """Return the error message of an export that failed. `fault` begins with the name of the folder."""
    advice = "" if os.access(_existing(folder), os.W_OK) else f"; {NOT_WRITABLE}"
    return f"cannot export the {exported} to {fault}{advice}"


def _files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return all tensors of the trainer that a checkpoint holds, by their names in the checkpoint.

    The tensors are sharded and share memory with the trainer's tensors, so that loading into them changes the trainer.
    """
    state = _get_state(trainer.model, trainer.optimizer)
    for name, critic in _critics(trainer).items():
        state[name] = _get_state(critic.model, critic.optimizer)
    if trainer.average is not None:
        state["ewma"] = trainer.average
    if trainer.refreshes and trainer.reference is not None:
        state["reference"] = {name: value.detach() for name, value in trainer.reference.named_parameters()}
    return state


def _extras(trainer: Trainer) -> tuple[str, ...]:
    """Return the names of the parts that the trainer keeps beside the policy, one entry per critic.

    A checkpoint records them in `Manifest.extras`. A run may resume only with the same parts (`extras_mismatch`).
    """
    kept = {
        "lora": int(trainer.base_fingerprint != ()),
        "critic": len(trainer.critics),
        "ewma": int(trainer.average is not None),
        "reference": int(trainer.refreshes),
    }
    return tuple(name for name in EXTRAS for _ in range(kept[name]))


def _critics(trainer: Trainer) -> dict[str, Critic]:
    """Return the critics by their names in a checkpoint: critic, critic-1, …"""
    return {f"critic-{index}" if index else "critic": critic for index, critic in enumerate(trainer.critics)}


def _scales(trainer: Trainer) -> list[LossScale]:
    """Return the loss scales of the policy and of each critic."""
    return [trainer.scale, *(critic.scale for critic in trainer.critics)]


def _get_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the weights of a model and the state of its optimizer (moments and counters), without a copy.

    An optimizer that has not made an update yet gets moments of zero.
    """
    fresh = not optimizer.state
    weights, moments = get_state_dict(model, optimizer)
    if fresh:
        # torch fills an empty optimizer by a step with zero gradients, and counts that step.
        for entry in optimizer.state.values():
            entry["step"].zero_()
    return {"model": _without_frozen(model, weights), "optimizer": moments}


def _without_frozen(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights without the frozen base of a model with adapters, which can be loaded from `model.path`."""
    if config_in(model) is None:
        return weights
    every = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def _put_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put loaded weights and moments into a model and its optimizer.

    The optimizer keeps the settings of the configuration, such as the learning rate.
    """
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    weights, moments = state["model"], state["optimizer"]
    # The state of a model with adapters lacks the frozen base, which strict loading would refuse.
    partly = StateDictOptions(strict=False)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=partly)
    # Loading has replaced the options by the checkpoint's. Restore the options of the configuration, which may have
    # changed when the run was resumed.
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def _reason(error: Any) -> str:
    """Return the failures of all ranks in a `CheckpointException` of torch as text, without their tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())


def _write_rng(folder: Path, shard: int) -> None:
    """Write the random states of this process under the number of its data shard."""
    content = io.BytesIO()
    torch.save(_random_states(), content)
    # torch writes only into memory, because its errors about files do not contain the system's message.
    (folder / _rng_name(shard)).write_bytes(content.getbuffer())


def _read_rng(folder: Path, shard: int) -> None:
    """Restore the random states of this process from the file of its data shard.

    A run may resume with more data shards than it had. A shard without a file keeps the random state that the rank's
    seed gave it.
    """
    file = folder / _rng_name(shard)
    if not file.exists():
        return
    _set_random_states(torch.load(file, weights_only=True))


def _random_states() -> dict[str, Tensor]:
    """Return torch's random states in this process, by device."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    """Set torch's random states in this process. A device without a state, or that is absent here, is left out."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _rng_name(shard: int) -> str:
    """Return the name of the file with the random states of a data shard."""
    return f"rng-{shard:05d}.pt"


def _on_all_ranks(work: Callable[[], T], about: Path) -> list[T]:
    """Run `work` on each rank, and return the results of all ranks, in the order of the ranks. A collective.

    A rank that raised alone would leave the others waiting in their next collective. So a failure is raised on all
    ranks. For work of rank 0 alone, the other ranks pass a function that does nothing, and wait here until rank 0 has
    finished. `about` is the path that the error message begins with.

    Raises:
        CheckpointError: on every rank, if `work` raised on any rank. The message has the failures of all ranks.
        TransportError: on this rank alone, if `work` raised it.
    """
    result: T | None = None
    fault = ""
    try:
        result = work()
    except TransportError:
        raise  # the hub is gone or ends the run, which ends all ranks, too
    except Exception as error:  # supervised boundary: every failure is passed on to all ranks
        fault = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    outcomes: list[tuple[str, Any]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(outcomes, (fault, result))
    faults = [one for one, _ in outcomes if one]
    if faults:
        raise CheckpointError(f"{about}: {'; '.join(faults)}")
    return [value for _, value in outcomes]


@contextmanager
def _removed_on_failure(aside: Path, describe: Callable[[str], str]) -> Generator[None]:
    """Remove the temporary folder `aside` if the block raises a CheckpointError.

    Rank 0 removes it, because all ranks share the folder. Then a CheckpointError with the text `describe(message)` is
    raised instead. Only a CheckpointError is raised on all ranks at once. After any other error, other ranks may still
    write, so the folder stays; the next write to the same place removes it.
    """
    try:
        yield
    except CheckpointError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(describe(str(error))) from error


def _seal(aside: Path, rank: int, mesh: TrainerMesh) -> list[FileEntry]:
    """Force the files that this rank has written to the disk, and return the manifest entries of these files.

    The files are the rank's files of torch.distributed.checkpoint, the random states if the rank leads its data shard,
    and on rank 0 the index of torch's files.
    """
    own = [*(aside / STATE).glob(f"__{rank}_*")]
    if mesh.leads_shard:
        own.append(aside / _rng_name(mesh.data_shard))
    if rank == 0:
        own.append(aside / STATE / ".metadata")
    for file in own:
        sync_to_disk(file)
    return [file_entry(file, aside) for file in own]


def _commit(aside: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and then rename the folder. From then on, the checkpoint is found."""
    (aside / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in (aside / MANIFEST, aside / STATE, aside):
        sync_to_disk(path)
    move_into_place(aside, folder)


def _existing(folder: Path) -> Path:
    """Return the folder in which a failed write to `folder` was made: the nearest one above it that exists."""
    return next(path for path in folder.parents if path.is_dir())


def _remedy(folder: Path, trainer: Trainer) -> str:
    """Return advice after a failed write: check permissions, or free disk space, with the bytes that are needed.

    The bytes are an estimate: for each trained weight, the weight and two moments in float32, and the average of the
    weights if the run keeps one.
    """
    # The failure itself may come from torch, the hub or another rank, which report it as text only.
    existing = _existing(folder)
    if not os.access(existing, os.W_OK):
        return NOT_WRITABLE
    own = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    tensors = 3 * own + list((trainer.average or {}).values())
    for critic in trainer.critics:
        tensors += 3 * list(critic.model.parameters())
    needed = 4 * sum(tensor.numel() for tensor in tensors)
    return f"it needs about {needed:,} bytes, {shutil.disk_usage(existing).free:,} are free there"
