"""Functions that use torch beyond its documented interface, so that a new release of torch is checked in one place.

- Stores and process groups: a *store* is a small key-value server, through which the ranks of a process group meet. A
  *collective* is an operation in which all ranks of a group take part; gloo (CPU) and nccl (GPU) carry them out.
- The prediction of memory: `counted` makes tensors without data, and counts the bytes that they would need.
- `offload_inputs` keeps the inputs of recomputed layers on another device.
- `ipc_handle` lets another process open a CUDA tensor, and `set_recompile_limit` is for torch.compile.

torch is imported inside the functions, because the import takes seconds.
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
"""Attributes of torch that this module and `flash.trainer.checkpoint` use, as `module:Class.attribute`. A test looks
for each of them."""


def collective_failed(error: BaseException) -> bool:
    """Return True if an error means that a collective failed, for example because another rank is gone.

    The rank is then not at fault, and the ranks can start again. Trainer ranks call this for each error that they
    catch.
    """
    from torch.distributed import DistError

    # nccl raises a class of its own. gloo raises a RuntimeError with a path in gloo's sources in its message.
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def open_store(host: str, seconds: float) -> tuple[Store, int]:
    """Start to serve a store in this process, on a free port, and return the store and the port. Rank 0 calls this.

    `host`: name or address of this machine at which other processes reach it; `seconds`: time limit of each operation
    of the store.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    return store, store.port


def reach_store(host: str, port: int, seconds: float) -> Store:
    """Connect to a store that another process serves with `open_store`. Reading a key waits until it is set. All ranks
    except rank 0 call this.

    `seconds`: time limit of the connection and of each operation.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


def private_store() -> Store:
    """Return a store in this process's memory, for a process group of one rank."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    return HashStore()


def file_store(file: Path, ranks: int) -> Store:
    """Return a store for `ranks` processes of one machine. It is in a file, which must not exist before the first of
    them calls this. The ranks of `flash sft` use it."""
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

    return FileStore(str(file), ranks)


class Broadcasts:
    """A process group beside the default one, for broadcasts from its rank 0. Forming it waits for all of its ranks.

    `flash.weights.broadcast` sends weights to engines with it. If a rank dies in the middle of a broadcast with gloo,
    the broadcast fails on the ranks that send to the dead rank or receive from it. When these ranks leave, it also
    fails on further ranks. With nccl it fails on a rank that calls `abort`, or at the time limit.

    Args:
        backend: gloo or nccl.
        store: the store through which the ranks meet.
        rank: rank of this process.
        size: number of ranks.
        limit_s: time limit in seconds for forming the group, and for each broadcast.

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
        # The group is put together here, because `dist.new_group` needs a default group that has all of these ranks.
        self._inner: Any = inner
        self._group: Any = parts.ProcessGroup(store, rank, size)
        self._group._set_default_backend(kind)
        self._group._register_backend(device, kind, inner)

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` if this is rank 0; otherwise overwrite `tensor` with the tensor that rank 0 sends.

        Returns when this rank's part is done.
        """
        self._group.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        """End an nccl broadcast in which another thread of this process waits. Does nothing after `close`."""
        if (inner := self._inner) is not None:
            inner.abort()

    def close(self) -> None:
        """End a running broadcast, leave the group and close its connections."""
        self.abort()
        self._group = self._inner = None


@contextmanager
def _blocking_wait() -> Generator[None]:
    """Let an nccl group that is made in this block raise the errors of its collectives in the thread that calls them.

    By default torch handles such errors in a thread of its own, which ends the process. torch reads the environment
    variable when the group is made.
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


def all_gather(gathered: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Fill `gathered` with the tensors `own` of all ranks, one below another. All ranks of `group` must call this."""
    import torch.distributed as dist

    # torch 2.13 has renamed the function.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
    gather(gathered, own, group=group)


@contextmanager
def single_process_group(backend: str) -> Generator[None]:
    """Provide a default process group with this process as its only rank while the block runs, for code that expects a
    group. Commands that run the trainer's code in their own process use it."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=private_store(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ipc_handle(tensor: Tensor) -> tuple[Any, ...]:
    """Return the arguments with which another process on this machine opens a CUDA tensor without a copy.

    Engines that share a GPU with a trainer rank get weights in this way. The other process passes the arguments to
    torch's function `rebuild_cuda_tensor`.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)[1]


def set_recompile_limit(variants: int) -> None:
    """Set how many compiled variants of one function torch.compile keeps. After that number it compiles no further
    variant. Called when a trainer rank compiles its layers.

    There is one variant for each combination of shapes, dtypes and whether gradients are computed.
    """
    from torch._dynamo import config

    settings: Any = config
    settings.recompile_limit = variants


@contextmanager
def absent_ranks(count: int, rank: int = 0) -> Generator[None]:
    """Provide a default process group of `count` ranks of which only this one exists.

    Collectives end at once and exchange no data. So one process can predict the memory of a rank of many; `flash plan`
    does so.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class LiveBytes:
    """Counter of the bytes of tensors of one device that are alive at the same time. `counted` makes and feeds it.

    A *storage* is the memory of a tensor, which several tensors may share. Used in a `with` statement, the counter
    counts no new tensors inside the block.

    Args:
        device: type of the device, such as "cpu".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._paused = 0
        """Number of `with` blocks of this counter that are entered now."""
        self._sizes: dict[int, int] = {}
        """Size in bytes of each living storage, by the id of its Python object."""
        self.now = 0
        """Bytes that are alive now."""
        self.most = 0
        """Largest value of `now` so far."""

    def add(self, storage: UntypedStorage) -> None:
        """Count a storage, with its current size, until it is deleted."""
        if (key := id(storage)) not in self._sizes:
            # `_end` runs when the storage is deleted, and not at the end of the process.
            weakref.finalize(storage, self._end, key).atexit = False
        self._set(key, storage.size())

    def resized(self, storage: UntypedStorage) -> None:
        """Update the size of a storage if it is counted. Called when torch has resized it."""
        if id(storage) in self._sizes:
            self._set(id(storage), storage.size())

    def _set(self, key: int, size: int) -> None:
        """Set the size of a storage in bytes, and update the sums."""
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.most = max(self.most, self.now)

    def _end(self, key: int) -> None:
        """Forget a storage that was deleted."""
        self.now -= self._sizes.pop(key)

    def __enter__(self) -> None:
        """Pause the counting of new tensors. Pauses may be nested."""
        self._paused += 1

    def __exit__(self, *_: object) -> None:
        """End one pause."""
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
    """Make tensors without data inside this block, and count the bytes that tensors on `device` would need.

    All operations work, but only compute shapes, and need neither time nor memory. `flash.trainer.memory` predicts the
    memory of a step in this way. With the default, tensors on "cpu" stand for tensors on a GPU.
    """
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
        """Mode of torch in which each operation's results are counted."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Run one operation of torch, and count its results."""
            if DTensor in types:
                return NotImplemented  # DTensor then calls the operation on this rank's part, which is counted here
            # Without data, wait_tensor makes a new tensor. In a real run it returns its argument, so no tensor must be
            # counted.
            result = args[0] if func is wait_tensor else func(*args, **(kwargs or {}))
            count.add_tensors(result)
            return result

    # FSDP frees gathered parameters by resizing their storage to 0, which no dispatch mode sees.
    def counted_resize(storage: UntypedStorage, size: int) -> UntypedStorage:
        """Resize a storage, and count its new size."""
        result = resize(storage, size)
        count.resized(storage)
        return result

    propagation: Any = ShardingPropagator
    learn_shapes: Any = propagation._propagate_tensor_meta_non_cached

    # DTensor infers shapes by computing with whole tensors without data. A real run has no such tensors.
    def uncounted(*args: Any) -> Any:
        """Infer the shape of an operation's result, and count nothing meanwhile."""
        with count:
            return learn_shapes(*args)

    storages.resize_ = counted_resize
    propagation._propagate_tensor_meta_non_cached = uncounted
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), CountingMode():
            yield count
    finally:
        storages.resize_, propagation._propagate_tensor_meta_non_cached = resize, learn_shapes


@cache
def _any_grouped_product() -> None:
    """Let torch infer the shape of grouped matrix products for all dtypes. By default only bfloat16 works.

    Such products compute the experts of a mixture. This is called once in a process.
    """
    import torch
    from torch._subclasses.fake_impls import register_op_impl

    @register_op_impl(torch.ops.aten._grouped_mm.default)
    def result_shape(mode: Any, _: Any, left: Tensor, right: Tensor, offs: Tensor, *__: Any, **___: Any) -> Tensor:
        """Return a tensor without data of the product's shape."""
        # `offs` [groups]: end of each group of rows. Either each row is multiplied by the matrix of its group, or there
        # is one product for each group, summed over its rows.
        shape = [len(left), right.shape[-1]] if right.dim() == 3 else [len(offs), len(left), right.shape[1]]
        with mode:
            return left.new_empty(shape)


def offload_inputs(layer: nn.Module, where: str) -> None:
    """Keep the inputs of a checkpointed layer on the device `where` until the backward pass runs the layer again.

    A checkpointed layer saves only its inputs in the forward pass, and is computed again in the backward pass. With
    many layers and long sequences these inputs would fill the device. Must be called before FSDP shards the layer
    (divides it among the ranks).

    Copies do not block the host: they run in the order of the device's work, from and to pinned memory if the device is
    a GPU.

    Args:
        layer: a layer that torch's `checkpoint` was applied to.
        where: device of the copies, such as "cpu".
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.distributed._composable.checkpoint_activation import checkpoint

    state, entered = checkpoint.state(layer), list[saved_tensors_hooks]()

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        """Copy a saved tensor to `where`. torch calls this in the forward pass, and keeps the result."""
        if not tensor.is_cuda or not torch.cuda.is_available():
            return tensor.device, tensor.to(where, copy=True)
        offloaded = torch.empty(tensor.shape, dtype=tensor.dtype, device=where, pin_memory=True)
        return tensor.device, offloaded.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        """Copy a saved tensor back to its device. torch calls this in the backward pass."""
        device, offloaded = packed
        return offloaded.to(device, non_blocking=True)

    def before(*_: object) -> None:
        """Begin to offload saved tensors. This is called before the layer's forward pass."""
        # When the layer is computed again, its saved tensors are needed at once, so they stay on the device. torch has
        # switched `enable_hook` off in this case.
        if state.enable_hook and torch.is_grad_enabled():
            entered.append(saved_tensors_hooks(pack, unpack))
            entered[-1].__enter__()

    def after(*_: object) -> None:
        """Stop offloading. This is called after the layer's forward pass, even if the pass has failed."""
        if entered:
            entered.pop().__exit__()

    layer.register_forward_pre_hook(before, prepend=True)
    layer.register_forward_hook(after, always_call=True)


def has_data(tensor: Tensor) -> bool:
    """Return True if the tensor has data; False if it was made inside `counted`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor)
