"""Worker side of the tcp backend: runs inside vLLM's worker process, registered by `flash.weights.plugin`.

The tensors go through vLLM's layerwise reload, which keeps the storage that compiled graphs point into.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash.foreign.vllm_worker import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    begin_reload,
    end_reload,
)
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
        begin_reload(self.model)

    def receive_weights(self, update_info: TcpUpdateInfo) -> None:
        """Load each tensor as soon as it arrived and was verified."""
        self.model.load_weights(pull(update_info))  # pyright: ignore[reportCallIssue]

    def finish_weight_update(self) -> None:
        """Put the new tensors in place, in every form in which the model keeps them."""
        end_reload(self.model, self.model_config, self.device)

    def shutdown(self) -> None:
        """Nothing outlives a pull."""
