"""torch's kernels of attention, called so that they tell the sums of weights, too, and take merged answers.

Shape legend: S = sequences, H = heads, G = heads of keys, Q = tokens that ask, K = tokens that are asked, M = tokens of
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
"""In the form of `flash.foreign.vllm.TOUCHED`."""


class Attention(NamedTuple):
    """Who sees whom, and how scores are scaled."""

    mask: Tensor | None
    """bool, [S, 1, Q, K]."""
    causal: bool
    """Without a mask: each sees those up to its own place."""
    scale: float
    cap: float | None = None
    """Scores become cap · tanh(score / cap), of which no kernel knows."""


WIDTHS = 8
"""Kernels on a GPU want heads of a multiple of so many numbers, and masks with rows of twice as many."""
WIDEST_FLASH = 256
"""The widest heads of the fastest kernel on a GPU."""
FLASH_SINCE = (8, 0)
"""The first capability of GPUs that have it."""
SUMS = 32
"""One kernel wants the sums of its weights for a multiple of so many tokens."""


def attend(query: Tensor, key: Tensor, value: Tensor, how: Attention) -> tuple[Tensor, Tensor]:
    """What tokens are answered, [S, H, Q, D], and the logarithm of the sum of their weights, float32 [S, H, Q].

    Keys and values: [S, G, K, D], where H is a multiple of G; the D of values may be another one. -inf: sees nothing,
    and is answered zeros.
    """
    import torch

    wide = [_to_width(one, (query, value)) for one in (query, key, value)]
    mask, causal = _added(how.mask, query), how.causal and how.mask is None
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        answer, weight = kernels._scaled_dot_product_flash_attention_for_cpu(
            *wide, 0.0, causal, attn_mask=mask, scale=how.scale
        )
    elif _takes_flash(wide[0], mask):
        answer, weight, *_ = kernels._scaled_dot_product_flash_attention(*wide, 0.0, causal, False, scale=how.scale)
    else:
        answer, weight, *_ = kernels._scaled_dot_product_efficient_attention(
            *_every_head(wide), mask, True, 0.0, causal, scale=how.scale
        )
        weight = weight[..., : query.shape[2]]
    if how.mask is not None:
        blind = ~how.mask.any(-1)
        answer, weight = answer.masked_fill(blind[..., None], 0.0), weight.masked_fill(blind, -torch.inf)
    return answer[..., : value.shape[-1]], weight


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, answer: Tensor, weight: Tensor, how: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, where `answer` and `weight` may be over more keys than these."""
    import torch
    from torch.nn.functional import pad

    grad, answer, *wide = (_to_width(one, (query, value)) for one in (grad, answer, query, key, value))
    mask, causal = _added(how.mask, query), how.causal and how.mask is None
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        grads = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *wide, answer, weight, 0.0, causal, attn_mask=mask, scale=how.scale
        )
    elif _takes_flash(wide[0], mask):
        none = torch.zeros((), dtype=torch.uint64, device=query.device)
        grads = kernels._scaled_dot_product_flash_attention_backward(
            grad, *wide, answer, weight.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal, none, none,
            scale=how.scale,
        )  # fmt: skip
    else:
        none = torch.zeros((), dtype=torch.int64, device=query.device)
        sums = pad(weight, (0, -query.shape[2] % SUMS), value=torch.inf).contiguous()
        grads = kernels._scaled_dot_product_efficient_attention_backward(
            grad, *_every_head(wide), mask, _by_token(answer), sums, none, none, 0.0, [True, True, True, False],
            causal, scale=how.scale,
        )[:3]  # fmt: skip
        groups = (1, query.shape[1] // key.shape[1], query.shape[1] // value.shape[1])
        grads = [one.unflatten(1, (-1, count)).sum(2) for one, count in zip(grads, groups, strict=True)]
    return tuple(one[..., : given.shape[-1]] for one, given in zip(grads, (query, key, value), strict=True))


def takes_ragged(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_ragged` has a kernel for these: queries and values of [M, H, D]."""
    wide = _to_width(query[:0], (query, value))
    return query.device.type == "cuda" and _takes_flash(wide, None)


class RaggedSequences(NamedTuple):
    """One after the other, those that ask and those that are asked."""

    begins: tuple[Tensor, Tensor]
    """int32, [S + 1] each: where the tokens of each begin, and the last end."""
    most: tuple[int, int]
    """Tokens of the longest."""
    window: int | None = None
    """Each sees so many, its own among them; causal ones alone have one."""


def attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, how: Attention, sequences: RaggedSequences
) -> tuple[Tensor, Tensor]:
    """As `attend`, without padding, mask or cap, on a GPU: [M, H, D], and float32 [M, H]."""
    import torch

    wide = [_to_width(one, (query, value)).contiguous() for one in (query, key, value)]
    answer, weight, *_ = torch.ops.aten._flash_attention_forward(
        *wide, *sequences.begins, *sequences.most, 0.0, how.causal, False, scale=how.scale, **_windows(sequences)
    )
    return answer[..., : value.shape[-1]], weight.transpose(0, 1)


def attend_ragged_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    answer: Tensor,
    weight: Tensor,
    how: Attention,
    sequences: RaggedSequences,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend_backward`, of the same."""
    import torch

    grad, answer, *wide = (
        _to_width(one.to(query.dtype), (query, value)).contiguous() for one in (grad, answer, query, key, value)
    )
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad, *wide, answer, weight.transpose(0, 1).contiguous(), *sequences.begins, *sequences.most, 0.0, how.causal,
        none, none[:0], scale=how.scale, **_windows(sequences),
    )  # fmt: skip
    return tuple(one[..., : given.shape[-1]] for one, given in zip(grads, (query, key, value), strict=True))


def _windows(sequences: RaggedSequences) -> dict[str, int]:
    window = sequences.window
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _takes_flash(query: Tensor, mask: Tensor | None) -> bool:
    import torch

    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < FLASH_SINCE:
        return False
    return mask is None and query.element_size() == 2 and query.shape[-1] <= WIDEST_FLASH


def _by_token(answer: Tensor) -> Tensor:
    """With the heads of a token beside each other in memory: one kernel takes that for granted, unasked."""
    return answer.transpose(1, 2).contiguous().transpose(1, 2)


def _to_width(states: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """With zeros at the end of each head, to the width that kernels want of all of them."""
    from torch.nn.functional import pad

    most = max(one.shape[-1] for one in others)
    most += 0 if states.device.type == "cpu" else -most % WIDTHS
    return pad(states, (0, most - states.shape[-1])) if states.shape[-1] < most else states


def _every_head(states: list[Tensor]) -> list[Tensor]:
    """Keys and values once for each head that asks."""
    heads = states[0].shape[1]
    return [one.repeat_interleave(heads // one.shape[1], 1) if one.shape[1] < heads else one for one in states]


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What a mask adds to scores, for all heads; its rows begin where kernels want them."""
    import torch

    if mask is None:
        return None
    *shape, asked = mask.shape
    room = query.new_zeros(*shape, asked + -asked % (2 * WIDTHS))
    added = room[..., :asked].masked_fill_(~mask, -torch.inf)
    return added.expand(-1, query.shape[1], -1, -1)
