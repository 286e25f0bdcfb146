"""The ipc backend: vLLM's own receiver, fed by ours. Engine and trainer share GPUs.

Every trainer rank exports handles of device copies on its own GPU; rank 0 collects them by GPU. No engine reports when
it is done with the memory, so the newest two versions are kept.
"""

from __future__ import annotations

import base64
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from flash.foreign.torch import ipc_handle
from flash.weights.fingerprint import Fingerprint
from flash.weights.staging import VERSIONS_KEPT, dtype_name, stage
from flash.weights.update import UpdateInfo, encode_update

StagedTensors = list[tuple[str, torch.Tensor]]
IpcHandles = list[dict[str, Any]]
"""Per tensor: GPU id → what rebuilds the tensor there."""


def describe(tensors: StagedTensors) -> dict[str, Any]:
    """Names, dtypes and shapes as vLLM's receivers want them."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [dtype_name(tensor.dtype) for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


class IpcExporter(Protocol):
    """This rank's GPU, as far as sharing its memory goes."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """Handles of this rank's tensors, valid while the tensors live."""
        ...

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """Every rank's handles on rank 0; a collective."""
        ...


class IpcPublisher:
    """Trainer side of the ipc backend."""

    def __init__(self, rank: int, dtype: torch.dtype, exporter: IpcExporter) -> None:
        self._rank = rank
        self._dtype = dtype
        self._exporter = exporter
        self._kept: deque[StagedTensors] = deque(maxlen=VERSIONS_KEPT)

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        announce: Callable[[bytes], None],
    ) -> int:
        """Copy on every rank's GPU, export, and announce the merged handles. Returns as soon as engines may read."""
        fingerprint = Fingerprint()
        staged = list(stage(tensors, self._dtype, fingerprint, device=None))
        self._kept.append(staged)
        gathered = self._exporter.gather(self._exporter.export(staged))
        if self._rank != 0:
            return 0
        merged: IpcHandles = [{} for _ in staged]
        for handles in gathered:
            for target, handle in zip(merged, handles, strict=True):
                target.update(handle)
        pickled = base64.b64encode(pickle.dumps(merged)).decode()
        update = describe(staged) | {"ipc_handles_pickled": pickled}
        announce(encode_update(UpdateInfo(update, fingerprint.sums, {"packed": False})))
        return 0

    def close(self) -> None:
        """Free the copies."""
        self._kept.clear()


class TorchIpcExporter:
    """CUDA IPC through torch; handles travel over the default process group of the trainer ranks."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """One handle per tensor, under the id of this rank's GPU."""
        torch.cuda.ipc_collect()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handles = [{gpu: ipc_handle(tensor)} for _, tensor in tensors]
        # A handle says nothing about pending work: the copies have to be complete before anyone opens it.
        torch.cuda.current_stream().synchronize()
        return handles

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """An object gather, bounded by the process group's own timeout."""
        if not torch.distributed.is_initialized():
            return [handles]
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        torch.distributed.gather_object(handles, gathered, dst=0)
        return gathered or []
