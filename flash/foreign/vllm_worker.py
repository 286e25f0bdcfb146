"""vLLM beyond what it documents, inside its worker: how new weights are put in place. Importing this imports vLLM.

What is touched here is listed in `flash.foreign.vllm.TOUCHED_BY_WORKERS`.
"""

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
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "begin_reload",
    "end_reload",
]


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
