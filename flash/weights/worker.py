"""Loads a version inside vLLM's workers, and checks the weights that a worker holds.

For each version the node loop (`flash.rollout.vllm.engine`) calls `WorkerExtension.flash_load` in each worker.
(vLLM adds this class to its worker class.) It lets vLLM call `WeightReceiver`, our weight transfer engine: first
`start_weight_update`, then `receive_weights`, then `finish_weight_update`. `receive_weights` pulls the version
(`flash.weights.tcp`, `flash.weights.broadcast`) and gives its tensors to vLLM's layerwise reload, which keeps the
storage that compiled graphs point into. `flash_load` returns the fingerprint of the weights that the worker then holds,
a checksum of all elements. It also loads adapters (LoRA), which vLLM holds beside the model's own weights.

A *worker* is a process of an engine that holds the model, or a part of it. With ipc (engine and trainer on one GPU),
vLLM's own weight transfer engine receives; `WorkerExtension` is used all the same.

A version that cannot be pulled is reported as a `LoadFailure`, and no exception is raised. vLLM would print the
traceback of an exception twice, although a trainer that dies in the middle of a pull is an expected event.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from flash.errors import FlashError
from flash.foreign.vllm_worker import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    begin_reload,
    end_reload,
    held_adapter,
    put_adapter,
)
from flash.weights.broadcast import BroadcastReceiver
from flash.weights.image import Fingerprint
from flash.weights.tcp import TcpReceiver, WeightSource, pull
from flash.weights.versions import LoadFailure

LayerSums = WeakKeyDictionary[nn.Module, list[int]]
"""Fingerprints of layers whose weights the CPU's kernels have packed, taken before the packing."""


@dataclass
class ReceiverInitInfo(WeightTransferInitInfo):
    """Empty arguments of `init_transfer_engine`, which vLLM's interface requires."""


@dataclass
class ReceiverUpdateInfo(WeightSource, WeightTransferUpdateInfo):
    """A `WeightSource`, in the class that vLLM expects."""


class WeightReceiver(WeightTransferEngine[ReceiverInitInfo, ReceiverUpdateInfo]):
    """Weight transfer engine of one worker: pulls a version and loads each tensor as it arrives (tcp, gloo, nccl).

    vLLM makes one object per worker and calls its methods.
    """

    init_info_cls = ReceiverInitInfo
    update_info_cls = ReceiverUpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._broadcasts = BroadcastReceiver(self.device)
        self._tcp = TcpReceiver()
        self.failure: LoadFailure | None = None
        """Reason why the last version could not be pulled; None if it could."""
        self.layer_sums: LayerSums = WeakKeyDictionary()
        """Fingerprints of packed layers, for `WorkerExtension.flash_fingerprint`."""

    def init_transfer_engine(self, init_info: ReceiverInitInfo) -> None:
        """Do nothing: every pull opens a connection of its own."""

    def start_weight_update(self) -> None:
        """Prepare the layers for new tensors, and forget the failure of the last version."""
        self.failure = None
        begin_reload(self.model, self.device, partial(keep_sums, self.layer_sums))

    def receive_weights(self, update_info: ReceiverUpdateInfo) -> None:
        """Load each tensor as it arrives. vLLM calls this once for a version.

        If the pull fails, the reason is stored in `failure` and not raised; `WorkerExtension.flash_load` returns it.
        Any other exception, such as an error of vLLM, is raised.
        """
        receive = self._tcp.receive if update_info.backend == "tcp" else self._broadcasts.receive
        try:
            self.model.load_weights(pull(update_info, receive))  # pyright: ignore[reportCallIssue]
        except FlashError as error:
            self.failure = LoadFailure.of(error)
        except BaseException:
            # Layers count the tensors that they get. Without this call, the next version would be loaded on top of a
            # part of this version.
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Put the new tensors in place, in every form in which the model keeps them."""
        end_reload(self.model, self.model_config, self.device)

    def shutdown(self) -> None:
        """Leave the group of the last broadcast, if any."""
        self._broadcasts.leave()


class WorkerExtension:
    """Methods that vLLM adds to its worker class. The node loop calls them with `collective_rpc`.

    vLLM refuses names that its workers already have, so the names have a prefix. `self` is vLLM's worker.
    """

    def flash_load(
        self, update: dict[str, Any], adapter: int, dropped: list[int]
    ) -> tuple[dict[str, str] | None, list[int]]:
        """Pull a version and put it in place: the model's weights, or an adapter if `adapter` is not 0.

        Args:
            update: the place of the version (`flash.weights.versions.UpdateInfo.update`).
            adapter: number of the adapter to load.
            dropped: numbers of the adapters that this one replaces.

        Returns:
            The reason why the version could not be pulled, a `LoadFailure` as plain data, or None if it could. And the
            fingerprint of the weights or the adapter that this worker holds now; empty after a failure.
        """
        # All steps of a load are one call, because the engine stands still meanwhile, and the node loop, which waits
        # for each call, may be busy with its episodes.
        worker: Any = self
        failure: LoadFailure | None = None
        if adapter:
            try:
                tensors = dict(pull(WeightSource(**update)))
            except FlashError as error:
                failure = LoadFailure.of(error)
            else:
                put_adapter(self, adapter, tensors, dropped)
        else:
            worker.start_weight_update()
            worker.update_weights(update)
            worker.finish_weight_update()
            receiver = worker.weight_transfer_engine
            failure = receiver.failure if isinstance(receiver, WeightReceiver) else None
        if failure is not None:
            return failure.to_plain(), []
        return None, self.flash_fingerprint(adapter)

    def flash_fingerprint(self, adapter: int) -> list[int]:
        """Return the fingerprint of the weights that this worker holds.

        If `adapter` is not 0, the fingerprint of the adapter with this number is returned.
        """
        worker: Any = self
        if not adapter:
            receiver = worker.weight_transfer_engine
            layer_sums = receiver.layer_sums if isinstance(receiver, WeightReceiver) else WeakKeyDictionary()
            return model_sums(worker.get_model(), layer_sums)
        fingerprint = Fingerprint()
        for tensor in held_adapter(worker, adapter):
            fingerprint.add(tensor)
        return fingerprint.sums


def keep_sums(layer_sums: LayerSums, layer: nn.Module) -> None:
    """Add a layer's fingerprint to `layer_sums`.

    `flash.foreign.vllm_worker` calls this just before the CPU's kernels pack the layer's new weights into another
    layout, after which the fingerprint cannot be computed.
    """
    fingerprint = Fingerprint()
    for parameter in layer.parameters(recurse=False):
        fingerprint.add(parameter)
    layer_sums[layer] = fingerprint.sums


def model_sums(model: nn.Module, layer_sums: LayerSums) -> list[int]:
    """Return the fingerprint of all weights that a model holds. A weight that several layers share counts once.

    Layers in `layer_sums` have packed weights, so their fingerprints are taken from `layer_sums`.
    """
    fingerprint, seen = Fingerprint(), set[int]()
    # Packed layers come first. A parameter that a packed layer shares with another layer is then not counted again.
    for layer in sorted(model.modules(), key=lambda layer: layer not in layer_sums):
        parameters = [one for one in layer.parameters(recurse=False) if id(one) not in seen]
        seen.update(map(id, parameters))
        if layer in layer_sums:
            fingerprint.add_sums(layer_sums[layer])
            continue
        for parameter in parameters:
            fingerprint.add(parameter)
    return fingerprint.sums
