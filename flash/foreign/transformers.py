"""transformers beyond what it documents: what a model says of its own layers, and how they are divided."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from json import loads
from logging import ERROR, getLogger
from pathlib import Path
from shutil import copymode

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file

TOUCHED = (
    "transformers:PreTrainedModel._supports_attention_backend",
    "transformers:PreTrainedModel._no_split_modules",
    "transformers:PreTrainedModel.set_attn_implementation",
    "transformers:PreTrainedModel.get_output_embeddings",
    "transformers:PreTrainedModel.set_output_embeddings",
    "transformers:PreTrainedModel.get_correct_attn_implementation",
    "transformers:AttentionInterface.register",
    "transformers:PreTrainedModel.tp_plan",
    "transformers.distributed.tensor_parallel:apply_tensor_parallelism",
    "transformers.conversion_mapping:get_model_conversion_mapping",
    "transformers.utils.hub:cached_file",
    "transformers.models.qwen3.modeling_qwen3:Qwen3Attention.layer_idx",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether the model calls its attention by name, so that it can be replaced."""
    return bool(getattr(model, "_supports_attention_backend", False))


def default_attention(model: PreTrainedModel) -> str:
    """The attention that transformers gives a model of this class where nothing is asked for."""
    return model.get_correct_attn_implementation(None)


def windows(model: PreTrainedModel) -> list[int]:
    """How many tokens the model's attention sees back where it is limited, by window or by chunk."""
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
    return [limit for limit in limits if isinstance(limit, int) and limit > 0]


def positions(model: PreTrainedModel) -> int | None:
    """How many tokens a sequence of the model may have; None where it does not say."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return count if isinstance(count, int) else None


def layer_types(model: PreTrainedModel) -> set[str]:
    """Class names of the layers that are sharded as a whole."""
    return set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]


def layer_count(model: PreTrainedModel) -> int:
    """Decoder layers."""
    return int(model.config.get_text_config().num_hidden_layers)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Last names of the model's linear layers, but for its output layer: those that adapters are usually put on."""
    output = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output)
    return sorted({name.rpartition(".")[2] for name in linear})


def without_weights(path: str, *, trusted: bool, layers: int | None = None) -> PreTrainedModel:
    """The model at a folder or hub id with parameters on the meta device, which take no memory; buffers are real.

    With `layers`, it has the first so many of its decoder layers. Raises what transformers does.
    """
    described = AutoConfig.from_pretrained(path, local_files_only=Path(path).is_dir(), trust_remote_code=trusted)
    if layers is not None:
        keep_layers(described.get_text_config(), layers)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=trusted)


def keep_layers(described: PreTrainedConfig, count: int) -> None:
    """Describe a model of so many decoder layers, the first of those it had."""
    described.num_hidden_layers = count
    if getattr(described, "layer_types", None):
        described.layer_types = described.layer_types[:count]


def layer_number(attention: nn.Module) -> int | None:
    """Which decoder layer an attention module belongs to, from 0; None where it does not say."""
    number = getattr(attention, "layer_idx", None)
    return number if isinstance(number, int) else None


def divide_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave to each rank of the mesh its part of each decoder layer, in place, by the model's own plan."""
    plan = {name: style for name, style in model.tp_plan.items() if "layers" in name.split(".")}
    apply_tensor_parallelism(model, mesh, plan)
    # What FSDP shards once more is gathered in two steps, of which torch warns.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)


def stored_tensors(path: str, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> dict[str, str] | None:
    """The safetensors file of each of these tensors, at a folder or hub id.

    None: there are no such files, or they hold other tensors, from which transformers makes the model's as it loads.
    """
    if get_model_conversion_mapping(model, add_legacy=False) or hasattr(model.config, "quantization_config"):
        return None
    local = Path(path).is_dir()
    try:
        files = [str(cached_file(path, SAFE_WEIGHTS_NAME, local_files_only=local))]
    except OSError:
        try:
            index = Path(str(cached_file(path, SAFE_WEIGHTS_INDEX_NAME, local_files_only=local)))
            names = sorted({*loads(index.read_bytes())["weight_map"].values()})
            files = [str(cached_file(path, name, local_files_only=local)) for name in names]
        except OSError:
            return None
    found: dict[str, str] = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                if list(shapes.get(key, ())) == file.get_slice(key).get_shape():
                    found[key] = name
    return found if found.keys() >= shapes.keys() else None


def open_weights(folder: Path) -> None:
    """Let who may read a model's configuration read its weights, which safetensors writes for their owner alone."""
    for file in folder.glob("*.safetensors"):
        copymode(next(folder.glob("*config.json")), file)


@contextmanager
def without_bars() -> Generator[None]:
    """Without transformers' own progress bars, which would cut into the caller's lines."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
