"""Packed rows: sequences as the policy and the critics are given them, and the attention that keeps them apart.

The sequences of a micro-batch lie one after the other in one row, without padding. What several of them begin with, a
group's prompt or the turns before branches part, is in the row once (`flash.trainer.model.prefixes`): what works on
single tokens is not repeated. Attention is computed in two parts, which are merged as the softmax of both: each
sequence's own tokens attend to one another causally, and those of all sequences that go on from the same tokens attend
to these, however deep in the tree. So no key is there twice and none is masked, and fast kernels apply
(`flash.trainer.model.attention`).

A model that attends by itself, since something else in it passes between tokens, is given one sequence at a time.

Shape legend: P = packed tokens of the sequences, U = those that are computed, S = sequences, M = slots of a part,
H = heads, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from flash.branches import Int64Array
from flash.errors import ConfigError
from flash.foreign.transformers import attention
from flash.trainer.mesh import to_device
from flash.trainer.model.attention import Part, Parts, Scores, States
from flash.trainer.model.context import RowSlice
from flash.trainer.model.prefixes import PackedSequences

PACKED_ATTENTION = "packed"
"""Our name in transformers' attention interface. Not in its mask interface, so no dense mask is built. It must contain
none of transformers' own names, such as sdpa: the rules for that one would apply."""


class AttentionWatch(Protocol):
    """Looks on while the layers attend."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """What one layer compares, as the model made it: query [1, H, P, D], key [1, heads of keys, P, D]."""
        ...


class PackedLayout(msgspec.Struct, frozen=True):
    """How the tokens of a row attend, and who looks on.

    No dataclass: in half precision FSDP copies those among a layer's arguments with all that they hold, so a copy would
    look on.
    """

    parts: Parts
    row_P: Tensor
    """int64: where each token of the sequences, one after the other, is computed."""
    shared: bool
    """Whether some tokens stand for those of several sequences; else the row is these, one after the other."""
    part: RowSlice
    """What this rank is given of the row."""
    watch: AttentionWatch | None = None
    """Is told of every layer's attention."""


class PackedRow(NamedTuple):
    """Sequences as a model is given them."""

    input_U: Tensor
    """int64: token ids."""
    position_U: Tensor
    """int64: of each token in its sequences."""
    row_P: Int64Array
    """As in the layout."""
    layout: PackedLayout
    routes_ULK: Tensor | None
    """int32: the experts that engines chose; -1: not known."""

    def over(self, context: DeviceMesh | None) -> PackedRow:
        """What this one of the ranks is given of the row."""
        part = RowSlice(len(self.input_U), context)
        layout = msgspec.structs.replace(self.layout, part=part)
        routes = None if self.routes_ULK is None else part.of(self.routes_ULK)
        return PackedRow(part.of(self.input_U), part.of(self.position_U), self.row_P, layout, routes)

    def watched(self, watch: AttentionWatch | None) -> PackedRow:
        """The same, while somebody looks on."""
        return self._replace(layout=msgspec.structs.replace(self.layout, watch=watch))


def packs(model: PreTrainedModel) -> bool:
    """Whether sequences share a row of this model: it attends as is said here, and not by itself."""
    return attention(model) == PACKED_ATTENTION


def given(model: PreTrainedModel, row: PackedRow) -> dict[str, Any]:
    """What a model is called with, to make no more of a row than hidden states."""
    ids = {"input_ids": row.input_U.unsqueeze(0), "use_cache": False}
    if packs(model):
        return ids | {"position_ids": row.position_U.unsqueeze(0), "packed_layout": row.layout}
    assert row.layout.parts.sequences == 1, "a model that attends by itself has one sequence"
    return ids


def packed_row(sequences: PackedSequences, device: torch.device) -> PackedRow:
    """Put sequences in one row."""
    place_U, row_P = sequences.computed
    offset_S = sequences.offset_S
    owner_U = np.searchsorted(offset_S, place_U, side="right") - 1
    own_S = np.bincount(owner_U, minlength=len(offset_S) - 1)
    # By powers of two, so that padding is at most a half.
    kind_S = np.frexp(own_S)[1]
    shared = len(place_U) < len(row_P)
    if shared:
        # What attends together lies together, where it need not stay where it was.
        order = np.argsort(kind_S[owner_U], kind="stable")
        place_U, row_P = place_U[order], np.argsort(order)[row_P]
    begin_S, stop_S = offset_S[:-1] + np.diff(offset_S) - own_S, offset_S[1:]
    own = [row_P[begin:stop] for begin, stop in zip(begin_S, stop_S, strict=True)]
    known = [row_P[start:begin] for start, begin in zip(offset_S[:-1], begin_S, strict=True)]
    position_U = sequences.position_P[place_U]
    parts = Parts(own, kind_S, known, position_U, device)
    layout = PackedLayout(parts, to_device(row_P, device), shared, RowSlice(len(place_U)))
    routes = sequences.routes
    routes_ULK = None if routes is None else to_device(routes.numbers()[place_U], device)
    return PackedRow(
        to_device(sequences.input_P[place_U], device), to_device(position_U, device), row_P, layout, routes_ULK
    )


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row: query [1, H, U, D] to output [1, U, H, D].

    Where the row is over several ranks, they are given and answered their slices.
    """
    if packed_layout is None:
        raise ConfigError(f"{class_name(module)} does not pass on what its attention is told of packed sequences")
    if attention_mask is not None:
        raise ConfigError(f"{class_name(module)} makes a mask of its own for its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores, sinks_H = Scores(scale, sliding_window, other.get("softcap")), other.get("s_aux")
    if packed_layout.watch is not None:
        if scores.cap is not None or sinks_H is not None:
            raise ConfigError(
                f"algorithm.rhythm: {class_name(module)} caps its attention or lets it go into sinks, which nothing "
                "that looks on knows of; choose another model"
            )
        row_P = packed_layout.row_P if packed_layout.shared else slice(None)
        packed_layout.watch(module, query[:, :, row_P], key[:, :, row_P], scaling, sliding_window)
    part = packed_layout.part
    query_UHD, key_UHD, value_UHD = part.by_heads([one[0].transpose(0, 1) for one in (query, key, value)])
    sinks_H = None if sinks_H is None else part.heads(sinks_H)
    parts = packed_layout.parts.of(query_UHD, value_UHD, scores)
    answer_UHD = attend_in_parts(query_UHD, key_UHD, value_UHD, sinks_H, parts, scores)
    return part.by_tokens(answer_UHD).unsqueeze(0), None


def attend_in_parts(
    query_UHD: Tensor,
    key_UHD: Tensor,
    value_UHD: Tensor,
    sinks_H: Tensor | None,
    parts: Sequence[Part],
    scores: Scores,
) -> Tensor:
    """[U, H, D]: what each token of the row is answered, over the parts in which it asks; with gradients."""
    return _PackedAttention.apply(query_UHD, key_UHD, value_UHD, sinks_H, parts, scores)  # pyright: ignore[reportReturnType]


class _PackedAttention(torch.autograd.Function):
    """See `attend_in_parts`. No batch of a part is kept for the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query_UHD: Tensor,
        key_UHD: Tensor,
        value_UHD: Tensor,
        sinks_H: Tensor | None,
        parts: Sequence[Part],
        scores: Scores,
    ) -> Tensor:
        states = (query_UHD, key_UHD, value_UHD)
        wide = torch.promote_types(value_UHD.dtype, torch.float32)
        if len(parts) == 1 and parts[0].asking.along is not None:
            answer_UHD, weight_UH = parts[0].attend(states, scores)
        else:
            answer_UHD, weight_UH = _answered(states, parts, scores, wide)
        if sinks_H is not None:
            # A token more that all see, with a score of its own and nothing to say.
            all_UH = torch.logaddexp(weight_UH, sinks_H.to(wide))
            answer_UHD = answer_UHD * (weight_UH - all_UH).exp_()[..., None]
            weight_UH = all_UH
        answer_UHD = answer_UHD.to(value_UHD.dtype)
        ctx.save_for_backward(query_UHD, key_UHD, value_UHD, sinks_H, answer_UHD, weight_UH)
        ctx.parts, ctx.scores = parts, scores
        return answer_UHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_UHD,), (query_UHD, key_UHD, value_UHD, sinks_H, answer_UHD, weight_UH) = grads, ctx.saved_tensors
        states, parts = (query_UHD, key_UHD, value_UHD), ctx.parts
        if len(parts) == 1 and parts[0].asking.along is not None:
            totals = parts[0].gradients(grad_UHD, states, answer_UHD, weight_UH, ctx.scores)
        else:
            totals = [torch.zeros(one.shape, dtype=weight_UH.dtype, device=one.device) for one in states]
            for part in parts:
                parted = part.gradients(grad_UHD, states, answer_UHD, weight_UH, ctx.scores)
                for total, places, one in zip(totals, (part.asking, part.asked, part.asked), parted, strict=True):
                    places.add(total, one)
        grad_H = None
        if sinks_H is not None:
            earned_UH = (grad_UHD.to(weight_UH) * answer_UHD).sum(-1)
            grad_H = ((sinks_H.to(weight_UH) - weight_UH).exp_() * -earned_UH).sum(0).to(sinks_H.dtype)
        return *(total.to(one.dtype) for total, one in zip(totals, states, strict=True)), grad_H, None, None


def _answered(states: States, parts: Sequence[Part], scores: Scores, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """[U, H, D] in a wide dtype, and the logarithms of the sums of weights, [U, H]: over all parts."""
    query_UHD, _, value_UHD = states
    answer_UHD = value_UHD.new_empty((*query_UHD.shape[:2], value_UHD.shape[2]), dtype=wide)
    weight_UH = value_UHD.new_empty(query_UHD.shape[:2], dtype=wide)
    for part in parts:
        answer_MHD, weight_MH = part.attend(states, scores)
        if not part.causal:
            answer_MHD, weight_MH = _merged(
                part.asking.take(answer_UHD), part.asking.take(weight_UH), answer_MHD, weight_MH
            )
        part.asking.put(answer_UHD, answer_MHD)
        part.asking.put(weight_UH, weight_MH)
    return answer_UHD, weight_UH


def _merged(one_MHD: Tensor, one_MH: Tensor, other_MHD: Tensor, other_MH: Tensor) -> tuple[Tensor, Tensor]:
    """Answers over two sets of keys as one over both, and the logarithms of the sums of their exponentials."""
    share_MH = torch.sigmoid(other_MH - one_MH)
    return torch.lerp(one_MHD, other_MHD.to(one_MHD.dtype), share_MH[..., None]), torch.logaddexp(one_MH, other_MH)


def class_name(module: nn.Module) -> str:
    """The name of a module's class as transformers has it; FSDP puts its own before it."""
    return type(module).__name__.removeprefix("FSDP")
