"""Log-probs and entropies of chosen tokens, with the output layer inside.

The logits of a micro-batch, positions × vocabulary, are often larger than all its other activations together. Here
they exist for a chunk of positions at a time: a chunk's logits are made, reduced to numbers per position and dropped;
the backward pass makes them again. Neither the logits of all positions nor their gradient is ever held.

With z = logits / temperature, p = softmax(z) and H = −Σ p log p:
d log p[target] / dz = 1[target] − p  and  dH / dz = −p (log p + H).
Tokens that could not have been drawn have z = −∞, near enough: p and its part of every sum and gradient are 0. To the
logits of those that could have been, what was done when they were drawn is done here.

Shape legend: T = predicted tokens, C = tokens of one chunk, V = vocabulary, D = width of a hidden state, N = kept
tokens of all positions, W = the most of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear
from transformers import PreTrainedModel

from flash.branches import Int64Array
from flash.errors import ConfigError
from flash.foreign.transformers import LogitChange, logit_change
from flash.trainer.model.fused import fused
from flash.trainer.model.routing_replay import RoutingReplay
from flash.trainer.packing import KeptTokens

CHUNK_BYTES = 256 * 2**20
"""Size of one chunk's logits in float32; up to three tensors of it are alive at once. Every chunk reads the whole
weight and adds to its whole gradient, so it needs some hundred rows to keep the processor busy: for a vocabulary of
150,000 these are 440."""


UNCHANGED = LogitChange()


LEFT_OUT = -1e9
"""The logit of a token that could not have been drawn. Finite, since 0 · ∞ is no number."""


class KeptLogits(NamedTuple):
    """What `KeptSets.only` finds."""

    logits_CV: Tensor
    token_CW: Tensor
    """The tokens that were kept, some of them twice."""
    slope_CW: Tensor
    """By how much their logits go up where those of the output layer do."""


@dataclass(frozen=True)
class KeptSets:
    """The tokens that could have been drawn at each position, as `flash.trainer.packing.KeptTokens` has them."""

    token_N: Tensor
    bias_N: Tensor
    penalty_N: Tensor
    count_T: Tensor
    start_T: Tensor
    """int64: where the tokens of each position begin."""
    most: int
    """W."""

    @classmethod
    def of(cls, kept: KeptTokens) -> KeptSets | None:
        """None: everywhere all."""
        if not len(kept.token_N):
            return None
        token_N, bias_N, penalty_N, count_T = (
            torch.from_numpy(each) for each in (kept.token_N, kept.bias_N, kept.penalty_N, kept.count_T)
        )
        return cls(token_N, bias_N, penalty_N, count_T, count_T.cumsum(0) - count_T, int(kept.count_T.max()))

    def at(self, place_T: Int64Array, device: torch.device) -> KeptSets:
        """Those of some of the positions, elsewhere."""
        some_T = torch.from_numpy(place_T)
        token_N, bias_N, penalty_N, count_T, start_T = (
            each.to(device)
            for each in (self.token_N, self.bias_N, self.penalty_N, self.count_T[some_T], self.start_T[some_T])
        )
        return KeptSets(token_N, bias_N, penalty_N, count_T, start_T, self.most)

    def only(self, logits_CV: Tensor, rows: slice, target_C: Tensor) -> KeptLogits:
        """The logits of these positions, wide: those of kept tokens as they were drawn from, all others `LEFT_OUT`.

        In their memory, where it can be.
        """
        some_C1, start_C1 = self.count_T[rows, None] > 0, self.start_T[rows, None]
        place_W = torch.arange(self.most, device=self.count_T.device)
        # What is too many of a position is its target once more; one that was drawn from all has that alone.
        place_CW = (start_C1 + place_W).where(place_W < self.count_T[rows, None], start_C1)
        place_CW.clamp_(max=len(self.token_N) - 1)
        token_CW = self.token_N[place_CW].where(some_C1, target_C[:, None])
        wide_CV = logits_CV.to(_wide(logits_CV))
        bias_CW = self.bias_N[place_CW].where(some_C1, 0.0).to(wide_CV)
        penalty_CW = self.penalty_N[place_CW].where(some_C1, 1.0).to(wide_CV)
        kept_CW = wide_CV.gather(-1, token_CW) + bias_CW
        slope_CW = penalty_CW.where(kept_CW <= 0, 1 / penalty_CW)
        only_CV = wide_CV.masked_fill_(some_C1, LEFT_OUT).scatter_(-1, token_CW, kept_CW * slope_CW)
        return KeptLogits(only_CV, token_CW, slope_CW)


@dataclass
class Selection:
    """Which numbers the output layer is to give in one forward pass."""

    target_T: Tensor
    """int64: the token at each position whose log-prob is asked for."""
    temperature_T: Tensor
    """Float: which logits are divided by at each position."""
    entropy_gradient: bool
    kept: KeptSets | None = None
    answer: Tensor | None = None
    """[1, T, 2]: log-prob and entropy, once the layer has run."""


class OutputLayer(nn.Module):
    """A linear output layer that answers with log-probs and entropies in place of logits.

    It holds the parameters of the layer it replaces, under the same names. The work is done in `forward`, which runs
    inside the model's, where FSDP has gathered the parameters.
    """

    def __init__(
        self, layer: nn.Linear, *, wide: bool, context: DeviceMesh | None = None, change: LogitChange = UNCHANGED
    ) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.wide = wide
        """Whether logits are made in float32 from factors of less."""
        self.context = context
        """The ranks that rows are over, where they are; each answers for its own slice."""
        self.change = change
        """What the model would do to logits, and is kept from."""
        self.chunk_bytes = CHUNK_BYTES
        self.replay: RoutingReplay | None = None
        """Where the model takes the experts that engines chose."""
        self._selection: Selection | None = None

    @contextmanager
    def selecting(self, selection: Selection) -> Generator[None]:
        """Calls inside answer with what is selected; there may be none outside."""
        self._selection = selection
        try:
            yield
        finally:
            self._selection = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, T, D] to [1, T, 2]."""
        selection = self._selection
        assert selection is not None, "call the model through token_logprobs"
        assert hidden.shape[1] == len(selection.target_T), "the model hands on other positions than are asked for"
        logp_T, entropy_T = selected_logprobs(
            hidden[0],
            self.weight,
            self.bias,
            selection.target_T,
            temperature_T=selection.temperature_T,
            kept=selection.kept,
            entropy_gradient=selection.entropy_gradient,
            wide=self.wide,
            change=self.change,
            chunk_bytes=self.chunk_bytes,
        )
        # No view: FSDP warns of outputs that are views.
        selection.answer = torch.stack((logp_T[None], entropy_T[None]), dim=-1)
        return selection.answer


def replace_output_layer(model: PreTrainedModel, *, wide: bool, context: DeviceMesh | None = None) -> None:
    """Give a language model an `OutputLayer` with its own parameters. A model without an output layer stays as it is.

    `wide`: logits are made in float32, whatever the dtype of the forward pass. `context`: the ranks that rows are over.

    Raises:
        ConfigError: the output layer is not a plain linear one.
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
    """Log-prob of each target under p = softmax((hidden · weightᵀ + bias) / temperature), and the entropy of p in nats.

    p is over the tokens that are `kept`, where that says something. What a model does to logits, the `change`, comes
    before all that is done to them when tokens are drawn.

    The product is made in the dtype of its factors, or, where it is to be `wide`, in float32; everything after it is in
    float32 (float64 for float64 factors). The products of the backward pass are in the dtype of the factors. The
    entropy has a gradient only where asked for.
    """
    return _SelectedLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_TD, weight_VD, bias_V, target_T, temperature_T, kept, entropy_gradient, wide, change, chunk_bytes
    )


class _SelectedLogprobs(torch.autograd.Function):
    """See `selected_logprobs`; the formulas are at the top of this file."""

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
        logp_T = hidden_TD.new_empty(len(target_T), dtype=_wide(hidden_TD))
        norm_T, entropy_T = torch.empty_like(logp_T), torch.empty_like(logp_T)
        temperature_T1 = temperature_T.to(logp_T)[:, None]
        product = _wide_product if wide and weight_VD.dtype != logp_T.dtype else linear
        answers = fused(_answers, cuda=hidden_TD.is_cuda)
        for rows in _chunks(logp_T, weight_VD, chunk_bytes):
            logits_CV = changed(product(hidden_TD[rows], weight_VD, bias_V), change)
            if kept is not None:
                logits_CV = kept.only(logits_CV, rows, target_T[rows]).logits_CV
            logp_T[rows], norm_T[rows], entropy_T[rows] = answers(logits_CV, target_T[rows], temperature_T1[rows])
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T, temperature_T1, norm_T, entropy_T)
        ctx.entropy_gradient, ctx.chunk_bytes = entropy_gradient, chunk_bytes
        ctx.product, ctx.kept, ctx.change = product, kept, change
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads_T: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_TD, weight_VD, bias_V, target_T, temperature_T1, norm_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        # Sums over all tokens, so they are wide; the sum over one chunk is the matrix product's own.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=norm_T.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=norm_T.dtype) if needs_bias else None
        grad_logits = fused(_grad_logits, cuda=hidden_TD.is_cuda)
        for rows in _chunks(norm_T, weight_VD, ctx.chunk_bytes):
            logits_CV = changed(ctx.product(hidden_TD[rows], weight_VD, bias_V), ctx.change)
            slope = _slope(logits_CV, ctx.change)
            kept = None if ctx.kept is None else ctx.kept.only(logits_CV, rows, target_T[rows])
            if kept is not None:
                logits_CV = kept.logits_CV
            temperature_C1 = temperature_T1[rows]
            grad_logp_C1, grad_entropy_C1 = (grad_T[rows, None] / -temperature_C1 for grad_T in grads_T)
            index_C1 = target_T[rows, None]
            entropy_C1 = (entropy_T[rows, None], grad_entropy_C1) if ctx.entropy_gradient else None
            narrow_CV, target_C1 = grad_logits(
                logits_CV, norm_T[rows, None], index_C1, grad_logp_C1, entropy_C1, temperature_C1, weight_VD.dtype
            )
            del logits_CV
            narrow_CV.scatter_(-1, index_C1, target_C1)
            if kept is not None:
                drawn_CW = narrow_CV.gather(-1, kept.token_CW) * kept.slope_CW
                narrow_CV.scatter_(-1, kept.token_CW, drawn_CW.to(narrow_CV.dtype))
            if ctx.change != UNCHANGED:
                narrow_CV *= slope
            if grad_bias_V is not None:
                grad_bias_V += narrow_CV.sum(0, dtype=grad_bias_V.dtype)
            if grad_hidden_TD is not None:
                torch.mm(narrow_CV, weight_VD, out=grad_hidden_TD[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, narrow_CV.T, hidden_TD[rows])
        sums = (grad_hidden_TD, grad_weight_VD, grad_bias_V)
        grads = [None if total is None else total.to(weight_VD.dtype) for total in sums]
        return (*grads, *[None] * 7)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(number_T: Tensor, weight_VD: Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Rows of each chunk: as many as fit, at least one."""
    rows = max(chunk_bytes // (len(weight_VD) * number_T.element_size()), 1)
    for start in range(0, len(number_T), rows):
        yield slice(start, start + rows)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of hidden states and the output layer's weight, its bias added."""


def _wide_product(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """[C, V] in float32, from factors of less, none of whose products is rounded."""
    if hidden_CD.is_cuda:
        logits_CV = torch.mm(hidden_CD, weight_VD.T, out_dtype=torch.float32)
        return logits_CV if bias_V is None else logits_CV.add_(bias_V)
    return linear(hidden_CD.float(), weight_VD.float(), None if bias_V is None else bias_V.float())


def changed(logits_CV: Tensor, change: LogitChange) -> Tensor:
    """What a model makes of the logits of its output layer, wide; without a change, the same tensor."""
    if change == UNCHANGED:
        return logits_CV
    scaled_CV = logits_CV.to(_wide(logits_CV)) * change.scale
    return scaled_CV if change.cap is None else scaled_CV.div_(change.cap).tanh_().mul_(change.cap)


def _slope(changed_CV: Tensor, change: LogitChange) -> Tensor | float:
    """By how much they go up where those of the output layer do."""
    return change.scale if change.cap is None else (1 - (changed_CV / change.cap).square_()).mul_(change.scale)


def _scaled_logits(logits_CV: Tensor, temperature_C1: Tensor) -> Tensor:
    """[C, V] logits / temperature, wide; in the memory of the logits where it can be."""
    if torch.compiler.is_compiling():
        return logits_CV.to(_wide(logits_CV)) / temperature_C1
    return logits_CV.to(_wide(logits_CV)).div_(temperature_C1)


def _answers(logits_CV: Tensor, target_C: Tensor, temperature_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[C] each: log-prob of the target, what a scaled logit exceeds its log-prob by, and entropy."""
    scaled_CV = _scaled_logits(logits_CV, temperature_C1)
    # Relative to the largest: sums of small numbers keep the digits that the logits' size would cost.
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
    """[C, V], but for what is at the targets, and [C, 1], what is there. `entropy_C1`: the entropy and its gradient."""
    log_share_CV = _scaled_logits(logits_CV, temperature_C1)
    log_share_CV -= norm_C1
    if entropy_C1 is None:
        grad_CV = log_share_CV.exp_()
        grad_CV *= grad_logp_C1
    else:
        entropy, grad_entropy = entropy_C1
        grad_CV = log_share_CV.exp()
        log_share_CV += entropy
        log_share_CV *= grad_entropy
        log_share_CV += grad_logp_C1
        grad_CV *= log_share_CV
    return grad_CV.to(dtype), (grad_CV.gather(-1, index_C1) - grad_logp_C1).to(dtype)


def _add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """Add a matrix product to a wide sum."""
    if sum_VD.dtype == left_VC.dtype:
        sum_VD.addmm_(left_VC, right_CD)
    elif sum_VD.is_cuda:
        torch.addmm(sum_VD, left_VC, right_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += left_VC @ right_CD
