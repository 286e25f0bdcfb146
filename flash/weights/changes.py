"""What has changed in a tensor from one version to the next, for `flash.weights.tcp`.

A step of 1e-6 moves few weights far enough to be another number in 16 bits. Where versions differ, bit for bit, the
places and what stands there now travel, if that is less than the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_ELEMENTS = 2**31
"""Of a tensor whose places are sent, 32 bits wide."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Changes:
    """Of one tensor, in the order of its memory and of the host's bytes."""

    places: torch.Tensor
    """(changed,) int32."""
    elements: torch.Tensor
    """(changed,) integers: their bits."""

    @property
    def nbytes(self) -> int:
        """That travel."""
        return self.places.nbytes + self.elements.nbytes


def find_changes(before: torch.Tensor, after: torch.Tensor) -> Changes | None:
    """Of two contiguous tensors of one shape and dtype; None: the whole one is less."""
    if not 0 < after.numel() <= MOST_ELEMENTS:
        return None
    bits = _BITS[after.itemsize]
    new = after.view(-1).view(bits)
    differs = before.view(-1).view(bits) != new
    # Counted first: torch's places are 64 bits wide, several times the tensor where all of it has changed.
    if int(differs.count_nonzero()) * (torch.int32.itemsize + after.itemsize) >= after.nbytes:
        return None
    places = differs.nonzero().view(-1)
    return Changes(places.int(), new[places])


def empty_changes(count: int, itemsize: int) -> Changes:
    """Room for so many, of elements of so many bytes."""
    return Changes(torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=_BITS[itemsize]))


def put_changes(flat: torch.Tensor, changes: Changes) -> None:
    """Make bytes of the version before those of this one, in place."""
    flat.view(changes.elements.dtype)[changes.places.long()] = changes.elements
