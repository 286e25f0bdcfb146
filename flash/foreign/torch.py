"""torch beyond its documented interface: stores and process groups, errors of collectives, memory without data.

Also CUDA handles for other processes, and the offloading of the inputs of recomputed layers. torch is imported where it
is used, since that takes seconds.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage, nn
    from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

TOUCHED = (
    "torch.distributed:TCPStore",
    "torch.distributed:HashStore",
    "torch.distributed:FileStore",
    "torch.distributed:DistError",
    "torch.distributed:ProcessGroup.broadcast",
    "torch.distributed:ProcessGroup._register_backend",
    "torch.distributed:ProcessGroup._set_default_backend",
    "torch.distributed:ProcessGroupGloo.abort",
    "torch.multiprocessing.reductions:reduce_tensor",
    "torch._dynamo.config:recompile_limit",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch._subclasses.fake_impls:register_op_impl",
    "torch:ops.aten._grouped_mm.default",
    "torch.distributed._composable.checkpoint_activation:checkpoint.state",
    "torch.distributed._tools.common_utils:get_untyped_storages",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch:UntypedStorage.resize_",
    "torch:ops._c10d_functional.wait_tensor.default",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_leaves",
    "torch.distributed.checkpoint.state_dict_loader:load",
    "torch.distributed.checkpoint.state_dict_saver:save",
    "torch.distributed.checkpoint.api:CheckpointException",
    "torch.distributed.checkpoint.state_dict:get_state_dict",
    "torch.distributed.checkpoint.state_dict:set_state_dict",
)
"""Attributes of torch that this module uses, in the form of `flash.foreign.vllm.TOUCHED`."""


def collective_failed(error: BaseException) -> bool:
    """Return True if an error means that a collective failed, for example since another rank is gone.

    nccl raises a class of its own. gloo raises a RuntimeError whose message begins with a path in gloo's sources.
    """
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def open_store(host: str, seconds: float) -> tuple[Store, int]:
    """Return a store for a process group, which this process serves, and its port."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    return store, store.port


def reach_store(host: str, port: int, seconds: float) -> Store:
    """Return a store that another process serves. Reading a key waits until it is set."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


def private_store() -> Store:
    """Return a store of this process alone, for a process group of one rank."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    return HashStore()


def file_store(file: Path, ranks: int) -> Store:
    """Return a store of `ranks` processes of one machine, in a file that does not exist yet."""
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

    return FileStore(str(file), ranks)


class Broadcasts:
    """A process group beside the default one, for broadcasts from its rank 0. Forming it waits for all of its ranks.

    If a rank dies in the middle of a broadcast with gloo, the broadcast fails on the ranks that send to it or receive
    from it, and on further ranks when these leave. With nccl it fails on a rank that calls `abort`, or at the time
    limit.

    Args:
        backend: gloo or nccl.
        store: the store through which the ranks meet.
        rank: rank of this process.
        size: number of ranks.
        limit_s: seconds for forming the group, and for each broadcast.

    Raises:
        RuntimeError: forming the group, or later a broadcast, failed or took too long. The group cannot be used again.
    """

    def __init__(self, backend: str, store: Store, rank: int, size: int, limit_s: float) -> None:
        import torch
        import torch.distributed as dist

        parts: Any = dist
        limit = timedelta(seconds=limit_s)
        if backend == "nccl":
            kind, device = parts.ProcessGroup.BackendType.NCCL, torch.device("cuda", torch.cuda.current_device())
            options = parts.ProcessGroupNCCL.Options()
            options._timeout = limit
            with _blocking_wait():
                inner = parts.ProcessGroupNCCL(store, rank, size, options)
        else:
            kind, device = parts.ProcessGroup.BackendType.GLOO, torch.device("cpu")
            inner = parts.ProcessGroupGloo(store, rank, size, timeout=limit)
        self._inner: Any = inner
        self._group: Any = parts.ProcessGroup(store, rank, size)
        self._group._set_default_backend(kind)
        self._group._register_backend(device, kind, inner)

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` if this is rank 0, else fill it. Returns when this rank's part is done."""
        self._group.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        """End an nccl broadcast that another thread waits in."""
        if (inner := self._inner) is not None:
            inner.abort()

    def close(self) -> None:
        """Leave the group and end its connections."""
        self.abort()
        self._group = self._inner = None


@contextmanager
def _blocking_wait() -> Generator[None]:
    """Let an nccl group that is made in the block wait for its collectives on the host and raise their errors.

    By default torch leaves errors to a thread that ends the process.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def all_gather(found: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Fill `found` with the tensors of all ranks, one below another. torch 2.13 renamed the function for it."""
    import torch.distributed as dist

    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
    gather(found, own, group=group)


@contextmanager
def single_process_group(backend: str) -> Generator[None]:
    """Provide a default process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=private_store(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ipc_handle(tensor: Tensor) -> tuple[Any, ...]:
    """Return the arguments with which another process opens a CUDA tensor of this process."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)[1]


def set_recompile_limit(variants: int) -> None:
    """Set how many variants of one function torch.compile keeps, by shape, dtype and mode of gradients."""
    from torch._dynamo import config

    settings: Any = config
    settings.recompile_limit = variants


@contextmanager
def absent_ranks(count: int, rank: int = 0) -> Generator[None]:
    """Provide a process group of `count` ranks of which only this one exists: collectives end at once, without data."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class LiveBytes:
    """Counter of the bytes of tensors of one device that are alive at the same time. `with` pauses the counting."""

    def __init__(self, device: str) -> None:
        self._device, self._sizes, self._paused = device, dict[int, int](), 0
        self.now = 0
        """Bytes that are alive now."""
        self.most = 0
        """Largest value of `now` so far."""

    def add(self, storage: UntypedStorage) -> None:
        """Count a storage, with its current size, until it is deleted."""
        if (key := id(storage)) not in self._sizes:
            weakref.finalize(storage, self._end, key).atexit = False
        self._set(key, storage.size())

    def resized(self, storage: UntypedStorage) -> None:
        """Update the size of a storage if it is counted."""
        if id(storage) in self._sizes:
            self._set(id(storage), storage.size())

    def _set(self, key: int, size: int) -> None:
        """Record the size in bytes of a storage."""
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.most = max(self.most, self.now)

    def _end(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __enter__(self) -> None:
        self._paused += 1

    def __exit__(self, *_: object) -> None:
        self._paused -= 1

    def add_tensors(self, result: object) -> None:
        """Count the storages of all tensors in the result of an operation, unless the counting is paused."""
        from torch import Tensor
        from torch.distributed._tools.common_utils import get_untyped_storages
        from torch.utils._pytree import tree_leaves

        for tensor in () if self._paused else tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                for storage in get_untyped_storages(tensor):
                    self.add(storage)


@contextmanager
def counted(device: str = "cpu") -> Generator[LiveBytes]:
    """Make tensors without data inside this block, and count the bytes of those that claim to be on `device`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import TorchDispatchMode

    _any_grouped_product()
    count = LiveBytes(device)
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default
    storages: Any = torch.UntypedStorage
    resize: Any = storages.resize_

    class CountingMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented  # the operation on this rank's part comes here too, and is counted
            # Without data, wait_tensor makes a new tensor; with data it returns its argument.
            result = args[0] if func is wait_tensor else func(*args, **(kwargs or {}))
            count.add_tensors(result)
            return result

    def counted_resize(storage: UntypedStorage, size: int) -> UntypedStorage:
        result = resize(storage, size)
        count.resized(storage)
        return result

    propagation: Any = ShardingPropagator
    learn_shapes: Any = propagation._propagate_tensor_meta_non_cached

    def uncounted(*args: Any) -> Any:
        with count:
            return learn_shapes(*args)

    # FSDP frees gathered parameters by resizing their storage, which no dispatch mode sees.
    storages.resize_ = counted_resize
    # DTensor infers shapes with whole tensors without data. They do not exist in a real run.
    propagation._propagate_tensor_meta_non_cached = uncounted
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), CountingMode():
            yield count
    finally:
        storages.resize_, propagation._propagate_tensor_meta_non_cached = resize, learn_shapes


@cache
def _any_grouped_product() -> None:
    """Support grouped matrix products without data for all dtypes; torch itself supports bfloat16 alone."""
    import torch
    from torch._subclasses.fake_impls import register_op_impl

    @register_op_impl(torch.ops.aten._grouped_mm.default)
    def shaped(mode: Any, _: Any, left: Tensor, right: Tensor, offs: Tensor, *__: Any, **___: Any) -> Tensor:
        # Either rows multiplied by their group's matrix, or one product per group, summed over its rows.
        shape = [len(left), right.shape[-1]] if right.dim() == 3 else [len(offs), len(left), right.shape[1]]
        with mode:
            return left.new_empty(shape)


def offload_inputs(layer: nn.Module, where: str) -> None:
    """Keep the inputs of a checkpointed layer on the device `where` until the backward pass runs the layer again.

    Must be called before the layer is sharded. Copies run in the order of the device's work. They use pinned memory if
    the device is a GPU.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.distributed._composable.checkpoint_activation import checkpoint

    state, entered = checkpoint.state(layer), list[saved_tensors_hooks]()

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if not tensor.is_cuda or not torch.cuda.is_available():
            return tensor.device, tensor.to(where, copy=True)
        offloaded = torch.empty(tensor.shape, dtype=tensor.dtype, device=where, pin_memory=True)
        return tensor.device, offloaded.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, offloaded = packed
        return offloaded.to(device, non_blocking=True)

    def before(*_: object) -> None:
        # During recomputation, saved tensors are for the backward pass that has begun: they stay on the device.
        if state.enable_hook and torch.is_grad_enabled():
            entered.append(saved_tensors_hooks(pack, unpack))
            entered[-1].__enter__()

    def after(*_: object) -> None:
        if entered:
            entered.pop().__exit__()

    layer.register_forward_pre_hook(before, prepend=True)
    layer.register_forward_hook(after, always_call=True)


def has_data(tensor: Tensor) -> bool:
    """Return True if the tensor has data, because it was made outside of `counted`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor)
