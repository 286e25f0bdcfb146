"""The nccl and ipc backends: vLLM's own receivers, fed by ours.

Run on a GPU so far: the trainer's side of ipc, up to the announcement. The messages, their order and the arithmetic of
ranks are tested with fakes, the calls into vLLM and CUDA were written against vLLM 0.32's sources (`nccl_engine`,
`ipc_engine`, `packed_tensor`).

nccl: trainer rank 0 and all engine workers form one group, trainer first; engine e's workers start at rank
1 + e · tensor_parallel, which each engine fills in itself. Rank 0 stages a version in host memory, announces, and
broadcasts; that ends when the last engine joined. The group is fixed: no engine can be started again, and one that dies
makes the next publish fail.

ipc: engine and trainer share GPUs. Every trainer rank exports handles of device copies on its own GPU; rank 0 collects
them by GPU. No engine reports when it is done with the memory, so the newest two versions are kept.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from flash.errors import DeadlineError
from flash.foreign import vllm
from flash.foreign.torch import ipc_handle
from flash.weights.fingerprint import Fingerprint
from flash.weights.staging import VERSIONS_KEPT, dtype_name, stage
from flash.weights.update import TRAINER_RANKS, UpdateInfo, encode_update

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


class BroadcastLink(Protocol):
    """Rank 0's end of the group it shares with the engine workers."""

    def join(self, host: str, port: int, world_size: int) -> None:
        """Form the group; returns when every worker joined."""
        ...

    def broadcast(self, tensors: StagedTensors) -> None:
        """Send host tensors, in order; returns when they are sent."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class NcclPublisher:
    """Trainer side of the nccl backend."""

    def __init__(
        self,
        rank: int,
        host: str,
        dtype: torch.dtype,
        first_s: float,
        timeout_s: float,
        workers: int,
        link: BroadcastLink,
    ) -> None:
        self._rank = rank
        self._host = host
        self._dtype = dtype
        self._first_s, self._timeout_s = first_s, timeout_s
        self._world_size = TRAINER_RANKS + workers
        self._link = link
        self._port: int | None = None
        self._joined = False

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        announce: Callable[[bytes], None],
    ) -> None:
        """Gather, announce, then broadcast to the engines as they join. Returns when all of them have it.

        Raises:
            DeadlineError: not all engines joined in time, which for the first version includes their start. The group
                cannot be used after that.
        """
        if self._rank != 0:
            for _ in tensors:
                pass
            return
        fingerprint = Fingerprint()
        staged = list(stage(tensors, self._dtype, fingerprint))
        if self._port is None:
            self._port = free_port(self._host)
        port = self._port
        init = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": TRAINER_RANKS,
            "world_size": self._world_size,
            "packed": True,
        }
        announce(encode_update(UpdateInfo(describe(staged), fingerprint.sums, init)))

        def transfer() -> None:
            if not self._joined:
                self._link.join(self._host, port, self._world_size)
                self._joined = True
            self._link.broadcast(staged)

        seconds = self._timeout_s if self._joined else self._first_s
        within(transfer, seconds, f"{self._world_size - 1} engine workers to take version {version}")

    def close(self) -> None:
        """Leave the group."""
        self._link.close()


class NcclLink:
    """The group, through vLLM's stateless NCCL communicator."""

    def __init__(self) -> None:
        self._group: Any = None
        self._device = torch.accelerator.current_device_index()

    def join(self, host: str, port: int, world_size: int) -> None:
        """Rank 0 of the rendezvous that the workers join in `init_weight_transfer_engine`."""
        # The current device belongs to a thread, and this may be another one than made the link.
        torch.accelerator.set_device_index(self._device)
        self._group = vllm.nccl_group(host, port, world_size)

    def broadcast(self, tensors: StagedTensors) -> None:
        """The packed broadcast that vLLM's receiver expects, with its default geometry."""
        torch.accelerator.set_device_index(self._device)
        vllm.nccl_broadcast(self._group, tensors, self._device)

    def close(self) -> None:
        """Destroy the communicator."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


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
    ) -> None:
        """Copy on every rank's GPU, export, and announce the merged handles. Returns as soon as engines may read."""
        fingerprint = Fingerprint()
        staged = list(stage(tensors, self._dtype, fingerprint, device=None))
        self._kept.append(staged)
        gathered = self._exporter.gather(self._exporter.export(staged))
        if self._rank != 0:
            return
        merged: IpcHandles = [{} for _ in staged]
        for handles in gathered:
            for target, handle in zip(merged, handles, strict=True):
                target.update(handle)
        pickled = base64.b64encode(pickle.dumps(merged)).decode()
        update = describe(staged) | {"ipc_handles_pickled": pickled}
        announce(encode_update(UpdateInfo(update, fingerprint.sums, {"packed": False})))

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


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]


def within(work: Callable[[], None], seconds: float, waited_for: str) -> None:
    """Run `work` in a thread, because a collective cannot be interrupted, and stop waiting after `seconds`.

    Raises:
        DeadlineError: the work is still going on; its thread is left behind.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the waiting thread, which raises it
            failures.append(error)

    thread = threading.Thread(target=run, name="flash-weights-broadcast", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise DeadlineError(waited_for, seconds, "the engines: one of them is dead, or did not start to load")
    if failures:
        raise failures[0]
