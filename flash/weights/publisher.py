"""The trainer's side: every rank publishes each version, and rank 0 announces it to the engines.

`flash.trainer.loop` calls `publish` after each step. `HostPublisher` (tcp, nccl, gloo) copies tensors to rank 0's host
memory and serves them there: engine workers pull or join a broadcast. `IpcPublisher` (ipc) leaves copies on the GPUs
that trainer and engine share, and announces CUDA handles, which vLLM's own receiver opens.

Law (a version is immutable): once announced, a version's tensors never change, though the trainer goes on updating its
own. Both publishers copy before they announce.

Nobody waits in `publish` for an engine. The hub announces the next version only when all engines have acknowledged this
one (`flash.hub.fleet`); two versions are kept, because an engine may still read the older one. With ipc an engine that
dies in the middle loses nothing of others, and a late joiner opens the handles of the newest version.
"""

from __future__ import annotations

import base64
import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from flash.config.tree import Config
from flash.foreign.torch import ipc_handle
from flash.weights.broadcast import BroadcastServer
from flash.weights.image import VERSIONS_KEPT, Fingerprint, NamedTensors, dtype_name, make_image, staged_copies
from flash.weights.tcp import WeightServer
from flash.weights.versions import UpdateInfo, encode_update

Announce = Callable[[bytes], None]
"""Tells the engines that they may start to load a version; its argument is `Published.update_info`."""


class WeightPublisher(Protocol):
    """Gives versions to the engines. Lives on every trainer rank, because gathering full tensors is a collective."""

    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> int:
        """Offer `version` to the engines, and return as soon as they may load it.

        Every rank calls this with the same names in the same order, because iterating over `tensors`, which are full
        and unsharded, is a collective. Rank 0 calls `announce(update_info)` once.

        Returns:
            the bytes that then travel to one worker of an engine, on rank 0; 0 on other ranks, and for ipc.
        """
        ...

    def close(self) -> None:
        """Release ports, threads and device memory."""
        ...


def make_publisher(config: Config, rank: int, host: str) -> WeightPublisher:
    """Return the publisher of `config.weights_backend`.

    Args:
        config: the run.
        rank: rank of this process among the trainer ranks.
        host: address of this machine that all engines can reach.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if config.weights_backend == "ipc":
        return IpcPublisher(rank, dtype, TorchIpcExporter())
    if config.weights_backend == "tcp":
        serve = partial(WeightServer, deltas=config.weights.deltas)
    else:
        serve = partial(BroadcastServer, config.weights_backend)
    return HostPublisher(rank, host, dtype, config.deadlines.connect, config.deadlines.swap, serve)


# -- tcp, nccl, gloo -------------------------------------------------------------------------------------------------


class HostPublisher:
    """Publishes host copies. Rank 0 stages and serves them; other ranks only take part in the gather.

    Args:
        rank: rank of this process among the trainer ranks.
        host: an address of this machine that workers reach.
        dtype: the engines' dtype.
        prove_s: seconds for a worker to prove the token.
        timeout_s: longest silence of a worker that has proven it, in seconds.
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

    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> int:
        """Serve copies of `tensors` as `version`. See `WeightPublisher.publish`."""
        if self._server is None:
            for _ in tensors:
                pass
            return 0
        fingerprint = Fingerprint()
        image = make_image(staged_copies(tensors, self._dtype, fingerprint), crc32=self._server.compares_crc32)
        source = self._server.hold(version, image, fingerprint.sums)
        announce(encode_update(UpdateInfo(vars(source), fingerprint.sums)))
        return self._server.newest_bytes

    def close(self) -> None:
        """Stop serving. Pulls in progress go on while this process lives."""
        if self._server is not None:
            self._server.close()


# -- ipc -------------------------------------------------------------------------------------------------------------

StagedTensors = list[tuple[str, torch.Tensor]]
"""Copies on this rank's GPU, by name."""
IpcHandles = list[dict[str, Any]]
"""Per tensor: GPU id → arguments that rebuild the tensor in another process which uses that GPU."""


class IpcExporter(Protocol):
    """Access to this rank's GPU memory for other processes."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """Return handles of this rank's tensors, valid while the tensors live."""
        ...

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """Return every rank's handles, on rank 0; a collective."""
        ...


class IpcPublisher:
    """Publishes device copies that stay on the GPUs. Every rank exports handles of its own, rank 0 announces all.

    No engine reports when it has read the memory, so the copies of the newest `VERSIONS_KEPT` versions are kept.
    """

    def __init__(self, rank: int, dtype: torch.dtype, exporter: IpcExporter) -> None:
        self._rank = rank
        self._dtype = dtype
        self._exporter = exporter
        self._kept: deque[StagedTensors] = deque(maxlen=VERSIONS_KEPT)

    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> int:
        """Copy on every rank's GPU, export, and announce the merged handles. See `WeightPublisher.publish`."""
        fingerprint = Fingerprint()
        staged = list(staged_copies(tensors, self._dtype, fingerprint, device=None))
        self._kept.append(staged)
        gathered = self._exporter.gather(self._exporter.export(staged))
        if self._rank != 0:
            return 0
        merged: IpcHandles = [{} for _ in staged]
        for handles in gathered:
            for target, handle in zip(merged, handles, strict=True):
                target.update(handle)
        # vLLM's receiver takes handles as pickle and no other way. They travel to the engine over the hub's
        # connections, whose ends have proven the token, so that nobody else can make vLLM unpickle anything.
        update = {
            "names": [name for name, _ in staged],
            "dtype_names": [dtype_name(tensor.dtype) for _, tensor in staged],
            "shapes": [list(tensor.shape) for _, tensor in staged],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(merged)).decode(),
        }
        announce(encode_update(UpdateInfo(update, fingerprint.sums, {"packed": False})))
        return 0

    def close(self) -> None:
        """Free the copies."""
        self._kept.clear()


class TorchIpcExporter:
    """CUDA IPC through torch. Handles travel over the default process group of the trainer ranks."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """Return one handle per tensor, under the id of this rank's GPU."""
        torch.cuda.ipc_collect()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handles = [{gpu: ipc_handle(tensor)} for _, tensor in tensors]
        # A handle says nothing about pending work: the copies have to be complete before another process opens it.
        torch.cuda.current_stream().synchronize()
        return handles

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """Gather handles as objects. The process group's own timeout bounds the wait."""
        if not torch.distributed.is_initialized():
            return [handles]
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        torch.distributed.gather_object(handles, gathered, dst=0)
        return gathered or []
