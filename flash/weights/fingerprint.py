"""A fingerprint of a version's weights, which stale ones cannot have. The canary's tolerance has to allow for rounding.

Two sums over the bit patterns of all elements, modulo 2^64: of the patterns, and of their squares. They are exact, so
no tolerance is needed; they do not depend on order, so fused projections and permuted layouts keep them; zeros add
nothing, so padding does not matter. The trainer takes it of what it publishes, the engine of the parameters that it
holds after loading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Elements at a time: they are widened to 8 bytes each."""
PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the size of an element."""


class Fingerprint:
    """Gathers tensors."""

    def __init__(self) -> None:
        self._sums = [0, 0]

    def add(self, tensor: Tensor) -> None:
        """One more tensor; a contiguous one is not copied as a whole."""
        flat = tensor.detach().contiguous().view(-1).view(PATTERNS[tensor.element_size()])
        sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
        for part in flat.split(CHUNK):
            wide = part.long()
            sums += torch.stack([wide.sum(), (wide * wide).sum()])
        self.join(sums.tolist())

    def join(self, sums: Sequence[int]) -> None:
        """One more fingerprint."""
        self._sums = [_wrapped(mine + other) for mine, other in zip(self._sums, sums, strict=True)]

    @property
    def sums(self) -> list[int]:
        """Of all that was added."""
        return list(self._sums)


def _wrapped(number: int) -> int:
    """Modulo 2^64, with a sign, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63
