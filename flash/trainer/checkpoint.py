"""Checkpoints that are whole or absent, and the Hugging Face export.

A checkpoint is written to a `.tmp-` sibling: model, optimizer and what else the trainer keeps (critics, an average of
the weights) by torch.distributed.checkpoint, so that they load on any number of ranks; random states per data shard;
the hub's state; and last a manifest with the size and CRC of every file. Only then is the folder renamed. Whatever
happens before the rename, the previous checkpoint is the newest complete one.

`save` and `load` are collectives: a failure on one rank is raised on all. The trainer ranks share the run directory.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from flash.errors import CheckpointError, TransportError
from flash.trainer.checkpoint_files import (
    EXTRAS,
    HUB_STATE,
    MANIFEST,
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

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from flash.trainer.critic import Critic
    from flash.trainer.mesh import TrainerMesh
    from flash.trainer.optimizer import LossScale
    from flash.trainer.step import Trainer

T = TypeVar("T")

KeepHubState = Callable[[Path], FileEntry]
"""Has the hub write its state to a file, and describes it."""

STATE = "state"
"""Folder of the sharded weights and moments."""
EXPORTED_BYTES = 5 * 10**9
"""Of one file of an export, unless one tensor has more: so much of the model is whole on the first rank at a time."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of the system that have nothing to do with room on the disk."""
NOT_WRITABLE = "check that you may write there, and that its disk is not mounted read-only"


def save(run_dir: Path, trainer: Trainer, keep_hub_state: KeepHubState, *, keep: int) -> Path:
    """Write `checkpoints/step-…` for the trainer's version, then prune to the `keep` newest. Called by all ranks.

    `keep_hub_state` is called on rank 0. An earlier checkpoint of the same version is replaced.

    Raises:
        CheckpointError: on every rank, when any rank or the hub could not write. The previous checkpoint is untouched.
        TransportError: on rank 0 alone, when the hub did not answer: the hub's end is that of all ranks.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    folder = step_folder(run_dir, trainer.version)
    aside = temporary_of(folder)
    try:
        _together(lambda: make_empty(aside, aside.parent.glob(TMP + "*")) if rank == 0 else None, aside)
        _together(lambda: _write_rng(aside, trainer.mesh.data_shard) if trainer.mesh.leads_shard else None, aside)
        _write_state(aside / STATE, trainer)
        hub_state = _together(lambda: [keep_hub_state(aside / HUB_STATE)] if rank == 0 else [], aside)[0]
        mine = _together(lambda: _seal(aside, rank, trainer.mesh), aside)
        files = [entry for entries in (hub_state, *mine) for entry in entries]
        files.sort(key=lambda entry: entry.path)
        rates, apart = ({}, (0.0, 0.0)) if trainer.lag is None else (trainer.lag.rates, trainer.lag.disagreement_sums)
        scales = tuple((scale.value, scale.finite) for scale in _scales(trainer))
        kept = (files, _extras(trainer), rates, scales, apart, trainer.base_fingerprint, trainer.lora_alpha)
        manifest = Manifest(trainer.version, trainer.skipped_steps, *kept)
        _together(lambda: _commit(aside, folder, manifest) if rank == 0 else None, aside)
    except CheckpointError as error:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        remedy = _remedy(str(error), folder.parent, trainer)
        raise CheckpointError(f"cannot write {folder}: {error}; {remedy}") from error
    if rank == 0:
        prune(run_dir, keep)
    return folder


def load(path: Path, trainer: Trainer) -> None:
    """Put a checkpoint into the trainer, on any number of ranks. Called by all ranks.

    Raises:
        CheckpointError: on every rank, when a file is damaged, the model is another one, or the checkpoint holds
            something beside the policy that the trainer does not keep, or lacks something that it does.
    """
    state = _state(trainer)
    manifest = _read(path, state, _extras(trainer))
    if manifest.base != trainer.base_fingerprint:
        raise CheckpointError(
            f"{path} holds adapters of another model than model.path names now: go on with the one that they were "
            "trained on, or start a new run"
        )
    if fault := alpha_mismatch(path, manifest, trainer.lora_alpha):
        raise CheckpointError(fault)
    _put_state(trainer.model, trainer.optimizer, state)
    for name, critic in _critics(trainer).items():
        _put_state(critic.model, critic.optimizer, state[name])
    _together(lambda: _read_rng(path, trainer.mesh.data_shard), path)
    trainer.version = manifest.version
    trainer.skipped_steps = manifest.skipped_steps
    if trainer.lag is not None:
        trainer.lag.rates, trainer.lag.disagreement_sums = dict(manifest.rates), manifest.apart
    if trainer.scale.active:
        for scale, (value, finite) in zip(_scales(trainer), manifest.scales, strict=False):
            scale.value, scale.finite = value, finite


def _scales(trainer: Trainer) -> list[LossScale]:
    return [trainer.scale, *(critic.scale for critic in trainer.critics)]


def read_weights(path: Path, trainer: Trainer) -> dict[str, Tensor]:
    """The policy's weights in a checkpoint, by parameter name, whole and on the CPU; the trainer stays as it is.

    Called by all ranks. What the checkpoint holds beside them is not read.

    Raises:
        CheckpointError: on every rank, when a file is damaged, or the model is another one.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

    held = _without_frozen(trainer.model, get_model_state_dict(trainer.model))
    weights = {name: torch.zeros_like(value) for name, value in held.items()}
    _read(path, {"model": weights})
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu() for name, value in weights.items()
    }


def _read(path: Path, state: dict[str, Any], extras: tuple[str, ...] | None = None) -> Manifest:
    """Fill the tensors of a state from a checkpoint that is whole, and that holds no other `extras` than these."""
    import torch.distributed as dist
    import torch.distributed.checkpoint.state_dict_loader as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    rank, world = dist.get_rank(), dist.get_world_size()
    manifest = _together(lambda: read_manifest(path), path)[rank]
    if extras is not None and (fault := extras_mismatch(path, manifest.extras, extras)):
        raise CheckpointError(fault)
    _together(lambda: check_files(path, manifest.files[rank::world]), path)
    try:
        dcp.load(state, checkpoint_id=path / STATE)
    except CheckpointException as error:
        raise CheckpointError(f"cannot load {path}: {_reason(error)}") from error
    return manifest


def export_hf(model: PreTrainedModel, tokenizer: Any, folder: Path, most_bytes: int = EXPORTED_BYTES) -> None:
    """Write a Hugging Face folder (config, safetensors, tokenizer), whole or not at all. Called by all ranks.

    Of a model with adapters these alone, as peft reads them.

    Raises:
        CheckpointError: on every rank, when rank 0 could not write. An earlier export is untouched.
    """
    import torch.distributed as dist
    from safetensors.torch import save_file

    from flash.foreign.peft import described_in
    from flash.foreign.transformers import open_weights
    from flash.trainer.model.model import kept_buffers, named_full_tensors, trained_parameters

    if (adapters := described_in(model)) is not None:
        _export_adapters(model, adapters, tokenizer, folder)
        return
    first, aside = dist.get_rank() == 0, temporary_of(folder)
    named: chain[tuple[str, Tensor]] = chain(trained_parameters(model), kept_buffers(model))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in named}
    files = _weight_files(sizes, most_bytes)
    tensors = chain(named_full_tensors(model), kept_buffers(model))

    def write(file: str, held: dict[str, Tensor]) -> None:
        save_file(held, aside / file, metadata={"format": "pt"})

    def finish() -> None:
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(aside)
        if len(files) > 1:
            weights = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights}
            (aside / "model.safetensors.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
        open_weights(aside)
        for file in _files(aside):
            sync_to_disk(file)
        move_into_place(aside, folder)

    try:
        _together(lambda: make_empty(aside) if first else None, folder)
        for file, names in files.items():
            # Every rank takes part in the gathering; only the first keeps the tensors, on the CPU, of a file at a time.
            held = {name: tensor.cpu().contiguous() for name, tensor in islice(tensors, len(names)) if first}
            _together(partial(write, file, held) if first else lambda: None, folder)
            del held
        _together(lambda: finish() if first else None, folder)
    except CheckpointError as error:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
        remedy = f"; {NOT_WRITABLE}" if refused(str(error)) else ""
        raise CheckpointError(f"cannot export the model to {error}{remedy}") from error


def _weight_files(sizes: dict[str, int], most_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors of each file, in their order, as transformers names files."""
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
    import torch.distributed as dist

    from flash.trainer.model.adapters import write_adapters
    from flash.trainer.model.model import named_full_tensors

    rank, aside = dist.get_rank(), temporary_of(folder)
    tensors = {name: tensor.cpu() for name, tensor in named_full_tensors(model) if rank == 0}

    def write() -> None:
        make_empty(aside)
        tokenizer.save_pretrained(aside)
        write_adapters(aside, described, tensors)
        for file in _files(aside):
            sync_to_disk(file)
        move_into_place(aside, folder)

    try:
        _together(lambda: write() if rank == 0 else None, folder)
    except CheckpointError as error:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        remedy = f"; {NOT_WRITABLE}" if refused(str(error)) else ""
        raise CheckpointError(f"cannot export the adapters to {error}{remedy}") from error


def _write_state(folder: Path, trainer: Trainer) -> None:
    """Weights and moments, each rank its own shards, forced to the disk."""
    import torch.distributed.checkpoint.state_dict_saver as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(_state(trainer), checkpoint_id=folder)
    except CheckpointException as error:
        # Gathered from all ranks by torch, and no subclass of Exception.
        raise CheckpointError(_reason(error)) from error


def _state(trainer: Trainer) -> dict[str, Any]:
    """All weights and moments by parameter name, as sharded tensors that share memory with the trainer's."""
    state = _get_state(trainer.model, trainer.optimizer)
    for name, critic in _critics(trainer).items():
        state[name] = _get_state(critic.model, critic.optimizer)
    if trainer.average is not None:
        state["ewma"] = trainer.average
    if (heads_2N := _rhythm_heads(trainer)) is not None:
        state["rhythm"] = heads_2N
    if trainer.refreshes and trainer.reference is not None:
        state["reference"] = {name: value.detach() for name, value in trainer.reference.named_parameters()}
    return state


def _rhythm_heads(trainer: Trainer) -> Tensor | None:
    return None if trainer.rhythm is None else trainer.rhythm.kinds_2N


def _critics(trainer: Trainer) -> dict[str, Critic]:
    """By their names in a checkpoint: critic, critic-1, …"""
    return {f"critic-{index}" if index else "critic": critic for index, critic in enumerate(trainer.critics)}


def _get_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    fresh = not optimizer.state
    weights, moments = get_state_dict(model, optimizer)
    if fresh:
        # torch fills an empty optimizer by taking a step with zero gradients, and counts it.
        for entry in optimizer.state.values():
            entry["step"].zero_()
    return {"model": _without_frozen(model, weights), "optimizer": moments}


def _without_frozen(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """A model's state, of one with adapters without what stays as it is at `model.path`."""
    from flash.foreign.peft import described_in

    if described_in(model) is None:
        return weights
    every = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def _put_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    weights, moments = state["model"], state["optimizer"]
    partly = StateDictOptions(strict=False)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=partly)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)  # a run may be resumed with others than the checkpoint holds


def _extras(trainer: Trainer) -> tuple[str, ...]:
    rhythm = _rhythm_heads(trainer) is not None
    kept = {"critic": len(trainer.critics), "ewma": int(trainer.average is not None), "rhythm": int(rhythm)}
    kept["reference"] = int(trainer.refreshes)
    kept["lora"] = int(trainer.base_fingerprint != ())
    return tuple(name for name in EXTRAS for _ in range(kept[name]))


def _reason(error: Any) -> str:
    """The failures of each rank, without their tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())


def _write_rng(folder: Path, shard: int) -> None:
    import torch

    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    whole = io.BytesIO()
    torch.save(state, whole)
    # Not by torch, whose errors do not tell what the system said.
    (folder / _rng_name(shard)).write_bytes(whole.getbuffer())


def _read_rng(folder: Path, shard: int) -> None:
    """A data shard that did not exist when the checkpoint was written keeps its own seed."""
    import torch

    file = folder / _rng_name(shard)
    if not file.exists():
        return
    state = torch.load(file, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rng_name(shard: int) -> str:
    return f"rng-{shard:05d}.pt"


def _together(work: Callable[[], T], about: Path) -> list[T]:
    """Do something on each rank and get the results of all; a failure on one is raised on all.

    The ranks would otherwise wait in the next collective for the one that failed.
    """
    import torch.distributed as dist

    result: T | None = None
    fault = ""
    try:
        result = work()
    except TransportError:
        raise  # the hub is gone or ends the run, and so do all ranks
    except Exception as error:  # supervised boundary: whatever happened is passed on to every rank
        fault = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    outcomes: list[tuple[str, Any]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(outcomes, (fault, result))
    faults = [told for told, _ in outcomes if told]
    if faults:
        raise CheckpointError(f"{about}: {'; '.join(faults)}")
    return [value for _, value in outcomes]


def _seal(aside: Path, rank: int, mesh: TrainerMesh) -> list[FileEntry]:
    """Force this rank's files to the disk and describe them."""
    mine = [*(aside / STATE).glob(f"__{rank}_*")]
    if mesh.leads_shard:
        mine.append(aside / _rng_name(mesh.data_shard))
    if rank == 0:
        mine.append(aside / STATE / ".metadata")
    for file in mine:
        sync_to_disk(file)
    return [file_entry(file, aside) for file in mine]


def _commit(aside: Path, folder: Path, manifest: Manifest) -> None:
    """The manifest, then the name that makes the checkpoint count."""
    (aside / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in (aside / MANIFEST, aside / STATE, aside):
        sync_to_disk(path)
    move_into_place(aside, folder)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def refused(fault: str) -> bool:
    """Whether a write has failed for want of a permission, by the words of the system."""
    return any(os.strerror(code) in fault for code in REFUSED)


def _remedy(fault: str, folder: Path, trainer: Trainer) -> str:
    """What to look at after a write that failed; of other ranks only the words are known."""
    return NOT_WRITABLE if refused(fault) else _space(folder, trainer)


def _space(folder: Path, trainer: Trainer) -> str:
    """What a checkpoint needs (float32 weights, two moments of each trained one) and what the disk has."""
    own = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    tensors = 3 * own + list((trainer.average or {}).values())
    for critic in trainer.critics:
        tensors += 3 * list(critic.model.parameters())
    needed = 4 * sum(tensor.numel() for tensor in tensors)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return f"it needs about {needed:,} bytes, {shutil.disk_usage(existing).free:,} are free there"
