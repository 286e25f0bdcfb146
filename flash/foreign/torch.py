"""torch beyond what it documents: torchrun as a function, the stores of a rendezvous, CUDA handles."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

TOUCHED = (
    "torch.distributed.run:run",
    "torch.distributed.run:parse_args",
    "torch.distributed.elastic.multiprocessing.api:SignalException",
    "torch.distributed.elastic.multiprocessing.errors:ChildFailedError",
    "torch.distributed:TCPStore",
    "torch.distributed:PrefixStore",
    "torch.distributed:DistError",
    "torch.multiprocessing.reductions:reduce_tensor",
    "torch.distributed.checkpoint.state_dict_loader:load",
    "torch.distributed.checkpoint.state_dict_saver:save",
    "torch.distributed.checkpoint.api:CheckpointException",
    "torch.distributed.checkpoint.state_dict:get_state_dict",
    "torch.distributed.checkpoint.state_dict:set_state_dict",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


class Interrupted(Exception):
    """A signal ended torchrun."""


def torchrun(arguments: Sequence[str]) -> bool:
    """Run torchrun in this process, to the end of its workers; whether all of them ended well.

    Raises:
        Interrupted: a signal ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(arguments)))
    except ChildFailedError:
        return False
    except SignalException:
        raise Interrupted from None
    return True


def connect_store(host: str, port: int, seconds: float, prefix: str) -> Store:
    """torchrun's store, seen below a prefix; reading a key waits for it."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds)))


def below(store: Store, prefix: str) -> Store:
    """The part of a store below a prefix."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    return PrefixStore(prefix, store)


def ipc_handle(tensor: Tensor) -> tuple[Any, ...]:
    """What another process opens a CUDA tensor of this one with."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)[1]
