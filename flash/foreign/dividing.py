"""How transformers divides a model's layers and experts over ranks, which its releases before 5.19 do in another way.

Imported where they are to be divided alone, so that all else runs with what is installed.
"""

from __future__ import annotations

from contextlib import nullcontext
from logging import ERROR, getLogger
from typing import Any

from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    EpDispatchExpertsParallel,
    apply_expert_parallelism,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
    resolve_parallel_plans,
)

from flash.foreign.torch import has_data

TOUCHED = (
    "transformers:PreTrainedModel.tp_plan",
    "transformers:PreTrainedModel.ep_plan",
    "transformers.distributed.configuration_utils:DistributedConfig",
    "transformers.distributed.tensor_parallel:ALL_PARALLEL_STYLES",
    "transformers.distributed.tensor_parallel:EpDispatchExpertsParallel._dispatch_tokens",
    "transformers.distributed.tensor_parallel:EpDispatchExpertsParallel.transform_output_post_forward",
    "transformers.distributed.tensor_parallel:apply_expert_parallelism",
    "transformers.distributed.tensor_parallel:apply_tensor_parallelism",
    "transformers.distributed.tensor_parallel:replace_layer_number_by_wildcard",
    "transformers.distributed.tensor_parallel:resolve_parallel_plans",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""

DISPATCHED = "ep_dispatch_experts"
"""transformers' name of experts to whose ranks tokens are sent."""


def divide_layers(model: PreTrainedModel, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> list[nn.Module]:
    """Leave to each rank of a mesh its part of the decoder layers, in place, by the model's own plans.

    One of the meshes is there. Returns what holds the experts where they are divided.
    """
    sizes = [1 if mesh is None else mesh.size() for mesh in (tensor, expert)]
    asked = DistributedConfig(tp_size=sizes[0], ep_size=sizes[1], fsdp_size=get_world_size() // sizes[0])
    layers, experts = resolve_parallel_plans(model, asked)
    if tensor is not None:
        plan = {name: style for name, style in layers.items() if "layers" in name.split(".")}
        apply_tensor_parallelism(model, tensor, plan)
    # What FSDP shards once more is gathered in two steps, of which torch warns.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    if expert is None:
        return []
    same_tokens: Any = tensor
    apply_expert_parallelism(model, expert, same_tokens, experts)
    held = {name for name, style in experts.items() if style == DISPATCHED}
    return [one for name, one in model.named_modules() if replace_layer_number_by_wildcard(name) in held]


class _Even(TorchFunctionMode):
    """Says number by number how many choices go to each rank, then how many come from each, where none is known."""

    def __init__(self, choices: int, ranks: int) -> None:
        super().__init__()
        sent = [choices // ranks + (rank < choices % ranks) for rank in range(ranks)]
        self._said = iter([*sent, *[sent[0]] * ranks])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self._said) if func is Tensor.item else func(*args, **(kwargs or {}))


class _Dispatched(EpDispatchExpertsParallel):
    """transformers' own."""

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, num_local_experts: int, ep_group: Any, ep_size: int
    ) -> Any:
        # Sizes of what is sent are numbers, and have to be, also where a step is only planned.
        with nullcontext() if has_data(top_k_index) else _Even(top_k_index.numel(), ep_size):
            return super()._dispatch_tokens(hidden_states, top_k_index, num_local_experts, ep_group, ep_size)

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh, **how: Any) -> Tensor:
        found = super().transform_output_post_forward(module, output, mesh, **how)
        # No view: FSDP warns of outputs that are views.
        return found if how["tp_mesh"] is None else found.clone()


_dispatched: Any = _Dispatched()
ALL_PARALLEL_STYLES.register(DISPATCHED, _dispatched)
