"""Functions that use undocumented parts of vLLM inside its workers, to put new weights and LoRA adapters in place.

A *worker* is a process of an engine that computes. `flash.weights.worker` calls these functions there when it has
fetched a new version of the weights: `begin_reload`, then vLLM's loading of each tensor, then `end_reload`.

On the CPU, vLLM *packs* weights: it stores them in the order in which its kernels read them. Packed copies must be made
again for each version.

Importing this module imports vLLM. The attributes that are used are listed in
`flash.foreign.vllm_touched.TOUCHED_BY_WORKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

__all__ = [
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "begin_reload",
    "end_reload",
    "held_adapter",
    "put_adapter",
]


def begin_reload(
    model: torch.nn.Module, device: torch.device, before_packing: Callable[[torch.nn.Module], None]
) -> None:
    """Make the layers of a model expect new tensors. These go into the same storage, because compiled graphs point into
    it. Called in each worker before the tensors of a version arrive.

    On the CPU `before_packing` is called with each layer when its new weights have arrived, before they are packed.
    `flash.weights.worker` computes the checksum of the weights there, because packing changes their order.
    """
    if device.type == "cpu":
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            process = getattr(method, "process_weights_after_loading", None)
            # A partial was set by an earlier call of this function.
            if process is not None and not isinstance(process, partial):
                method.process_weights_after_loading = partial(_pack_weights, method, process, before_packing)
    initialize_layerwise_reload(model)


def _pack_weights(
    method: Any, process: Any, before_packing: Callable[[torch.nn.Module], None], layer: torch.nn.Module
) -> None:
    """Pack a layer's new weights for its kernel, on the CPU. Replaces a method of the layer's quantization.

    vLLM packs the experts of a mixture when it loads a model, but not when it reloads weights: without the last step
    here, the kernel would read plain weights as if they were packed.

    Args:
        method: the layer's quantization method, to which `process` belongs.
        process: vLLM's own method, `process_weights_after_loading`.
        before_packing: called with the layer before its weights are packed.
        layer: the layer.
    """
    before_packing(layer)
    # Read before `process`, which makes the kernel if there is none yet, and then packs the weights itself.
    kernel = method.moe_kernel if isinstance(method, UnquantizedFusedMoEMethod) else None
    process(layer)
    if kernel is not None:
        kernel.fused_experts.process_weights_after_loading(layer)


def end_reload(model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
    """Put the new tensors in place, and renew the copies that the CPU's kernels have made of the old tensors. Called in
    each worker when all tensors of a version have arrived.

    Args:
        model: the model that `begin_reload` has prepared.
        model_config: vLLM's configuration of the model.
        device: device of the worker.
    """
    finalize_layerwise_reload(model, model_config)
    if device.type == "cpu":
        _repack_embeddings(model)
        _widen_head(model, model_config, replace=True)


def put_adapter(worker: Any, number: int, tensors: dict[str, torch.Tensor], dropped: Sequence[int]) -> None:
    """Put an adapter into a worker under the number `number`.

    An older adapter with this number is replaced, and the adapters `dropped` are removed. vLLM's own function would
    read the adapter from a folder.

    Args:
        worker: vLLM's worker.
        number: number of the adapter, at least 1.
        tensors: tensors of the adapter, by the names that peft uses in its files. Their products are added to the
            outputs of layers with the factor 1, because they contain the scale of the adapter already.
        dropped: numbers of adapters to remove.
    """
    manager: Any = worker.model_runner.lora_manager
    adapters: Any = manager._adapter_manager
    mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        number,
        tensors,
        PEFTHelper(r=1, lora_alpha=1, target_modules=[]),  # vLLM uses only the ratio of alpha to r, which is 1
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
    )
    for old in (number, *dropped):
        adapters.remove_adapter(old)
    adapters.add_adapter(adapter)
    adapters.activate_adapter(number)
    if worker.device.type == "cpu":
        _widen_head(adapters.model, worker.model_config, replace=False)


def held_adapter(worker: Any, number: int) -> Iterator[torch.Tensor]:
    """Yield the tensors with which a worker computes for an adapter. They are padded with zeros.

    `flash.weights.worker` computes the checksum of the adapter from them. `number` is the number of the adapter. Raises
    ValueError if the worker does not hold it.
    """
    adapters: Any = worker.model_runner.lora_manager._adapter_manager
    slot = adapters.lora_index_to_id.index(number)  # the layers hold all adapters, stacked in this order
    for layer in adapters.modules.values():
        for stacked in (*layer.lora_a_stacked, *layer.lora_b_stacked):
            yield stacked[slot]


def _widen_head(model: torch.nn.Module, model_config: Any, *, replace: bool) -> None:
    """Give the model a `WideHead` if its output layer computes in another dtype than the model. On the CPU, called
    after each load of weights or adapters.

    Args:
        model: the model.
        model_config: vLLM's configuration of the model.
        replace: True if the output layer has new weights, so that an older `WideHead`, which has a copy of the old
            weights, must be replaced.
    """
    for layer in model.modules():
        if isinstance(layer, LogitsProcessor) and layer.head_dtype != model_config.dtype:
            head: Any = layer._apply_head  # pyright: ignore[reportPrivateUsage]
            layer._apply_head = WideHead() if replace or not isinstance(head, WideHead) else head  # pyright: ignore[reportPrivateUsage]


class WideHead:
    """Computes logits in float32 on the CPU, with a float32 copy of the output layer's weights of one version.

    It replaces `LogitsProcessor._apply_head`. vLLM would copy the weights to float32 in every step, which takes a third
    of a small model's step. The kernel that is used here also gives a row the same result whatever other rows are in
    the batch. Responses with a seed need this to be repeatable.
    """

    def __init__(self) -> None:
        self._head: Any = None
        """Module with the float32 copy; made by the first call, when the weights of the version are in place."""

    def __call__(self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        """Return the logits, float32 [tokens, vocabulary]. vLLM calls this like `LogitsProcessor._apply_head`."""
        if self._head is None:
            self._head = torch.nn.Module()
            self._head.weight = torch.nn.Parameter(lm_head.weight.float(), requires_grad=False)
            dispatch_cpu_unquantized_gemm(self._head, remove_weight=True)
        bias = None if embedding_bias is None else embedding_bias.float()
        return self._head.cpu_linear(hidden_states.float(), self._head.weight, bias)


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the weights of embedding and output layer again, for the CPU's kernels. Called after each load of weights.

    An output layer that shares the embedding's weights gets no tensor of its own. So the reload never packs it again,
    and it would compute logits with the previous version.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and not layer.weight.is_meta:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
