"""Log-probs of given tokens under a model, and entropies of the distributions from which the tokens were sampled.

The training step, and every forward pass before it, call `policy_logprobs` with a micro-batch. The canary and the
packing check call `token_logprobs` with sequences of their own. `token_logprobs` puts the sequences into one row
(`flash.trainer.model.packed`), gives a `LogprobRequest` to the model's `OutputLayer`, and runs the model. `shard_model`
has put this layer in place of the model's own output layer. The layer answers with log-probs and entropies, which
transformers returns under the name `logits`.

The logits of a micro-batch, positions × vocabulary, are often larger than all its other activations together. So they
exist for a chunk of positions at a time, and the backward pass computes them again. Neither the logits of all positions
nor their gradient is ever held. With z = logits / temperature, p = softmax(z) and H = −Σ p log p:
d log p[target] / dz = 1[target] − p  and  dH / dz = −p (log p + H).

The *kept set* of a position has the tokens that settings such as top-k, or a grammar, left in the distribution. All
other tokens get z = `LEFT_OUT`, so p = 0. Small sets are lists of tokens, large sets are masks. A *question* is a
computed position with a target token and a temperature. Without kept sets, equal questions are answered once.

Shape legend: P = tokens of the packed sequences, U = computed tokens, T = predicted tokens, Q = distinct questions,
M = questions in this rank's slice of the row, N = tokens of all lists, K = masks, B = bytes of a mask, C = positions of
a chunk, V = vocabulary, D = width of a hidden state, W = longest list of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from flash.branches import Int64Array
from flash.errors import ConfigError
from flash.foreign.transformers import LogitChange, logit_change, logits_unchanged
from flash.trainer.kept import KeptTokens
from flash.trainer.mesh import device_of, to_device
from flash.trainer.model.fused import fused
from flash.trainer.model.packed import AttentionWatch, class_name, model_inputs, packed_row
from flash.trainer.model.routing_replay import RoutingReplay
from flash.trainer.packing import Float64Array, MicroBatch, PackedSequences

CHUNK_BYTES = 256 * 2**20
"""Bytes of one chunk's logits in float32. Up to three tensors of this size exist at once. Every chunk reads the whole
weight and adds to the weight's whole gradient. So a chunk needs some hundred positions to keep the processor busy; with
a vocabulary of 150,000 it has 440."""

UNCHANGED = LogitChange()
"""The change of a model that leaves its logits as they are."""

LEFT_OUT = -1e9
"""Logit of a token that could not have been sampled. It is finite, since 0 · ∞ would be NaN."""


class TokenLogprobs(NamedTuple):
    """Log-probs and entropies of the action tokens of a micro-batch under the current weights."""

    logp_T: Tensor
    """Log-prob under the distribution that the token was sampled from, with gradient."""
    entropy_T: Tensor
    """Entropy of this distribution in nats, with a gradient only if the caller asked for it."""


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

    A collective if the model is sharded. Ranks of a context group, over which a row is divided, pass the same sequences
    and get the same result. Without a backward pass, the caller must call `flash.trainer.model.model.reshard` after its
    last forward pass.

    Args:
        model: prepared by `shard_model`.
        sequences: the sequences, for example a `flash.trainer.packing.MicroBatch`.
        before_T: for each predicted token, the place in P of the token before it. The output layer computes only these
            places. A place that several sequences share is computed once for each different token that follows it.
        target_T: ids of the predicted tokens.
        temperature_T: divisor of the logits; None: 1.
        kept: kept sets over which the softmax runs; None: the whole vocabulary.
        entropy_gradient: True if the entropy needs a gradient.
        watch: callback that is given the queries and keys of every layer.

    Raises:
        ConfigError: the model changes the logits after its output layer in a way that the layer does not know.
        ContractError: `sequences` have routes (an engine's choice of experts) of a model with other layers or experts.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, OutputLayer), "prepare the model with shard_model"
    device = device_of(model)
    # 1. Lay the sequences out in a row, and take this rank's slice of it.
    row = packed_row(sequences, device).watched(watch).sliced(layer.context)
    part = row.layout.row_slice
    scale_T = np.ones(len(target_T)) if temperature_T is None else temperature_T
    # 2. Collect the questions, each once. With kept sets no questions are merged, since equal tokens at a shared place
    # may come from different kept sets.
    merge = row.layout.shared and kept is None
    distinct = _distinct_questions(sequences.computed.row_P[before_T], target_T, scale_T) if merge else None
    first_Q = np.arange(len(target_T)) if distinct is None else distinct.first_Q
    row_Q = row.row_P[before_T[first_Q]]
    # 3. Put the questions in this rank's slice to the output layer, and run the model.
    held_M = part.holds(row_Q)
    place_M = first_Q[held_M]
    rows, target, scale = (
        to_device(each, device) for each in (row_Q[held_M] - part.first, target_T[place_M], scale_T[place_M])
    )
    request = LogprobRequest(target, scale, entropy_gradient, None if kept is None else kept.select(held_M, device))
    if layer.replay is not None:
        layer.replay.set_routes(row.routes_ULK)
    with layer.answering(request), logits_unchanged(model):
        output = model(**model_inputs(model, row), logits_to_keep=rows)
    # 4. The model must return the layer's answer itself: any further change of "logits" would have changed log-probs.
    # If the model scales or caps logits, the layer does so instead. The model may then still divide by 1, and so return
    # another tensor; `check_packing` has verified that it does no more.
    if request.answer is None or (layer.change == UNCHANGED and output.logits is not request.answer):
        raise changes_logits(model)
    # 5. Gather the answers of all slices, and give each predicted token the answer to its question. `output.logits`
    # holds no logits: `OutputLayer.forward` has returned log-probs and entropies in their place.
    answer_T2 = part.gather_answers(output.logits[0], row_Q)
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

    All ranks must call this together. An action token is a token that the policy sampled. `entropy_gradient` is True if
    the entropy needs a gradient. `watch` is called with the queries and keys of every layer.

    Raises:
        ConfigError: the model changes the logits after its output layer in a way that the layer does not know.
        ContractError: the micro-batch has routes (an engine's choice of experts) of a model with other layers or
            experts.
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
    """Run a forward pass only so that `watch` sees the attention of every layer.

    All ranks must call this together. The rhythm of attention (`flash.trainer.rhythm`) needs such passes. The output
    layer computes the logits of one token only, because its answer is not used. The caller must free the gathered
    parameters with `flash.trainer.model.model.reshard`.

    Raises:
        ConfigError: the model changes the logits after its output layer in a way that the layer does not know.
    """
    token_logprobs(model, micro, micro.before_T[:1], micro.target_T[:1], watch=watch)


def changes_logits(model: PreTrainedModel) -> ConfigError:
    """Return the error for a model that changes its logits after the output layer in a way that is not known.

    The log-probs of the trainer and of the engines would differ, because engines use the changed logits.
    """
    return ConfigError(
        f"model.path: {class_name(model)} caps, scales or otherwise changes the logits after its output layer in a way "
        "that training does not know; choose another model"
    )


class _DistinctQuestions(NamedTuple):
    """Questions without repetitions, so that each is answered once; and the question of each predicted token."""

    first_Q: Int64Array
    """Index in T of the first occurrence of each question."""
    question_T: Int64Array
    """Index in Q of each predicted token's question."""


def _distinct_questions(place_T: Int64Array, target_T: Int64Array, scale_T: Float64Array) -> _DistinctQuestions:
    """Find equal questions: sequences that share a computed token, and have the same next token, ask the same question.

    Args:
        place_T: for each predicted token, the computed token before it, which several sequences may share.
        target_T: ids of the predicted tokens.
        scale_T: temperatures.
    """
    order = np.lexsort((scale_T, target_T, place_T))
    new_T = np.ones(len(order), dtype=np.bool_)
    new_T[1:] = np.any([np.diff(each[order]) != 0 for each in (place_T, target_T, scale_T)], axis=0)
    question_T = np.empty(len(order), dtype=np.int64)
    question_T[order] = np.cumsum(new_T) - 1
    return _DistinctQuestions(order[new_T], question_T)


class KeptLogits(NamedTuple):
    """Logits of a chunk of positions, restricted to their kept sets. The backward pass needs the other fields."""

    logits_CV: Tensor
    """Logits from which the targets were sampled."""
    token_CW: Tensor
    """int64: ids of the kept tokens. A position with fewer than W kept tokens repeats the first of them."""
    slope_CW: Tensor
    """Derivative of each kept token's logit with respect to the output layer's logit."""


@dataclass(frozen=True)
class KeptSets:
    """The tokens that could have been sampled at each position: tensors of a `flash.trainer.packing.KeptTokens`."""

    token_N: Tensor
    """int64: token ids of all kept sets."""
    bias_N: Tensor
    """Number added to the logit of each kept token."""
    penalty_N: Tensor
    """Repetition penalty of each kept token, applied after the bias."""
    count_T: Tensor
    """int64: size of each position's kept set; 0: the whole vocabulary."""
    start_T: Tensor
    """int64: index in N of the first kept token of each position."""
    largest: int
    """W, the size of the largest kept set that is a list of tokens."""
    mask_T: Tensor
    """int64: index in K of the mask that is each position's kept set; -1 for a position without a mask."""
    mask_KB: Tensor
    """uint8: large kept sets as bits, of which each byte has eight."""

    @classmethod
    def from_tokens(cls, kept: KeptTokens) -> KeptSets | None:
        """Return kept sets as tensors. None if every token was sampled from the whole vocabulary."""
        if not len(kept.token_N) and not len(kept.mask_KB):
            return None
        token_N, bias_N, penalty_N, count_T, mask_T = (
            torch.from_numpy(each) for each in (kept.token_N, kept.bias_N, kept.penalty_N, kept.count_T, kept.mask_T)
        )
        start_T, largest, mask_KB = count_T.cumsum(0) - count_T, int(kept.count_T.max()), torch.tensor(kept.mask_KB)
        return cls(token_N, bias_N, penalty_N, count_T, start_T, largest, mask_T, mask_KB)

    def select(self, position_T: Int64Array, device: torch.device) -> KeptSets:
        """Return the kept sets of some positions, given as indices in T, on `device`.

        All kept tokens are copied; `start_T` still points to the kept tokens of each position.
        """
        chosen_T = torch.from_numpy(position_T)
        token_N, bias_N, penalty_N, count_T, start_T, mask_T, mask_KB = (
            tensor.to(device)
            for tensor in (
                *(self.token_N, self.bias_N, self.penalty_N, self.count_T[chosen_T], self.start_T[chosen_T]),
                *(self.mask_T[chosen_T], self.mask_KB),
            )
        )
        return KeptSets(token_N, bias_N, penalty_N, count_T, start_T, self.largest, mask_T, mask_KB)

    def restrict(self, logits_CV: Tensor, rows: slice, target_C: Tensor) -> KeptLogits:
        """Return the logits from which the positions `rows` were sampled: `LEFT_OUT` outside of the kept set.

        For a kept token, the bias is added to the logit. The sum is divided by the penalty if it is positive, and else
        multiplied by it. A position that was sampled from the whole vocabulary is not changed. The result is in float32
        or wider; it reuses the memory of `logits_CV` if that has this dtype.
        """
        limited_C1, start_C1 = self.count_T[rows, None] > 0, self.start_T[rows, None]
        place_W = torch.arange(self.largest, device=self.count_T.device)
        # All positions get W places. The places beyond a position's kept set repeat its first token, the target. For a
        # position that was sampled from the whole vocabulary, all places have its target, and nothing is changed.
        place_CW = (start_C1 + place_W).where(place_W < self.count_T[rows, None], start_C1)
        place_CW.clamp_(max=len(self.token_N) - 1)
        token_CW = self.token_N[place_CW].where(limited_C1, target_C[:, None])
        wide_CV = logits_CV.to(_wide(logits_CV))
        if len(self.mask_KB):
            wide_CV.masked_fill_(self._masked_out(rows, wide_CV.shape[-1]), LEFT_OUT)
        bias_CW = self.bias_N[place_CW].where(limited_C1, 0.0).to(wide_CV)
        penalty_CW = self.penalty_N[place_CW].where(limited_C1, 1.0).to(wide_CV)
        kept_CW = wide_CV.gather(-1, token_CW) + bias_CW
        slope_CW = penalty_CW.where(kept_CW <= 0, 1 / penalty_CW)
        restricted_CV = wide_CV.masked_fill_(limited_C1, LEFT_OUT).scatter_(-1, token_CW, kept_CW * slope_CW)
        return KeptLogits(restricted_CV, token_CW, slope_CW)

    def _masked_out(self, rows: slice, vocabulary: int) -> Tensor:
        """Return bool [C, V]: True where the mask of a position, if it has one, leaves out a token.

        A token for which the mask has no bit is left out.
        """
        mask_C = self.mask_T[rows]
        bit_8 = torch.arange(8, dtype=torch.uint8, device=mask_C.device)
        kept_CB8 = (self.mask_KB[mask_C.clamp(min=0)][..., None] >> bit_8).bitwise_and_(1)
        bits_CV = kept_CB8.flatten(1)[:, :vocabulary]
        left_out_CV = pad(bits_CV, (0, vocabulary - bits_CV.shape[1])) == 0
        return left_out_CV.logical_and_((mask_C >= 0)[:, None])


@dataclass
class LogprobRequest:
    """Description of the numbers that the output layer has to compute in one forward pass, and the layer's answer.

    transformers calls the layer and passes nothing but hidden states, so `token_logprobs` puts the request into the
    layer before the call.
    """

    target_T: Tensor
    """int64: the token whose log-prob is wanted at each position."""
    temperature_T: Tensor
    """float: divisor of the logits at each position."""
    entropy_gradient: bool
    """True if the entropy needs a gradient."""
    kept: KeptSets | None = None
    """Kept sets of the positions; None: all were sampled from the whole vocabulary."""
    answer: Tensor | None = None
    """Log-prob and entropy, [1, T, 2]; None until the layer has run."""


class OutputLayer(nn.Module):
    """Linear output layer that returns log-probs and entropies in place of logits.

    The layer holds the parameters of the layer that it replaces, under the same names, so that checkpoints and exports
    do not change. `token_logprobs` sets the request. transformers then calls `forward` inside the model's forward pass,
    where FSDP has gathered the parameters.
    """

    def __init__(
        self, layer: nn.Linear, *, wide: bool, context: DeviceMesh | None = None, change: LogitChange = UNCHANGED
    ) -> None:
        """Take over the parameters of `layer`. The fields of the same names explain the other arguments."""
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.wide = wide
        """True to compute logits in float32 from hidden states and weights of a smaller dtype."""
        self.context = context
        """Ranks over which a row is divided; each computes the log-probs of its own slice. None: rows are whole."""
        self.change = change
        """Change (scale and cap) that the model makes to logits. This layer makes the change instead of the model."""
        self.chunk_bytes = CHUNK_BYTES
        """Largest number of bytes of logits that exist at a time. Tests set a smaller number."""
        self.replay: RoutingReplay | None = None
        """Replay of the experts that engines chose, for `token_logprobs`; None if the model chooses its own experts."""
        self._request: LogprobRequest | None = None

    @contextmanager
    def answering(self, request: LogprobRequest) -> Generator[None]:
        """Make the layer answer `request` in the model's forward pass inside this block.

        The layer cannot be called outside of such a block.
        """
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return log-prob and entropy [1, T, 2] from hidden states [1, T, D], and store them in the request.

        transformers passes only the positions that `logits_to_keep` named.
        """
        request = self._request
        assert request is not None, "call the model through token_logprobs"
        assert hidden.shape[1] == len(request.target_T), "the model passes other positions on than were requested"
        logp_T, entropy_T = selected_logprobs(
            hidden[0],
            self.weight,
            self.bias,
            request.target_T,
            temperature_T=request.temperature_T,
            kept=request.kept,
            entropy_gradient=request.entropy_gradient,
            wide=self.wide,
            change=self.change,
            chunk_bytes=self.chunk_bytes,
        )
        # `stack` makes a new tensor and not a view, because FSDP warns of outputs that are views.
        request.answer = torch.stack((logp_T[None], entropy_T[None]), dim=-1)
        return request.answer


def replace_output_layer(model: PreTrainedModel, *, wide: bool, context: DeviceMesh | None = None) -> None:
    """Replace a model's output layer by an `OutputLayer` with the same parameters.

    A model without an output layer, such as a critic's backbone, stays as it is. With `wide`, logits are computed in
    float32 whatever the dtype of the forward pass. `context` are the ranks over which rows are divided; None: rows are
    whole.

    Raises:
        ConfigError: the output layer is not a plain linear layer.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        return
    if type(layer) is not nn.Linear:
        raise ConfigError(
            f"model.path: the output layer of {type(model).__name__} is a {type(layer).__name__}; training computes "
            "log-probs from a plain linear one, choose another model"
        )
    model.set_output_embeddings(OutputLayer(layer, wide=wide, context=context, change=logit_change(model)))


def selected_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    *,
    temperature_T: Tensor,
    entropy_gradient: bool,
    kept: KeptSets | None = None,
    wide: bool = False,
    change: LogitChange = UNCHANGED,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob [T] of each target under p, and the entropy [T] of p in nats.

    p = softmax((hidden · weightᵀ + bias) / temperature), over the kept set where `kept` has one, else over the whole
    vocabulary. The model's own `change` of logits is applied first, then the bias and penalty of kept tokens.

    The product is computed in the dtype of its factors or, with `wide`, in float32. Everything after it is in float32
    (float64 for float64 factors). The products of the backward pass are in the dtype of the factors. The entropy has a
    gradient only with `entropy_gradient`. `bias_V` is None for a layer without a bias. `chunk_bytes` bounds the memory
    of the logits that exist at a time.
    """
    return _SelectedLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_TD, weight_VD, bias_V, target_T, temperature_T, kept, entropy_gradient, wide, change, chunk_bytes
    )


class _SelectedLogprobs(torch.autograd.Function):
    """Forward and backward pass of `selected_logprobs`; the formulas are at the top of this file.

    Both passes go through the positions in the same chunks. The forward pass keeps three numbers per position:
    log-prob, norm and entropy. The backward pass computes the logits of each chunk again. If one pass computes the
    logits differently, the other pass must do so, too.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        temperature_T: Tensor,
        kept: KeptSets | None,
        entropy_gradient: bool,
        wide: bool,
        change: LogitChange,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy, [T] each. `selected_logprobs` explains the arguments."""
        logp_T = hidden_TD.new_empty(len(target_T), dtype=_wide(hidden_TD))
        norm_T, entropy_T = torch.empty_like(logp_T), torch.empty_like(logp_T)
        temperature_T1 = temperature_T.to(logp_T)[:, None]
        # Factors that are float32 or wider give wide logits by themselves.
        product = _wide_product if wide and weight_VD.dtype != logp_T.dtype else linear
        # On a GPU, `fused` compiles the function to one kernel, which reads the logits once.
        reduce_logits = fused(_reduce_logits, cuda=hidden_TD.is_cuda)
        for rows in _chunks(logp_T, weight_VD, chunk_bytes):
            logits_CV = apply_change(product(hidden_TD[rows], weight_VD, bias_V), change)
            if kept is not None:
                logits_CV = kept.restrict(logits_CV, rows, target_T[rows]).logits_CV
            logp_T[rows], norm_T[rows], entropy_T[rows] = reduce_logits(logits_CV, target_T[rows], temperature_T1[rows])
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T, temperature_T1, norm_T, entropy_T)
        ctx.entropy_gradient, ctx.chunk_bytes = entropy_gradient, chunk_bytes
        ctx.product, ctx.kept, ctx.change = product, kept, change
        # Without a gradient of the entropy, autograd must not expect one from `backward`.
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads_T: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return one gradient per argument of `forward`: of hidden states, weight and bias, and None for the others.

        `grads_T` are the gradients of the loss by the log-probs and by the entropies.
        """
        hidden_TD, weight_VD, bias_V, target_T, temperature_T1, norm_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        # Sums over all chunks are kept in a wide dtype. The sum over one chunk is computed inside the matrix product.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=norm_T.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=norm_T.dtype) if needs_bias else None
        grad_logits = fused(_grad_logits, cuda=hidden_TD.is_cuda)
        for rows in _chunks(norm_T, weight_VD, ctx.chunk_bytes):
            # Compute the logits of the chunk once more, exactly as in the forward pass.
            logits_CV = apply_change(ctx.product(hidden_TD[rows], weight_VD, bias_V), ctx.change)
            slope = _change_slope(logits_CV, ctx.change)
            kept = None if ctx.kept is None else ctx.kept.restrict(logits_CV, rows, target_T[rows])
            if kept is not None:
                logits_CV = kept.logits_CV
            temperature_C1 = temperature_T1[rows]
            # g · (1[target] − p) / temperature = (g / −temperature) · (p − 1[target]), and likewise for the entropy.
            grad_logp_C1, grad_entropy_C1 = (grad_T[rows, None] / -temperature_C1 for grad_T in grads_T)
            index_C1 = target_T[rows, None]
            entropy_C1 = (entropy_T[rows, None], grad_entropy_C1) if ctx.entropy_gradient else None
            narrow_CV, target_C1 = grad_logits(
                logits_CV, norm_T[rows, None], index_C1, grad_logp_C1, entropy_C1, temperature_C1, weight_VD.dtype
            )
            # Free the logits before the products below, which need memory.
            del logits_CV
            narrow_CV.scatter_(-1, index_C1, target_C1)
            # Carry the gradient back through the kept sets, and then through the model's change of logits.
            if kept is not None:
                grad_CW = narrow_CV.gather(-1, kept.token_CW) * kept.slope_CW
                narrow_CV.scatter_(-1, kept.token_CW, grad_CW.to(narrow_CV.dtype))
            if ctx.change != UNCHANGED:
                narrow_CV *= slope
            if grad_bias_V is not None:
                grad_bias_V += narrow_CV.sum(0, dtype=grad_bias_V.dtype)
            if grad_hidden_TD is not None:
                torch.mm(narrow_CV, weight_VD, out=grad_hidden_TD[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, narrow_CV.T, hidden_TD[rows])
        # The other seven arguments of `forward` have no gradient.
        sums = (grad_hidden_TD, grad_weight_VD, grad_bias_V)
        grads = [None if total is None else total.to(weight_VD.dtype) for total in sums]
        return (*grads, *[None] * 7)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return float32, or the tensor's dtype if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(number_T: Tensor, weight_VD: Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Divide the positions into chunks, and yield the slice of each chunk.

    The logits of a chunk fit into `chunk_bytes`, but a chunk has at least one position. Both passes must get equal
    chunks. `number_T` is any tensor with one number for each position, in the dtype to which the logits are converted.
    Only its length and dtype are used.
    """
    rows = max(chunk_bytes // (len(weight_VD) * number_T.element_size()), 1)
    for start in range(0, len(number_T), rows):
        yield slice(start, start + rows)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function that multiplies hidden states by the output layer's weight and adds its bias."""


def _wide_product(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return [C, V]: logits in float32 from factors of a smaller dtype.

    `model.head_dtype = "float32"` selects this. The logits are not rounded to the smaller dtype, in which close logits
    would become equal. A GPU needs no copy of the factors for this; on a CPU they are cast. `bias_V` may be None.
    """
    if hidden_CD.is_cuda:
        logits_CV = torch.mm(hidden_CD, weight_VD.T, out_dtype=torch.float32)
        return logits_CV if bias_V is None else logits_CV.add_(bias_V)
    return linear(hidden_CD.float(), weight_VD.float(), None if bias_V is None else bias_V.float())


def apply_change(logits_CV: Tensor, change: LogitChange) -> Tensor:
    """Return [C, V]: the logits, scaled and capped as the model does it, in float32 or wider.

    If the model does not change its logits, the given tensor is returned as it is.
    """
    if change == UNCHANGED:
        return logits_CV
    scaled_CV = logits_CV.to(_wide(logits_CV)) * change.scale
    return scaled_CV if change.cap is None else scaled_CV.div_(change.cap).tanh_().mul_(change.cap)


def _change_slope(changed_CV: Tensor, change: LogitChange) -> Tensor | float:
    """Return the derivative of the changed logits with respect to the logits of the output layer.

    With a cap, y = cap · tanh(scale · x / cap), so dy/dx = scale · (1 − (y / cap)²).
    """
    return change.scale if change.cap is None else (1 - (changed_CV / change.cap).square_()).mul_(change.scale)


def _scaled_logits(logits_CV: Tensor, temperature_C1: Tensor) -> Tensor:
    """Return [C, V]: logits / temperature, in float32 or wider. The memory of the logits is reused if it has this
    dtype."""
    if torch.compiler.is_compiling():
        return logits_CV.to(_wide(logits_CV)) / temperature_C1
    return logits_CV.to(_wide(logits_CV)).div_(temperature_C1)


def _reduce_logits(logits_CV: Tensor, target_C: Tensor, temperature_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [C]: log-prob of the target, norm = scaled logit − log-prob, and entropy.

    The norm, the log of the sum of exp(scaled logit), is all that the backward pass needs of the softmax. `logits_CV`
    may be overwritten, so that no second tensor of this size is needed. `temperature_C1` is the divisor of the logits.
    """
    scaled_CV = _scaled_logits(logits_CV, temperature_C1)
    # Subtract the largest logit, so that large logits do not cost digits of the small differences between them.
    peak_C = scaled_CV.amax(-1)
    scaled_CV -= peak_C[:, None]
    share_CV = scaled_CV.exp()
    total_C = share_CV.sum(-1)
    log_total_C = total_C.log()
    logp_C = scaled_CV.gather(-1, target_C[:, None])[:, 0] - log_total_C
    share_CV *= scaled_CV
    return logp_C, peak_C + log_total_C, log_total_C - share_CV.sum(-1) / total_C


def _grad_logits(
    logits_CV: Tensor,
    norm_C1: Tensor,
    index_C1: Tensor,
    grad_logp_C1: Tensor,
    entropy_C1: tuple[Tensor, Tensor] | None,
    temperature_C1: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the logits in two tensors: [C, V] without the term 1[target], and [C, 1] with it.

    The second tensor has the entry of the target, which the caller writes into the first tensor, after the cast to
    `dtype`.

    Args:
        logits_CV: the logits, which may be overwritten.
        norm_C1: norm of each position, from `_reduce_logits`.
        index_C1: the targets.
        grad_logp_C1: gradient of the loss by log p[target], divided by −temperature.
        entropy_C1: the entropy, and the gradient of the loss by it, divided by −temperature. None: no gradient.
        temperature_C1: divisor of the logits.
        dtype: dtype of the results.
    """
    log_share_CV = _scaled_logits(logits_CV, temperature_C1)
    log_share_CV -= norm_C1
    if entropy_C1 is None:
        grad_CV = log_share_CV.exp_()
        grad_CV *= grad_logp_C1
    else:
        # p · ((log p + H) · g_entropy + g_logp) / −temperature, by the formulas at the top of the file.
        entropy, grad_entropy = entropy_C1
        grad_CV = log_share_CV.exp()
        log_share_CV += entropy
        log_share_CV *= grad_entropy
        log_share_CV += grad_logp_C1
        grad_CV *= log_share_CV
    return grad_CV.to(dtype), (grad_CV.gather(-1, index_C1) - grad_logp_C1).to(dtype)


def _add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """Add a matrix product to a sum of the same or a wider dtype, in place."""
    if sum_VD.dtype == left_VC.dtype:
        sum_VD.addmm_(left_VC, right_CD)
    elif sum_VD.is_cuda:
        torch.addmm(sum_VD, left_VC, right_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += left_VC @ right_CD
