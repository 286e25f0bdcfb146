"""Models that a command begins with, or writes. The functions run in the process of the command, or in the launcher.

- `make_missing_models` makes the models that a configuration asks for and that do not exist yet: a *tiny model*, which
  is made from the settings of `[tiny_model]` for a first try on a CPU, or a fetched one (`flash.run.fetch`).
- `hugging_face_fault` checks before any work that the Hugging Face hub has a model.
- `chosen_model` and `model_folder` find the model that the user has named to `flash eval`, `flash rollout` or `flash
  rhythm`: a model folder, a hub id, a GGUF file, a run, or a checkpoint.
- `export_model` writes the weights of a run as a model folder, for `flash export`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from flash.config.models import folders_beside, gguf_folder, is_gguf, is_hub_id
from flash.config.tree import Config, DeadlinesConfig, TinyModelConfig
from flash.errors import CheckpointError, ConfigError
from flash.observe.rundir.rundir import RunDirectory
from flash.run.fetch import MODEL_CONFIG, fetch, model_lock, source_of
from flash.trainer.checkpoint_files import (
    MANIFEST,
    STATE,
    alpha_mismatch,
    make_empty,
    move_into_place,
    newest_complete,
    read_manifest,
    sync_to_disk,
    temporary_of,
)
from flash.trainer.model.tiny_model import FINGERPRINT, changed_parts, interrupted_after, make_tiny_model, show_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Dtype = Literal["float32", "bfloat16", "float16"]
"""Precision of stored weights."""

CRITIC_PART = 3
"""Part of the policy's layers, as a divisor, that a tiny model of critics has: AsyPPO needs only small critics."""

HUB_RESPONSE_S = 10.0
"""Seconds to wait for one short response of the Hugging Face hub."""


def make_missing_models(config: Config) -> None:
    """Make the fetched and tiny models that a configuration asks for, unless they are there already.

    `flash train`, `flash join`, `flash eval` and `flash rollout` call this before they start engines. All nodes of a
    job do so at the same time, and so may several runs that share a model. One process makes the model, and the others
    wait. Each node makes its own model if the nodes do not share the folder.

    Raises:
        ConfigError: a model cannot be made from these options, or not in this place.
        DeadlineError: another process has been making it for longer than deadlines.rendezvous.
    """
    make_fetched(config)
    for _, path, tiny in tiny_models(config):
        _make_tiny(path, tiny, config)


def make_fetched(config: Config) -> None:
    """Make the pretrained model that `model.fetch` names, unless it is there. Raises the errors of
    `make_missing_models`.

    `flash sft`, which makes no tiny model, and commands that start no run, such as `flash replay`, call only this.
    """
    if config.model.fetch is not None:
        fetch(source_of(config.model.fetch), Path(config.model.path), config.deadlines.rendezvous)


def tiny_models(config: Config) -> Iterator[tuple[str, Path, TinyModelConfig]]:
    """Yield the tiny models that a configuration asks for: the policy, and the critics' model if it has a folder of its
    own that holds no other model.

    For each model, yield the configuration key of its path, the path of its folder, and its settings.
    """
    tiny, critic = config.tiny_model, config.critic
    if tiny is None:
        return
    policy = Path(config.model.path)
    yield "model.path", policy, tiny
    # Critics have no model of their own if `critic.path` is None or names the policy's folder.
    if critic is None or critic.path is None or (path := Path(critic.path)) == policy:
        return
    # The file FINGERPRINT marks a folder that was made as a tiny model before. Any other model belongs to the user.
    if (path / FINGERPRINT).exists() or not (path / MODEL_CONFIG).exists():
        yield "critic.path", path, msgspec.structs.replace(tiny, layers=max(1, tiny.layers // CRITIC_PART))


def _make_tiny(path: Path, tiny: TinyModelConfig, config: Config) -> None:
    """Make one tiny model in the folder `path`, unless the folder holds it or the run resumes from a checkpoint.

    Also makes it again if it was made from other settings (`tiny`) or from another environment. Raises the errors of
    `make_missing_models`.
    """
    wanted = (tiny, config.env.path, config.env.options)
    if path.exists() and config.run.resume and newest_complete(config.run_dir) is not None:
        # The run goes on with the weights of its checkpoint, so it does not matter from what the folder was made. Other
        # runs may use the folder.
        return
    if not changed_parts(path, *wanted):
        if steps := interrupted_after(path):
            sys.stdout.write(
                f"tiny model: {path} is used as it is, though its warm start was interrupted after {steps} steps; "
                "remove the folder to have it made whole\n"
            )
        return
    with model_lock(path, f"the tiny model {path}", config.deadlines.rendezvous):
        changed = changed_parts(path, *wanted)
        if not changed:  # another process has made it while this one waited
            return
        if path.exists():
            sys.stdout.write(f"tiny model: {path} is made again: it was made from other {' and '.join(changed)}\n")
        make_tiny_model(path, *wanted, show_progress)


def chosen_model(named: str) -> str:
    """Return the model that a user's argument `named` means: the path of a model folder or checkpoint, or a hub id.

    `named` may also be a run, which means its exported model or else its newest checkpoint. A GGUF file is converted to
    a model folder first. `flash eval`, `flash rollout`, `flash rhythm` and `flash export` use this.

    Raises:
        ConfigError: nothing has this name, it is not a model, a checkpoint or a run that has one, or a GGUF file cannot
            be converted.
        DeadlineError: another process has been converting the GGUF file for too long.
    """
    if is_gguf(named):
        fetch(Path(named), Path(gguf_folder(named)), DeadlinesConfig().rendezvous)
        return gguf_folder(named)
    path = Path(named)
    if not path.exists():
        if not is_hub_id(named):
            raise ConfigError(f"there is no model, checkpoint or run {named}{folders_beside(path)}")
        return named
    if (path / "model" / MODEL_CONFIG).is_file():  # the exported model of a run
        return str(path / "model")
    if (path / MODEL_CONFIG).is_file():
        return str(path)
    checkpoint = path if (path / MANIFEST).is_file() else newest_complete(path)
    if checkpoint is None:
        raise ConfigError(_no_model(path))
    return str(checkpoint)


def overrides_of_run(model: str) -> list[str]:
    """Return the overrides `key=value` with which the configuration of a run can be read, to use its weights.

    `flash eval`, `flash rollout`, `flash export` and `flash.evaluate` call this.

    Args:
        model: the run, or the model or checkpoint that is used in its place.

    Raises:
        ConfigError, DeadlineError: see `chosen_model`.
    """
    chosen = chosen_model(model)
    # The model that the run began with may be gone, so a whole model replaces model.path. A checkpoint does not: it
    # needs the architecture and the tokenizer of that model.
    is_checkpoint = (Path(chosen) / MANIFEST).is_file()
    # A run that was resumed has recorded run.resume = true, but these commands resume nothing.
    return ["run.resume=false", *([] if is_checkpoint else [f"model.path={json.dumps(chosen)}"])]


@contextmanager
def model_folder(named: str, config: Config) -> Generator[str]:
    """Yield the path of a model folder, or a hub id, for the model that a user's argument `named` means.

    `flash eval`, `flash rollout` and `flash rhythm` load this model in the block. A checkpoint is no model folder. It
    is written as one to a temporary folder, which exists while the block runs.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: see `chosen_model`; also if the hub has no such model, or if config.model.path cannot be loaded.
            The architecture and the tokenizer of a checkpoint are those of config.model.path.
    """
    chosen = chosen_model(named)
    if not Path(chosen).exists() and (fault := hugging_face_fault(chosen)):
        raise ConfigError(fault)
    if not (Path(chosen) / MANIFEST).is_file():
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="flash-checkpoint-") as folder:
        # Merged: adapters become part of the model.
        _write_out(Path(chosen), config, Path(folder), merged=True)
        yield folder


def export_model(named: str, config: Config, folder: Path, *, merged: bool, dtype: Dtype | None = None) -> str:
    """Write weights as a Hugging Face model folder, complete or not at all. For `flash export`.

    Returns the path that the weights were read from.

    Args:
        named: a run directory or a checkpoint.
        config: configuration of the run.
        folder: path of the new folder. An earlier folder of this name is replaced.
        merged: for a run with adapters: True to write the whole model, False to write a folder in the format of peft.
        dtype: precision of a whole model's weights. None: the precision that they have, which is float32 for weights of
            a trainer.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the folder cannot be written.
        ConfigError: see `model_folder`.
    """
    chosen, aside = Path(chosen_model(named)), temporary_of(folder)  # `aside` becomes `folder` when it is complete
    try:
        make_empty(aside)
        if (chosen / MANIFEST).is_file():
            _write_out(chosen, config, aside, merged=merged)
        else:
            shutil.copytree(chosen, aside, dirs_exist_ok=True)
        if dtype is not None and (merged or config.lora is None):
            _convert_weights(aside, dtype)
        for file in aside.iterdir():
            sync_to_disk(file)
        move_into_place(aside, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return str(chosen)


def hugging_face_fault(model: str, *, cache: Path | None = None, endpoint: str | None = None) -> str:
    """Return the reason why a run could not load the model of a hub id; empty if the cache or the hub has it.

    A *hub id* names a model on the Hugging Face hub, which is a server, and not the hub of a run. Commands check the id
    before any work; `transformers` loads the model later.

    Makes one request without retries, so that a wrong name shows at once. `transformers` alone would repeat the request
    for minutes.

    Args:
        model: `name` or `owner/name`.
        cache: folder of the cache; None: the one that Hugging Face's environment variables choose.
        endpoint: address of the hub; None: the one that Hugging Face's environment variables choose.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub import errors as hf

    address = endpoint or constants.ENDPOINT
    here = f"there is no folder {model} here, no such model in the cache {cache or constants.HF_HUB_CACHE}"
    name = "expected the folder of a Hugging Face model, or a hub id such as Qwen/Qwen3-0.6B"
    try:
        if isinstance(try_to_load_from_cache(model, MODEL_CONFIG, cache_dir=cache), str):
            return ""
        get_hf_file_metadata(hf_hub_url(model, MODEL_CONFIG, endpoint=address), timeout=HUB_RESPONSE_S)
    except hf.HFValidationError as error:
        return f"there is no folder {model} here, and it can be no hub id ({error}): {name}"
    except hf.GatedRepoError:
        return (
            f"{model} is given at {address} to those only who were granted access: ask for it there, and set HF_TOKEN"
        )
    except hf.RepositoryNotFoundError:
        return f"{here}, and none at {address} that may be read: {name}; a private one needs HF_TOKEN"
    except hf.EntryNotFoundError:
        return f"{model} has no {MODEL_CONFIG} at {address}: {name}"
    except hf.OfflineModeIsEnabled:
        return f"{here}, and HF_HUB_OFFLINE forbids to ask {address}: {name}; or unset it"
    except Exception as error:  # errors of a network, a proxy or a mirror, in classes of the client
        return f"{here}, and {address} cannot be asked ({error}): {name}; without a network, one that is in the cache"
    return ""


def own_dtype(model: str) -> Dtype | None:
    """Return the precision of a stored model, as its configuration states it; None if it is unknown.

    `flash export` uses it as the default precision. `model` is a model folder, or the hub id of a model in Hugging
    Face's cache.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        # `model` may be neither a folder nor a hub id, if it is the path of a model folder that was removed.
        cached = try_to_load_from_cache(model, MODEL_CONFIG) if model.count("/") == 1 else None
        file = Path(model) / MODEL_CONFIG if Path(model).is_dir() else cached
        described = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str | Path) else {}
    except (OSError, ValueError):
        return None
    dtype = described.get("dtype", described.get("torch_dtype"))
    return dtype if dtype in get_args(Dtype) else None


def _convert_weights(folder: Path, dtype: Dtype) -> None:
    """Store the float32 weights of a model folder in another precision, in place, for `export_model`.

    Changes the weight files, `config.json`, and the total size in the index of the weights. Tensors of other data types
    stay as they are.
    """
    import torch
    from safetensors.torch import load_file, save_file

    if dtype == "float32":  # the precision in which trainers keep and write their weights
        return
    size = 0  # bytes of all tensors
    for file in folder.glob("*.safetensors"):
        rounded = {
            name: tensor.to(getattr(torch, dtype)) if tensor.dtype == torch.float32 else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(rounded, file, metadata={"format": "pt"})
        size += sum(tensor.numel() * tensor.element_size() for tensor in rounded.values())
    described = json.loads((folder / MODEL_CONFIG).read_text(encoding="utf-8"))
    described.pop("torch_dtype", None)
    (folder / MODEL_CONFIG).write_text(json.dumps({**described, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["metadata"]["total_size"] = size
        index.write_text(json.dumps(listed, indent=2) + "\n")


def _no_model(path: Path) -> str:
    """Return the error message of `chosen_model` for a path that exists, and is no model, no checkpoint and no run that
    has one."""
    if not path.is_dir():
        return f"{path} is a file; expected the folder of a model, a checkpoint or a run"
    if RunDirectory(path).config.is_file():
        return f"the run {path} has left no whole checkpoint and no model yet"
    return f"{path} is neither a model (it has no config.json) nor a checkpoint nor a run"


def _write_out(checkpoint: Path, config: Config, folder: Path, *, merged: bool) -> None:
    """Write the policy of a checkpoint, and its tokenizer, to a model folder or to a folder of adapters.

    Adapters are the small matrices that a run with `[lora]` trains in place of the model's own weights.

    Args:
        checkpoint: folder of the checkpoint.
        config: configuration of the run. Its model gives the architecture and the tokenizer.
        folder: the folder to write.
        merged: True to write the whole model if the checkpoint holds adapters.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the configuration.
        ConfigError: the run's model cannot be loaded.
    """
    from flash.foreign.peft import config_in
    from flash.foreign.transformers import hidden_progress_bars, make_weights_readable
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.trainer.model.adapters import add_adapters, merge_adapters, write_adapters
    from flash.trainer.model.model import empty_model, load_model, published_parameters

    make_fetched(config)
    tokenizer = HfTokenizer(config.model)
    with hidden_progress_bars(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # Flash does not need torch.distributed here
        manifest = read_manifest(checkpoint)
        if ("lora" in manifest.extras) != (config.lora is not None):
            content, wanted = ("adapters", "an") if "lora" in manifest.extras else ("a whole model", "no")
            raise CheckpointError(f"{checkpoint} holds {content}: expected {wanted} [lora] table in the configuration")
        if fault := alpha_mismatch(checkpoint, manifest, config.lora and config.lora.alpha):
            raise CheckpointError(fault)
        if config.lora is None:
            model = load_model(config.model)
            # The tensors of `state_dict` are the model's own, so this loads the weights into the model.
            _read(checkpoint, model.state_dict(), config)
            tokenizer.add_ends(model.generation_config)
            model.save_pretrained(folder)
        else:
            adapted = add_adapters(empty_model(config.model), config.model, config.lora)
            # `adapted` has no storage: only the names and shapes of its adapters are needed, to read them.
            tensors = {
                name: parameter.new_zeros(parameter.shape, device="cpu")
                for name, parameter in published_parameters(adapted)
            }
            _read(checkpoint, tensors, config)
            if merged:
                model = load_model(config.model)
                _check_base(checkpoint, model, config)
                merge_adapters(model, tensors, config.lora)
                tokenizer.add_ends(model.generation_config)
                model.save_pretrained(folder)
            else:
                write_adapters(folder, config_in(adapted), tensors)
        make_weights_readable(folder)
    tokenizer.inner.save_pretrained(str(folder))


def _check_base(checkpoint: Path, model: PreTrainedModel, config: Config) -> None:
    """Raise CheckpointError if the adapters of a checkpoint were not trained on the weights of `model`.

    Merged with other weights, adapters would give a model that was never trained.
    """
    from flash.weights.image import Fingerprint

    fingerprint = Fingerprint()
    for parameter in model.parameters():
        fingerprint.add(parameter)
    # `base` is the fingerprint of the weights at `model.path` in float32 (`Trainer.base_fingerprint`). So `model` must
    # be as `load_model` returns it: in float32, and not merged yet.
    if tuple(fingerprint.sums) != read_manifest(checkpoint).base:
        raise CheckpointError(f"{checkpoint} holds adapters of another model than {config.model.path}")


def _read(checkpoint: Path, tensors: dict[str, Any], config: Config) -> None:
    """Read the policy's weights from a checkpoint into `tensors`, by name.

    Neither the optimizer's moments nor other models of the checkpoint, such as critics, are read.

    Raises:
        CheckpointError: the checkpoint has no weights of these names and shapes.
    """
    import torch.distributed.checkpoint.state_dict_loader as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.load({"model": tensors}, checkpoint_id=checkpoint / STATE, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(
            f"{checkpoint} holds other weights than {config.model.path}, which model.path names: {error}"
        ) from error
