"""Weights as copies that may leave the trainer: contiguous, in the engines' dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from flash.weights.fingerprint import Fingerprint

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""A model's tensors by name, one after the other."""
Announce = Callable[[bytes], None]
"""Tells the engines, by `Published.update_info`, that they may start to load a version."""
VERSIONS_KEPT = 2
"""Versions that a publisher holds: the newest, and the one that engines may still be reading."""


def stage(
    tensors: NamedTensors, dtype: torch.dtype, fingerprint: Fingerprint, device: str | None = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Contiguous private copies in the engines' dtype; `device` None leaves each tensor where it is.

    The fingerprint gathers them, and is complete when the iterator is at its end.
    """
    for name, tensor in tensors:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        # On the device where the tensor is, which adds up faster than the host.
        cast = tensor.detach().to(dtype=target)
        fingerprint.add(cast)
        yield name, cast.to(device=device or tensor.device, copy=True).contiguous()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `bfloat16`, as the receivers expect it."""
    return str(dtype).removeprefix("torch.")
