"""The interface of all objectives: packed token tensors in, a per-token loss out.

Shape legend: T = packed tokens of one micro-batch that predict an action token (prompts are already gone); S =
sequences of that micro-batch. Every tensor is float32 unless said otherwise.

An objective is a frozen struct whose fields are its options and whose `__call__` is its formula. It does no I/O,
reads no config and calls no collective: the trainer aggregates, masks and reduces. Files here use tensor methods
only, so that the options can be read and checked without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class PackedTokens(NamedTuple):
    """What an objective sees. Slots where `mask_T` is False may hold anything, NaN included."""

    logp_T: Tensor
    """log π_θ now, with gradient."""
    behaviour_T: Tensor
    """Log-prob under the policy that sampled the token, from the engine."""
    proximal_T: Tensor
    """Log-prob under the weights at the start of this training step, no gradient."""
    advantage_T: Tensor
    """Advantage of the token's sequence (or of the token)."""
    mask_T: Tensor
    """bool: the token takes part in the loss."""
    sequence_T: Tensor
    """int64: which of the S sequences the token belongs to; non-decreasing."""
    sequences: int
    """S."""


class ObjectiveOutput(NamedTuple):
    """Per-token loss, and per-token statistics that the trainer averages over unmasked tokens of the whole batch."""

    loss_T: Tensor
    """To be minimised. Values in masked slots are ignored, also when they are NaN."""
    stats: dict[str, Tensor]
    """Name → [T], detached."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objectives. Subclasses add options as fields and implement `__call__`."""

    corrects_staleness: ClassVar[bool] = True
    """Whether the objective uses behaviour log-probs; without them async_ratio > 0 is refused."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss of one micro-batch."""
        raise TypeError(f"{type(self).__name__} does not define __call__")
