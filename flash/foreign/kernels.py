"""torch's attention kernels, called directly, because attention is computed in parts here.

`flash.trainer.model.attention` divides the keys that a query sees into parts, for example a shared prefix and the rest.
It computes attention to each part, and merges the outputs. For the merge it needs the sum of the attention weights of
each part. torch's public function `scaled_dot_product_attention` does not return these sums, but the kernels do.

`lse` is the log-sum-exp of a query's scores, the log of the sum of its weights. In the backward pass the kernels get
the merged output and `lse` of all parts, from which each computes its share of the gradient.

There are three kernels: one for the CPU; *flash*, the fastest on a GPU, for 16-bit numbers without a mask; and the
*memory-efficient* kernel for all other cases on a GPU. `attend_ragged` calls flash for sequences of different lengths
that lie one after another without padding.

Shape legend: S = sequences, H = heads of queries, G = heads of keys, Q = query tokens, K = key tokens, M, N = tokens
of all sequences of queries, of keys, D = width of a head.
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
"""Attributes of torch that this module uses, as `module:Class.attribute`. A test looks for each of them."""


class AttentionOptions(NamedTuple):
    """Mask and scale of one attention call."""

    mask: Tensor | None
    """Mask, bool [S, 1, Q, K]: True where the query sees the key. None: `causal` decides."""
    causal: bool
    """True if each query sees the keys up to its own position; False if it sees all keys. Used only without a mask."""
    scale: float
    """Factor of the products of queries and keys."""
    cap: float | None = None
    """Bound on scores, which become cap · tanh(score / cap); None: no bound. The kernels ignore it, so the caller must
    compute such attention itself."""


WIDTHS = 8
"""GPU kernels require head widths that are a multiple of this number, and rows of masks that are a multiple of twice
this number."""
WIDEST_FLASH = 256
"""Largest head width of the flash kernel, the fastest one on a GPU."""
FLASH_SINCE = (8, 0)
"""Lowest compute capability of GPUs with the flash kernel."""
LSE_MULTIPLE = 32
"""Number of tokens. The memory-efficient kernel requires `lse` padded to a multiple of it."""


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the attention output, [S, H, Q, D], and the log of the sum of weights (`lse`), float32 [S, H, Q].

    `flash.trainer.model.attention` calls this in the forward pass, for each part of the keys. Queries are [S, H, Q, D];
    keys and values are [S, G, K, D], where H is a multiple of G. The D of values may differ. A query that sees no key
    gets an output of zeros and a log-sum of −inf, so that it adds nothing in a merge.
    """
    import torch

    wide = [_pad_heads(one, (query, value)) for one in (query, key, value)]  # the three tensors with heads of one width
    mask, causal = _additive_mask(options.mask, query), options.causal and options.mask is None
    kernels = torch.ops.aten
    # The number 0.0 in each call is the share of dropout.
    if query.device.type == "cpu":
        output, lse = kernels._scaled_dot_product_flash_attention_for_cpu(
            *wide, 0.0, causal, attn_mask=mask, scale=options.scale
        )
    elif _takes_flash(wide[0], mask):
        output, lse, *_ = kernels._scaled_dot_product_flash_attention(*wide, 0.0, causal, False, scale=options.scale)
    else:
        output, lse, *_ = kernels._scaled_dot_product_efficient_attention(
            *_repeat_heads(wide), mask, True, 0.0, causal, scale=options.scale
        )
        # This kernel returns `lse` with padding (LSE_MULTIPLE).
        lse = lse[..., : query.shape[2]]
    if options.mask is not None:
        # Such a query must add nothing in a merge, whatever the kernel returns for it.
        sees_nothing = ~options.mask.any(-1)
        output, lse = output.masked_fill(sees_nothing[..., None], 0.0), lse.masked_fill(sees_nothing, -torch.inf)
    return output[..., : value.shape[-1]], lse


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `attend`, given `grad`, the gradient of the output.

    Called in the backward pass, for each part of the keys. `output` and `lse` are results of `attend`. If each token's
    attention is computed in several parts, they must be merged over all parts. The result is then this part's share of
    the whole gradient.
    """
    import torch
    from torch.nn.functional import pad

    grad, output, *wide = (_pad_heads(one, (query, value)) for one in (grad, output, query, key, value))
    mask, causal = _additive_mask(options.mask, query), options.causal and options.mask is None
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        grads = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *wide, output, lse, 0.0, causal, attn_mask=mask, scale=options.scale
        )
    elif _takes_flash(wide[0], mask):
        # Without dropout the kernel does not use the state of the random generator.
        random_state = torch.zeros((), dtype=torch.uint64, device=query.device)
        grads = kernels._scaled_dot_product_flash_attention_backward(
            grad, *wide, output, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal,
            random_state, random_state, scale=options.scale,
        )  # fmt: skip
    else:
        random_state = torch.zeros((), dtype=torch.int64, device=query.device)
        # With lse = inf, padding has weight 0.
        padded_lse = pad(lse, (0, -query.shape[2] % LSE_MULTIPLE), value=torch.inf).contiguous()
        grads = kernels._scaled_dot_product_efficient_attention_backward(
            grad, *_repeat_heads(wide), mask, _heads_adjacent(output), padded_lse, random_state, random_state, 0.0,
            [True, True, True, False], causal, scale=options.scale,
        )[:3]  # fmt: skip
        # Keys and values were repeated for each head of queries; their gradients are summed over the repetitions.
        groups = (1, query.shape[1] // key.shape[1], query.shape[1] // value.shape[1])
        grads = [one.unflatten(1, (-1, count)).sum(2) for one, count in zip(grads, groups, strict=True)]
    return tuple(one[..., : given.shape[-1]] for one, given in zip(grads, (query, key, value), strict=True))


def takes_ragged(query: Tensor, value: Tensor) -> bool:
    """Return True if `attend_ragged` supports these queries and values, [M, H, D]: on a GPU, and as flash requires."""
    # Only the width and type of the padded queries matter, so no tokens are copied.
    padded = _pad_heads(query[:0], (query, value))
    return query.device.type == "cuda" and _takes_flash(padded, None)


class RaggedSequences(NamedTuple):
    """Positions of sequences that lie one after another, in the queries and in the keys."""

    begins: tuple[Tensor, Tensor]
    """For queries and for keys: int32 [S + 1], the position of each sequence's first token, then the end of the last
    sequence."""
    most: tuple[int, int]
    """For queries and for keys: number of tokens of the longest sequence."""
    window: int | None = None
    """Number of tokens that each query sees, itself included; None: each query sees all tokens. Only causal attention
    may have a window."""


def attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, sequences: RaggedSequences
) -> tuple[Tensor, Tensor]:
    """Return the attention output [M, H, D] and the log of the sum of weights (`lse`), float32 [M, H].

    `flash.trainer.model.attention` calls this in the forward pass where `takes_ragged` allows it. Queries are
    [M, H, D]; keys and values are [N, G, D], where H is a multiple of G. Tokens attend within their sequence. The
    kernel needs no padding, and supports neither a mask nor a cap.
    """
    import torch

    wide = [_pad_heads(one, (query, value)).contiguous() for one in (query, key, value)]
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *wide,
        *sequences.begins,
        *sequences.most,
        0.0,  # no dropout
        options.causal,
        False,  # no debug mask
        scale=options.scale,
        **_windows(sequences),
    )
    return output[..., : value.shape[-1]], lse.transpose(0, 1)


def attend_ragged_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    sequences: RaggedSequences,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `attend_ragged`, given `grad`, the gradient of the output.

    Called in the backward pass. If each token's attention is computed in several parts, `output` and `lse` must be
    merged over all parts. The result is then this part's share of the whole gradient.
    """
    import torch

    # The kernel takes one type. The merged output and its gradient may have another one.
    grad, output, *wide = (
        _pad_heads(one.to(query.dtype), (query, value)).contiguous() for one in (grad, output, query, key, value)
    )
    # Without dropout the kernel does not use the state of the random generator.
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad, *wide, output, lse.transpose(0, 1).contiguous(), *sequences.begins, *sequences.most, 0.0, options.causal,
        random_state, random_state[:0], scale=options.scale, **_windows(sequences),
    )  # fmt: skip
    return tuple(one[..., : given.shape[-1]] for one, given in zip(grads, (query, key, value), strict=True))


def _windows(sequences: RaggedSequences) -> dict[str, int]:
    """Return the kernel's arguments for a window: the numbers of tokens before and after itself that a query sees."""
    window = sequences.window
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _takes_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Return True if the flash kernel supports these padded queries: 16-bit, not too wide, no mask, on a newer GPU.

    The caller has excluded the CPU. Tensors of the meta device, with which tests try the shapes of the kernels, count
    as on a newer GPU.
    """
    import torch

    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < FLASH_SINCE:
        return False
    return mask is None and query.element_size() == 2 and query.shape[-1] <= WIDEST_FLASH


def _heads_adjacent(output: Tensor) -> Tensor:
    """Return an equal tensor with the heads of one token adjacent in memory.

    The memory-efficient kernel assumes this layout without a check.
    """
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _pad_heads(states: Tensor, states_of_call: tuple[Tensor, ...]) -> Tensor:
    """Return `states` with each head padded with zeros to the largest width among `states_of_call`.

    The kernels require one width for queries, keys and values, on a GPU a multiple of `WIDTHS`. Zeros change no score.
    """
    from torch.nn.functional import pad

    most = max(one.shape[-1] for one in states_of_call)
    most += 0 if states.device.type == "cpu" else -most % WIDTHS
    return pad(states, (0, most - states.shape[-1])) if states.shape[-1] < most else states


def _repeat_heads(states: list[Tensor]) -> list[Tensor]:
    """Return query, key and value, with the heads of keys and values repeated up to the number of heads of queries."""
    heads = states[0].shape[1]
    return [one.repeat_interleave(heads // one.shape[1], 1) if one.shape[1] < heads else one for one in states]


def _additive_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the mask as numbers that are added to scores, [S, H, Q, K]: 0 where a query sees a key, −inf elsewhere.

    The rows lie in memory as the kernels require. Returns None without a mask.
    """
    import torch

    if mask is None:
        return None
    *shape, keys = mask.shape
    padded = query.new_zeros(*shape, keys + -keys % (2 * WIDTHS))
    added = padded[..., :keys].masked_fill_(~mask, -torch.inf)
    return added.expand(-1, query.shape[1], -1, -1)
