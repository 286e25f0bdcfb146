"""transformers beyond what it documents: what a model says of its own layers, and how they are divided."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from json import loads
from pathlib import Path
from shutil import copymode
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file
from transformers.utils.output_capturing import OutputRecorder

TOUCHED = (
    "transformers:PreTrainedModel._supports_attention_backend",
    "transformers:PreTrainedModel._no_split_modules",
    "transformers:PreTrainedModel._is_stateful",
    "transformers:PreTrainedModel.set_attn_implementation",
    "transformers:PreTrainedModel.get_output_embeddings",
    "transformers:PreTrainedModel.set_output_embeddings",
    "transformers:PreTrainedModel.get_correct_attn_implementation",
    "transformers:PreTrainedConfig._attn_implementation",
    "transformers:AttentionInterface.register",
    "transformers.conversion_mapping:get_model_conversion_mapping",
    "transformers.core_model_loading:WeightConverter.add_tensor",
    "transformers.core_model_loading:WeightConverter.convert",
    "transformers.core_model_loading:WeightRenaming",
    "transformers.core_model_loading:dot_natural_key",
    "transformers.core_model_loading:rename_source_key",
    "transformers.utils.hub:cached_file",
    "transformers.models.qwen3.modeling_qwen3:Qwen3Attention.layer_idx",
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoePreTrainedModel._can_record_outputs",
    "transformers.utils.output_capturing:OutputRecorder.target_class",
    "transformers.utils.output_capturing:OutputRecorder.layer_name",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""

SCALED = ("F8", "F6", "F4", "I8", "U8")
"""How safetensors' names of dtypes begin whose numbers are to be multiplied by a scale that is stored beside them."""


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether the model calls its attention by name, so that it can be replaced."""
    return bool(getattr(model, "_supports_attention_backend", False))


def attention(model: PreTrainedModel) -> str | None:
    """The name of the attention that the model calls."""
    return model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]


def default_attention(model: PreTrainedModel) -> str:
    """The attention that transformers gives a model of this class where nothing is asked for."""
    # Its sdpa leaves caps out without a word.
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return model.get_correct_attn_implementation("eager" if capped else None)


class LogitChange(NamedTuple):
    """What a model does to the logits of its output layer: scales them, then takes cap · tanh(logit / cap)."""

    scale: float = 1.0
    cap: float | None = None


def _changers(model: PreTrainedModel) -> list[tuple[object, str, float | None]]:
    """What has a say in that: the attribute's owner, its name, and what it says where logits stay as they are."""
    found: list[tuple[object, str, float | None]] = [
        (model.config, "final_logit_softcapping", None),
        (model.config, "logits_scaling", 1.0),
        (model, "logits_scaling", 1.0),
        (model, "logit_scale", 1.0),
        (model.base_model, "lm_head_multiplier", 1.0),
    ]
    return [one for one in found if isinstance(getattr(one[0], one[1], None), int | float)]


def logit_change(model: PreTrainedModel) -> LogitChange:
    """As far as it is known by the names of attributes; whether that is all, only the model's own forward pass says."""
    said: dict[str, float] = {name: getattr(owner, name) for owner, name, _ in _changers(model)}
    cap, scale = said.pop("final_logit_softcapping", None), 1.0
    for name, value in said.items():
        # Two families have this name for opposite things.
        divides = name == "logits_scaling" and model.config.model_type.startswith("granite")
        scale = scale / value if divides else scale * value
    return LogitChange(scale, cap)


@contextmanager
def logits_unchanged(model: PreTrainedModel) -> Generator[None]:
    """The model hands on what its output layer says."""
    kept = [(owner, name, getattr(owner, name), neutral) for owner, name, neutral in _changers(model)]
    try:
        for owner, name, _, neutral in kept:
            setattr(owner, name, neutral)
        yield
    finally:
        for owner, name, value, _ in kept:
            setattr(owner, name, value)


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


RUNNING = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
"""What transformers calls layers whose state runs on from one token to the next."""


def runs_on(model: PreTrainedModel) -> bool:
    """Whether a model says that a state runs on in it."""
    return bool(getattr(model, "_is_stateful", False))


def running_layers(described: PreTrainedConfig) -> str:
    """The kinds of layers of a model of this configuration whose state runs on; empty: none, or it does not say."""
    return ", ".join(sorted(RUNNING & set(getattr(described.get_text_config(), "layer_types", None) or ())))


def layer_count(model: PreTrainedModel) -> int:
    """Decoder layers."""
    return int(model.config.get_text_config().num_hidden_layers)


WITHOUT_ATTENTION = {"conv", "linear_attention", "mamba"}
"""Names in transformers of kinds of layers that have no attention."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names in configurations of transformers for the number of experts of a layer."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""Names in configurations of transformers for the number of experts that a token is sent to."""


class AttentionLayer(NamedTuple):
    """The size of one attention layer."""

    window: float
    """The number of tokens that a token sees at most, itself included; infinite without a window or chunk."""
    width: int
    """Numbers in all queries and all values of one token."""


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Return the size of each attention layer of a model; layers without attention are left out."""
    described, limits = model.config.get_text_config(), windows(model)
    count = int(described.num_hidden_layers)
    # Gemma 4's layers differ, and its configuration refuses to name one size for all of them.
    each = described.per_layer_config if getattr(described, "is_heterogeneous", False) else [described] * count
    kinds: list[str] | None = getattr(described, "layer_types", None)
    layers: list[AttentionLayer] = []
    for layer, kind in zip(each, kinds or [""] * count, strict=False):
        heads = getattr(layer, "num_attention_heads", None) or 0
        if kind in WITHOUT_ATTENTION or not heads:
            continue
        bounded = bool(limits) and (not kind or "sliding" in kind or "chunked" in kind)
        head = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        query, value = (getattr(layer, name, None) or head for name in ("qk_head_dim", "v_head_dim"))
        layers.append(AttentionLayer(float(limits[0]) if bounded else math.inf, heads * (query + value)))
    return layers


def routed_share(model: PreTrainedModel) -> tuple[int, float]:
    """Return the number of experts of a layer, 0 without experts, and the share of them that a token is sent to."""
    described = model.config.get_text_config()
    experts, chosen = (
        next((count for name in names if (count := getattr(described, name, None))), 0)
        for names in (EXPERT_COUNTS, EXPERTS_PER_TOKEN)
    )
    return experts, chosen / experts if experts and chosen else 1.0


ABSORBED = "kv_b_proj"
"""Of latent attention (DeepSeek): engines multiply it into other weights when they load it, beside which an adapter of
it would be held and never used."""


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Last names of the model's linear layers that adapters may be put on: not its output layer, nor `ABSORBED`."""
    output = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output)
    return sorted({name.rpartition(".")[2] for name in linear} - {ABSORBED})


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


class ExpertRouter(NamedTuple):
    """What chooses experts in a decoder layer."""

    layer: int
    module: nn.Module
    experts: int


def routers(model: PreTrainedModel) -> list[ExpertRouter]:
    """Those of a model whose class says what its routers are; none where it has none, or says it of several kinds."""
    recorded: Any = getattr(model, "_can_record_outputs", None) or {}
    router, found = recorded.get("router_logits"), list[ExpertRouter]()
    if not isinstance(router, OutputRecorder):
        return found
    for name, module in model.named_modules():
        number = re.search(r"\blayers\.(\d+)\.", name)
        if number and isinstance(module, router.target_class) and name.endswith(router.layer_name or ""):
            found.append(
                ExpertRouter(int(number[1]), module, len(next(one for one in module.parameters() if one.dim() == 2)))
            )
    return found


def layer_number(attention: nn.Module) -> int | None:
    """Which decoder layer an attention module belongs to, from 0; None where it does not say."""
    number = getattr(attention, "layer_idx", None)
    return number if isinstance(number, int) else None


def positions_by_length(described: PreTrainedConfig) -> str | None:
    """The kind of the model's positions where those of all tokens depend on the last one's; else None."""
    rope: Any = getattr(described, "rope_parameters", None) or {}
    kinds = [one.get("rope_type", "") for one in (rope, *rope.values()) if isinstance(one, dict)]
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


def stored_tensors(
    path: str, model: PreTrainedModel, shapes: Mapping[str, torch.Size]
) -> Callable[[str], Tensor] | None:
    """Reads one of these tensors of the model, in the dtype that the safetensors files at a folder or hub id have.

    What files hold in pieces, such as each expert by itself, is put together as transformers does it as it loads.
    None: there are no such files, or what they hold cannot be told apart by tensor.

    Raises:
        ValueError: one is stored in a form that means nothing without its scale.
    """
    if (files := _weight_files(path)) is None:
        return None
    found: dict[str, tuple[str, list[int], str]] = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                stored = file.get_slice(key)
                found[key] = (name, stored.get_shape(), str(stored.get_dtype()))
    changes = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in changes if isinstance(one, WeightRenaming)]
    converters = [one for one in changes if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    pieces: dict[str, list[tuple[str, str | None]]] = {}
    known = dict(shapes)
    for key, (file_name, shape, dtype) in sorted(found.items(), key=lambda one: dot_natural_key(one[0])):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in shapes and key in shapes:
            name, pattern = key, None
        if name in shapes and (pattern is not None or list(shapes[name]) == shape):
            if dtype.startswith(SCALED):
                raise ValueError(f"{file_name} has {key} as {dtype}, which is quantized: expected whole weights")
            pieces.setdefault(name, []).append((key, pattern))
    if not pieces.keys() >= shapes.keys():
        return None

    def read(name: str) -> Tensor:
        with ExitStack() as stack:
            names = {found[key][0] for key, _ in pieces[name]}
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in names}
            (first, pattern), *_ = pieces[name]
            if pattern is None:
                return opened[found[first][0]].get_tensor(first)
            # It keeps what it is given until it has put it together.
            converter: Any = deepcopy(by_pattern[pattern])
            for key, source in pieces[name]:
                converter.add_tensor(name, key, source, opened[found[key][0]].get_tensor(key))
            made = converter.convert(name, model=model, config=model.config)[name]
            return made[0] if isinstance(made, list) else made

    return read


def _weight_files(path: str) -> list[str] | None:
    """The safetensors files of a model; None: there are none."""
    local = Path(path).is_dir()
    try:
        return [str(cached_file(path, SAFE_WEIGHTS_NAME, local_files_only=local))]
    except OSError:
        try:
            index = Path(str(cached_file(path, SAFE_WEIGHTS_INDEX_NAME, local_files_only=local)))
            names = sorted({*loads(index.read_bytes())["weight_map"].values()})
            return [str(cached_file(path, name, local_files_only=local)) for name in names]
        except OSError:
            return None


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
