"""Functions that use transformers beyond its documented interface, so that a new release is checked in one place.

The classes and configurations of models answer some questions in different ways. The functions here give one answer:
which attention function a model has, how it changes logits, how many experts it has, and which positions.
`stored_tensors` reads weights tensor by tensor, so that no process has to hold a whole model.

The *text configuration* (`get_text_config`) is the configuration of the language model, even in a model that also reads
images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
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
"""Attributes of transformers that this module and `flash.trainer.model` use, as `module:Class.attribute`. A test looks
for each of them."""

QUANTIZED = ("F8", "F6", "F4", "I8", "U8")
"""Prefixes of the dtypes in safetensors files that are quantized: their numbers must be multiplied by a scale that is
stored separately."""


def takes_attention(model: PreTrainedModel) -> bool:
    """Return True if the model looks its attention function up by name, so that Flash can set another function. Trainer
    ranks call this when they load a model."""
    return bool(getattr(model, "_supports_attention_backend", False))


def attention(model: PreTrainedModel) -> str | None:
    """Return the name of the attention function that the model calls, such as `sdpa`."""
    return model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]


def default_attention(model: PreTrainedModel) -> str:
    """Return the name of the attention function that transformers would select for a model of this class.

    Trainer ranks set it when they load a model, before Flash's own function may replace it. For models that cap
    attention scores it is "eager", because transformers' sdpa ignores the cap without a warning.
    """
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return model.get_correct_attn_implementation("eager" if capped else None)


class LogitChange(NamedTuple):
    """Change that a model makes to the logits of its output layer: cap · tanh(scale · logit / cap).

    Flash computes log-probs itself, from the output layer's input, so it has to make this change, too.
    """

    scale: float = 1.0
    """Factor of the logits."""
    cap: float | None = None
    """Bound of the capped logits; None: no cap."""


class _LogitAttribute(NamedTuple):
    """Attribute with which a model changes logits."""

    owner: object
    """Object that has the attribute: a model or a configuration."""
    name: str
    """Name of the attribute."""
    neutral: float | None
    """Value with which logits stay unchanged."""


def _logit_attributes(model: PreTrainedModel) -> list[_LogitAttribute]:
    """Return the attributes with which this model changes logits. Families of models have different ones. Empty if the
    model has none of the known ones."""
    known = [
        _LogitAttribute(model.config, "final_logit_softcapping", None),
        _LogitAttribute(model.config, "logits_scaling", 1.0),
        _LogitAttribute(model, "logits_scaling", 1.0),
        _LogitAttribute(model, "logit_scale", 1.0),
        _LogitAttribute(model.base_model, "lm_head_multiplier", 1.0),
    ]
    return [one for one in known if isinstance(getattr(one.owner, one.name, None), int | float)]


def logit_change(model: PreTrainedModel) -> LogitChange:
    """Return the change of logits that the model's attributes imply. Called once for each model, for its output layer.

    A model may change logits in other ways, too. `flash.trainer.model.packing_check` finds such a change, because it
    compares with the model's own forward pass.
    """
    # By name: a model that copies an attribute from its configuration applies it only once.
    values: dict[str, float] = {name: getattr(owner, name) for owner, name, _ in _logit_attributes(model)}
    cap, scale = values.pop("final_logit_softcapping", None), 1.0
    for name, value in values.items():
        # Granite models divide by `logits_scaling`; other models multiply by a number of the same name.
        divides = name == "logits_scaling" and model.config.model_type.startswith("granite")
        scale = scale / value if divides else scale * value
    return LogitChange(scale, cap)


@contextmanager
def logits_unchanged(model: PreTrainedModel) -> Generator[None]:
    """Let the model return the output of its output layer, which Flash has replaced, unchanged inside this block.

    A forward pass for log-probs runs in the block: the output is log-probs then, and not logits.
    """
    attributes = _logit_attributes(model)
    values = [getattr(one.owner, one.name) for one in attributes]
    try:
        for one in attributes:
            setattr(one.owner, one.name, one.neutral)
        yield
    finally:
        for one, value in zip(attributes, values, strict=True):
            setattr(one.owner, one.name, value)


def windows(model: PreTrainedModel) -> list[int]:
    """Return the lengths in tokens of the model's attention windows and chunks; empty if it has none. The check of
    packing tries sequences that are longer."""
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
    return [limit for limit in limits if isinstance(limit, int) and limit > 0]


def positions(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens that a sequence of the model may have; None if its configuration does not
    say."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return count if isinstance(count, int) else None


def layer_types(model: PreTrainedModel) -> set[str]:
    """Return the class names of the decoder layers. FSDP shards (divides among the ranks) each of them as a whole."""
    return set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]


RECURRENT = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
"""transformers' names of kinds of layers with a state that each token passes on to the next. The trainer gives such a
model one sequence at a time, so that no state passes from one sequence to another. It refuses such a model with context
parallelism, where ranks have parts of a sequence."""


def is_recurrent(model: PreTrainedModel) -> bool:
    """Return True if the model's class declares a state that each token passes on to the next. Such a model's layers
    are not compiled as a whole."""
    return bool(getattr(model, "_is_stateful", False))


def recurrent_layers(described: PreTrainedConfig) -> str:
    """Return the kinds of recurrent layers (`RECURRENT`) in a configuration, separated by commas; else empty."""
    return ", ".join(sorted(RECURRENT & set(getattr(described.get_text_config(), "layer_types", None) or ())))


def layer_count(model: PreTrainedModel) -> int:
    """Return the number of decoder layers."""
    return int(model.config.get_text_config().num_hidden_layers)


WITHOUT_ATTENTION = {"conv", "linear_attention", "mamba"}
"""transformers' names of kinds of layers that have no attention."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names that configurations of transformers have for the number of experts of a layer."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""Names that configurations of transformers have for the number of experts that a token is sent to."""


class AttentionLayer(NamedTuple):
    """The size of one attention layer, from which `flash.trainer.performance` computes FLOPs."""

    window: float
    """Largest number of tokens that a token sees, itself included; infinite without a window or chunk."""
    width: int
    """Number of elements in all queries and all values of one token: heads · (query size + value size)."""


def layer_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configuration of each decoder layer. It is the configuration of the model, unless the layers differ in
    size."""
    described = model.config.get_text_config()
    # Gemma 4 has layers of different sizes: its configuration raises an error if code reads a size for all layers.
    if getattr(described, "is_heterogeneous", False):
        return list(described.per_layer_config)
    return [described] * layer_count(model)


def head_width(layer: Any) -> int:
    """Return the width of an attention head, given the configuration of its layer."""
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Return the size of each attention layer of a model; layers without attention are left out."""
    described, limits, each = model.config.get_text_config(), windows(model), layer_configs(model)
    kinds: list[str] | None = getattr(described, "layer_types", None)
    layers: list[AttentionLayer] = []
    # A configuration may name more kinds than the model has layers.
    for layer, kind in zip(each, kinds or [""] * len(each), strict=False):
        heads = getattr(layer, "num_attention_heads", None) or 0
        if kind in WITHOUT_ATTENTION or not heads:
            continue
        # Without kinds of layers, a window holds for all layers.
        bounded = bool(limits) and (not kind or "sliding" in kind or "chunked" in kind)
        query, value = (getattr(layer, name, None) or head_width(layer) for name in ("qk_head_dim", "v_head_dim"))
        layers.append(AttentionLayer(float(limits[0]) if bounded else math.inf, heads * (query + value)))
    return layers


def routed_share(model: PreTrainedModel) -> tuple[int, float]:
    """Return the number of experts of a layer, and the share of them that a token is sent to. For the count of FLOPs.

    A model without experts has 0 and 1.
    """
    described = model.config.get_text_config()
    experts, chosen = (
        next((count for name in names if (count := getattr(described, name, None))), 0)
        for names in (EXPERT_COUNTS, EXPERTS_PER_TOKEN)
    )
    return experts, chosen / experts if experts and chosen else 1.0


ABSORBED_LAYER = "kv_b_proj"
"""Name of a projection of latent attention (DeepSeek). Engines multiply this projection into other weights when they
load a model, so they would never use an adapter for it."""


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of all linear layers that may get LoRA adapters, such as `q_proj`, sorted.

    These are the layers that get adapters if `lora.targets` is empty. The output layer and `ABSORBED_LAYER` are left
    out.
    """
    output = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output)
    return sorted({name.rpartition(".")[2] for name in linear} - {ABSORBED_LAYER})


def without_weights(path: str, *, trusted: bool, layers: int | None = None) -> PreTrainedModel:
    """Return a model whose parameters are on the meta device, where they need no memory. Its buffers are real.

    Checks and predictions of memory use it, and trainer ranks before they load their parts of the weights.

    Args:
        path: folder or id of the model.
        trusted: True if code that comes with the model may run.
        layers: number of decoder layers that the model keeps, the first ones; None to keep all.

    Raises:
        OSError, ValueError, and others of transformers: the model does not exist, or is no causal language model.
    """
    described = AutoConfig.from_pretrained(path, local_files_only=Path(path).is_dir(), trust_remote_code=trusted)
    if layers is not None:
        keep_layers(described.get_text_config(), layers)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=trusted)


def keep_layers(described: PreTrainedConfig, count: int) -> None:
    """Change a configuration, in place, so that the model has only the first `count` of its decoder layers."""
    described.num_hidden_layers = count
    if getattr(described, "layer_types", None):
        described.layer_types = described.layer_types[:count]


class ExpertRouter(NamedTuple):
    """Module that chooses the experts of a decoder layer (its router)."""

    layer: int
    """Number of the decoder layer, from 0."""
    module: nn.Module
    """The router itself."""
    experts: int
    """Number of experts in the layer."""


def routers(model: PreTrainedModel) -> list[ExpertRouter]:
    """Return the routers of a model, in the order of its layers. The trainer makes them repeat the engine's choice of
    experts.

    The list is empty if the model's class does not declare in transformers where routers are, or declares several
    kinds.
    """
    # In `_can_record_outputs` transformers declares which modules give the outputs that a user can request.
    recorded: Any = getattr(model, "_can_record_outputs", None) or {}
    router, found = recorded.get("router_logits"), list[ExpertRouter]()
    if not isinstance(router, OutputRecorder):
        return found
    for name, module in model.named_modules():
        number = re.search(r"\blayers\.(\d+)\.", name)
        if number and isinstance(module, router.target_class) and name.endswith(router.layer_name or ""):
            # A router's matrix has one row per expert.
            matrix = next(weight for weight in module.parameters() if weight.dim() == 2)
            found.append(ExpertRouter(int(number[1]), module, len(matrix)))
    return found


def layer_number(attention: nn.Module) -> int | None:
    """Return the number of the decoder layer that an attention module belongs to, from 0; None if it has no number. The
    measurement of attention (`algorithm.rhythm`) calls this in each layer."""
    number = getattr(attention, "layer_idx", None)
    return number if isinstance(number, int) else None


def positions_by_length(described: PreTrainedConfig) -> str | None:
    """Return the kind of the model's rotary positions if they depend on the length of the sequence; else None.

    With context parallelism, where each rank has a part of each sequence, such a model is refused: a rank does not know
    the length that its positions depend on.
    """
    rope: Any = getattr(described, "rope_parameters", None) or {}
    kinds = [table.get("rope_type", "") for table in (rope, *rope.values()) if isinstance(table, dict)]
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


def stored_tensors(path: str, model: PreTrainedModel, shapes: dict[str, torch.Size]) -> Callable[[str], Tensor] | None:
    """Return a function that reads one tensor of the model, by name, from safetensors files.

    `flash.trainer.model.model` calls this when it loads weights. So a rank can load its part of each tensor without
    holding the whole model. A tensor has the dtype of its file. Tensors that are stored in pieces, such as each expert
    apart, are put together as transformers does when it loads a model. Stored names may differ from the model's names,
    as transformers' conversions of the model say.

    Args:
        path: folder or hub id of the model.
        model: the model, whose class has the conversions.
        shapes: shape of each tensor of the model, by name.

    Returns:
        The function; None if there are no safetensors files, or if they do not hold every tensor of `shapes`.

    Raises:
        ValueError: a tensor is quantized, so that it cannot be used without its scale.
        Exception: a file is damaged. The type depends on the damage.
    """
    if (files := _weight_files(path)) is None:
        return None
    # File, shape and dtype of each stored tensor, by its name in the file.
    stored: dict[str, tuple[str, list[int], str]] = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(key)
                stored[key] = (name, part.get_shape(), str(part.get_dtype()))
    # The conversions from stored names and pieces to the model's tensors. The legacy ones of any model are left out:
    # weights with such names (LayerNorm.gamma) lack tensors of the model here, so the caller loads them as a whole.
    changes = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    # Stored names of the pieces of each tensor, each with the pattern of the conversion that takes it; None if the
    # tensor is stored in one piece.
    pieces: dict[str, list[tuple[str, str | None]]] = {}
    for key, (file_name, shape, dtype) in sorted(stored.items(), key=lambda one: dot_natural_key(one[0])):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, shapes)
        # The files may already use the model's own names.
        if name not in shapes and key in shapes:
            name, pattern = key, None
        # A stored tensor of another shape is not used, unless a conversion changes the shape.
        if name in shapes and (pattern is not None or list(shapes[name]) == shape):
            if dtype.startswith(QUANTIZED):
                raise ValueError(f"{file_name} has {key} as {dtype}, which is quantized: expected whole weights")
            pieces.setdefault(name, []).append((key, pattern))
    if not pieces.keys() >= shapes.keys():
        return None

    def read(name: str) -> Tensor:
        """Read one tensor of the model from the files that have its pieces."""
        with ExitStack() as stack:
            names = {stored[key][0] for key, _ in pieces[name]}
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in names}
            (first, pattern), *_ = pieces[name]
            if pattern is None:
                return opened[stored[first][0]].get_tensor(first)
            # A converter collects pieces until it is complete, so each tensor needs a new copy.
            converter: Any = deepcopy(by_pattern[pattern])
            for key, source in pieces[name]:
                converter.add_tensor(name, key, source, opened[stored[key][0]].get_tensor(key))
            tensor = converter.convert(name, model=model, config=model.config)[name]
            return tensor[0] if isinstance(tensor, list) else tensor

    return read


def _weight_files(path: str) -> list[str] | None:
    """Return the paths of a model's safetensors files, of one file or of several with an index; None if there are none.

    The files of a hub id are downloaded into the local cache. A damaged index raises errors of several types.
    """
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


def make_weights_readable(folder: Path) -> None:
    """Give the safetensors files in a folder the permissions of the configuration file beside them, which must exist.

    safetensors writes files that only their owner may read, but another user, such as a server, may need to load the
    model.
    """
    for file in folder.glob("*.safetensors"):
        copymode(next(folder.glob("*config.json")), file)


@contextmanager
def hidden_progress_bars() -> Generator[None]:
    """Hide the progress bars of transformers inside this block, because they would break up the caller's output."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
