"""The trainer's side: every rank publishes each version, so that engines can load it.

`flash.trainer.loop` calls `publish` after each step, and rank 0 then announces the version to the hub. `HostPublisher`
(tcp, nccl, gloo) copies tensors to rank 0's host memory and serves them there: the engines' workers (processes that
each hold a part of the model) pull the bytes or join a broadcast. `IpcPublisher` (ipc) leaves copies on the GPUs that
trainer and engine share, and offers CUDA handles, which vLLM's own receiver opens.

Invariant: a version (n is the weights after n steps) is immutable. Once it is announced, its tensors never change,
although the trainer goes on updating its own tensors. Both publishers have copied the tensors when `publish` returns.

`publish` waits for no engine. The announcement waits: the hub answers it only when all engines have acknowledged the
version before (`flash.hub.steps.TrainingSteps.publish`). Two versions are kept, because an engine may still read the
older one. With ipc, an engine that dies during a load does not disturb other engines, and an engine that joins late
opens the handles of the newest version.
"""

from __future__ import annotations

import base64
import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from flash.config.tree import Config
from flash.foreign.torch import ipc_handle
from flash.weights.broadcast import BroadcastServer
from flash.weights.image import VERSIONS_KEPT, Fingerprint, NamedTensors, dtype_name, make_image, staged_copies
from flash.weights.tcp import WeightServer
from flash.weights.versions import UpdateInfo, encode_update


class Offer(NamedTuple):
    """A version that is ready for the engines, once rank 0 has announced it to them through the hub."""

    update_info: bytes
    """Announcement for the engines: an encoded `flash.weights.versions.UpdateInfo`, which becomes
    `Published.update_info`."""
    sent_bytes: int
    """Number of bytes that are sent to each engine worker; 0 for ipc."""


class WeightPublisher(Protocol):
    """Interface of the two publishers, which offer versions to the engines.

    Every trainer rank has one, because gathering full tensors is a collective.
    """

    def publish(self, version: int, tensors: NamedTensors) -> Offer | None:
        """Make `version` ready for the engines, and return what rank 0 must announce; None on the other ranks.

        `tensors` are full, not sharded. Each rank must iterate over all tensors, with the same names in the same order,
        because gathering them is a collective.
        """
        ...

    def close(self) -> None:
        """Release ports, threads and device memory."""
        ...


def make_publisher(config: Config, rank: int, host: str) -> WeightPublisher:
    """Return the publisher of `config.weights_backend`. Each trainer rank calls this once (`flash.run.trainer_rank`).

    Args:
        config: the run.
        rank: rank of this process among the trainer ranks.
        host: address of this machine that all engines can reach.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if config.weights_backend == "ipc":
        return IpcPublisher(rank, dtype, TorchIpcExporter())
    if config.weights_backend == "tcp":
        serve = partial(WeightServer, deltas=config.weights.backend == "tcp_deltas")
    else:
        serve = partial(BroadcastServer, config.weights_backend)
    return HostPublisher(rank, host, dtype, config.deadlines.request, config.deadlines.swap, serve)


# -- tcp, nccl, gloo -------------------------------------------------------------------------------------------------


class HostPublisher:
    """Publishes versions as copies in host memory, from which rank 0's server sends (tcp, nccl, gloo).

    Rank 0 copies and serves. The other ranks only take part in gathering the tensors, which FSDP has divided among all.

    Args:
        rank: rank of this process among the trainer ranks.
        host: an address of this machine that workers reach.
        dtype: the engines' dtype.
        prove_s: seconds for a worker to prove the token.
        timeout_s: seconds for which a worker that has proven the token may be silent.
        serve: makes rank 0's server from `host`, `prove_s` and `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        dtype: torch.dtype,
        prove_s: float,
        timeout_s: float,
        serve: Callable[[str, float, float], WeightServer] | None = None,
    ) -> None:
        self._dtype = dtype
        self._server = (serve or WeightServer)(host, prove_s, timeout_s) if rank == 0 else None

    def publish(self, version: int, tensors: NamedTensors) -> Offer | None:
        """Serve copies of `tensors` as `version`. Returns what rank 0 must announce; None on other ranks.

        `WeightPublisher.publish` explains the arguments.
        """
        if self._server is None:
            for _ in tensors:  # iterate, because this gathers tensors: rank 0 would hang without this rank
                pass
            return None
        fingerprint = Fingerprint()
        image = make_image(staged_copies(tensors, self._dtype, fingerprint), crc32=self._server.compares_crc32)
        source = self._server.hold(version, image, fingerprint.sums)
        return Offer(encode_update(UpdateInfo(vars(source), fingerprint.sums)), self._server.newest_bytes)

    def close(self) -> None:
        """Stop serving new workers; does nothing on other ranks than 0. Pulls in progress continue as long as this
        process lives."""
        if self._server is not None:
            self._server.close()


# -- ipc -------------------------------------------------------------------------------------------------------------

StagedTensors = list[tuple[str, torch.Tensor]]
"""Pairs of name and copy, on this rank's GPU."""
IpcHandles = list[dict[str, Any]]
"""Per tensor: GPU id → arguments that rebuild the tensor in another process which uses that GPU."""


class IpcExporter(Protocol):
    """Interface that gives other processes access to this rank's GPU memory. Tests without a GPU pass a fake."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """Return handles of this rank's tensors. A handle is valid while its tensor exists."""
        ...

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """Return every rank's handles on rank 0, and an empty list on other ranks. Every rank must call this."""
        ...


class IpcPublisher:
    """Publishes versions as copies on the GPUs, which trainer and engines share (ipc).

    Every rank exports handles of the copies on its GPU, and rank 0 offers the handles of all ranks. No engine reports
    to a publisher that it has read the memory, so the copies of the newest `VERSIONS_KEPT` versions are kept.
    """

    def __init__(self, rank: int, dtype: torch.dtype, exporter: IpcExporter) -> None:
        self._rank = rank
        self._dtype = dtype
        self._exporter = exporter
        self._kept: deque[StagedTensors] = deque(maxlen=VERSIONS_KEPT)

    def publish(self, version: int, tensors: NamedTensors) -> Offer | None:
        """Copy the tensors on this rank's GPU and export handles of the copies.

        Rank 0 merges the handles of all ranks, so that each engine worker finds the handle of its GPU. The result is
        what rank 0 must announce; None on other ranks. `version` is not used: the caller adds the number to the
        announcement.
        """
        fingerprint = Fingerprint()
        # device=None: each copy stays on the GPU of its tensor.
        staged = list(staged_copies(tensors, self._dtype, fingerprint, device=None))
        self._kept.append(staged)
        gathered = self._exporter.gather(self._exporter.export(staged))
        if self._rank != 0:
            return None
        merged: IpcHandles = [{} for _ in staged]
        for handles in gathered:
            for target, handle in zip(merged, handles, strict=True):
                target.update(handle)
        # vLLM's receiver accepts handles only as pickle. They travel to the engine over the hub's connections, on which
        # both ends have proven the token, so that nobody else can make vLLM unpickle anything.
        update = {
            "names": [name for name, _ in staged],
            "dtype_names": [dtype_name(tensor.dtype) for _, tensor in staged],
            "shapes": [list(tensor.shape) for _, tensor in staged],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(merged)).decode(),
        }
        # `packed` is False because there is one handle per tensor. vLLM's packed form has one buffer with all tensors.
        return Offer(encode_update(UpdateInfo(update, fingerprint.sums, {"packed": False})), sent_bytes=0)

    def close(self) -> None:
        """Free the copies of all versions that are kept."""
        self._kept.clear()


class TorchIpcExporter:
    """Exporter that uses torch's CUDA IPC. It gathers handles over the default process group of the trainer ranks."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """Return one handle per tensor, under the id of this rank's GPU."""
        # Free the memory of earlier versions that their readers have closed.
        torch.cuda.ipc_collect()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handles = [{gpu: ipc_handle(tensor)} for _, tensor in tensors]
        # A handle does not wait for pending work, so the copies have to be complete before another process opens it.
        torch.cuda.current_stream().synchronize()
        return handles

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """Return every rank's handles on rank 0, and an empty list on other ranks.

        The process group's own timeout bounds the wait. Without a process group, this process is the only rank.
        """
        if not torch.distributed.is_initialized():
            return [handles]
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        torch.distributed.gather_object(handles, gathered, dst=0)
        return gathered or []
