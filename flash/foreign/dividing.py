"""Tensor and expert parallelism by transformers' own plans, of transformers 5.19 or newer.

With *tensor parallelism* several ranks compute each layer together; each rank has a part of the layer's weights. With
*expert parallelism* each rank has some of the experts of a mixture, and tokens are sent to the ranks of their experts.
A model of transformers has a *plan*, which says how each of its modules is divided.

`flash.trainer.model.model` imports this module only where layers are divided. Earlier releases of transformers divide
models in another way, but the rest of Flash must run with them, too.
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
"""Attributes of transformers that this module uses, as `module:Class.attribute`. A test looks for each of them."""

DISPATCH_STYLE = "ep_dispatch_experts"
"""transformers' name of the parallel style of modules whose tokens are sent to the ranks of their experts."""


def divide_layers(model: PreTrainedModel, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> list[nn.Module]:
    """Divide the decoder layers among the ranks, in place, by the model's own plans. Each rank calls this when it
    builds the model.

    Args:
        model: the model, before it is sharded with FSDP.
        tensor: ranks of tensor parallelism; None without it.
        expert: ranks of expert parallelism; None without it. At least one of the two is given.

    Returns:
        The modules that hold divided experts; empty without `expert`.
    """
    tensor_ranks, expert_ranks = (1 if mesh is None else mesh.size() for mesh in (tensor, expert))
    fsdp_ranks = get_world_size() // tensor_ranks
    config = DistributedConfig(tp_size=tensor_ranks, ep_size=expert_ranks, fsdp_size=fsdp_ranks)
    layers, experts = resolve_parallel_plans(model, config)
    if tensor is not None:
        # Only decoder layers are divided: the embedding and the output layer stay whole.
        plan = {name: style for name, style in layers.items() if "layers" in name.split(".")}
        apply_tensor_parallelism(model, tensor, plan)
    # FSDP shards the divided tensors once more, and torch would warn each time that gathering them takes two steps.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    if expert is None:
        return []
    # Ranks of tensor parallelism have the same tokens, which must be sent to the experts only once.
    same_tokens: Any = tensor
    apply_expert_parallelism(model, expert, same_tokens, experts)
    dispatched = {name for name, style in experts.items() if style == DISPATCH_STYLE}
    return [module for name, module in model.named_modules() if replace_layer_number_by_wildcard(name) in dispatched]


class _EvenDispatch(TorchFunctionMode):
    """Mode of torch in which `Tensor.item` returns numbers of tokens as if they were spread evenly over the ranks.

    The memory of a step is predicted with tensors without data, which have no such numbers. transformers reads, in this
    order, the numbers of tokens that are sent to each rank, and the numbers that are received from each.

    Args:
        choices: number of (token, expert) pairs on this rank.
        ranks: number of ranks that divide the experts.
    """

    def __init__(self, choices: int, ranks: int) -> None:
        super().__init__()
        sent = [choices // ranks + (rank < choices % ranks) for rank in range(ranks)]  # the first ranks get one more
        self._counts = iter([*sent, *[sent[0]] * ranks])
        """Results of the next calls of `Tensor.item`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch, or return the next number in place of `Tensor.item`. torch calls this."""
        return next(self._counts) if func is Tensor.item else func(*args, **(kwargs or {}))


class _DispatchedExperts(EpDispatchExpertsParallel):
    """Dispatch of tokens to experts, which replaces that of transformers.

    It also works for tensors without data and with FSDP. transformers calls the two methods around the forward pass of
    a module with divided experts.
    """

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, num_local_experts: int, ep_group: Any, ep_size: int
    ) -> Any:
        """Send each token to the ranks of its experts; called before the experts compute."""
        # The sizes of the messages must be numbers. Tensors have no data when the memory of a step is only predicted.
        with nullcontext() if has_data(top_k_index) else _EvenDispatch(top_k_index.numel(), ep_size):
            return super()._dispatch_tokens(hidden_states, top_k_index, num_local_experts, ep_group, ep_size)

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh, **how: Any) -> Tensor:
        """Combine the outputs of a module with divided experts; called after its forward pass."""
        found = super().transform_output_post_forward(module, output, mesh, **how)
        # Return a copy, because FSDP warns of outputs that are views.
        return found if how["tp_mesh"] is None else found.clone()


# From here on transformers uses our class for every model in this process.
_our_style: Any = _DispatchedExperts()
ALL_PARALLEL_STYLES.register(DISPATCH_STYLE, _our_style)
