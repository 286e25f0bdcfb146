"""Worker side of the tcp backend: runs inside vLLM's worker process, registered by `flash.weights.plugin`.

The tensors go through vLLM's layerwise reload, which keeps the storage that compiled graphs point into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from flash.weights.tcp import TcpSource, pull


@dataclass
class TcpInitInfo(WeightTransferInitInfo):
    """Nothing: every pull opens its own connection."""


@dataclass
class TcpUpdateInfo(TcpSource, WeightTransferUpdateInfo):
    """`TcpSource`, as vLLM hands it over."""


class TcpWeightEngine(WeightTransferEngine[TcpInitInfo, TcpUpdateInfo]):
    """Pulls a version and loads it while it arrives."""

    init_info_cls = TcpInitInfo
    update_info_cls = TcpUpdateInfo

    def init_transfer_engine(self, init_info: TcpInitInfo) -> None:
        """There is no rendezvous."""

    def start_weight_update(self) -> None:
        """Make the layers expect new tensors."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: TcpUpdateInfo) -> None:
        """Load each tensor as soon as it arrived and was verified."""
        self.model.load_weights(pull(update_info))  # pyright: ignore[reportCallIssue]

    def finish_weight_update(self) -> None:
        """Put the new tensors in place, in every form in which the model keeps them."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_embeddings(self.model)

    def shutdown(self) -> None:
        """Nothing outlives a pull."""


def repack_embeddings(model: torch.nn.Module) -> None:
    """Renew the packed copies that the CPU kernels made of embedding and output weights.

    An output layer tied to the embedding gets no tensor of its own, so the reload never repacks it, and it would go on
    computing logits with the previous version.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and not layer.weight.is_meta:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
