"""torch's attention kernels, called so that they also return the log of the sum of weights and accept merged outputs.

`flash.trainer.model.attention` computes attention in parts and merges them, for which it needs these sums. torch's
public function `scaled_dot_product_attention` does not return them, so the kernels are called directly.

`lse` is the log-sum-exp of a query's scores, the log of the sum of its weights.

Shape legend: S = sequences, H = heads of queries, G = heads of keys, Q = query tokens, K = key tokens, M = tokens of
all sequences, D = width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

TOUCHED = (
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch:ops.aten._scaled_dot_product_flash_attention",
    "torch:ops.aten._scaled_dot_product_flash_attention_backward",
    "torch:ops.aten._flash_attention_forward",
    "torch:ops.aten._flash_attention_backward",
    "torch:ops.aten._scaled_dot_product_efficient_attention",
    "torch:ops.aten._scaled_dot_product_efficient_attention_backward",
)
"""Attributes of torch that this module uses, in the form of `flash.foreign.vllm.TOUCHED`."""


class AttentionOptions(NamedTuple):
    """Mask and scale of one attention call."""

    mask: Tensor | None
    """bool, [S, 1, Q, K]: True where the query sees the key. None: `causal` decides."""
    causal: bool
    """Used without a mask. True: each query sees the keys up to its own place. False: each query sees all keys."""
    scale: float
    """Factor of the products of queries and keys."""
    cap: float | None = None
    """Scores become cap · tanh(score / cap). No kernel of this module supports a cap."""


WIDTHS = 8
"""GPU kernels require head widths that are a multiple of this, and mask rows that are a multiple of twice this."""
WIDEST_FLASH = 256
"""Largest head width of the flash kernel, the fastest one on a GPU."""
FLASH_SINCE = (8, 0)
"""Lowest compute capability of GPUs with the flash kernel."""
SUMS = 32
"""The memory-efficient kernel requires the sums of weights padded to a multiple of this many tokens."""


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the attention output, [S, H, Q, D], and the log of the sum of weights, float32 [S, H, Q].

    Queries are [S, H, Q, D]; keys and values are [S, G, K, D], where H is a multiple of G. The D of values may differ.
    A query that sees no key gets an output of zeros and a log-sum of −inf.
    """
    import torch

    wide = [_to_width(one, (query, value)) for one in (query, key, value)]
    mask, causal = _added(options.mask, query), options.causal and options.mask is None
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        answer, lse = kernels._scaled_dot_product_flash_attention_for_cpu(
            *wide, 0.0, causal, attn_mask=mask, scale=options.scale
        )
    elif _takes_flash(wide[0], mask):
        answer, lse, *_ = kernels._scaled_dot_product_flash_attention(*wide, 0.0, causal, False, scale=options.scale)
    else:
        answer, lse, *_ = kernels._scaled_dot_product_efficient_attention(
            *_every_head(wide), mask, True, 0.0, causal, scale=options.scale
        )
        lse = lse[..., : query.shape[2]]
    if options.mask is not None:
        blind = ~options.mask.any(-1)
        answer, lse = answer.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
    return answer[..., : value.shape[-1]], lse


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, answer: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    If each token's attention is computed in several parts, `answer` and `lse` must be merged over all parts. The
    result is then this part's share of the whole gradient.
    """
    import torch
    from torch.nn.functional import pad

    grad, answer, *wide = (_to_width(one, (query, value)) for one in (grad, answer, query, key, value))
    mask, causal = _added(options.mask, query), options.causal and options.mask is None
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        grads = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *wide, answer, lse, 0.0, causal, attn_mask=mask, scale=options.scale
        )
    elif _takes_flash(wide[0], mask):
        none = torch.zeros((), dtype=torch.uint64, device=query.device)
        grads = kernels._scaled_dot_product_flash_attention_backward(
            grad, *wide, answer, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal, none, none,
            scale=options.scale,
        )  # fmt: skip
    else:
        none = torch.zeros((), dtype=torch.int64, device=query.device)
        sums = pad(lse, (0, -query.shape[2] % SUMS), value=torch.inf).contiguous()
        grads = kernels._scaled_dot_product_efficient_attention_backward(
            grad, *_every_head(wide), mask, _by_token(answer), sums, none, none, 0.0, [True, True, True, False],
            causal, scale=options.scale,
        )[:3]  # fmt: skip
        groups = (1, query.shape[1] // key.shape[1], query.shape[1] // value.shape[1])
        grads = [one.unflatten(1, (-1, count)).sum(2) for one, count in zip(grads, groups, strict=True)]
    return tuple(one[..., : given.shape[-1]] for one, given in zip(grads, (query, key, value), strict=True))


def takes_ragged(query: Tensor, value: Tensor) -> bool:
    """Return True if `attend_ragged` supports these states: queries and values of [M, H, D] on a GPU."""
    wide = _to_width(query[:0], (query, value))
    return query.device.type == "cuda" and _takes_flash(wide, None)


class RaggedSequences(NamedTuple):
    """Limits of sequences laid one after another, for queries and for keys."""

    begins: tuple[Tensor, Tensor]
    """For queries and for keys: int32 [S + 1], the place of each sequence's first token, then the end of the last
    sequence."""
    most: tuple[int, int]
    """For queries and for keys: number of tokens of the longest sequence."""
    window: int | None = None
    """Number of tokens that each query sees, itself included; None: all. Only causal attention may have a window."""


def attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, sequences: RaggedSequences
) -> tuple[Tensor, Tensor]:
    """Return the attention output [M, H, D] and the log of the sum of weights, float32 [M, H].

    The kernel exists only on GPUs (`takes_ragged`). It needs no padding and supports neither a mask nor a cap.
    """
    import torch

    wide = [_to_width(one, (query, value)).contiguous() for one in (query, key, value)]
    answer, lse, *_ = torch.ops.aten._flash_attention_forward(
        *wide,
        *sequences.begins,
        *sequences.most,
        0.0,
        options.causal,
        False,
        scale=options.scale,
        **_windows(sequences),
    )
    return answer[..., : value.shape[-1]], lse.transpose(0, 1)


def attend_ragged_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    answer: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    sequences: RaggedSequences,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `attend_ragged`.

    If each token's attention is computed in several parts, `answer` and `lse` must be merged over all parts.
    """
    import torch

    grad, answer, *wide = (
        _to_width(one.to(query.dtype), (query, value)).contiguous() for one in (grad, answer, query, key, value)
    )
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad, *wide, answer, lse.transpose(0, 1).contiguous(), *sequences.begins, *sequences.most, 0.0, options.causal,
        none, none[:0], scale=options.scale, **_windows(sequences),
    )  # fmt: skip
    return tuple(one[..., : given.shape[-1]] for one, given in zip(grads, (query, key, value), strict=True))


def _windows(sequences: RaggedSequences) -> dict[str, int]:
    """Return the kernel's arguments for a window, which count the tokens before and after a query."""
    window = sequences.window
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _takes_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Return True if the flash kernel supports these queries: 16-bit, of a permitted width, and without a mask."""
    import torch

    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < FLASH_SINCE:
        return False
    return mask is None and query.element_size() == 2 and query.shape[-1] <= WIDEST_FLASH


def _by_token(answer: Tensor) -> Tensor:
    """Return the tensor with the heads of one token adjacent in memory, which the kernel assumes without a check."""
    return answer.transpose(1, 2).contiguous().transpose(1, 2)


def _to_width(states: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """Pad each head with zeros to the common width that the kernels require."""
    from torch.nn.functional import pad

    most = max(one.shape[-1] for one in others)
    most += 0 if states.device.type == "cpu" else -most % WIDTHS
    return pad(states, (0, most - states.shape[-1])) if states.shape[-1] < most else states


def _every_head(states: list[Tensor]) -> list[Tensor]:
    """Repeat the heads of keys and values so that there is one for each head of queries."""
    heads = states[0].shape[1]
    return [one.repeat_interleave(heads // one.shape[1], 1) if one.shape[1] < heads else one for one in states]


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the mask as numbers to add to scores, for all heads, with rows aligned as the kernels require."""
    import torch

    if mask is None:
        return None
    *shape, keys = mask.shape
    padded = query.new_zeros(*shape, keys + -keys % (2 * WIDTHS))
    added = padded[..., :keys].masked_fill_(~mask, -torch.inf)
    return added.expand(-1, query.shape[1], -1, -1)
