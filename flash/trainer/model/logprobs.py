"""Log-probs of given tokens under a model, and entropies of the distributions that the tokens were sampled from.

The training step, and every forward pass before it, call `policy_logprobs` with a micro-batch. The canary and the
packing check call `token_logprobs` with sequences of their own. `token_logprobs` puts the sequences into one row
(`flash.trainer.model.packed`), runs the model, and collects the answer of its output layer
(`flash.trainer.model.output_layer`). The answer is log-probs and entropies, which transformers returns under the name
`logits`.

A *kept set* has the tokens that a setting such as top_k left in the distribution from which a token was sampled. A
*question* is a computed position with a target token and a temperature.

Shape legend: P = tokens of the packed sequences, U = computed tokens, T = predicted tokens, N = distinct questions,
M = questions in this rank's slice of the row.
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
from flash.trainer.model.output_layer import UNCHANGED, KeptSets, LogprobRequest, OutputLayer
from flash.trainer.model.packed import AttentionWatch, class_name, model_inputs, packed_row
from flash.trainer.model.prefixes import PackedSequences
from flash.trainer.packing import MicroBatch

Float64Array = npt.NDArray[np.float64]


class TokenLogprobs(NamedTuple):
    """Log-probs and entropies of the action tokens of a micro-batch under the current weights."""

    logp_T: Tensor
    """Log-prob under the distribution that the token was sampled from, with gradient."""
    entropy_T: Tensor
    """Entropy of that distribution in nats, with a gradient only if the caller asked for one."""


def token_logprobs(
    model: PreTrainedModel,
    sequences: PackedSequences,
    before_T: Int64Array,
    target_T: Int64Array,
    *,
    temperature_T: Float64Array | None = None,
    kept: KeptSets | None = None,
    entropy_gradient: bool = False,
    watch: AttentionWatch | None = None,
) -> TokenLogprobs:
    """Return log-prob and entropy of each target under softmax(logits / temperature), in float32.

    A collective if the model is sharded. Ranks of a context group pass the same sequences and get the same result.

    Args:
        model: prepared by `shard_model`.
        sequences: for example a `flash.trainer.packing.MicroBatch`.
        before_T: places in P of the tokens before the predicted ones. The output layer computes only these. A place
            that several sequences share is computed once for each different token that follows it.
        target_T: ids of the predicted tokens.
        temperature_T: divisor of the logits; None: 1.
        kept: kept sets over which the softmax runs; None: the whole vocabulary.
        entropy_gradient: True if the entropy needs a gradient.
        watch: callback for the attention of every layer.

    Raises:
        ConfigError: the model changes the logits after its output layer in a way that the layer does not know.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    device = device_of(model)
    row = packed_row(sequences, device).watched(watch).sliced(layer.context)
    part = row.layout.row_slice
    scale_T = np.ones(len(target_T)) if temperature_T is None else temperature_T
    # With kept sets no questions are merged, since equal tokens at a shared place may come from different kept sets.
    merge = row.layout.shared and kept is None
    distinct = _distinct_questions(sequences.computed.row_P[before_T], target_T, scale_T) if merge else None
    first_N = np.arange(len(target_T)) if distinct is None else distinct.first_N
    row_N = row.row_P[before_T[first_N]]
    held_M = part.holds(row_N)
    place_M = first_N[held_M]
    rows, target, scale = (
        to_device(each, device) for each in (row_N[held_M] - part.first, target_T[place_M], scale_T[place_M])
    )
    request = LogprobRequest(target, scale, entropy_gradient, None if kept is None else kept.select(held_M, device))
    if layer.replay is not None:
        layer.replay.set_routes(row.routes_ULK)
    with layer.answering(request), logits_unchanged(model):
        output = model(**model_inputs(model, row), logits_to_keep=rows)
    # The model must return the layer's answer itself: any further change of "logits" would have changed log-probs. If
    # the layer makes the model's known change in its place, the model may still divide by 1, and so return another
    # tensor; `check_packing` has verified that it does no more.
    if request.answer is None or (layer.change == UNCHANGED and output.logits is not request.answer):
        raise changes_logits(model)
    # `output.logits` holds no logits: `OutputLayer.forward` has returned log-probs and entropies in their place.
    answer_T2 = part.gather_answers(output.logits[0], row_N)
    if distinct is not None:
        answer_T2 = answer_T2[to_device(distinct.question_T, device)]
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

    A collective. `entropy_gradient` is True if the entropy needs a gradient. `watch` is called with the attention of
    every layer.

    Raises:
        ConfigError: the model changes the logits after its output layer in a way that the layer does not know.
    """
    return token_logprobs(
        model,
        micro,
        micro.before_T,
        micro.target_T,
        temperature_T=micro.temperature_T,
        kept=KeptSets.from_tokens(micro.kept),
        entropy_gradient=entropy_gradient,
        watch=watch,
    )


def watch_attention(model: PreTrainedModel, micro: MicroBatch, watch: AttentionWatch) -> None:
    """Run a forward pass only so that `watch` sees the attention of every layer. A collective.

    The output layer computes the logits of one token only, because its answer is not used.
    """
    token_logprobs(model, micro, micro.before_T[:1], micro.target_T[:1], watch=watch)


def changes_logits(model: PreTrainedModel) -> ConfigError:
    """Return the error for a model that changes its logits after the output layer in a way that is not known."""
    return ConfigError(
        f"model.path: {class_name(model)} caps, scales or otherwise changes the logits after its output layer in a way "
        "that training does not know; choose another model"
    )


class _DistinctQuestions(NamedTuple):
    """Questions without repetitions."""

    first_N: Int64Array
    """Index in T of the first occurrence of each question."""
    question_T: Int64Array
    """Index in N of each predicted token's question."""


def _distinct_questions(row_T: Int64Array, target_T: Int64Array, scale_T: Float64Array) -> _DistinctQuestions:
    """Return each question once. Sequences that share a position and have the same next token ask the same question.

    `row_T` is the position in the row at which each predicted token is computed, and `scale_T` its temperature.
    """
    order = np.lexsort((scale_T, target_T, row_T))
    new_T = np.ones(len(order), dtype=np.bool_)
    new_T[1:] = np.any([np.diff(each[order]) != 0 for each in (row_T, target_T, scale_T)], axis=0)
    question_T = np.empty(len(order), dtype=np.int64)
    question_T[order] = np.cumsum(new_T) - 1
    return _DistinctQuestions(order[new_T], question_T)
