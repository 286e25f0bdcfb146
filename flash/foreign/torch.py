"""torch beyond what it documents: errors of collectives, CUDA handles and memory, checkpoints. And its stores."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

TOUCHED = (
    "torch.distributed:TCPStore",
    "torch.distributed:HashStore",
    "torch.distributed:DistError",
    "torch.multiprocessing.reductions:reduce_tensor",
    "torch.cuda.memory:_record_memory_history",
    "torch.cuda.memory:_dump_snapshot",
    "torch._dynamo.config:recompile_limit",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.distributed._tools.mem_tracker:MemTracker.get_tracker_snapshot",
    "torch.distributed._tools.mem_tracker:MemTracker.reset_mod_stats",
    "torch.distributed.checkpoint.state_dict_loader:load",
    "torch.distributed.checkpoint.state_dict_saver:save",
    "torch.distributed.checkpoint.api:CheckpointException",
    "torch.distributed.checkpoint.state_dict:get_state_dict",
    "torch.distributed.checkpoint.state_dict:set_state_dict",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


MOST_MEMORY_EVENTS = 100_000
"""Allocations of CUDA memory whose history is kept; older ones are forgotten."""


def collective_failed(error: BaseException) -> bool:
    """Whether an error says that a collective failed, as it does when another rank is gone.

    nccl's have a class; gloo's are a RuntimeError that begins with the place in gloo's sources.
    """
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def open_store(host: str, seconds: float) -> tuple[Store, int]:
    """A store for a process group, served by this process, and its port."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    return store, store.port


def reach_store(host: str, port: int, seconds: float) -> Store:
    """One that another process serves; reading a key waits for it."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


def private_store() -> Store:
    """A store of this process alone, for a process group of one rank."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    return HashStore()


@contextmanager
def alone(backend: str) -> Generator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=private_store(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ipc_handle(tensor: Tensor) -> tuple[Any, ...]:
    """What another process opens a CUDA tensor of this one with."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)[1]


def keep_kernels(most: int) -> None:
    """How many forms torch.compile keeps of one function: of each shape, dtype and mode of gradients that it meets."""
    from torch._dynamo import config

    kept: Any = config
    kept.recompile_limit = most


def keep_memory_history(*, on: bool) -> None:
    """Whether CUDA memory remembers who has allocated it."""
    from torch.cuda import memory

    history: Any = memory
    if on:
        history._record_memory_history(max_entries=MOST_MEMORY_EVENTS)
    else:
        history._record_memory_history(enabled=None)


def dump_memory(file: Path) -> None:
    """Write what CUDA memory holds and remembers, for pytorch.org/memory_viz."""
    from torch.cuda import memory

    history: Any = memory
    history._dump_snapshot(str(file))


@contextmanager
def absent_ranks(count: int) -> Generator[None]:
    """Be rank 0 of so many, of which there are no others: collectives end at once and carry nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Count(Protocol):
    """Of tensors that are alive at a time."""

    def most(self) -> int:
        """Bytes, so far."""
        ...

    def begin(self) -> None:
        """To be called before each forward pass."""
        ...


@contextmanager
def counted() -> Generator[Count]:
    """Tensors made inside have no data, and are counted while they live."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()

    class Tracked:
        def begin(self) -> None:
            tracker.reset_mod_stats()

        def most(self) -> int:
            return tracker.get_tracker_snapshot("peak").get(torch.device("cpu"), {}).get("Total", 0)

    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        yield Tracked()
