"""Trainer side of publishing a policy version.

Invariant: once announced, a version's tensors never change, although the trainer goes on updating its own.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from flash.config.tree import Config
from flash.weights.staging import Announce, NamedTensors


class WeightPublisher(Protocol):
    """Gives versions to the engines. Lives on every trainer rank, because gathering full tensors is a collective."""

    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> int:
        """Offer `version` to the engines.

        Called by all ranks with the same names in the same order: to iterate over `tensors`, full and unsharded,
        is a collective. Rank 0 calls `announce(update_info)` as soon as engines may start to load, and not later than
        it needs them to.

        Returns:
            bytes that then travel to an engine's worker, as rank 0 knows; 0 where they stay in a GPU.
        """
        ...

    def close(self) -> None:
        """Release ports, threads and device memory."""
        ...


def make_publisher(config: Config, rank: int, host: str) -> WeightPublisher:
    """The publisher of `config.weights_backend`.

    Args:
        config: the run.
        rank: this process among the trainer ranks.
        host: address of this machine that all engines can reach.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if config.weights_backend == "ipc":
        from flash.weights.ipc import IpcPublisher, TorchIpcExporter

        return IpcPublisher(rank, dtype, TorchIpcExporter())
    from flash.weights.group import GroupServer
    from flash.weights.tcp import TcpPublisher, WeightServer

    if config.weights_backend == "tcp":
        serve = partial(WeightServer, deltas=config.weights.deltas)
    else:
        serve = partial(GroupServer, config.weights_backend)
    return TcpPublisher(rank, host, dtype, config.deadlines.connect, config.deadlines.swap, serve)
