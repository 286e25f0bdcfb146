"""vLLM beyond what it documents, inside its worker: how new weights are put in place. Importing this imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

__all__ = [
    "TOUCHED",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "begin_reload",
    "end_reload",
]

TOUCHED = (
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.init_transfer_engine",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.start_weight_update",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.finish_weight_update",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.shutdown",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.model",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.model_config",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.device",
    "vllm.distributed.weight_transfer.base:WeightTransferInitInfo",
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


def begin_reload(model: torch.nn.Module) -> None:
    """Make the layers expect new tensors, in the storage that compiled graphs point into."""
    initialize_layerwise_reload(model)


def end_reload(model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
    """Put the new tensors in place, in every form in which the model keeps them."""
    finalize_layerwise_reload(model, model_config)
    if device.type == "cpu":
        _repack_embeddings(model)


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Renew the packed copies that the CPU kernels made of embedding and output weights.

    An output layer tied to the embedding gets no tensor of its own, so the reload never repacks it, and it would go on
    computing logits with the previous version.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and not layer.weight.is_meta:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
