"""What the policy says of given tokens: their log-probs and the entropies of the distributions they were drawn from.

Shape legend: P = tokens of the packed sequences, T = predicted tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import PreTrainedModel

from flash.branches import Int64Array
from flash.errors import ConfigError
from flash.foreign.transformers import logits_unchanged
from flash.trainer.mesh import to_device
from flash.trainer.model.model import device_of
from flash.trainer.model.output_layer import UNCHANGED, KeptSets, OutputLayer, Selection
from flash.trainer.model.packed import AttentionWatch, class_name, model_inputs, packed_row
from flash.trainer.model.prefixes import PackedSequences
from flash.trainer.packing import MicroBatch

Float64Array = npt.NDArray[np.float64]


class TokenLogprobs(NamedTuple):
    """What the policy says of the action tokens of a micro-batch."""

    logp_T: Tensor
    """Log-prob as it was sampled, with gradient."""
    entropy_T: Tensor
    """Entropy of the distribution it was drawn from in nats, with gradient only where asked for."""


def token_logprobs(
    model: PreTrainedModel,
    sequences: PackedSequences,
    keep_T: Int64Array,
    target_T: Int64Array,
    *,
    temperature_T: Float64Array | None = None,
    kept: KeptSets | None = None,
    entropy_gradient: bool = False,
    watch: AttentionWatch | None = None,
) -> TokenLogprobs:
    """Log-prob and entropy of each target under softmax(logits / temperature), in float32; None: at 1.

    The softmax is over the tokens that are `kept`; None: over all.

    `keep_T` and `target_T` are as in `flash.trainer.packing.MicroBatch`, which is one of `sequences`; the model comes
    from `shard_model`. Only the positions in `keep_T` go through the output layer, and never all of them at once; one
    that sequences share does so once for each token that follows it. A collective where the model is sharded; the ranks
    of a context group, given the same sequences, are told the same. `watch` is told of every layer's attention.

    Raises:
        ConfigError: the model changes what comes out of its output layer, for example by a cap or a scale.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    device = device_of(model)
    row = packed_row(sequences, device).watched(watch).sliced(layer.context)
    part = row.layout.row_slice
    scale_T = np.ones(len(target_T)) if temperature_T is None else temperature_T
    # Beside kept sets, the same token may be drawn from others.
    alike = row.layout.shared and kept is None
    asked = _distinct(sequences.computed.row_P[keep_T], target_T, scale_T) if alike else None
    first_N = np.arange(len(target_T)) if asked is None else asked.first_N
    row_N = row.row_P[keep_T[first_N]]
    held_M = part.holds(row_N)
    place_M = first_N[held_M]
    rows, target, scale = (
        to_device(each, device) for each in (row_N[held_M] - part.first, target_T[place_M], scale_T[place_M])
    )
    selection = Selection(target, scale, entropy_gradient, None if kept is None else kept.at(held_M, device))
    if layer.replay is not None:
        layer.replay.take(row.routes_ULK)
    with layer.selecting(selection), logits_unchanged(model):
        output = model(**model_inputs(model, row), logits_to_keep=rows)
    # The very tensor: whatever a model does to logits, it would have done to log-probs here. One that is kept from
    # doing what it does may still divide by 1; `check_packing` has seen that this is all.
    if selection.answer is None or (layer.change == UNCHANGED and output.logits is not selection.answer):
        raise changes_logits(model)
    answer_T2 = part.gather_answers(output.logits[0], row_N)
    if asked is not None:
        answer_T2 = answer_T2[to_device(asked.place_T, device)]
    logp_T, entropy_T = answer_T2.unbind(-1)
    return TokenLogprobs(logp_T, entropy_T if entropy_gradient else entropy_T.detach())


def policy_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    *,
    entropy_gradient: bool = False,
    watch: AttentionWatch | None = None,
) -> TokenLogprobs:
    """Return log-prob and entropy of a micro-batch's action tokens, under the distributions they were sampled from.

    A collective. `watch` is called with the attention of every layer. See `token_logprobs`.
    """
    return token_logprobs(
        model,
        micro,
        micro.keep_T,
        micro.target_T,
        temperature_T=micro.temperature_T,
        kept=KeptSets.of(micro.kept),
        entropy_gradient=entropy_gradient,
        watch=watch,
    )


def watch_attention(model: PreTrainedModel, micro: MicroBatch, watch: AttentionWatch) -> None:
    """Run a forward pass only so that `watch` sees the attention of every layer. A collective.

    The output layer computes the logits of one token, the fewest it can.
    """
    token_logprobs(model, micro, micro.keep_T[:1], micro.target_T[:1], watch=watch)


def changes_logits(model: PreTrainedModel) -> ConfigError:
    """What to say of a model whose log-probs are not those of its output layer."""
    return ConfigError(
        f"model.path: {class_name(model)} caps, scales or otherwise changes the logits after its output layer in a way "
        "that training does not know; choose another model"
    )


class _Distinct(NamedTuple):
    """Questions that are asked once, though some come several times."""

    first_N: Int64Array
    """Of the T, the first of each kind."""
    place_T: Int64Array
    """Which of the N each is."""


def _distinct(row_T: Int64Array, target_T: Int64Array, scale_T: Float64Array) -> _Distinct:
    """What branches predict of a token that they share: the same, where the same token follows."""
    order = np.lexsort((scale_T, target_T, row_T))
    new_T = np.ones(len(order), dtype=np.bool_)
    new_T[1:] = np.any([np.diff(each[order]) != 0 for each in (row_T, target_T, scale_T)], axis=0)
    place_T = np.empty(len(order), dtype=np.int64)
    place_T[order] = np.cumsum(new_T) - 1
    return _Distinct(order[new_T], place_T)
