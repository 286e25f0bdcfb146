"""Worker side of the tcp, gloo and nccl backends: runs inside vLLM's worker, registered by `flash.weights.plugin`.

The tensors go through vLLM's layerwise reload, which keeps the storage that compiled graphs point into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash.errors import FlashError
from flash.foreign.vllm_worker import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    begin_reload,
    end_reload,
)
from flash.weights.member import Member
from flash.weights.tcp import Held, TcpSource, pull
from flash.weights.worker_extension import forget_failure, remember, remember_failure


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

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._member = Member(self.device)
        self._held = Held()

    def init_transfer_engine(self, init_info: TcpInitInfo) -> None:
        """There is no rendezvous."""

    def start_weight_update(self) -> None:
        """Make the layers expect new tensors."""
        forget_failure()
        begin_reload(self.model, self.device, remember)

    def receive_weights(self, update_info: TcpUpdateInfo) -> None:
        """Load each tensor as soon as it arrived and was verified.

        A version that cannot be pulled is left for `flash_load_failure`: vLLM would print each exception's traceback
        twice, and a trainer that dies in the middle of a pull is nothing unheard of.
        """
        receive = self._held.receive if update_info.backend == "tcp" else self._member.receive
        try:
            self.model.load_weights(pull(update_info, receive))  # pyright: ignore[reportCallIssue]
        except FlashError as error:
            remember_failure(str(error))
        except BaseException:
            # Else the next version would be loaded on top of the half of this one: layers count what they are given.
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Put the new tensors in place, in every form in which the model keeps them."""
        end_reload(self.model, self.model_config, self.device)

    def shutdown(self) -> None:
        """Leave the group of the last pull, if any."""
        self._member.leave()
