"""Packed rows: the input of the policy and the critics for several sequences, and attention that separates these.

A *row* has the sequences of a micro-batch one after another, without padding. A *prefix* is the tokens with which
several sequences begin (a group's prompt, or the turns before branches of a sample part). It is in the row only once
(`flash.trainer.packing`), so that each layer computes it once.

The attention of a token is computed in up to two *parts*, which are merged as one softmax over both. In the first part,
the own tokens of each sequence attend to one another causally. In the second part, the own tokens of all sequences with
the same prefix attend to that prefix, however deep in the tree of prefixes it lies. So no key occurs twice and no key
is masked out, and fast kernels can be used (`flash.trainer.model.attention`).

A model in which anything but replaceable attention passes information between tokens cannot be packed: a recurrent
state, a convolution over tokens, or a mask of its own. Such a model gets one sequence at a time and keeps its own
attention; `flash.trainer.model.packing_check` finds out at the start.

`flash.trainer.model.logprobs` and `flash.trainer.critic` build a row per micro-batch with `packed_row` and call the
model with `model_inputs`. transformers then calls `packed_attention` in each layer.

Shape legend: P = packed tokens of the sequences, U = computed tokens (the row), S = sequences, M = slots of a part,
H = heads, D = width of a head, L = decoder layers, K = experts of a token.
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
from flash.trainer.model.attention import AttentionPart, RowAttention, ScoreOptions, States
from flash.trainer.model.context import RowSlice
from flash.trainer.packing import PackedSequences

PACKED_ATTENTION = "packed"
"""Name of `packed_attention` in transformers' attention interface. It is not in the mask interface, so that no dense
mask is built. The name must not contain one of transformers' own names, such as sdpa: transformers would then apply its
rules for that attention."""


class AttentionWatch(Protocol):
    """Callback that sees the queries and keys of every layer during a forward pass."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """Receive one layer's states as the model made them.

        Args:
            module: the attention module of the layer.
            query: [1, H, P, D], queries of all tokens of all sequences, also of tokens that sequences share.
            key: [1, heads of keys, P, D].
            scaling: factor of the products of queries and keys; None: 1 / √D.
            sliding_window: number of tokens that a token sees, itself included; None: itself and all earlier tokens.
        """
        ...


class PackedLayout(msgspec.Struct, frozen=True):
    """Description of a row, which every layer gets as an argument and needs for its attention.

    This must not be a dataclass: in half precision FSDP copies the dataclasses among a layer's arguments with all their
    fields, and a copy of `watch` would get the signals.
    """

    attention: RowAttention
    """Division of the row's attention into parts, which all layers share."""
    row_P: Tensor
    """int64: the place in the row at which each token of the sequences is computed."""
    shared: bool
    """True if some places of the row stand for tokens of several sequences."""
    row_slice: RowSlice
    """Slice of the row that this rank of a context group computes."""
    watch: AttentionWatch | None = None
    """Callback for the attention of every layer."""


class PackedRow(NamedTuple):
    """The input of a model for several sequences."""

    input_U: Tensor
    """int64: token ids."""
    position_U: Tensor
    """int64: position of each token in its sequences."""
    row_P: Int64Array
    """Place in the row at which each token of the sequences is computed: `layout.row_P` on the host."""
    layout: PackedLayout
    """Description of the whole row, for the attention of every layer."""
    routes_ULK: Tensor | None
    """int32: the experts that engines chose for each token; −1 if unknown. None: no engine reported experts."""

    def sliced(self, context: DeviceMesh | None) -> PackedRow:
        """Return the slice of the row that this rank of the context group computes.

        `context` is the ranks over which rows are divided; None returns the whole row. `row_P` and the layout still
        describe the whole row, because attention and the gathering of results need it.
        """
        row_slice = RowSlice(len(self.input_U), context)
        layout = msgspec.structs.replace(self.layout, row_slice=row_slice)
        routes = None if self.routes_ULK is None else row_slice.of(self.routes_ULK)
        return PackedRow(row_slice.of(self.input_U), row_slice.of(self.position_U), self.row_P, layout, routes)

    def watched(self, watch: AttentionWatch | None) -> PackedRow:
        """Return this row with a callback for the attention of every layer; None: without one."""
        return self._replace(layout=msgspec.structs.replace(self.layout, watch=watch))


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Return True if the model computes `packed_attention`, so that several sequences can share a row.

    Returns False for models whose attention cannot be replaced, and for models that have failed the check of packing
    (`flash.trainer.model.packing_check`).
    """
    return attention(model) == PACKED_ATTENTION


def model_inputs(model: PreTrainedModel, row: PackedRow) -> dict[str, Any]:
    """Return the keyword arguments with which a model computes the hidden states of a row.

    transformers passes `packed_layout` on to `packed_attention`. A model with its own attention gets the token ids
    only; its row must have one sequence.
    """
    ids = {"input_ids": row.input_U.unsqueeze(0), "use_cache": False}
    if takes_packed_rows(model):
        return ids | {"position_ids": row.position_U.unsqueeze(0), "packed_layout": row.layout}
    assert row.layout.attention.sequences == 1, "a model with its own attention gets one sequence at a time"
    return ids


def packed_row(sequences: PackedSequences, device: torch.device) -> PackedRow:
    """Lay sequences out in one row, in which each shared prefix occurs once.

    The result is the whole row; `PackedRow.sliced` divides it in a context group. `device` is the device on which the
    model computes.
    """
    # place_U has, for each place of the row, the token of the sequences that it computes. row_P is the reverse.
    place_U, row_P = sequences.computed
    offset_S = sequences.offset_S
    sequence_U = np.searchsorted(offset_S, place_U, side="right") - 1
    # Count the own tokens of each sequence. The tokens before them are a prefix that another sequence computes.
    own_S = np.bincount(sequence_U, minlength=len(offset_S) - 1)
    # Sequences whose lengths share a power of two are padded together, so that at most half of a batch is padding.
    length_class_S = np.frexp(own_S)[1]
    shared = len(place_U) < len(row_P)
    if shared:
        # Put tokens together whose attention is computed in one batch. Without shared tokens the order does not change,
        # so that attention need not gather the tokens.
        order = np.argsort(length_class_S[sequence_U], kind="stable")
        place_U, row_P = place_U[order], np.argsort(order)[row_P]
    # Find the rows of each sequence's own tokens, and of the prefix before these.
    begin_S, stop_S = offset_S[:-1] + np.diff(offset_S) - own_S, offset_S[1:]
    own = [row_P[begin:stop] for begin, stop in zip(begin_S, stop_S, strict=True)]
    prefixes = [row_P[start:begin] for start, begin in zip(offset_S[:-1], begin_S, strict=True)]
    position_U = sequences.position_P[place_U]
    row_attention = RowAttention(own, length_class_S, prefixes, position_U, device)
    layout = PackedLayout(row_attention, to_device(row_P, device), shared, RowSlice(len(place_U)))
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
    """Return the output of causal attention within each sequence of a packed row, [1, U, H, D], and None.

    transformers calls this in place of its own attention, and takes None for attention weights that are not returned.
    In a context group, each rank passes the states of its slice of the row and gets the output of its slice.

    Args:
        module: the attention module of the layer.
        query: [1, H, U, D].
        key: [1, heads of keys, U, D].
        value: [1, heads of keys, U, D].
        attention_mask: always None, because the layout takes its place.
        scaling: factor of the products of queries and keys; None: 1 / √D.
        sliding_window: number of tokens that a token sees, itself included; None: itself and all earlier tokens.
        packed_layout: description of the row, from `model_inputs`.
        other: options of single models: a cap of scores (`softcap`), scores of attention sinks (`s_aux`).

    Raises:
        ConfigError: the model does not pass `packed_layout` on, makes a mask of its own, or has capped scores or
            attention sinks while a callback watches its attention.
    """
    if packed_layout is None:
        raise ConfigError(f"{class_name(module)} does not pass the layout of packed sequences on to its attention")
    if attention_mask is not None:
        raise ConfigError(f"{class_name(module)} makes a mask of its own for its attention")
    # Models with capped scores pass the cap as `softcap`, and models with attention sinks pass the scores as `s_aux`.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores, sinks_H = ScoreOptions(scale, sliding_window, other.get("softcap")), other.get("s_aux")
    if packed_layout.watch is not None:
        if scores.cap is not None or sinks_H is not None:
            raise ConfigError(
                f"algorithm.rhythm: {class_name(module)} caps its attention scores or has attention sinks, which the "
                "rhythm of attention does not support; choose another model"
            )
        # The callback gets whole sequences, each with its prefix.
        row_P = packed_layout.row_P if packed_layout.shared else slice(None)
        packed_layout.watch(module, query[:, :, row_P], key[:, :, row_P], scaling, sliding_window)
    # In a context group, ranks exchange slices of all heads for some heads of the whole row, and afterwards back.
    row_slice = packed_layout.row_slice
    query_UHD, key_UHD, value_UHD = row_slice.to_heads([state[0].transpose(0, 1) for state in (query, key, value)])
    sinks_H = None if sinks_H is None else row_slice.own_heads(sinks_H)
    parts = packed_layout.attention.parts(query_UHD, value_UHD, scores)
    answer_UHD = attend_in_parts(query_UHD, key_UHD, value_UHD, sinks_H, parts, scores)
    return row_slice.to_tokens(answer_UHD).unsqueeze(0), None


def attend_in_parts(
    query_UHD: Tensor,
    key_UHD: Tensor,
    value_UHD: Tensor,
    sinks_H: Tensor | None,
    parts: Sequence[AttentionPart],
    scores: ScoreOptions,
) -> Tensor:
    """Return [U, H, D]: the attention output of each token of the row, merged over all parts, with gradients.

    An attention sink is a learned score of each head that takes a share of the attention and adds nothing to the
    output: `sinks_H` are these scores; None if the model has none. `parts` come from `RowAttention.parts`: each token
    is a query of one part with its own sequence, and of at most one more part with its prefix.
    """
    return _PackedAttention.apply(query_UHD, key_UHD, value_UHD, sinks_H, parts, scores)  # pyright: ignore[reportReturnType]


class _PackedAttention(torch.autograd.Function):
    """Forward and backward pass of `attend_in_parts`.

    Only the states of the row and the merged output are saved. The batches of the parts are gathered again in the
    backward pass, since together they would take more memory than the row.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query_UHD: Tensor,
        key_UHD: Tensor,
        value_UHD: Tensor,
        sinks_H: Tensor | None,
        parts: Sequence[AttentionPart],
        scores: ScoreOptions,
    ) -> Tensor:
        """Return [U, H, D]: the output. `attend_in_parts` explains the arguments."""
        states = (query_UHD, key_UHD, value_UHD)
        wide = torch.promote_types(value_UHD.dtype, torch.float32)
        # A single part over the whole row needs neither gathering nor merging.
        if len(parts) == 1 and parts[0].queries.contiguous is not None:
            answer_UHD, lse_UH = parts[0].attend(states, scores)
        else:
            answer_UHD, lse_UH = _attend_merged(states, parts, scores, wide)
        if sinks_H is not None:
            # A sink is like one more key that every token sees, with a learned score and the value 0.
            total_UH = torch.logaddexp(lse_UH, sinks_H.to(wide))
            answer_UHD = answer_UHD * (lse_UH - total_UH).exp_()[..., None]
            lse_UH = total_UH
        answer_UHD = answer_UHD.to(value_UHD.dtype)
        ctx.save_for_backward(query_UHD, key_UHD, value_UHD, sinks_H, answer_UHD, lse_UH)
        ctx.parts, ctx.scores = parts, scores
        return answer_UHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return one gradient per argument of `forward`: of query, key, value and sinks, and None for the others."""
        (grad_UHD,), (query_UHD, key_UHD, value_UHD, sinks_H, answer_UHD, lse_UH) = grads, ctx.saved_tensors
        states, parts = (query_UHD, key_UHD, value_UHD), ctx.parts
        if len(parts) == 1 and parts[0].queries.contiguous is not None:
            totals = parts[0].gradients(grad_UHD, states, answer_UHD, lse_UH, ctx.scores)
        else:
            # Sum in a wide dtype, because a prefix that many sequences share gets many small gradients.
            totals = [torch.zeros(state.shape, dtype=lse_UH.dtype, device=state.device) for state in states]
            for part in parts:
                gradients = part.gradients(grad_UHD, states, answer_UHD, lse_UH, ctx.scores)
                for total, index, grad in zip(totals, (part.queries, part.keys, part.keys), gradients, strict=True):
                    index.scatter_add(total, grad)
        grad_H = None
        if sinks_H is not None:
            # The sink's value is 0. So with share p = exp(sink − lse), its gradient is p · (0 − grad · answer).
            grad_dot_answer_UH = (grad_UHD.to(lse_UH) * answer_UHD).sum(-1)
            grad_H = ((sinks_H.to(lse_UH) - lse_UH).exp_() * -grad_dot_answer_UH).sum(0).to(sinks_H.dtype)
        return *(total.to(state.dtype) for total, state in zip(totals, states, strict=True)), grad_H, None, None


def _attend_merged(
    states: States, parts: Sequence[AttentionPart], scores: ScoreOptions, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the attention output over all parts, [U, H, D], and the log of the sum of exp(score), [U, H].

    Both have the dtype `wide`. `parts` begin with the own tokens of sequences, so that each row has an output before a
    prefix part is merged with it.
    """
    query_UHD, _, value_UHD = states
    answer_UHD = value_UHD.new_empty((*query_UHD.shape[:2], value_UHD.shape[2]), dtype=wide)
    lse_UH = value_UHD.new_empty(query_UHD.shape[:2], dtype=wide)
    for part in parts:
        answer_MHD, lse_MH = part.attend(states, scores)
        if not part.causal:
            # The keys of this part are a prefix. The queries already have the output over the own tokens.
            answer_MHD, lse_MH = _merge(
                part.queries.gather(answer_UHD), part.queries.gather(lse_UH), answer_MHD, lse_MH
            )
        part.queries.scatter(answer_UHD, answer_MHD)
        part.queries.scatter(lse_UH, lse_MH)
    return answer_UHD, lse_UH


def _merge(first_MHD: Tensor, first_MH: Tensor, second_MHD: Tensor, second_MH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention outputs over two disjoint sets of keys into the output over both sets.

    Each output, [M, H, D], comes with the log of the sum of exp(score) over its keys, [M, H], and so does the result.
    """
    share_MH = torch.sigmoid(second_MH - first_MH)
    merged_MHD = torch.lerp(first_MHD, second_MHD.to(first_MHD.dtype), share_MH[..., None])
    return merged_MHD, torch.logaddexp(first_MH, second_MH)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class in transformers, for messages. FSDP puts its own prefix before it."""
    return type(module).__name__.removeprefix("FSDP")
